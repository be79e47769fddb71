"""The oracle: random samples, a naive packer, and a loss on one device, one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.pipeline.programs import GroupArrays
from dflop_jax.records import Bucket, Microbatch, Plan, Schedule, SegmentPlan, SubmeshPlan


@dataclass(frozen=True)
class PlainSample:
    pixels: np.ndarray  # [tiles, px, px, 3]
    tokens: np.ndarray  # [n]
    visual: np.ndarray  # [n] index into the flattened visual tokens, or -1
    supervised: np.ndarray  # [n]


def random_samples(model, n: int, seed: int, *, max_tiles: int = 3, text: int = 20):
    """Samples of 0..max_tiles tiles (the first is text only) with visual runs inside the text."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        tiles = 0 if i == 0 else int(rng.integers(0, max_tiles + 1))
        # The text's length follows from the tiles, so that the oracle compiles few shapes.
        before, after = text // 4, text // 4 + 2 * tiles
        run = np.arange(tiles * model.tokens_per_tile)
        visual = np.concatenate([np.full(before, -1), run, np.full(after, -1)]).astype(np.int32)
        supervised = np.arange(len(visual)) >= len(visual) - after
        px = model.tile_px
        out.append(
            PlainSample(
                pixels=rng.integers(0, 256, (tiles, px, px, 3)).astype(np.uint8),
                tokens=np.where(
                    visual >= 0, 0, rng.integers(0, model.vocab_size, len(visual))
                ).astype(np.int32),
                visual=visual,
                supervised=supervised,
            )
        )
    return out


def row_fields(samples, length: int) -> dict[str, np.ndarray]:
    """One packed row."""
    f = {
        k: np.zeros(length, np.int32) for k in ("tokens", "segment_ids", "positions", "targets")
    } | {"weights": np.zeros(length, np.float32), "is_visual": np.zeros(length, bool)}
    at = 0
    for i, s in enumerate(samples):
        n = len(s.tokens)
        f["tokens"][at : at + n] = s.tokens
        f["segment_ids"][at : at + n] = i + 1
        f["positions"][at : at + n] = np.arange(n)
        f["targets"][at : at + n - 1] = s.tokens[1:]
        f["weights"][at : at + n - 1] = s.supervised[1:]
        f["is_visual"][at : at + n] = s.visual >= 0
        at += n
    assert at <= length
    return f


def pack(model, plan: Plan, schedule: Schedule, samples) -> list[GroupArrays]:
    """Naive packer: tiles in arrival order over the encoder's ranks."""
    out = []
    for group in schedule.groups:
        bucket = plan.buckets[group[0].bucket]
        rows, indices, pixels = [], [], []
        total = bucket.tiles * (plan.data_ranks("vision") if "vision" in plan.modules else 1)
        for mb in group:
            px = np.zeros((total, model.tile_px, model.tile_px, 3), np.uint8)
            at = 0
            for rank in mb.rows:
                for row in rank:
                    picked = [samples[i] for i in row]
                    rows.append(row_fields(picked, bucket.tokens))
                    index, pos = np.full(bucket.tokens, -1, np.int32), 0
                    for s in picked:
                        n, t = len(s.tokens), len(s.pixels)
                        base = at * model.tokens_per_tile
                        index[pos : pos + n] = np.where(s.visual >= 0, s.visual + base, -1)
                        px[at : at + t] = s.pixels
                        at += t
                        pos += n
                    indices.append(index)
            pixels.append(px)
        shape = (len(group), -1, bucket.tokens)
        fields = {"llm": {k: np.stack([r[k] for r in rows]).reshape(shape) for k in rows[0]}}
        if bucket.tiles:
            fields["vision"] = {"pixels": np.stack(pixels)}
        sources = {"vision": (np.stack(indices).reshape(*shape, 1),)} if bucket.tiles else {}
        out.append(GroupArrays(group[0].bucket, fields, sources))
    return out


