"""Random packings of samples through the compiled segments of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from packing_families import Drawing, Family

from dflop_jax.contract import (
    MultimodalModel,
    edges_of,
    n_stacked_layers,
    stacked_parts,
)
from dflop_jax.data import PackedGroup, Sample, pack_groups
from dflop_jax.records import (
    FORWARD,
    REDUCE,
    Bucket,
    Group,
    Layout,
    PackedPieces,
    Plan,
    Schedule,
    Shape,
)
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.module_parts import init_part
from dflop_jax.runtime.parameter_layout import initial_structs
from dflop_jax.runtime.programs import GroupArrays
from dflop_jax.runtime.segment import Segment
from dflop_jax.verify.round_trip import split_layout

Tree = Any
ROWS, TOKENS, ONES = 2, 512, 16  # of packed modules; rows of those that take one piece a row
MISFITS = 4  # samples without room that end a packing
NOISE = 0.05  # of every parameter, so that none stays what a fresh model has
# A gradient that is zero in theory is rounding: of a tensor whose largest entry is below this share
# of the largest of all, errors are a share of that.
LEAST_SCALE = 1e-2


# ---- packings ----


@dataclass(frozen=True)
class Packing:
    """Samples, and by module the row of each of their pieces, in the order of the samples."""

    samples: Sequence[Sample]
    rows: Mapping[str, Sequence[int]]

    def groups(self, model: MultimodalModel, shapes: Mapping[str, Shape]) -> tuple[Group, ...]:
        """One of each module that has pieces."""
        here = [m for m in model.modules if self.rows[m]]
        groups = []
        for m in here:
            targets = dict.fromkeys(e.target for e in edges_of(model) if e.source == m)
            feeds = tuple(here.index(t) for t in targets if t in here)
            n = np.arange(len(self.rows[m]))
            zero = np.zeros_like(n)
            pieces = PackedPieces.from_columns(n, zero, zero, np.array(self.rows[m]))
            groups.append(Group(m, shapes[m], feeds, pieces=pieces))
        return tuple(groups)


def random_packing(
    model: MultimodalModel, drawings: Sequence[Drawing], rng: np.random.Generator
) -> tuple[Packing, list[Drawing]]:
    """Random samples in random rows, until some in turn find no room; and how each was drawn."""
    free = {m: np.full(s.rows, s.tokens) for m, s in shapes_of(model).items()}
    rows: dict[str, list[int]] = {m: [] for m in model.modules}
    samples: list[Sample] = []
    ways: list[Drawing] = []
    misfits = 0
    while misfits < MISFITS:
        way = drawings[int(rng.integers(len(drawings)))]
        sample = way(int(rng.integers(1 << 30)))
        room = {m: a.copy() for m, a in free.items()}
        placed = _placed(model, sample, room, rng)
        if placed is None:
            misfits += 1
            continue
        free = room
        samples.append(sample)
        ways.append(way)
        for m, more in placed.items():
            rows[m] += more
    return Packing(samples, rows), ways


def _placed(
    model: MultimodalModel, sample: Sample, room: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, list[int]] | None:
    """A row for every piece of a sample, by module, taken from the room of the rows; None where a
    piece finds none."""
    rows: dict[str, list[int]] = {}
    for m in model.modules:
        rows[m] = []
        for length in sample.load.lengths(m):
            fit = np.flatnonzero(room[m] >= length)
            if not len(fit):
                return None
            row = int(rng.choice(fit))
            room[m][row] -= room[m][row] if m in model.piece_tokens else length
            rows[m].append(row)
    return rows


def shapes_of(model: MultimodalModel) -> dict[str, Shape]:
    """Shapes of the rows that samples are packed in."""
    ones = model.piece_tokens
    return {m: Shape(ONES, ones[m]) if m in ones else Shape(ROWS, TOKENS) for m in model.modules}


def alone(model: MultimodalModel, sample: Sample) -> tuple[Packing, dict[str, Shape]]:
    """A sample whose pieces have a row each, as long as the longest of its module."""
    lengths = {m: sample.load.lengths(m) for m in model.modules}
    rows = {m: list(range(len(pieces))) for m, pieces in lengths.items()}
    return Packing([sample], rows), {m: Shape(len(p), max(p)) for m, p in lengths.items() if p}


def silenced(sample: Sample) -> Sample:
    """The sample without a part in the loss."""
    quiet = {
        m: {k: np.zeros_like(a) if k == "weights" else a for k, a in named.items()}
        for m, named in sample.fields.items()
    }
    return replace(sample, fields=quiet)


def merged(fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fields of a group in which no piece begins anew: all that is in a row is one."""
    out = dict(fields)
    if "segment_ids" in fields:
        out["segment_ids"] = np.minimum(fields["segment_ids"], 1)
        if "positions" in fields:
            places = fields["positions"]
            numbers = np.arange(places.shape[2]).reshape(-1, *[1] * (places.ndim - 3))
            out["positions"] = np.broadcast_to(numbers, places.shape).astype(places.dtype)
    return out


