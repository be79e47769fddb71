"""The oracle: random samples, a naive packer, and a loss on one device, one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.contract import edges_of, with_adapter
from dflop_jax.data.packing import derive_seeds, pack_groups
from dflop_jax.records import (
    Bucket,
    Group,
    Layout,
    Plan,
    Schedule,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.programs import GroupArrays
from tests.rows import group_of_rows, rows_of

ENDS = ("entry", "exit", "entry_adapter", "exit_adapter")
AXES = ("stage", "data", "model")  # of meshes here, whatever others there are


@dataclass(frozen=True)
class PlainSample:
    pixels: np.ndarray  # [tiles, px, px, 3]
    tokens: np.ndarray  # [n]
    visual: np.ndarray  # [n] index into the flattened visual tokens, or -1
    supervised: np.ndarray  # [n]


def tile_of(model) -> tuple[int, int]:
    """Pixels of a tile's side, and the tokens that a tile becomes."""
    facts = model.preprocessing["vision"]
    return facts["tile_px"], facts["tokens_per_tile"]


def random_samples(model, n: int, seed: int, *, max_tiles: int = 3, text: int = 20):
    """Samples of 0..max_tiles tiles (the first is text only) with visual runs inside the text."""
    rng = np.random.default_rng(seed)
    px, tokens_per_tile = tile_of(model)
    out = []
    for i in range(n):
        tiles = 0 if i == 0 else int(rng.integers(0, max_tiles + 1))
        # The text's length follows from the tiles, so that the oracle compiles few shapes.
        before, after = text // 4, text // 4 + 2 * tiles
        run = np.arange(tiles * tokens_per_tile)
        visual = np.concatenate([np.full(before, -1), run, np.full(after, -1)]).astype(np.int32)
        supervised = np.arange(len(visual)) >= len(visual) - after
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


def numbers(model, module: str, draws: str, i: int, n: int) -> dict[str, np.ndarray]:
    """The field "seeds" of n tokens of the i-th sample, or of the i-th tile, if it is read."""
    if not any("seeds" in names for names in model.modules[module].inputs.values()):
        return {}
    drawn = derive_seeds(f"{draws}/{module}/{i}", n) if draws else np.zeros(n, np.uint32)
    return {"seeds": drawn}


def pack(model, plan: Plan, schedule: Schedule, samples, draws: str = "") -> list[GroupArrays]:
    """Naive packer of schedules that `random_schedule` makes: tiles in the order of the samples."""
    px, tokens_per_tile = tile_of(model)
    first_tile = np.cumsum([0, *(len(s.pixels) for s in samples)])
    tile_place = {}  # tile -> (group, row of its microbatch)
    out = []
    for g, group in enumerate(schedule.groups):
        if group.module == "vision":
            rows = plan.layout.data_ranks("vision") * group.shape.rows
            pixels = np.zeros((group.microbatches, rows, px, px, 3), np.uint8)
            drawn = {k: np.zeros(pixels.shape[:2], a.dtype)
                     for k, a in numbers(model, "vision", draws, 0, 1).items()}  # fmt: skip
            owner = [k for k, s in enumerate(samples) for _ in s.pixels]
            for m, ranks in enumerate(rows_of(group, plan.layout.data_ranks("vision"))):
                for r, rank in enumerate(ranks):
                    for k, row in enumerate(rank):
                        for tile in row:
                            place = r * group.shape.rows + k
                            tile_place[tile] = g, place
                            s = owner[tile]
                            pixels[m, place] = samples[s].pixels[tile - first_tile[s]]
                            for k, a in numbers(model, "vision", draws, tile, 1).items():
                                drawn[k][m, place] = a[0]
            out.append(GroupArrays({"pixels": pixels, **drawn}, {}))
            continue
        rows, indices = [], []
        sources = schedule.fed_by(g, "vision")
        for ranks in rows_of(group, plan.layout.data_ranks(group.module)):
            for row in (row for rank in ranks for row in rank):
                picked = [samples[i] for i in row]
                own = [numbers(model, "llm", draws, i, len(samples[i].tokens)) for i in row]
                fields = row_fields(picked, group.shape.tokens)
                for k, spec in numbers(model, "llm", draws, 0, 1).items():
                    every = np.concatenate([spec[:0], *(one[k] for one in own)])
                    fields[k] = np.pad(every, (0, group.shape.tokens - len(every)))
                rows.append(fields)
                index, pos = {v: np.full(group.shape.tokens, -1, np.int32) for v in sources}, 0
                for i in row:
                    s = samples[i]
                    for t in np.flatnonzero(s.visual >= 0):
                        tile, token = divmod(int(s.visual[t]), tokens_per_tile)
                        v, place = tile_place[int(first_tile[i]) + tile]
                        index[v][pos + t] = place * tokens_per_tile + token
                    pos += len(s.tokens)
                indices.append(index)
        shape = (group.microbatches, -1, group.shape.tokens)
        fields = {k: np.stack([r[k] for r in rows]).reshape(shape) for k in rows[0]}
        places = {v: (np.stack([i[v] for i in indices]).reshape(*shape, 1),) for v in sources}
        out.append(GroupArrays(fields, places))
    return out


