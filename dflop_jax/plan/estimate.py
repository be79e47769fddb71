"""Tasks and bytes of modules in all their forms at all cuts, as arrays.

Every group of a cut has one bucket, so its tasks' seconds are exact before anything is scheduled;
only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.plan.links import reduce_s, update_s
from dflop_jax.plan.load import CUTS, Load, encoder_items, least_groups, llm_rows
from dflop_jax.plan.placement import Form, Outline, Placement, encoders_of, ends_in_layers, lay_out
from dflop_jax.profile.fit import Array, CostModel
from dflop_jax.records import BACKWARD, FORWARD, SegmentPlan

Family = tuple[int, int, int]  # (segments, stages, tensor-parallel degree)


@dataclass(frozen=True)
class Rules:
    """What every placement is priced with.

    trains: whether a segment has trainable parameters. memory_bytes: of a device, 0: not checked.
    remat: "auto" (layers where memory needs it) or a value of `SegmentPlan.remat`. hardware: links
    and memory of the devices; None: what crosses them takes no time.
    """

    costs: CostModel
    loads: Mapping[str, Load]
    token_multiple: int
    max_microbatches: int
    trains: Callable[[SegmentPlan], bool]
    memory_bytes: float = 0.0
    remat: str = "auto"
    hardware: Hardware | None = None

    @property
    def n_layers(self) -> dict[str, int]:
        """Of every module, the LLM last."""
        return self.costs.profile.n_layers

    @property
    def remats(self) -> tuple[str, ...]:
        """To be tried in this order."""
        return ("none", "layers") if self.remat == "auto" else (self.remat,)

    def cuts(self, group_size: int) -> np.ndarray:
        """Groups that a mean batch may be cut into."""
        most = max(1, self.max_microbatches // group_size)
        return np.array([*(c for c in CUTS if c < most), most])

    def placement(self, outline: Outline) -> Placement:
        return lay_out(outline, self.n_layers, self._ends_in_layers)

    @cached_property
    def _ends_in_layers(self) -> dict[tuple[str, int], tuple[float, float]]:
        return ends_in_layers(self.costs.profile)

    def segments(self, module: str, form: Form) -> tuple[SegmentPlan, ...]:
        """A module's segments in a form."""
        forms = [form if m == module else Form((1, 1, 1)) for m in self.n_layers]
        whole = self.placement(Outline(tuple(forms[:-1]), forms[-1], 0))
        return tuple(s for s in whole.segments if s.module == module)

    @cached_property
    def encoders_train(self) -> bool:
        whole = Form((1, 1, 1))
        return any(
            self.trains(s) for m in encoders_of(self.n_layers) for s in self.segments(m, whole)
        )


@dataclass(frozen=True)
class Segments:
    """A module in forms of one family: of each of its segments, by remat, seconds and bytes.

    items, tokens: the bucket of each form and cut. groups: that each sampled batch takes at least,
    [n_batches, n_forms, n_cuts]. state, kept, temporaries: see `profile.fit.SegmentBytes`.
    reduce_s, update_s: at the step's end. These and `state` are [n_forms, 1].
    """

    data: np.ndarray
    items: Array
    tokens: Array
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
            self.items[i],
            self.tokens[i],
            self.groups[:, i],
            of(self.forward_s),
            {r: of(a) for r, a in self.backward_s.items()},
            of(self.state),
            of(self.kept),
            {r: of(a) for r, a in self.temporaries.items()},
            of(self.reduce_s),
            of(self.update_s),
        )

    def __len__(self) -> int:
        return len(self.forward_s)


def module_table(
    rules: Rules, module: str, family: Family, group_size: int, degrees: Sequence[int]
) -> Segments:
    """A module's table for rising data degrees."""
    n, stage, tp = family
    costs, load = rules.costs, rules.loads[module]
    cuts = rules.cuts(group_size)
    data = np.array(degrees)[:, None]
    if module == "llm":
        items, tokens = llm_rows(load, cuts * group_size, data, costs, tp, rules.token_multiple)
        room = items * tokens * data * group_size
    else:
        items = encoder_items(load, cuts * group_size, data)
        tokens = np.full(items.shape, costs.profile.item_tokens[module])
        room = items * data * group_size
    mesh = (stage, data, tp)
    nothing, no_end = np.zeros(items.shape), np.zeros(data.shape)
    forward, state, kept, reduce, update = [], [], [], [], []
    backward: dict[str, list[Array]] = {r: [] for r in rules.remats}
    temporaries: dict[str, list[Array]] = {r: [] for r in rules.remats}
    wanted = module == "llm" and rules.encoders_train  # the gradient of a segment's input
    segments = rules.segments(module, Form((stage, 1, tp), n))
    for s in segments:
        trained = rules.trains(s)
        wanted = wanted or trained
        final = module == "llm" and s is segments[-1]  # its backward is all it runs
        shape = (mesh, group_size, items, tokens)
        forward.append(nothing if final else costs.group_s(s, *shape, FORWARD))
        for r in rules.remats:
            with_r = replace(s, remat=r)
            runs = wanted or final
            backward[r].append(costs.group_s(with_r, *shape, BACKWARD) if runs else nothing)
            found = costs.segment_bytes(with_r, *shape, trained=trained)
            temporaries[r].append(found.temporaries)
        state.append(found.state)
        kept.append(found.kept)
        ends = (s, mesh, costs.profile, rules.hardware)
        reduce.append(reduce_s(*ends) if trained else no_end)
        update.append(update_s(*ends) if trained else no_end)
    return Segments(
        np.array(degrees),
        items,
        tokens,
        least_groups(load, room),
        forward,
        backward,
        state,
        kept,
        temporaries,
        reduce,
        update,
    )
