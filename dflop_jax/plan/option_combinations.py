"""The graph of a layout's segments, the seconds that no schedule of it undercuts, and which options
of modules that share devices fit together.

An option makes a module cheaper to hold and dearer to run. Of all combinations only those matter
that fit, and that no other one that fits undercuts in everything. They are not listed for whole
spaces, only for candidates that are looked at; of the others it is enough to know whether any
combination fits, and the least of every quantity over the options that may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dflop_jax.plan.memory import SegmentNeed, resource_peaks, segment_need
from dflop_jax.plan.module_tables import ModuleTable, SearchContext
from dflop_jax.plan.options import MemoryOption
from dflop_jax.profile.state import Array
from dflop_jax.records import Direction, Layout, Plan
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.bounds import fill_and_drain_s, step_bound_s
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.simulate.task_graph import in_flight_limit, segment_links, submesh_resources

SegmentDirections = tuple[tuple[Direction, ...], ...]


@dataclass(frozen=True)
class SegmentGraph:
    """The graph of a family's segments, by their number in topological order.

    modules: module of each. resource: devices of each. sources: what it reads, of modules that the
    data uses. in_flight: groups that it keeps at most. tasks: what a group runs in it.
    """

    modules: tuple[str, ...]
    resource_of: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    directions: SegmentDirections

    def segments_of(self, module: str) -> list[int]:
        """Numbers of a module's segments."""
        return [i for i, m in enumerate(self.modules) if m == module]

    def module_key(self, module: str) -> tuple[SegmentDirections, tuple[int, ...], tuple[int, ...]]:
        """(tasks, resource, groups in flight) of a module's segments; resources are counted from
        the first one of them, so that equal modules elsewhere have equal facts."""
        numbers = self.segments_of(module)
        first = min(self.resource_of[i] for i in numbers)
        return (
            tuple(self.directions[i] for i in numbers),
            tuple(self.resource_of[i] - first for i in numbers),
            tuple(self.in_flight[i] for i in numbers),
        )

    @cached_property
    def blocks(self) -> list[tuple[str, ...]]:
        """Modules that share devices: all of those that each of them has."""
        blocks: dict[frozenset[int], list[str]] = defaultdict(list)
        for m in dict.fromkeys(self.modules):
            blocks[frozenset(self.resource_of[i] for i in self.segments_of(m))].append(m)
        return list(map(tuple, blocks.values()))


def segment_graph(layout: Layout, context: SearchContext) -> SegmentGraph:
    """The graph of a layout, whatever its shapes."""
    number = {s.name: i for i, s in enumerate(layout.segments)}
    used_segments = {s.name for s in layout.segments if context.volumes[s.module].max_per_sample}
    sources: list[list[int]] = [[] for _ in number]
    for link in segment_links(layout):
        if {link.source, link.target} <= used_segments:
            sources[number[link.target]].append(number[link.source])
    resource, in_flight = submesh_resources(layout), in_flight_limit(Plan("", layout))
    directions_of = segment_directions(layout, context.trainable(layout))
    return SegmentGraph(
        tuple(s.module for s in layout.segments),
        tuple(resource[s.submesh] for s in layout.segments),
        tuple(map(tuple, sources)),
        tuple(in_flight[n] for n in number),
        tuple(directions_of[n] for n in number),
    )


