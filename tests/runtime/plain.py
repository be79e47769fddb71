"""The oracle: random samples, and a loss on one device, one sample at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.contract import edges_of, with_adapter
from dflop_jax.data.packing import derive_seeds, pack_groups
from dflop_jax.data.sample import FeatureGather, Sample
from dflop_jax.records import (
    Bucket,
    Group,
    Layout,
    Load,
    Plan,
    Schedule,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.programs import GroupArrays
from tests.rows import group_of_rows

ENDS = ("entry", "exit", "entry_adapter", "exit_adapter")
AXES = ("stage", "data", "model")  # of meshes here, whatever others there are


def random_samples(model, n: int, seed: int, *, max_tiles: int = 3, text: int = 20):
    """Samples of 0..max_tiles tiles (the first is text only) with visual runs inside the text."""
    rng = np.random.default_rng(seed)
    facts = model.preprocessing["vision"]
    out = []
    for i in range(n):
        tiles = 0 if i == 0 else int(rng.integers(0, max_tiles + 1))
        # The text's length follows from the tiles, so that the oracle compiles few shapes.
        before, after = text // 4, text // 4 + 2 * tiles
        run = np.arange(tiles * facts["tokens_per_tile"])
        visual = np.concatenate([np.full(before, -1), run, np.full(after, -1)]).astype(np.int32)
        pixels = rng.integers(0, 256, (tiles, facts["tile_px"], facts["tile_px"], 3))
        tokens = np.where(visual >= 0, 0, rng.integers(0, model.vocab_size, len(visual)))
        supervised = np.arange(len(visual)) >= len(visual) - after
        fields = {
            "llm": {
                "tokens": tokens.astype(np.int32),
                "targets": np.append(tokens[1:], 0).astype(np.int32),
                "weights": np.append(supervised[1:], 0).astype(np.float32),
                "is_visual": visual >= 0,
            }
        }
        pieces, gathers = {"llm": (len(visual),)}, {}
        if tiles:
            fields["vision"] = {"pixels": pixels.astype(np.uint8)}
            pieces["vision"] = (model.piece_tokens["vision"],) * tiles
            gathers["vision", "llm"] = FeatureGather(visual[:, None])
        out.append(Sample(fields, gathers, Load(pieces)))
    return out


def pack(model, plan: Plan, schedule: Schedule, samples, draws: str = "") -> list[GroupArrays]:
    """As a run packs samples of the data layer."""
    loads = [s.load for s in samples]
    packed = pack_groups(plan.layout, schedule, samples, loads, model=model, draws=draws)
    return [GroupArrays(p.fields, p.gathers) for p in packed]


def random_schedule(plan: Plan, samples, n_groups: int, seed: int, *, text_only=()) -> Schedule:
    """A permutation of the samples dealt to rows; `text_only` samples form a last group that no
    tile feeds. As many groups of tiles feed every other group as the plan's `fan_in`, or each feeds
    as many groups of text."""
    rng = np.random.default_rng(seed)
    n, g = len(samples), plan.layout.group_size
    first_tile = np.cumsum([0, *(len(s.load.lengths("vision")) for s in samples)])
    order = [int(i) for i in rng.permutation(n) if i not in text_only]
    shape = plan.layout.shapes("llm")[0]
    ranks = plan.layout.data_ranks("llm")
    feeding, reading = (
        plan.layout.fan_in if m in plan.layout.divided else 1 for m in ("vision", "llm")
    )
    groups: list[Group] = []

    def add(items, n_groups, feeding, reading):
        n_rows = n_groups * reading * g * ranks * shape.rows
        it = iter([tuple(items[i::n_rows]) for i in range(n_rows)])
        for _ in range(n_groups):
            readers = [
                tuple(tuple(tuple(next(it) for _ in range(shape.rows)) for _ in range(ranks))
                      for _ in range(g))
                for _ in range(reading)
            ]  # fmt: skip
            fed = tuple(len(groups) + feeding + i for i in range(reading))
            for k in range(feeding):
                low, v = plan.layout.shapes("vision")[0], plan.layout.data_ranks("vision")
                dealt = []
                for microbatch in zip(*readers, strict=True):
                    held = [i for one in microbatch for rank in one for row in rank for i in row]
                    tiles = [t for i in held for t in range(first_tile[i], first_tile[i + 1])]
                    mine = [int(t) for t in tiles[k::feeding]]
                    per_rank = [mine[r::v] for r in range(v)]
                    assert max(map(len, per_rank)) <= low.rows
                    dealt.append(tuple(
                        tuple((p[j],) if j < len(p) else () for j in range(low.rows))
                        for p in per_rank))  # fmt: skip
                groups.append(group_of_rows("vision", low, tuple(dealt), fed))
            groups.extend(group_of_rows("llm", shape, rows) for rows in readers)

    add(order, n_groups, feeding if "vision" in plan.layout.modules else 0, reading)
    if text_only:
        add(list(text_only), 1, 0, 1)
    return Schedule(0, tuple(groups))


def scales_of(groups_arrays) -> dict[str, float]:
    """One over the supervised tokens of the batch, and their number."""
    count = sum(float(a.fields["weights"].sum()) for a in groups_arrays if "weights" in a.fields)
    return {"llm": 1.0 / count}


def fields_alone(model, sample, i: int, draws: str):
    """Fields of the i-th sample by module, as one unpadded row or one row a tile."""
    found = {}
    for name, fields in sample.fields.items():
        seeds = {}
        if any("seeds" in names for names in model.modules[name].inputs.values()):
            per_piece = sample.load.lengths(name) if name == "llm" else (1,) * len(fields["pixels"])
            seeds["seeds"] = np.concatenate(
                [derive_seeds(f"{draws}/{name}/{i}/{k}", n) * np.uint32(bool(draws))
                 for k, n in enumerate(per_piece)]
            )  # fmt: skip
        found[name] = {**fields, **seeds}
    n = len(sample.fields["llm"]["tokens"])
    counts = {"segment_ids": np.ones(n, np.int32), "positions": np.arange(n, dtype=np.int32)}
    found["llm"] = {k: a[None] for k, a in (found["llm"] | counts).items()}
    return found


def plain_loss_and_grads(model, params, samples, draws: str = ""):
    """Mean token loss and its gradients, every sample run alone and unpadded on one device."""

    def loss_sum(params, fields, index):
        spec = model.modules["llm"].field_spec("visual", 1, fields["llm"]["tokens"].shape[1])
        features = jnp.zeros(spec.shape, spec.dtype)
        if "vision" in fields:
            out = run_module(model.modules["vision"], params["vision"], fields["vision"])
            rows = out.reshape(-1, out.shape[-1])[jnp.maximum(index, 0)]
            features = jnp.where((index >= 0)[:, None], rows, jnp.zeros_like(rows))[None]
        llm = {**fields["llm"], "visual": features}
        return run_module(model.modules["llm"], params["llm"], llm)["loss_sum"]

    every_args = []
    for i, s in enumerate(samples):
        index = s.gathers["vision", "llm"].index[:, 0] if s.gathers else np.zeros(0, np.int32)
        every_args.append((fields_alone(model, s, i, draws), index))
    count = sum(float(s.fields["llm"]["weights"].sum()) for s in samples)
    loss, grads = summed(jax.jit(jax.value_and_grad(loss_sum)), params, every_args)
    return loss / count, jax.tree.map(lambda a: a / count, grads)


def summed(value_and_grad, params, every_args):
    """(loss, gradients) of samples, of these arguments each, added up in float64."""
    loss, grads = 0.0, jax.tree.map(lambda a: np.zeros(a.shape, np.float64), params)
    for args in every_args:
        value, gradient = value_and_grad(params, *args)
        loss += float(value)
        grads = jax.tree.map(lambda a, g: a + np.asarray(g, np.float64), grads, gradient)
    return loss, grads


def fresh_params(model, plan: Plan):
    """The parameters that every plan of a model begins with, by module."""
    ex = Executor(model, plan, optax.sgd(1.0))
    ex.init(0)
    params = join(plan, ex.state.params)
    ex.close()
    return params


def losses_of(ex, samples, first: int, n: int, **options) -> list[float]:
    """Losses of some steps on text, each of a schedule of its own."""
    losses = []
    for step in range(first, first + n):
        schedule = random_schedule(ex.plan, samples, 1, seed=step)
        arrays = pack(ex.model, ex.plan, schedule, samples)
        scales = scales_of(arrays)
        result = ex.run_step(schedule, arrays, scales, **options).result()
        losses.append(result.sums["llm.loss_sum"] * scales["llm"])
    return losses


def run_module(module, params, fields):
    x = module.entry(with_adapter("entry", params), fields)
    if hasattr(module, "layer_kinds"):
        rows = {kind: iter(range(module.n_layers)) for kind in module.layer_kinds}
        for kind in module.layer_kinds:
            row = next(rows[kind])
            layer = jax.tree.map(lambda a, row=row: a[row], params[kind])
            x = module.layer(layer, x, fields, kind=kind)
        return module.exit(params["exit"], x, fields, params["entry"] if module.tied else None)
    layers = with_adapter("layers", params)

    def layer(x, now):
        return module.layer(now[0], x, {**fields, "layer": now[1]}), None

    x, _ = jax.lax.scan(layer, x, (layers, jnp.arange(module.n_layers)))
    entry = params["entry"] if module.tied else None
    return module.exit(with_adapter("exit", params), x, fields, entry)


def whole_of(cut, held) -> np.ndarray:
    """A parameter from what data and tensor ranks hold of it, flat or not."""
    held = np.asarray(held)
    if not cut.local_shape:
        return held
    lead = held.shape[: held.ndim - len(cut.local_shape)]
    blocks = held.reshape(*lead, cut.n_replicas, cut.dp, cut.tp, -1)
    pieces = blocks[..., 0, :, :, :]
    for copy in range(1, cut.n_replicas):
        np.testing.assert_array_equal(blocks[..., copy, :, :, :], pieces)
    n = int(np.prod(cut.local_shape))
    parts = []
    for rank in range(cut.tp):
        mine = np.concatenate([pieces[..., d, rank, :] for d in range(cut.dp)], axis=-1)
        parts.append(mine[..., :n].reshape(*lead, *cut.local_shape))
    return np.concatenate(parts, axis=len(lead) + max(cut.tensor_dim, 0))


def in_order(plan: Plan, s: SegmentPlan, stacked: np.ndarray) -> np.ndarray:
    """Layers one after the other of a stack [stages, rounds, layers of a chunk], flattened."""
    stages = plan.layout.submesh(s.submesh).stage
    chunks = stacked.reshape(stages, s.rounds, -1, *stacked.shape[1:])
    return chunks.swapaxes(0, 1).reshape(stacked.shape)


def join(plan: Plan, trees: dict[str, dict], cuts: dict[str, dict] | None = None):
    """Per-segment trees -> per-module trees of numpy arrays, layers concatenated; `cuts` say by
    segment how the arrays are cut, if some may be flat."""
    out = {}
    for module in plan.layout.modules:
        parts: dict = {}
        for s in plan.layout.segments_of(module):
            for part, tree in trees.get(s.name, {}).items():
                host = jax.tree.map(np.asarray, tree)
                if cuts is not None:
                    host = jax.tree.map(whole_of, cuts[s.name][part], host)
                if part not in ENDS and s.rounds > 1:
                    host = jax.tree.map(partial(in_order, plan, s), host)
                if part not in ENDS and part in parts:
                    host = jax.tree.map(lambda *two: np.concatenate(two), parts[part], host)
                parts[part] = host
        out[module] = parts
    return out


def plan_of(
    model, vision: tuple[int, int, int, int] | None, llm: tuple[int, int, int, int], *,
    llm_segments=1, rounds=1, bucket=(8, 160), rows=1, order="1f1b", **layout,
) -> Plan:  # fmt: skip
    """`vision` and `llm` are (first device, stage, data, model); LLM segments side by side; loops
    of so many `rounds`."""
    submeshes, segments = [], []
    if vision is not None:
        submeshes.append(SubmeshPlan("vision", vision[0], **dict(zip(AXES, vision[1:]))))
        n = model.modules["vision"].n_layers
        segments.append(SegmentPlan("vision", "vision", 0, n, "vision", True, True))
    n, k = model.modules["llm"].n_layers, llm_segments
    first, *shape = llm
    size = shape[0] * shape[1] * shape[2]
    for i in range(k):
        name = "llm" if k == 1 else f"llm{i}"
        submeshes.append(SubmeshPlan(name, first + i * size, **dict(zip(AXES, shape))))
        begins, ends = n * i // k, n * (i + 1) // k
        segments.append(SegmentPlan(name, "llm", begins, ends, name, i == 0, i == k - 1))
    tall = Shape(rows, bucket[1])
    tiles = Shape(bucket[0], model.piece_tokens["vision"]) if vision else None
    buckets = tuple(map(Bucket.from_shapes, ({"vision": tiles, "llm": tall}, {"llm": tall})))
    stages = {m.name: m.stage for m in submeshes}
    segments = [replace(s, rounds=rounds if stages[s.submesh] > 1 else 1) for s in segments]
    edges, tied = edges_of(model) if vision else (), ("llm",) * model.modules["llm"].tied
    layout |= {"edges": tuple(edges), "tied": tied}
    buckets = buckets if vision else buckets[1:]
    made = Layout(tuple(submeshes), tuple(segments), buckets, **layout)
    return Plan("test", made, Scheduling(order=order))


def with_zero(plan: Plan, **degrees: int | tuple[int, int]) -> Plan:
    """The plan with other degrees of sharding of some modules, or (degree, devices of a block)."""

    def changed(s):
        degree = degrees.get(s.module, s.zero)
        zero, devices = degree if isinstance(degree, tuple) else (degree, 0)
        return replace(s, zero=zero, shard_devices=devices)

    return plan.with_layout(segments=tuple(map(changed, plan.layout.segments)))
