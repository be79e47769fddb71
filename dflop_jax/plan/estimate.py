"""Tasks and bytes of modules in all their forms at all cuts and with all options, as arrays.

Every group of a cut has one shape and one content, so its tasks' seconds are exact before anything
is scheduled; only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only. Those that
depend on the option have it first, [n_options, n_forms, n_cuts].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from dflop_jax.plan.options import Option
from dflop_jax.plan.placement import (
    BY_NUMBER,
    CutCosts,
    Extent,
    Form,
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
from dflop_jax.profile.state import Array, SegmentBytes, SegmentState
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
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
        remats = (remat,) if remat != "auto" else self.costs.fits.priced_policies(module)
        degrees: tuple[Zero, ...] = (zero,) if zero != "auto" else get_args(Zero)
        return tuple(
            Option(r, z, d)
            for z in degrees
            for d in (self.shard_devices if z > 1 else self.shard_devices[:1])
            for r in remats
        )

    @cached_property
    def extent(self) -> Extent:
        """How far the space of placements reaches, with the tensor-parallel degrees of which the
        profile has timings."""
        timed: dict[str, set[int]] = {m: set() for m in self.n_layers}
        for t in self.profile.timings:
            timed[t.module].add(t.model)
        kinds = {m: self.profile.layer_kinds(m) for m in self.n_layers}
        n, node = self.spec.n_devices, self.spec.config.node
        return Extent.of(kinds, timed, self.profile.edges, n, node or n, self.spec.config)

    @property
    def shard_devices(self) -> tuple[int, ...]:
        """Sizes of blocks of devices that may share state: as asked for, else all or, where links
        have prices and there are several nodes, those of a node."""
        if given := self.spec.config.shard_devices:
            return (given,)
        node = self.spec.config.node if self.profile.hardware else 0
        return (0, node) if 0 < node < self.spec.n_devices else (0,)

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
        finest = [max(1, most // size) for size in sizes]
        groups = [[*(c for c in CUTS if c < n), n] for n in finest]
        return np.concatenate(groups), np.repeat(sizes, [len(n) for n in groups])

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
class Segments:
    """A module in forms of one kind, with every option, at the cuts of `Rules.cuts`.

    data: degree of each form, [n_forms]. rows, tokens: the shape of each form and cut, 0 rows where
    the data has no piece. trusted: whether its prices are believed, or no cut is finer. groups:
    that each sampled batch takes at least, [n_batches, n_forms, n_cuts]. seconds: of each segment's
    group forward and backward, 0 where it does not run them, and of the step's end: reduction and
    update. n_bytes: of each segment's devices.
    """

    options: tuple[Option, ...]
    data: Array
    rows: Array
    tokens: Array
    trusted: Array
    groups: Array
    seconds: tuple[tuple[Array, ...], ...]
    n_bytes: tuple[SegmentBytes, ...]

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
    known: dict[tuple[object, ...], list[Array]] = {}
    costs = []
    for s, has in zip(segments, tasks, strict=True):
        key = rules.costs.kind(s), tuple(has), rules.spec.trains(s)
        if key not in known:
            known[key] = _costs(rules, s, mesh, group_size, figures, content, has)
        costs.append(known[key])
    *seconds, state, kept, temporaries = zip(*costs, strict=True)
    return Segments(
        rules.options(module),
        data[:, 0],
        rows,
        tokens,
        n_tokens <= np.maximum(rules.trusted_tokens(module), smallest),
        least_groups(volume, room, rules.shares[0]),
        tuple(seconds),
        tuple(map(SegmentBytes, state, kept, temporaries)),
    )


def _costs(
    rules: Rules,
    s: SegmentPlan,
    mesh: MeshShape,
    group_size: Array,
    figures: Figures,
    content: Sequence[Array],
    tasks: Collection[str],
) -> list[Array]:
    """What a segment takes with every option of its module: seconds forward, backward, of reduction
    and of update, and the fields of its `SegmentBytes`."""
    costs, trains, shape = rules.costs, rules.spec.trains(s), figures.is_there.shape
    by_option = []
    for option in rules.options(s.module):
        saving = option.of(s)
        state = SegmentState(saving, mesh, rules.profile)
        moved, held = state.moved(), costs.state_of(saving, mesh, trained=trains)
        taken: list[Array] = []
        for d in (FORWARD, BACKWARD):
            seconds: Array = 0.0
            if d in tasks:
                seconds = costs.task_s(saving, mesh, group_size, figures, d, moved)
                unit_s = costs.group_content_s(saving, mesh, group_size, d)
                seconds = seconds + content_s(unit_s, content)
            taken.append(seconds)
        taken += [state.reduce_s(), state.update_s()] if trains else [0.0, 0.0]
        backward = BACKWARD in tasks
        n_bytes = costs.bytes_of(saving, mesh, group_size, figures, held, backward=backward)
        taken += [n_bytes.state, n_bytes.kept, n_bytes.temporaries]
        by_option.append([np.broadcast_to(a, shape) for a in taken])
    return [np.stack(each) for each in zip(*by_option, strict=True)]