def step_lower_bound_s(
    graph: SegmentGraph,
    seconds: Mapping[str, tuple[tuple[Array, ...], ...]],
    groups: Array,
    devices: Mapping[str, Array],
    cores: float,
    groups_together: Mapping[str, Array],
) -> Array:
    """Seconds that no schedule undercuts.

    Args:
      seconds: of a group of every module in each of its segments, as in `Member`.
      groups: of each sampled batch, [n_batches, ...].
      devices: that a task of each module takes.
      cores: devices that compute at once.
      parts: groups of a module that go with one of `groups`, where it is not one.
    """
    forward, backward, reduce, update = (
        [a for m in dict.fromkeys(graph.modules) for a in seconds[m][kind]] for kind in range(4)
    )
    before_s, after_s = fill_and_drain_s(graph.sources, forward, backward, reduce)
    mean_groups: Array = groups.mean(axis=0)
    first_group_share = np.minimum(groups, 1.0).mean(
        axis=0
    )  # part of a group takes that part of one's seconds
    segment_s = [
        mean_groups * (forward[i] + backward[i]) * groups_together.get(m, 1)
        for i, m in enumerate(graph.modules)
    ]
    after_s = [np.where(b > 0, a, 0.0) for a, b in zip(after_s, backward, strict=True)]
    by_resource: dict[int, list[int]] = defaultdict(list)
    for i, r in enumerate(graph.resource_of):
        by_resource[r].append(i)

    def min_per_resource(values: Sequence[Array]) -> list[Array]:
        return [
            first_group_share
            * np.minimum.reduce(np.broadcast_arrays(*(values[i] for i in numbers)))
            for numbers in by_resource.values()
        ]

    def sum_per_resource(values: Sequence[Array]) -> list[Array]:
        return [sum(values[i] for i in numbers) for numbers in by_resource.values()]

    resource_bound_s = step_bound_s(
        sum_per_resource(segment_s),
        min_per_resource(before_s),
        min_per_resource(after_s),
        sum_per_resource(reduce),
        sum_per_resource(update),
    )
    device_s = sum(
        one_segment_s * np.minimum(devices[m], cores)
        for one_segment_s, m in zip(segment_s, graph.modules, strict=True)
    )
    return np.maximum(resource_bound_s, device_s / cores)


@dataclass(frozen=True)
class ModuleOptions:
    """A module of a block with all its options, [n_options, ...] by segment.

    needs: of each segment. seconds: of a group forward and backward, and of the step's end:
    reduction and update.
    """

    options: tuple[MemoryOption, ...]
    needs: tuple[SegmentNeed, ...]
    seconds: tuple[tuple[Array, ...], ...]

    @staticmethod
    def from_table(
        table: ModuleTable, resources: Sequence[int], in_flight: Sequence[Array]
    ) -> ModuleOptions:
        """A table's module where its segments have so many groups in flight."""
        needs = map(segment_need, resources, table.n_bytes, in_flight)
        return ModuleOptions(table.options, tuple(needs), table.seconds)

    def select(self, *index: Array) -> ModuleOptions:
        """The same at some of the table's forms (an array), or at one form and cut."""
        return self._sliced((slice(None), *index))

    def with_option(self, option: int) -> ModuleOptions:
        """The same with one of the options."""
        kept_option = slice(option, option + 1)
        return replace(self._sliced(kept_option), options=self.options[kept_option])

    def _sliced(self, index: Any) -> ModuleOptions:
        return replace(
            self,
            needs=tuple(
                (r, live_bytes[index], temporaries[index])
                for r, live_bytes, temporaries in self.needs
            ),
            seconds=tuple(tuple(a[index] for a in by_segment) for by_segment in self.seconds),
        )


@dataclass(frozen=True)
class BlockMinimum:
    """The least over what may fit, [n_forms, n_cuts].

    fits: whether any combination does. peak_bytes: of the device that needs most; where modules
    share devices, what is certainly needed. seconds: of every member, as in `Member`; 0 where
    nothing fits.
    """

    fits: Array
    min_peak_bytes: Array
    seconds: tuple[tuple[tuple[Array, ...], ...], ...]

    def select(self, rows: Array) -> BlockMinimum:
        """The same at some of the forms."""
        seconds = tuple(tuple(tuple(a[rows] for a in s) for s in m) for m in self.seconds)
        return BlockMinimum(self.fits[rows], self.min_peak_bytes[rows], seconds)


def block_minimum(members: Sequence[ModuleOptions], memory_bytes: float) -> BlockMinimum:
    """What the members of a block come to at least."""
    limit = memory_bytes or np.inf
    fitting, min_peak = _fitting_options(members, limit)
    fits = np.logical_and.reduce([a.any(axis=0) for a in fitting])
    if len(members) > 1 and memory_bytes:
        is_unsure = fits & ~(_upper_peak_bytes(members) <= limit)
        for index in np.argwhere(is_unsure):
            members_here = [m.select(*index) for m in members]
            fits[tuple(index)] = bool(
                (
                    _peaks_of_combinations(members_here, _all_combinations(members_here)) <= limit
                ).any()
            )
    seconds = tuple(
        tuple(
            tuple(np.where(fits, np.where(a, s, np.inf).min(axis=0), 0.0) for s in by_segment)
            for by_segment in m.seconds
        )
        for m, a in zip(members, fitting, strict=True)
    )
    return BlockMinimum(fits, min_peak, seconds)


