"""A made-up model of four modules and data for it: what a user adds, and nothing else.

"sights" take pictures of any size, packed into rows; "smells" take whiffs of six grains, one a row;
"words" read both at their first layer, and what the sights' first layer saw once more between two
inner layers; "echoes" read the words' hidden states and have a loss of their own. The words' head
is tied to their embedding. What words read of the sights is a weighted sum of two features.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.data.sample import FeatureGather, Sample
from dflop_jax.records import Load

WIDTH, VOCAB, GRAINS = 4, 11, 6


def shifted(x, segment_ids):
    """The token before, of the same piece; zeros at its start."""
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    same = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1] == segment_ids
    return jnp.where(same[..., None], before, jnp.zeros_like(before))


@dataclass(frozen=True)
class Toy:
    """Layers that look at the token before. `merge` neighbours make one feature."""

    kind: str
    n_layers: int
    merge: int = 1
    tied: bool = False
    loss_weight: float = 1.0

    @property
    def inputs(self):
        ends = {
            "sights": (("values", "segment_ids"), ()),
            "smells": (("values",), ()),
            "words": (("tokens", "seen"), ("targets", "weights")),
            "echoes": (("values", "heard"), ("wanted", "weights")),
        }[self.kind]
        layers = () if self.kind == "smells" else ("segment_ids",)
        parts = {"entry": ends[0], "layers": layers, "exit": ends[1]}
        return {**parts, "early": ()} if self.kind == "sights" else parts

    @property
    def taps(self):
        return {"sights": {"early": 1}, "words": {"last": self.n_layers}}.get(self.kind, {})

    @property
    def freeze_groups(self):
        return dict.fromkeys(self.inputs, self.kind)

    def field_spec(self, name, rows, tokens):
        if name in ("seen", "deep", "heard", "wanted"):
            return jax.ShapeDtypeStruct((rows, tokens, WIDTH), jnp.float32)
        if name == "values" and self.kind == "smells":
            return jax.ShapeDtypeStruct((rows, GRAINS), jnp.float32)
        if name == "values":
            return jax.ShapeDtypeStruct((rows, tokens, 2), jnp.float32)
        kind = jnp.float32 if name == "weights" else jnp.int32
        return jax.ShapeDtypeStruct((rows, tokens), kind)

    def init(self, part, key):
        shape = (WIDTH, WIDTH)
        if part == "entry":
            shape = {"words": (VOCAB, WIDTH), "smells": (1, WIDTH)}.get(self.kind, (2, WIDTH))
        elif part in ("exit", "early"):
            if self.tied:
                return {"scale": jnp.ones((WIDTH,))}
            shape = (self.merge * WIDTH, WIDTH)
        return {"matrix": jax.random.normal(key, shape) / 2}

    def logical_axes(self, part):
        if part == "exit" and self.tied:
            return {"scale": (None,)}
        return {"matrix": (None, None)}

    def entry(self, params, batch):
        matrix = params["matrix"]
        if self.kind == "words":
            return jnp.take(matrix, batch["tokens"], axis=0) + batch["seen"]
        values = batch["values"]
        x = (values[..., None] if self.kind == "smells" else values) @ matrix
        return x + batch["heard"] if self.kind == "echoes" else x

    def layer(self, params, x, batch):
        segments = batch.get("segment_ids", jnp.ones(x.shape[:2], jnp.int32))
        return x + jnp.tanh((x + shifted(x, segments)) @ params["matrix"])

    def features(self, params, x):
        rows, tokens, _ = x.shape
        return x.reshape(rows, tokens // self.merge, self.merge * WIDTH) @ params["matrix"]

    def exit(self, params, x, batch, entry):
        if self.kind == "words":
            logits = (x * params["scale"][None, None]) @ entry["matrix"].T
            taken = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
            losses = jax.nn.logsumexp(logits, -1) - taken
        elif self.kind == "echoes":
            losses = jnp.square(x @ params["matrix"] - batch["wanted"]).sum(-1)
        else:
            return self.features(params, x)
        return {"loss_sum": jnp.sum(losses * batch["weights"])}

    def tap(self, name, params, x, batch):
        return x if name == "last" else self.features(params, x)

    def inlet(self, name, x, placed, batch):
        return x + placed


@dataclass(frozen=True)
class MadeUp:
    """The graph."""

    vocab_size = VOCAB
    piece_tokens = {"smells": GRAINS}
    preprocessing = {}
    modules = {
        "sights": Toy("sights", 3, merge=2),
        "smells": Toy("smells", 2),
        "words": Toy("words", 6, tied=True),
        "echoes": Toy("echoes", 2, loss_weight=0.5),
    }
    edges = (
        {"source": "sights", "target": "words", "name": "seen", "sources": 2},
        {"source": "smells", "target": "words", "name": "seen"},
        {"source": "sights", "target": "words", "name": "deep"}
        | {"tap": "early", "enters": 4, "sources": 2},
        {"source": "words", "target": "echoes", "name": "heard", "tap": "last"},
    )


def build(size="", dtype="float32"):
    """The model, as `model.factory` asks for it."""
    return MadeUp()


@dataclass(frozen=True)
class MadeUpData:
    """`n` samples: the first is text only, others have up to three pictures of `sizes` patches,
    whiffs, and echoes of some of their words. `kinds` of equal lengths recur, if it is not 0."""

    n: int = 12
    sizes: tuple[int, ...] = (4, 10, 16)
    seed: int = 0
    kinds: int = 0
    name = "made up"

    def __len__(self):
        return self.n

    def label(self, index):
        return f"made up[{index}]"

    def load(self, index):
        return self.sample(index).load

    def sample(self, index):
        kind = index % (self.kinds or self.n)
        rng = np.random.default_rng((self.seed, kind))
        pictures = [] if kind == 0 else rng.choice(self.sizes, int(rng.integers(0, 4))).tolist()
        whiffs = 0 if kind == 0 else int(rng.integers(0, 3))
        heard = 0 if kind % 4 == 0 else int(rng.integers(1, 5))
        merge = MadeUp.modules["sights"].merge
        seen = sum(pictures) // merge
        smelt = whiffs * GRAINS
        text = int(rng.integers(6, 14))
        t = text + seen + smelt
        rng = np.random.default_rng((self.seed, index, 1))
        tokens = rng.integers(0, VOCAB, t).astype(np.int32)
        fields = {
            "words": {
                "tokens": tokens,
                "targets": np.append(tokens[1:], np.int32(0)),
                "weights": (np.arange(t) < t - 1).astype(np.float32),
            }
        }
        places, pieces = {}, {"words": (t,)}
        if pictures:
            values = rng.normal(size=(sum(pictures), 2)).astype(np.float32)
            fields["sights"], pieces["sights"] = {"values": values}, tuple(pictures)
            index_of = np.full((t, 2), -1, np.int32)
            index_of[2 : 2 + seen, 0] = rng.permutation(seen)
            index_of[3 : 2 + seen, 1] = rng.integers(0, seen, seen - 1)
            weight = rng.random((t, 2)).astype(np.float32)
            places["sights", "words"] = FeatureGather(index_of, weight)
        if whiffs:
            values = rng.normal(size=(whiffs, GRAINS)).astype(np.float32)
            fields["smells"], pieces["smells"] = {"values": values}, (GRAINS,) * whiffs
            index_of = np.full((t, 1), -1, np.int32)
            index_of[2 + seen : 2 + seen + smelt, 0] = np.arange(smelt)
            places["smells", "words"] = FeatureGather(index_of)
        if heard:
            fields["echoes"] = {
                "values": rng.normal(size=(heard, 2)).astype(np.float32),
                "wanted": rng.normal(size=(heard, WIDTH)).astype(np.float32),
                "weights": rng.integers(0, 3, heard).astype(np.float32),
            }
            pieces["echoes"] = (heard,)
            heard_of = rng.integers(0, t, (heard, 1)).astype(np.int32)
            places["words", "echoes"] = FeatureGather(heard_of)
        return Sample(fields, places, Load(pieces))


def plain_loss(params, pieces, fields, places, scales):
    """The weighted loss of one sample of these (module, lengths of its pieces), every module run
    plainly on its own pieces."""
    modules, lengths_of, outputs = MadeUp.modules, dict(pieces), {}
    total = 0.0
    for name, module in modules.items():
        lengths = lengths_of.get(name)
        if not lengths:
            continue
        start, after, taps = 0, [], []
        for order, n in enumerate(lengths):
            per_piece = name == "smells"
            cut = slice(order, order + 1) if per_piece else slice(start, start + n)
            batch = {k: v[cut] if per_piece else v[cut][None] for k, v in fields[name].items()}
            batch["segment_ids"] = jnp.ones((1, n), jnp.int32)
            placed = {"seen": 0.0, "heard": 0.0, "deep": 0.0}
            for (source, target), (index, weight) in places.items():
                if target != name:
                    continue
                for key, rows in outputs[source].items():
                    own = jnp.where(index[cut] >= 0, weight[cut], 0.0)
                    taken = (own[..., None] * rows[jnp.maximum(index[cut], 0)]).sum(1)
                    where = {"exit": "seen", "early": "deep", "last": "heard"}[key]
                    placed[where] = placed[where] + taken[None]
            p = params[name]
            x = module.entry(p["entry"], {**batch, **placed})
            for i in range(module.n_layers):
                if name == "words" and i == 4:
                    x = x + placed["deep"]
                x = module.layer({"matrix": p["layers"]["matrix"][i]}, x, batch)
                if name == "sights" and i == 0:
                    taps.append(module.tap("early", p["early"], x, batch)[0])
            out = module.exit(p["exit"], x, batch, p["entry"])
            if isinstance(out, dict):
                total = total + scales[name] * out["loss_sum"]
                after.append(x[0])
            else:
                after.append(out[0])
            start += n
        key = "last" if name == "words" else "exit"
        outputs[name] = {key: jnp.concatenate(after)}
        if taps:
            outputs[name]["early"] = jnp.concatenate(taps)
    return total


def scales_of(samples):
    """What multiplies the sums of both losses: weight over the batch's own denominator."""
    found = {}
    for name in ("words", "echoes"):
        weights = sum(float(s.fields[name]["weights"].sum()) for s in samples if name in s.fields)
        found[name] = MadeUp.modules[name].loss_weight / max(weights, 1.0)
    return found


def make_data(config, model, split):
    """The source, as `data.factory` asks for it; the splits are different samples."""
    return MadeUpData(config.n_samples, seed=config.seed + (split == "eval"))