# ---- what comes out ----


@dataclass(frozen=True)
class Seen:
    """What a run gave of one sample.

    outputs: by name, hidden states between segments and features that modules give, at the tokens
      of the sample [n, width]; and the loss, a scalar.
    gradients: of the loss, by (module, part, path), whole stacks of layers.
    """

    outputs: Mapping[str, np.ndarray]
    gradients: Mapping[tuple[str, ...], np.ndarray]


def differ(a: Seen, b: Seen) -> bool:
    """Whether any value of the two differs, or is no number."""
    return any(not np.array_equal(x[k], y[k]) for x, y in _both(a, b) for k in x)


def largest_error(got: Seen, want: Seen) -> float:
    """Largest difference as a share of the largest entry: of each output, of 1 at least in the
    loss, and of each tensor's gradient."""
    (mine, theirs), (my_gradients, gradients) = _both(got, want)
    least = LEAST_SCALE * max((float(np.abs(g).max()) for g in gradients.values()), default=0.0)
    errors = [_share(mine[k], a, 1.0 if k == "loss" else 0.0) for k, a in theirs.items()]
    errors += [_share(my_gradients[k], a, least) for k, a in gradients.items()]
    return float(np.max(errors))  # what is no number stays


def _share(got: np.ndarray, want: np.ndarray, least: float) -> float:
    scale = max(float(np.abs(want).max(initial=0.0)), least) or 1.0
    return float(np.abs(got - want).max(initial=0.0)) / scale


def _both(a: Seen, b: Seen) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    assert a.outputs.keys() == b.outputs.keys(), (a.outputs.keys(), b.outputs.keys())
    assert a.gradients.keys() == b.gradients.keys()
    return (a.outputs, b.outputs), (a.gradients, b.gradients)


def random_parameters(family: Family, seed: int = 0) -> dict[str, Tree]:
    """By module, every part of it, layers stacked: what a fresh model has, and noise on it, made
    calm."""
    model = family.model
    rng = np.random.default_rng(seed)

    def noisy(a: Any) -> np.ndarray:
        return np.asarray(a) + NOISE * rng.standard_normal(a.shape, np.float32)

    def part(module: Any, name: str) -> Tree:
        def one() -> Tree:
            key = jax.random.key(int(rng.integers(1 << 30)), impl="rbg")
            return jax.tree.map(noisy, init_part(module, name, key))

        if name not in stacked_parts(module):
            return one()
        return jax.tree.map(
            lambda *a: np.stack(a), *(one() for _ in range(n_stacked_layers(module, name)))
        )

    return {m: {p: family.calm(part(module, p)) for p in module.freeze_groups}
            for m, module in model.modules.items()}  # fmt: skip


# ---- packed, as a run computes it ----