def really_packed(model, plan: Plan, schedule: Schedule, samples) -> list[GroupArrays]:
    """As a run packs samples of the data layer."""
    loads = [s.load for s in samples]
    every = pack_groups(plan.layout, schedule, samples, loads, model=model)
    return [GroupArrays(packed.fields, packed.gathers) for packed in every]


def random_schedule(plan: Plan, samples, n_groups: int, seed: int, *, text_only=()) -> Schedule:
    """A permutation of the samples dealt to rows; `text_only` samples form a last group that no
    tile feeds. As many groups of tiles feed every other group as the plan's `fan_in`, or each feeds
    as many groups of text."""
    rng = np.random.default_rng(seed)
    n, g = len(samples), plan.layout.group_size
    first_tile = np.cumsum([0, *(len(s.pixels) for s in samples)])
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


def plain_loss_and_grads(model, params, samples, draws: str = ""):
    """Mean token loss and its gradients, every sample run alone and unpadded on one device."""

    @jax.jit
    def one(params, pixels, fields, visual, of_tiles):
        def loss_sum(params):
            spec = model.modules["llm"].field_spec("visual", 1, visual.shape[0])
            features = jnp.zeros(spec.shape, spec.dtype)
            if len(pixels):
                tiles = {"pixels": pixels, **of_tiles}
                out = run_module(model.modules["vision"], params["vision"], tiles)
                flat = out.reshape(-1, out.shape[-1])
                row = flat[jnp.maximum(visual, 0)]
                features = jnp.where((visual >= 0)[:, None], row, jnp.zeros_like(row))[None]
            return run_module(model.modules["llm"], params["llm"], {**fields, "visual": features})[
                "loss_sum"
            ]

        return jax.value_and_grad(loss_sum)(params)

    count = sum(int(s.supervised[1:].sum()) for s in samples)
    tile, every_args = 0, []
    for i, s in enumerate(samples):
        own = row_fields([s], len(s.tokens)) | numbers(model, "llm", draws, i, len(s.tokens))
        fields = {k: v[None] for k, v in own.items()}
        every = [numbers(model, "vision", draws, tile + k, 1) for k in range(len(s.pixels))]
        of_tiles = {k: np.concatenate([one_[k] for one_ in every]) for k in (every or [{}])[0]}
        tile += len(s.pixels)
        every_args.append((s.pixels, fields, s.visual, of_tiles))
    loss, grads = summed(one, params, every_args)
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


def losses_of(ex, samples, first: int, n: int) -> list[float]:
    """Losses of some steps on text, each of a schedule of its own."""
    losses = []
    for step in range(first, first + n):
        schedule = random_schedule(ex.plan, samples, 1, seed=step)
        arrays = pack(ex.model, ex.plan, schedule, samples)
        scales = scales_of(arrays)
        result = ex.run_step(schedule, arrays, scales).result()
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
    model,
    vision: tuple[int, int, int, int] | None,
    llm: tuple[int, int, int, int],
    *,
    llm_segments: int = 1,
    rounds: int = 1,
    group_size: int = 1,
    bucket=(8, 160),
    rows: int = 1,
    order: str = "1f1b",
    fan_in: int = 1,
    divided_readers: tuple[str, ...] = (),
) -> Plan:
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
        segments.append(
            SegmentPlan(name, "llm", n * i // k, n * (i + 1) // k, name, i == 0, i == k - 1)
        )
    tall = Shape(rows, bucket[1])
    tiles = Shape(bucket[0], model.piece_tokens["vision"]) if vision else None
    buckets = tuple(map(Bucket.from_shapes, ({"vision": tiles, "llm": tall}, {"llm": tall})))
    stages = {m.name: m.stage for m in submeshes}
    segments = [replace(s, rounds=rounds if stages[s.submesh] > 1 else 1) for s in segments]
    return Plan(
        "test",
        Layout(
            tuple(submeshes),
            tuple(segments),
            buckets if vision else buckets[1:],
            edges=tuple(e for e in edges_of(model) if vision is not None),
            group_size=group_size,
            fan_in=fan_in,
            divided_readers=divided_readers,
            tied=("llm",) if model.modules["llm"].tied else (),
        ),
        Scheduling(order=order),
    )


def with_zero(plan: Plan, **degrees: int | tuple[int, int]) -> Plan:
    """The plan with other degrees of sharding of some modules, or (degree, devices of a block)."""

    def changed(s):
        degree = degrees.get(s.module, s.zero)
        zero, devices = degree if isinstance(degree, tuple) else (degree, 0)
        return replace(s, zero=zero, shard_devices=devices)

    return plan.with_layout(segments=tuple(map(changed, plan.layout.segments)))
