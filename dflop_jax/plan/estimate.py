"""Tasks and bytes of modules in all their forms at all cuts, as arrays.

Every group of a cut has one shape and one content, so its tasks' seconds are exact before anything
is scheduled; only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import with_backward
from dflop_jax.plan.placement import Form, Outline, Placement, ends_in_layers, lay_out
from dflop_jax.plan.pricing import reduce_s, update_s
from dflop_jax.plan.volume import (
    CUTS,
    Volume,
    group_pairs,
    least_groups,
    packed_rows,
    piece_rows,
)
from dflop_jax.profile.fit import Array, CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Edge,
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
        forms = tuple(form if m == module else Form((1, 1, 1)) for m in self.n_layers)
        whole = self.placement(Outline(forms, tuple(range(len(forms)))))
        return tuple(s for s in whole.segments if s.module == module)

    @cached_property
    def brings_backward(self) -> frozenset[Edge]:
        """Edges whose target runs backward because of what is read: a part before them trains."""
        firsts = np.cumsum([0, *self.n_layers.values()]).tolist()
        forms = tuple(Form((1, 1, 1), n) for n in self.n_layers.values())
        finest = self.structure(self.placement(Outline(forms, tuple(firsts[:-1]))))
        trainable = {s.name for s in finest.segments if self.trains(s)}
        backward = set(with_backward(finest, trainable))
        return frozenset(
            e for e in finest.edges for s in finest.segments if s.sends(e) and s.name in backward
        )


@dataclass(frozen=True)
class Segments:
    """A module in forms of one kind: of each of its segments, by remat, seconds and bytes.

    rows, tokens: the shape of each form and cut, 0 rows where the data has no piece. trusted:
    whether its prices are believed, or no cut is finer. groups: that each sampled batch takes at
    least, [n_batches, n_forms, n_cuts]. state, kept, temporaries: see `profile.fit.SegmentBytes`.
    reduce_s, update_s: at the step's end. These and `state` are [n_forms, 1].
    """

    data: np.ndarray
    rows: Array
    tokens: Array
    trusted: Array
    pairs: Array
    groups: Array
    forward_s: Sequence[Array]
    backward_s: Mapping[str, Sequence[Array]]
    state: Sequence[Array]
    kept: Sequence[Array]
    temporaries: Mapping[str, Sequence[Array]]
    reduce_s: Sequence[Array]
    update_s: Sequence[Array]

    def at(self, data: Sequence[int]) -> Segments:
        """The forms with these data degrees, one after the other."""
        i = np.searchsorted(self.data, data)

        def of(arrays: Sequence[Array]) -> list[Array]:
            return [a[i] for a in arrays]

        return Segments(
            self.data[i],
            self.rows[i],
            self.tokens[i],
            self.trusted[i],
            self.pairs[i],
            self.groups[:, i],
            of(self.forward_s),
            {r: of(a) for r, a in self.backward_s.items()},
            of(self.state),
            of(self.kept),
            {r: of(a) for r, a in self.temporaries.items()},
            of(self.reduce_s),
            of(self.update_s),
        )

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
    if module in rules.profile.piece_tokens:
        rows = piece_rows(volume, cuts * group_size, data)
        tokens = np.full(rows.shape, rules.profile.piece_tokens[module])
        room = rows * data * group_size
    else:
        microbatches = cuts * group_size
        multiple = rules.token_multiple
        rows, tokens = packed_rows(volume, microbatches, data, costs, module, tp, multiple)
        room = rows * tokens * data * group_size
    pairs, sizes = group_pairs(volume, cuts, data), rows * tokens
    mesh = (stage, data, tp)
    nothing, no_end = np.zeros(rows.shape), np.zeros(data.shape)
    forward, state, kept, reduce, update = [], [], [], [], []
    backward: dict[str, list[Array]] = {r: [] for r in rules.remats}
    temporaries: dict[str, list[Array]] = {r: [] for r in rules.remats}
    edges, gradient_goes_on = rules.profile.edges, False

    def task_s(s: SegmentPlan, direction: str) -> Array:
        content_s = costs.group_pair_s(s, mesh, group_size, direction) * pairs
        return costs.group_s(s, mesh, group_size, rows, tokens, direction) + content_s

    for s in rules.segments(module, Form((stage, 1, tp), form.n_segments)):
        trained = rules.trains(s)
        reads = any(s.reads(e) for e in edges if e in rules.brings_backward)
        gradient_goes_on = gradient_goes_on or trained or reads
        fused = s.last and not any(s.sends(e) for e in edges)  # its backward is all it runs
        forward.append(nothing if fused else task_s(s, FORWARD))
        for r in rules.remats:
            with_r = replace(s, remat=r)
            backward[r].append(task_s(with_r, BACKWARD) if gradient_goes_on or fused else nothing)
            n_bytes = costs.segment_bytes(with_r, mesh, group_size, rows, tokens, trained=trained)
            temporaries[r].append(n_bytes.temporaries)
        state.append(n_bytes.state)
        kept.append(n_bytes.kept)
        ends = (s, mesh, costs.profile, rules.hardware)
        reduce.append(reduce_s(*ends) if trained else no_end)
        update.append(update_s(*ends) if trained else no_end)
    return Segments(
        np.array(degrees),
        rows,
        tokens,
        sizes <= np.maximum(rules.trusted_tokens(module), sizes[:, -1:]),
        pairs,
        least_groups(volume, room),
        forward,
        backward,
        state,
        kept,
        temporaries,
        reduce,
        update,
    )