class PackedRun:
    """A model on a plan that cuts every module in two, compiled, with given parameters."""

    def __init__(self, model: MultimodalModel, params: Mapping[str, Tree], n_devices: int = 1):
        self.model, self.shapes = model, shapes_of(model)
        layout = split_layout(model, n_devices, ())
        self.plan = Plan("packing", replace(layout, buckets=(Bucket.from_shapes(self.shapes),)))
        self._ex = Executor(model, self.plan, optax.sgd(0.0))
        self._ex.init(0, lambda segment, fresh: _held(segment, params[segment.plan.module]))
        self._ex.compile()
        self._given: dict[tuple[str, str], Tree] = {}
        compiled: dict[Any, Any] = self._ex.programs.compiled
        for key, program in list(compiled.items()):
            if key[-1] in (FORWARD, REDUCE):
                compiled[key] = partial(self._noted, key, program)

    def close(self) -> None:
        self._ex.close()

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def _noted(self, key: Any, program: Any, *args: Any) -> Tree:
        out = program(*args)
        kept = out[0] if key[-1] == REDUCE else {k: v for k, v in out.items() if k != "residuals"}
        self._given[key[0], key[-1]] = jax.tree.map(np.asarray, kept)
        return out

    def of(self, packing: Packing, target: int, *, merges: bool = False) -> Seen:
        """What comes out of one of the samples, packed with the others; only its own loss counts.

        Args:
          merges: whether pieces are not told apart.
        """
        samples = [s if i == target else silenced(s) for i, s in enumerate(packing.samples)]
        schedule = Schedule(0, packing.groups(self.model, self.shapes))
        packed = pack_all(self.model, self.layout, schedule, samples)
        arrays = [GroupArrays(merged(p.fields) if merges else p.fields, p.gathers) for p in packed]
        scales = dict.fromkeys(self.model.modules, 1.0)
        self._given.clear()
        # Whatever the gradients are, the parameters stay.
        result = self._ex.run_step(schedule, arrays, scales, norm_limit=0.0).result()
        sums = [v for k, v in result.sums.items() if k.endswith("loss_sum")]
        where = tokens_of(self.model, packing, target, schedule, packed)
        outputs = {"loss": np.asarray(sum(sums), np.float32)}
        for s in self.layout.segments:
            y = self._given.get((s.name, FORWARD), {})
            rows, features = where.tokens.get(s.module), where.features.get(s.module)
            if "next" in y and rows is not None:
                outputs[f"{s.module} after {s.stop}"] = y["next"][0][rows]
            for tap, given in {"": y.get("exit"), **y.get("taps", {})}.items():
                if given is not None and features is not None:
                    outputs[f"{s.module} gives {tap}"] = given.reshape(-1, given.shape[-1])[
                        features
                    ]
        return Seen(outputs, self._gradients())

    def _gradients(self) -> dict[tuple[str, ...], np.ndarray]:
        parts: dict[tuple[str, ...], list[np.ndarray]] = defaultdict(list)
        for s in self.layout.segments:
            own = self._ex.programs.segments[s.name].owned_parts
            for part in own:
                tree = self._given[s.name, REDUCE][part]
                for path, leaf in leaves_of(tree):
                    parts[s.module, part, *path].append(leaf)
        return {k: a[0] if len(a) == 1 else np.concatenate(a) for k, a in parts.items()}


def leaves_of(tree: Tree) -> list[tuple[tuple[str, ...], Any]]:
    every = jax.tree_util.tree_leaves_with_path(tree)
    return [(tuple(k.key for k in path), leaf) for path, leaf in every]


def _held(segment: Segment, params: Tree) -> Tree:
    """A segment's own parameters on its devices."""
    mine = {p: params[p] for p in segment.owned_parts}
    for part, rows in segment.layer_rows.items():
        mine[part] = jax.tree.map(lambda a, rows=rows: a[list(rows)], mine[part])
    return jax.tree.map(lambda a, s: shard_array(a, s.sharding), mine, initial_structs(segment))


def pack_all(
    model: MultimodalModel, layout: Layout, schedule: Schedule, samples: Sequence[Sample]
) -> list[PackedGroup]:
    loads = [s.load for s in samples]
    return pack_groups(layout, schedule, samples, loads, model=model)


@dataclass(frozen=True)
class Where:
    """Of one sample by module: its tokens in the rows of a group, (row of each, place of each); and
    which of the module's features, counted over all rows, it reads."""

    tokens: Mapping[str, tuple[np.ndarray, np.ndarray]]
    features: Mapping[str, np.ndarray]


def tokens_of(
    model: MultimodalModel,
    packing: Packing,
    target: int,
    schedule: Schedule,
    packed: Sequence[PackedGroup],
) -> Where:
    """Where a sample stands in the groups of a schedule."""
    tokens: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    features: dict[str, list[np.ndarray]] = defaultdict(list)
    for g, group in enumerate(schedule.groups):
        lengths = [s.load.lengths(group.module) for s in packing.samples]
        flat = np.array([n for pieces in lengths for n in pieces])
        starts = group.pieces.row_offsets(flat)
        first = sum(map(len, lengths[:target]))
        mine = range(first, first + len(lengths[target]))
        if not mine:
            continue
        rows = np.concatenate([np.full(flat[i], packing.rows[group.module][i]) for i in mine])
        places = np.concatenate([starts[i] + np.arange(flat[i]) for i in mine])
        tokens[group.module] = rows, places
        for source, (index, *_) in packed[g].gathers.items():
            read = index[0][rows, places].ravel()
            if (read >= 0).any():
                features[schedule.groups[source].module].append(read[read >= 0])
    return Where(tokens, {m: np.concatenate(f) for m, f in features.items()})
