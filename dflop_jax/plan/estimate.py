"""Tasks and bytes of modules in all their forms at all cuts, as arrays.

Every group of a cut has one shape and one content, so its tasks' seconds are exact before anything
is scheduled; only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.plan.placement import (
    Form,
    Outline,
    Placement,
    ends_in_layers,
    lay_out,
    module_segments,
)
from dflop_jax.plan.pricing import reduce_s, update_s
from dflop_jax.plan.volume import (
    CUTS,
    Volume,
    group_pairs,
    least_groups,
    packed_rows,
    piece_rows,
)
from dflop_jax.profile.fit import Array, CostModel, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    ModelProfile,
    Plan,
    Remat,
    SegmentPlan,
    Shape,
)

_BEYOND = 2.0  # times the largest timed shape of a module that prices are believed


@dataclass(frozen=True)
class Rules:
    """What every placement is priced with.

    volumes: of the sampled batches, by module. trains: whether a segment has trainable parameters.
    memory_bytes: of a device, 0: not checked. remat: "auto" (layers where memory needs it) or a
    value of `SegmentPlan.remat`. hardware: links and memory of the devices; None: what crosses them
    takes no time.
    """

    costs: CostModel
    volumes: Mapping[str, Volume]
    token_multiple: int
    max_microbatches: int
    trains: Callable[[SegmentPlan], bool]
    memory_bytes: float = 0.0
    remat: Remat | Literal["auto"] = "auto"
    hardware: Hardware | None = None

    @property
    def profile(self) -> ModelProfile:
        return self.costs.profile

    @property
    def n_layers(self) -> dict[str, int]:
        """Layers of every module, in topological order."""
        return self.profile.n_layers

    @property
    def remats(self) -> tuple[Remat, ...]:
        """Recompute policies to be tried, in this order."""
        if self.remat != "auto":
            return (self.remat,)
        return ("none", "layers")

    @cached_property
    def unstaged(self) -> frozenset[str]:
        """Modules with an edge between their layers, which lie in segments, not in stages."""
        edges = self.profile.edges
        taps = {e.source for e in edges if e.leaves >= 0}
        return frozenset(taps | {e.target for e in edges if e.enters >= 0})

    def node(self, n_devices: int) -> int:
        """Devices of a node."""
        return self.hardware.devices_per_node if self.hardware else n_devices

    def trusted_tokens(self, module: str) -> float:
        """Tokens of a microbatch on a rank up to which prices are believed: a fit of timings goes
        astray far beyond the largest shape that was timed. Prices of `hardware` come from formulas
        that hold at any size."""
        if self.hardware:
            return np.inf
        timed = (t.shape.size for t in self.profile.timings if t.module == module)
        return _BEYOND * max(timed)

    def cuts(self, group_size: int) -> np.ndarray:
        """Groups that a mean batch may be cut into."""
        most = max(1, self.max_microbatches // group_size)
        return np.array([*(c for c in CUTS if c < most), most])

    def placement(self, outline: Outline) -> Placement:
        return lay_out(outline, self.n_layers, self._ends_in_layers)

    @cached_property
    def _ends_in_layers(self) -> dict[tuple[str, int], tuple[float, float]]:
        return ends_in_layers(self.profile)

    def structure(self, placement: Placement, policy: str = "dflop") -> Plan:
        """The placement as a plan without shapes, to ask for its graph."""
        return Plan(
            policy,
            placement.submeshes,
            placement.segments,
            (Bucket.of({placement.segments[0].module: Shape(1, 1)}),),
            edges=self.profile.edges,
            group_size=placement.group_size,
            tied=self.profile.tied,
        )

    def segments(self, module: str, form: Form) -> tuple[SegmentPlan, ...]:
        """A module's segments in a form."""
        ends = self._ends_in_layers.get((module, form.mesh[2]), (0.0, 0.0))
        return module_segments(module, self.n_layers[module], 0, form, ends)[1]


@dataclass(frozen=True)
class Segments:
    """A module in forms of one kind, and each of its segments, by remat.

    data: degree of each form, [n_forms, 1]. rows, tokens: the shape of each form and cut, 0 rows
    where the data has no piece. trusted: whether its prices are believed, or no cut is finer.
    groups: that each sampled batch takes at least, [n_batches, n_forms, n_cuts]. forward_s,
    backward_s: of a group, should it run them. reduce_s, update_s: at the step's end, [n_forms, 1].
    """

    data: Array
    rows: Array
    tokens: Array
    trusted: Array
    pairs: Array
    groups: Array
    forward_s: list[Array]
    backward_s: dict[str, list[Array]]
    needs: dict[str, list[SegmentBytes]]
    reduce_s: list[Array]
    update_s: list[Array]

    def at(self, data: Array) -> Segments:
        """The forms with these data degrees, one after the other."""
        i = np.searchsorted(self.data[:, 0], data)

        def taken(value: Any) -> Any:
            if isinstance(value, list):
                return [taken(v) for v in value]
            if isinstance(value, dict):
                return {k: taken(v) for k, v in value.items()}
            if isinstance(value, SegmentBytes):
                return SegmentBytes(*(taken(getattr(value, f.name)) for f in fields(value)))
            return value[..., i, :]

        return Segments(*(taken(getattr(self, f.name)) for f in fields(self)))

    def shape(self, form: int, cut: int) -> Shape | None:
        rows, tokens = int(self.rows[form, cut]), int(self.tokens[form, cut])
        return Shape(rows, tokens) if rows else None


def module_table(
    rules: Rules, module: str, form: Form, group_size: int, degrees: Sequence[int]
) -> Segments:
    """A module's table for rising data degrees; `form` has any."""
    costs, volume = rules.costs, rules.volumes[module]
    stage, _, tp = form.mesh
    cuts, data = rules.cuts(group_size), np.array(degrees)[:, None]
    microbatches = cuts * group_size
    if module in rules.profile.piece_tokens:
        rows = piece_rows(volume, microbatches, data)
        tokens = np.full(rows.shape, rules.profile.piece_tokens[module])
        room = rows * data * group_size
    else:
        multiple = rules.token_multiple
        rows, tokens = packed_rows(volume, microbatches, data, costs, module, tp, multiple)
        room = rows * tokens * data * group_size
    sizes, pairs = rows * tokens, group_pairs(volume, cuts, data)
    mesh, segments = (stage, data, tp), rules.segments(module, form)

    def group_s(remat: Remat, direction: str) -> list[Array]:
        each = [replace(s, remat=remat) for s in segments]
        return [
            costs.group_s(s, mesh, group_size, rows, tokens, direction)
            + costs.group_pair_s(s, mesh, group_size, direction) * pairs
            for s in each
        ]

    def needs(s: SegmentPlan, remat: Remat) -> SegmentBytes:
        s = replace(s, remat=remat)
        return costs.segment_bytes(s, mesh, group_size, rows, tokens, trained=rules.trains(s))

    def end_s(of: Callable[..., Array]) -> list[Array]:
        every = [(s, mesh, rules.profile, rules.hardware) for s in segments]
        return [of(*ends) if rules.trains(ends[0]) else np.zeros(data.shape) for ends in every]

    return Segments(
        data,
        rows,
        tokens,
        sizes <= np.maximum(rules.trusted_tokens(module), sizes[:, -1:]),
        pairs,
        least_groups(volume, room),
        group_s("none", FORWARD),
        {r: group_s(r, BACKWARD) for r in rules.remats},
        {r: [needs(s, r) for s in segments] for r in rules.remats},
        end_s(reduce_s),
        end_s(update_s),
    )