def _fitting_options(members: Sequence[ModuleOptions], limit: float) -> tuple[list[Array], Array]:
    """(of every member which options fit beside the least of the others, the least peak)."""
    min_needs = [[(r, s.min(axis=0), w.min(axis=0)) for r, s, w in m.needs] for m in members]
    fitting, peaks = [], []
    for i, m in enumerate(members):
        other_needs = [need for j, needs in enumerate(min_needs) if j != i for need in needs]
        peak = _max_peak_bytes([*m.needs, *other_needs])
        fitting.append(peak <= limit)
        peaks.append(peak.min(axis=0))
    return fitting, np.maximum.reduce(peaks)


def _upper_peak_bytes(members: Sequence[ModuleOptions]) -> Array:
    """Peak bytes of the combination of options that each need the least alone."""
    needs: list[SegmentNeed] = []
    for m in members:
        option = sum(s + w for _, s, w in m.needs).argmin(axis=0)[None]
        needs += [
            (r, *(np.take_along_axis(a, option, 0)[0] for a in (s, w))) for r, s, w in m.needs
        ]
    return _max_peak_bytes(needs)


def _max_peak_bytes(needs: Iterable[SegmentNeed]) -> Array:
    """Peak bytes of the resource that needs most."""
    return np.maximum.reduce(np.broadcast_arrays(*resource_peaks(needs).values()))


def _all_combinations(members: Sequence[ModuleOptions]) -> np.ndarray:
    """All combinations, [n_combinations, n_members], those of first options first."""
    sizes = [len(m.options) for m in members]
    return np.indices(sizes).reshape(len(sizes), -1).T


def _peaks_of_combinations(members: Sequence[ModuleOptions], chosen: np.ndarray) -> Array:
    """Peak bytes of combinations, of members at one place."""
    chosen_options = zip(members, chosen.T, strict=True)
    return _max_peak_bytes(
        (r, live_bytes[o], temporaries[o])
        for m, o in chosen_options
        for r, live_bytes, temporaries in m.needs
    )


def smallest_combination(
    members: Sequence[ModuleOptions],
) -> tuple[float, tuple[MemoryOption, ...]]:
    """The combination that needs least at one place: (its peak bytes, every member's option)."""
    combinations = _all_combinations(members)
    peaks = _peaks_of_combinations(members, combinations)
    smallest = int(peaks.argmin())
    numbers = zip(members, combinations[smallest].tolist(), strict=True)
    return float(peaks[smallest]), tuple(m.options[o] for m, o in numbers)


def best_combinations(
    members: Sequence[ModuleOptions], memory_bytes: float
) -> Iterator[np.ndarray]:
    """The options of every member, by number, at one place: combinations that fit and that no other
    one undercuts."""
    limit = memory_bytes or np.inf
    fitting = [a.nonzero()[0] for a in _fitting_options(members, limit)[0]]
    grid = np.indices([len(a) for a in fitting]).reshape(len(fitting), -1)
    chosen = np.stack([a[g] for a, g in zip(fitting, grid, strict=True)], axis=1)
    chosen = chosen[_peaks_of_combinations(members, chosen) <= limit]
    option_seconds = [
        np.stack([s for by_segment in m.seconds for s in by_segment], axis=1) for m in members
    ]
    seconds = np.concatenate([p[i] for p, i in zip(option_seconds, chosen.T, strict=True)], axis=1)
    while len(chosen):
        best = int(seconds.sum(axis=1).argmin())
        is_equal = (seconds[:best] <= seconds[best] * (1 + ROUNDING)).all(axis=1)
        best = int(is_equal.argmax()) if is_equal.any() else best  # an equal one, but simpler
        yield chosen[best]
        is_dominated = (seconds >= seconds[best] * (1 - ROUNDING)).all(axis=1)
        chosen, seconds = chosen[~is_dominated], seconds[~is_dominated]
