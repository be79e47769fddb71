"""A model of plain functions in the place of "nano": pictures into text, with its shapes of data.

It traces and compiles in a fraction of the time, for tests of what no model changes: plans,
processes, checkpoints. Tensor parallelism splits its matrices, tokens of a piece depend on each
other, and its head may be tied.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, VOCAB = 8, 12, 512
TILE_PX, PATCH_PX, PATCHES, MERGE = 32, 8, 16, 4  # a tile, its patches, and those of a feature


def before(x, segment_ids):
    """The mean of the tokens before, of the same piece; zeros at its start. So answers depend on
    pictures, however far before them."""
    same = segment_ids[:, :, None] == segment_ids[:, None]
    earlier = jnp.tri(x.shape[1], k=-1, dtype=bool)[None]
    seen = (same & earlier).astype(x.dtype)
    return seen @ x / jnp.maximum(seen.sum(-1, keepdims=True), 1)


@dataclass(frozen=True)
class Stack:
    """What both modules have: layers that look at the tokens before, and their parameters."""

    n_layers: int
    tied: bool = False

    @property
    def shapes(self):
        """Parameters by part: shape and logical axes."""
        layer = {
            "up": ((WIDTH, HIDDEN), ("embed", "mlp")),
            "down": ((HIDDEN, WIDTH), ("mlp", "embed")),
            "bias": ((WIDTH,), ("embed",)),
        }
        return {"entry": self.entry_shapes, "layers": layer, "exit": self.exit_shapes}

    def init(self, part, key):
        shapes = [shape for shape, _ in self.shapes[part].values()]
        flat = jax.random.normal(key, (sum(map(_size, shapes)),))
        made, start = {}, 0
        # Smaller in deep stacks, which would make much of the last bits of a float.
        scale = 3 * max(1, self.n_layers / 4)
        for name, shape in zip(self.shapes[part], shapes, strict=True):
            made[name] = flat[start : start + _size(shape)].reshape(shape) / scale
            start += _size(shape)
        return made

    def logical_axes(self, part):
        return {name: axes for name, (_, axes) in self.shapes[part].items()}

    def layer(self, params, x, batch):
        segments = batch.get("segment_ids", jnp.ones(x.shape[:2], jnp.int32))
        hidden = jnp.tanh((x + before(x, segments)) @ params["up"])
        return x + hidden @ params["down"] + params["bias"][None, None]


def _size(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@dataclass(frozen=True)
class Eye(Stack):
    """The encoder: patches of a tile, and a feature of every few of them."""

    inputs = {"entry": ("pixels",), "layers": (), "exit": ()}
    freeze_groups = {"entry": "vision", "layers": "vision", "exit": "connector"}
    entry_shapes = {"patches": ((3 * PATCH_PX**2, WIDTH), (None, "embed"))}
    exit_shapes = {"features": ((MERGE * WIDTH, WIDTH), (None, "embed"))}

    def field_spec(self, name, rows, tokens):
        return jax.ShapeDtypeStruct((rows, TILE_PX, TILE_PX, 3), jnp.uint8)

    def entry(self, params, batch):
        n = TILE_PX // PATCH_PX
        pixels = batch["pixels"].astype(jnp.float32) / 128 - 1
        patches = pixels.reshape(-1, n, PATCH_PX, n, PATCH_PX, 3).swapaxes(2, 3)
        return patches.reshape(-1, PATCHES, 3 * PATCH_PX**2) @ params["patches"]

    def exit(self, params, x, batch, entry):
        return x.reshape(-1, PATCHES // MERGE, MERGE * WIDTH) @ params["features"]


@dataclass(frozen=True)
class Text(Stack):
    """The LLM."""

    inputs = {
        "entry": ("tokens", "is_visual", "visual"),
        "layers": ("segment_ids",),
        "exit": ("targets", "weights"),
    }
    freeze_groups = dict.fromkeys(inputs, "llm")
    entry_shapes = {"embedding": ((VOCAB, WIDTH), ("vocab", "embed"))}

    @property
    def exit_shapes(self):
        head = {} if self.tied else {"head": ((VOCAB, WIDTH), ("vocab", "embed"))}
        return {"scale": ((WIDTH,), ("embed",)), **head}

    def field_spec(self, name, rows, tokens):
        if name == "visual":
            return jax.ShapeDtypeStruct((rows, tokens, WIDTH), jnp.float32)
        kinds = {"weights": jnp.float32, "is_visual": jnp.bool_}
        return jax.ShapeDtypeStruct((rows, tokens), kinds.get(name, jnp.int32))

    def entry(self, params, batch):
        x = jnp.take(params["embedding"], batch["tokens"], axis=0)
        return jnp.where(batch["is_visual"][..., None], batch["visual"], x)

    def exit(self, params, x, batch, entry):
        table = entry["embedding"] if self.tied else params["head"]
        logits = (x * params["scale"][None, None]) @ table.T
        own = jax.nn.one_hot(batch["targets"], VOCAB, dtype=jnp.float32)
        losses = jax.nn.logsumexp(logits, -1) - (logits * own).sum(-1)
        right = (logits.argmax(-1) == batch["targets"]).astype(jnp.float32)
        sums = {"loss_sum": losses, "correct": right}
        return {name: jnp.sum(x * batch["weights"]) for name, x in sums.items()}


@dataclass(frozen=True)
class Small:
    """The model, its LLM of as many layers as that of "nano", or of `n_layers`."""

    tied: bool = True
    n_layers: int = 4
    n_encoder_layers: int = 2
    vocab_size = VOCAB
    piece_tokens = {"vision": PATCHES}
    preprocessing = {
        "vision": {"tile_px": TILE_PX, "tokens_per_tile": PATCHES // MERGE, "sources": 1}
    }
    edges = ({"source": "vision", "target": "llm", "name": "visual"},)

    @property
    def modules(self):
        return {"vision": Eye(self.n_encoder_layers), "llm": Text(self.n_layers, self.tied)}


def build(size="", dtype="float32"):
    """The model, as `model.factory` asks for it."""
    return Small()
