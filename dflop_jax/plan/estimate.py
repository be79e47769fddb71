"""Tasks and bytes of modules in all their forms at all cuts and with all options, as arrays.

Every group of a cut has one shape and one content, so its tasks' seconds are exact before anything
is scheduled; only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only. Those that
depend on the option have it first, [n_options, n_forms, n_cuts].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar, get_args

import numpy as np

from dflop_jax.plan.options import Option
from dflop_jax.plan.placement import (
    BY_NUMBER,
    CutCosts,
    Extent,
    Form,
    ModelFacts,
    RunCosts,
    cut_costs,
    module_segments,
)
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.plan.volume import (
    CUTS,
    Volume,
    group_content,
    least_groups,
    packed_rows,
    piece_rows,
)
from dflop_jax.profile.cost_model import CostModel, Figures
from dflop_jax.profile.state import Array, SegmentBytes, SegmentState, ShardSeconds, StateBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Direction,
    Layout,
    MeshShape,
    ModelProfile,
    SegmentPlan,
    Shape,
    Zero,
    content_s,
)

# Times the largest timed shape of a module up to which prices by timings are believed; twice as
# much admits fewer and larger groups, priced by a fit that nothing near them was timed for.
_TRUSTED_GROWTH = 2.0
# Microbatches of a group for each stage of a loop. A loop of S stages takes 1 + (S - 1) / (k S)
# times what it needs: with 8, at most an eighth more, which 16 would halve.
_FILLS = (1, 2, 4, 8)
# Of a bucket, what it and the smaller ones beside it have, those first that save most. In 6 set-ups
# of benchmarks/auto_choice.py (21 placements) quarters took 0.7% longer than all four, thirds 2%.
_SHARES = (1.0, 0.6, 0.3, 0.8)
Record = TypeVar("Record", ShardSeconds, StateBytes)


@dataclass(frozen=True)
class Rules:
    """What every placement is priced with.

    volumes: of the sampled batches, by module. spec: what is searched for, all limits above 0.
    """

    costs: CostModel
    volumes: Mapping[str, Volume]
    spec: SearchSpec

    @property
    def profile(self) -> ModelProfile:
        return self.costs.profile

    @property
    def n_layers(self) -> dict[str, int]:
        """Layers of every module, in topological order."""
        return self.profile.n_layers

    def options(self, module: str) -> tuple[Option, ...]:
        """What is tried for a module, the simplest first: of equals the first is taken."""
        remat, zero = self.spec.remat, self.spec.zero
        remats = (remat,) if remat != "auto" else self.costs.fits.known_policies(module)
        degrees: tuple[Zero, ...] = (zero,) if zero != "auto" else get_args(Zero)
        return tuple(
            Option(r, z, d)
            for z in degrees
            for d in (self.shard_devices if z > 1 else self.shard_devices[:1])
            for r in remats
        )

    @cached_property
    def facts(self) -> ModelFacts:
        """What placements depend on, with the tensor-parallel degrees of which the profile has
        timings."""
        timed: dict[str, set[int]] = {m: set() for m in self.n_layers}
        for t in self.profile.timings:
            timed[t.module].add(t.model)
        kinds = {m: self.profile.layer_kinds(m) for m in self.n_layers}
        return ModelFacts.of(kinds, timed, self.profile.edges)

    @property
    def known_node(self) -> int:
        """Devices of a node; 0: nobody says."""
        return self.spec.known_node(self.profile)

    @cached_property
    def extent(self) -> Extent:
        """How far the space of placements reaches."""
        n_devices = self.spec.n_devices
        return Extent(self.facts, n_devices, self.known_node or n_devices, self.spec.config)

    @property
    def shard_devices(self) -> tuple[int, ...]:
        """Sizes of blocks of devices that may share state: as asked for, else all or, where links
        have prices and there are several nodes, those of a node."""
        if given := self.spec.config.shard_devices:
            return (given,)
        node = self.known_node if self.profile.hardware else 0
        return (0, node) if 0 < node < self.spec.n_devices else (0,)

    def of_devices(self, n_devices: int) -> Rules:
        """The same for so many devices."""
        return replace(self, spec=replace(self.spec, n_devices=n_devices))

    def trusted_tokens(self, module: str) -> float:
        """Tokens of a microbatch on a rank up to which prices are believed: a fit of timings goes
        astray far beyond the largest shape that was timed, computed ones hold at any size."""
        if self.profile.computed:
            return np.inf
        timed = (t.shape.size for t in self.profile.timings if t.module == module)
        return _TRUSTED_GROWTH * max(timed)

    def cuts(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups that a mean batch may be cut into, microbatches of a group): groups of as many
        microbatches as the deepest loop has stages, and, where there is a loop, of more."""
        config = self.spec.config
        given, most = config.microbatches_per_stage, config.max_microbatches
        fills = [given] if given else [k for k in _FILLS if k * stages <= most]
        sizes = [k * stages for k in fills or [1]] if stages > 1 else [1]
        groups = [self._groups(size) for size in sizes]
        return np.concatenate(groups), np.repeat(sizes, [len(n) for n in groups])

    def _groups(self, group_size: int) -> np.ndarray:
        """Groups of so many microbatches that a mean batch may be cut into."""
        finest = max(1, self.spec.config.max_microbatches // group_size)
        return np.array([*(c for c in CUTS if c < finest), finest])

    def run_costs(self, module: str, model: int) -> RunCosts:
        """What a module's ends and layers cost at a tensor-parallel degree."""
        return self.cut_costs.get((module, model), BY_NUMBER)

    @property
    def shares(self) -> tuple[float, ...]:
        """What of a bucket the smaller ones have that plans may have beside it, and 1; rising."""
        return tuple(sorted(_SHARES[: self.spec.config.buckets]))

    def row_tokens(self, module: str) -> int:
        """Tokens of a packed row that holds the longest piece."""
        longest = max(1, self.volumes[module].longest)
        multiple = self.spec.token_multiple
        return -(-longest // multiple) * multiple

    def row_sizes(
        self, module: str, microbatches: Array, data: Array, model: int
    ) -> tuple[Array, Array]:
        """(rows, tokens of a row) of a rank where a mean batch has so many microbatches."""
        volume = self.volumes[module]
        if module in self.profile.piece_tokens:
            rows = piece_rows(volume, microbatches, data)
            return rows, np.full(rows.shape, self.profile.piece_tokens[module])
        return packed_rows(
            volume, microbatches, data, self.costs, module, model, self.spec.token_multiple
        )

    def room(self, module: str, rows: Array, tokens: Array) -> Array:
        """What such rows hold, in the units of `Volume`."""
        return rows if module in self.profile.piece_tokens else rows * tokens

    @cached_property
    def cut_costs(self) -> CutCosts:
        return cut_costs(self.profile)

    def joined(self, layout: Layout) -> Layout:
        """A layout of submeshes and segments, with the model's edges."""
        return replace(layout, edges=self.profile.edges, tied=self.profile.tied)

    def trainable(self, layout: Layout) -> list[str]:
        """Names of the plan's segments that train."""
        return [s.name for s in layout.segments if self.spec.trains(s)]

    def segments(self, module: str, form: Form) -> tuple[SegmentPlan, ...]:
        """A module's segments in a form."""
        costs = self.run_costs(module, form.mesh.model)
        return module_segments(module, self.n_layers[module], 0, form, costs)[1]


@dataclass(frozen=True)
class SegmentCosts:
    """What a segment takes, by option: seconds of a group, 0 where it does not run them, and of the
    step's end; bytes of its devices."""

    forward_s: Array
    backward_s: Array
    reduce_s: Array
    update_s: Array
    bytes: SegmentBytes

    @property
    def seconds(self) -> tuple[Array, Array, Array, Array]:
        return self.forward_s, self.backward_s, self.reduce_s, self.update_s


@dataclass(frozen=True)
class Segments:
    """A module in forms of one kind, with every option, at the cuts of `Rules.cuts`.

    data: degree of each form, [n_forms]. rows, tokens: the shape of each form and cut, 0 rows where
    the data has no piece. trusted: whether its prices are believed, or no cut is finer. groups:
    that each sampled batch takes at least, [n_batches, n_forms, n_cuts]. costs: of each segment.
    """

    options: tuple[Option, ...]
    data: Array
    rows: Array
    tokens: Array
    trusted: Array
    groups: Array
    costs: list[SegmentCosts]

    def shape(self, form: int, cut: int) -> Shape | None:
        rows, tokens = int(self.rows[form, cut]), int(self.tokens[form, cut])
        return Shape(rows, tokens) if rows else None


def module_table(
    rules: Rules,
    segments: Sequence[SegmentPlan],
    tasks: Sequence[Collection[str]],
    mesh: MeshShape,
    cuts: tuple[Array, Array],
    sizes: tuple[Array, Array],
    parts: Array = 1,
    max_parts: Array = 1,
) -> Segments:
    """A module's table.

    Args:
      segments: of the module, most of which are alike; `tasks` are each one's.
      mesh: has rising data degrees, [n_forms, 1].
      cuts: groups of a mean batch at each cut, and microbatches of a group.
      sizes: rows of a rank at each cut, and tokens of a row.
      parts, max_parts: groups of the module that go together, on average and at most.
    """
    module, (n_groups, group_size), (rows, tokens) = segments[0].module, cuts, sizes
    volume, n_tokens = rules.volumes[module], rows * tokens
    data: Array = mesh.data
    smallest = n_tokens[:, [int((n_groups * group_size).argmax())]]
    room = rules.room(module, rows, tokens) * max_parts * data * group_size
    figures = rules.costs.at(module, mesh.model, rows, tokens)
    content = group_content(volume, n_groups * parts, data)
    known: dict[tuple[object, ...], SegmentCosts] = {}
    costs = []
    for s, has in zip(segments, tasks, strict=True):
        key = rules.costs.kind(s), tuple(has), rules.spec.trains(s)
        if key not in known:
            known[key] = _costs(rules, s, mesh, group_size, figures, content, has)
        costs.append(known[key])
    return Segments(
        rules.options(module),
        data[:, 0],
        rows,
        tokens,
        n_tokens <= np.maximum(rules.trusted_tokens(module), smallest),
        least_groups(volume, room, rules.shares[0]),
        costs,
    )


def _costs(
    rules: Rules,
    s: SegmentPlan,
    mesh: MeshShape,
    group_size: Array,
    figures: Figures,
    content: Sequence[Array],
    tasks: Collection[str],
) -> SegmentCosts:
    """What a segment takes with every option of its module."""
    costs, trains = rules.costs, rules.spec.trains(s)
    options = [o.of(s) for o in rules.options(s.module)]
    shards = list({(o.zero, o.shard_devices): o for o in options}.values())
    remats = list({o.remat: o for o in options}.values())
    assert len(options) == len(shards) * len(remats), "every way to share state goes with every one"
    shape = (len(shards), *figures.is_there.shape)
    states = [SegmentState(o, mesh, rules.profile) for o in shards]
    moved = _stacked([s.moved() for s in states], mesh.data)
    state = _stacked([costs.state_of(o, mesh, trained=trains) for o in shards], mesh.data)
    backward = BACKWARD in tasks
    held = {
        o.remat: costs.bytes_of(o, mesh, group_size, figures, state, backward=backward)
        for o in remats
    }

    def task_s(s: SegmentPlan, direction: Direction) -> Array:
        """[shards, n_forms, n_cuts]."""
        static_s = costs.task_s(s, mesh, group_size, figures, direction, moved)
        unit_s = costs.group_content_s(s, mesh, group_size, direction)
        return static_s + content_s(unit_s, content)

    def by_option(of: Callable[[SegmentPlan], Array]) -> Array:
        """Of what is asked once for every recompute policy, [shards, n_forms, n_cuts]."""
        by_remat = [np.broadcast_to(of(o), shape) for o in remats]
        return np.stack(by_remat, axis=1).reshape(len(options), *shape[1:])

    def alike(by_shards: Array) -> Array:
        """Of what is the same under all recompute policies, by option."""
        return np.repeat(np.broadcast_to(by_shards, shape), len(remats), axis=0)

    def at_end_s(of: Callable[[SegmentState], Array]) -> Array:
        return alike(np.stack([np.broadcast_to(of(s), shape[1:]) for s in states]))

    def held_bytes(name: str) -> Array:
        return by_option(lambda o: getattr(held[o.remat], name))

    none = np.zeros((len(options), *shape[1:]))
    return SegmentCosts(
        alike(task_s(shards[0], FORWARD)) if FORWARD in tasks else none,
        by_option(lambda o: task_s(o, BACKWARD)) if backward else none,
        at_end_s(SegmentState.reduce_s) if trains else none,
        at_end_s(SegmentState.update_s) if trains else none,
        SegmentBytes(*(held_bytes(f.name) for f in fields(SegmentBytes))),
    )


def _stacked(records: Sequence[Record], like: Array) -> Record:
    """Records of arrays as one, whose arrays are [len(records), *like.shape]."""
    kind = type(records[0])
    each = ((getattr(r, f.name) for r in records) for f in fields(kind))
    return kind(*(np.stack([np.broadcast_to(a, like.shape) for a in arrays]) for arrays in each))