def random_schedule(plan: Plan, n: int, n_groups: int, seed: int, *, text_only=()) -> Schedule:
    """A permutation of the samples dealt to bins; `text_only` samples form a last group without
    tiles when the plan has a bucket for it."""
    rng = np.random.default_rng(seed)
    ranks, g = plan.data_ranks("llm"), plan.group_size
    order = [int(i) for i in rng.permutation(n) if i not in text_only]
    rows = plan.buckets[0].rows

    def cut(items, count):
        bins = [tuple(items[i::count]) for i in range(count)]
        return bins

    def groups(items, n_groups, bucket):
        bins = cut(items, n_groups * g * ranks * rows)
        it = iter(bins)
        return tuple(
            tuple(
                Microbatch(
                    bucket, tuple(tuple(next(it) for _ in range(rows)) for _ in range(ranks))
                )
                for _ in range(g)
            )
            for _ in range(n_groups)
        )

    out = groups(order, n_groups, 0)
    if text_only:
        out += groups(list(text_only), 1, 1)
    return Schedule(0, out)


def plain_loss_and_grads(model, params, samples):
    """Mean token loss and its gradients, every sample run alone and unpadded on one device."""

    @jax.jit
    def one(params, pixels, fields, visual):
        def loss_sum(params):
            spec = model.modules["llm"].field_spec("visual", 1, visual.shape[0])
            features = jnp.zeros(spec.shape, spec.dtype)
            if len(pixels):
                out = run_module(model.modules["vision"], params["vision"], {"pixels": pixels})
                flat = out.reshape(-1, out.shape[-1])
                row = flat[jnp.maximum(visual, 0)]
                features = jnp.where((visual >= 0)[:, None], row, jnp.zeros_like(row))[None]
            return run_module(model.modules["llm"], params["llm"], {**fields, "visual": features})[
                "loss_sum"
            ]

        return jax.value_and_grad(loss_sum)(params)

    loss, count = 0.0, sum(int(s.supervised[1:].sum()) for s in samples)
    grads = jax.tree.map(lambda a: np.zeros(a.shape, np.float64), params)
    for s in samples:
        fields = {k: v[None] for k, v in row_fields([s], len(s.tokens)).items()}
        value, gradient = one(params, s.pixels, fields, s.visual)
        loss += float(value) / count
        grads = jax.tree.map(lambda a, g: a + np.asarray(g, np.float64) / count, grads, gradient)
    return loss, grads


def run_module(module, params, fields):
    x = module.entry(params["entry"], fields)
    layers = params["layers"]
    if "adapter" in params:
        layers = {**layers, "adapter": params["adapter"]}
    x, _ = jax.lax.scan(lambda x, p: (module.layer(p, x, fields), None), x, layers)
    return module.exit(params["exit"], x, fields, params["entry"] if module.tied else None)


def join(plan: Plan, trees: dict[str, dict]) -> dict[str, dict]:
    """Per-segment trees -> per-module trees of numpy arrays, layers concatenated."""
    out = {}
    for module in plan.modules:
        parts: dict = {}
        for s in plan.segments_of(module):
            for part, tree in trees.get(s.name, {}).items():
                host = jax.tree.map(np.asarray, tree)
                if part in ("layers", "adapter") and part in parts:
                    parts[part] = jax.tree.map(
                        lambda a, b: np.concatenate([a, b]), parts[part], host
                    )
                else:
                    parts[part] = host
        out[module] = parts
    return out


def plan_of(
    model,
    vision: tuple[int, int, int, int] | None,
    llm: tuple[int, int, int, int],
    *,
    llm_segments: int = 1,
    group_size: int = 1,
    bucket=(8, 160),
    rows: int = 1,
    order: str = "1f1b",
) -> Plan:
    """`vision` and `llm` are (first device, stage, data, model); LLM segments side by side."""
    submeshes, segments = [], []
    if vision is not None:
        submeshes.append(SubmeshPlan("vision", *vision))
        n = model.modules["vision"].n_layers
        segments.append(SegmentPlan("vision", "vision", 0, n, "vision", True, True))
    n, k = model.modules["llm"].n_layers, llm_segments
    first, *shape = llm
    size = shape[0] * shape[1] * shape[2]
    for i in range(k):
        name = "llm" if k == 1 else f"llm{i}"
        submeshes.append(SubmeshPlan(name, first + i * size, *shape))
        segments.append(
            SegmentPlan(name, "llm", n * i // k, n * (i + 1) // k, name, i == 0, i == k - 1)
        )
    buckets = (Bucket(bucket[0] if vision else 0, bucket[1], rows), Bucket(0, bucket[1], rows))
    return Plan(
        "test", tuple(submeshes), tuple(segments), buckets, group_size=group_size, order=order
    )
