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

from dflop_jax.plan.estimate import Rules, Segments
from dflop_jax.plan.memory import Need, need_of, peaks_of
from dflop_jax.plan.options import Option
from dflop_jax.profile.state import Array
from dflop_jax.records import Direction, Layout, Plan
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.bounds import fill_and_drain_s, step_bound_s
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.simulate.task_graph import in_flight_limit, segment_links, submesh_resources

Tasks = tuple[tuple[Direction, ...], ...]


@dataclass(frozen=True)
class Structure:
    """The graph of a family's segments, by their number in topological order.

    modules: module of each. resource: devices of each. sources: what it reads, of modules that the
    data uses. in_flight: groups that it keeps at most. tasks: what a group runs in it.
    """

    modules: tuple[str, ...]
    resource: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    tasks: Tasks

    def of(self, module: str) -> list[int]:
        """Numbers of a module's segments."""
        return [i for i, m in enumerate(self.modules) if m == module]

    def facts(self, module: str) -> tuple[Tasks, tuple[int, ...], tuple[int, ...]]:
        """(tasks, resource, groups in flight) of a module's segments; resources are counted from
        the first one of them, so that equal modules elsewhere have equal facts."""
        mine = self.of(module)
        first = min(self.resource[i] for i in mine)
        return (
            tuple(self.tasks[i] for i in mine),
            tuple(self.resource[i] - first for i in mine),
            tuple(self.in_flight[i] for i in mine),
        )

    @cached_property
    def blocks(self) -> list[tuple[str, ...]]:
        """Modules that share devices: all of those that each of them has."""
        blocks: dict[frozenset[int], list[str]] = defaultdict(list)
        for m in dict.fromkeys(self.modules):
            blocks[frozenset(self.resource[i] for i in self.of(m))].append(m)
        return list(map(tuple, blocks.values()))


def structure_of(layout: Layout, rules: Rules) -> Structure:
    """The graph of a layout, whatever its shapes."""
    number = {s.name: i for i, s in enumerate(layout.segments)}
    used = {s.name for s in layout.segments if rules.volumes[s.module].largest}
    sources: list[list[int]] = [[] for _ in number]
    for link in segment_links(layout):
        if {link.source, link.target} <= used:
            sources[number[link.target]].append(number[link.source])
    resource, in_flight = submesh_resources(layout), in_flight_limit(Plan("", layout))
    tasks = segment_directions(layout, rules.trainable(layout))
    return Structure(
        tuple(s.module for s in layout.segments),
        tuple(resource[s.submesh] for s in layout.segments),
        tuple(map(tuple, sources)),
        tuple(in_flight[n] for n in number),
        tuple(tasks[n] for n in number),
    )


def least_s(
    structure: Structure,
    seconds: Mapping[str, tuple[tuple[Array, ...], ...]],
    groups: Array,
    devices: Mapping[str, Array],
    cores: float,
    parts: Mapping[str, Array],
) -> Array:
    """Seconds that no schedule undercuts.

    Args:
      seconds: of a group of every module in each of its segments, as in `Member`.
      groups: of each sampled batch, [n_batches, ...].
      devices: that a task of each module takes.
      cores: devices that compute at once.
      parts: groups of a module that go with one of `groups`, where it is not one.
    """
    forward, back, reduce, update = (
        [a for m in dict.fromkeys(structure.modules) for a in seconds[m][kind]] for kind in range(4)
    )
    before, after = fill_and_drain_s(structure.sources, forward, back, reduce)
    mean: Array = groups.mean(axis=0)
    begun = np.minimum(groups, 1.0).mean(axis=0)  # part of a group takes that part of one's seconds
    took_s = [
        mean * (forward[i] + back[i]) * parts.get(m, 1) for i, m in enumerate(structure.modules)
    ]
    after = [np.where(b > 0, a, 0.0) for a, b in zip(after, back, strict=True)]
    by_resource: dict[int, list[int]] = defaultdict(list)
    for i, r in enumerate(structure.resource):
        by_resource[r].append(i)

    def least_of(each: Sequence[Array]) -> list[Array]:
        return [
            begun * np.minimum.reduce(np.broadcast_arrays(*(each[i] for i in on)))
            for on in by_resource.values()
        ]

    def sum_of(each: Sequence[Array]) -> list[Array]:
        return [sum(each[i] for i in on) for on in by_resource.values()]

    least = step_bound_s(
        sum_of(took_s), least_of(before), least_of(after), sum_of(reduce), sum_of(update)
    )
    device_s = sum(
        took * np.minimum(devices[m], cores)
        for took, m in zip(took_s, structure.modules, strict=True)
    )
    return np.maximum(least, device_s / cores)


@dataclass(frozen=True)
class Member:
    """A module of a block with all its options, [n_options, ...] by segment.

    needs: of each segment. seconds: of a group forward and backward, and of the step's end:
    reduction and update.
    """

    options: tuple[Option, ...]
    needs: tuple[Need, ...]
    seconds: tuple[tuple[Array, ...], ...]

    @staticmethod
    def of(table: Segments, resource: Sequence[int], in_flight: Sequence[Array]) -> Member:
        """A table's module where its segments have so many groups in flight."""
        needs = map(need_of, resource, table.n_bytes, in_flight)
        return Member(table.options, tuple(needs), table.seconds)

    def at(self, *place: Array) -> Member:
        """The same at some of the table's forms (an array), or at one form and cut."""
        return self._sliced((slice(None), *place))

    def only(self, option: int) -> Member:
        """The same with one of the options."""
        one = slice(option, option + 1)
        return replace(self._sliced(one), options=self.options[one])

    def _sliced(self, here: Any) -> Member:
        return replace(
            self,
            needs=tuple((r, held[here], work[here]) for r, held, work in self.needs),
            seconds=tuple(tuple(a[here] for a in by_segment) for by_segment in self.seconds),
        )


@dataclass(frozen=True)
class Least:
    """The least over what may fit, [n_forms, n_cuts].

    fits: whether any combination does. peak_bytes: of the device that needs most; where modules
    share devices, what is certainly needed. seconds: of every member, as in `Member`; 0 where
    nothing fits.
    """

    fits: Array
    peak_bytes: Array
    seconds: tuple[tuple[tuple[Array, ...], ...], ...]

    def at(self, forms: Array) -> Least:
        """The same at some of the forms."""
        seconds = tuple(tuple(tuple(a[forms] for a in s) for s in m) for m in self.seconds)
        return Least(self.fits[forms], self.peak_bytes[forms], seconds)


def least(members: Sequence[Member], memory_bytes: float) -> Least:
    """What the members of a block come to at least."""
    limit = memory_bytes or np.inf
    allowed, peak = _may_fit(members, limit)
    fits = np.logical_and.reduce([a.any(axis=0) for a in allowed])
    if len(members) > 1 and memory_bytes:
        unsure = fits & ~(_some_peak(members) <= limit)
        for place in np.argwhere(unsure):
            here = [m.at(*place) for m in members]
            fits[tuple(place)] = bool((_peaks(here, _every(here)) <= limit).any())
    seconds = tuple(
        tuple(
            tuple(np.where(fits, np.where(a, s, np.inf).min(axis=0), 0.0) for s in by_segment)
            for by_segment in m.seconds
        )
        for m, a in zip(members, allowed, strict=True)
    )
    return Least(fits, peak, seconds)


def _may_fit(members: Sequence[Member], limit: float) -> tuple[list[Array], Array]:
    """(of every member which options fit beside the least of the others, the least peak)."""
    leasts = [[(r, s.min(axis=0), w.min(axis=0)) for r, s, w in m.needs] for m in members]
    allowed, peaks = [], []
    for i, m in enumerate(members):
        others = [need for j, needs in enumerate(leasts) if j != i for need in needs]
        peak = _peak([*m.needs, *others])
        allowed.append(peak <= limit)
        peaks.append(peak.min(axis=0))
    return allowed, np.maximum.reduce(peaks)


def _some_peak(members: Sequence[Member]) -> Array:
    """Peak bytes of the combination of options that each need the least alone."""
    picked: list[Need] = []
    for m in members:
        i = sum(s + w for _, s, w in m.needs).argmin(axis=0)[None]
        picked += [(r, *(np.take_along_axis(a, i, 0)[0] for a in (s, w))) for r, s, w in m.needs]
    return _peak(picked)


def _peak(needs: Iterable[Need]) -> Array:
    """Peak bytes of the resource that needs most."""
    return np.maximum.reduce(np.broadcast_arrays(*peaks_of(needs).values()))


def _every(members: Sequence[Member]) -> np.ndarray:
    """All combinations, [n_combinations, n_members], those of first options first."""
    sizes = [len(m.options) for m in members]
    return np.indices(sizes).reshape(len(sizes), -1).T


def _peaks(members: Sequence[Member], chosen: np.ndarray) -> Array:
    """Peak bytes of combinations, of members at one place."""
    each = zip(members, chosen.T, strict=True)
    return _peak((r, held[o], work[o]) for m, o in each for r, held, work in m.needs)


def least_peak(members: Sequence[Member]) -> tuple[float, tuple[Option, ...]]:
    """The combination that needs least at one place: (its peak bytes, every member's option)."""
    every = _every(members)
    peaks = _peaks(members, every)
    first = int(peaks.argmin())
    chosen = zip(members, every[first].tolist(), strict=True)
    return float(peaks[first]), tuple(m.options[o] for m, o in chosen)


def combinations(members: Sequence[Member], memory_bytes: float) -> Iterator[np.ndarray]:
    """The options of every member, by number, at one place: combinations that fit and that no other
    one undercuts."""
    limit = memory_bytes or np.inf
    allowed = [a.nonzero()[0] for a in _may_fit(members, limit)[0]]
    grid = np.indices([len(a) for a in allowed]).reshape(len(allowed), -1)
    chosen = np.stack([a[g] for a, g in zip(allowed, grid, strict=True)], axis=1)
    chosen = chosen[_peaks(members, chosen) <= limit]
    prices = [
        np.stack([s for by_segment in m.seconds for s in by_segment], axis=1) for m in members
    ]
    seconds = np.concatenate([p[i] for p, i in zip(prices, chosen.T, strict=True)], axis=1)
    while len(chosen):
        first = int(seconds.sum(axis=1).argmin())
        ahead = (seconds[:first] <= seconds[first] * (1 + ROUNDING)).all(axis=1)
        first = int(ahead.argmax()) if ahead.any() else first  # an equal one, but simpler
        yield chosen[first]
        undercut = (seconds >= seconds[first] * (1 - ROUNDING)).all(axis=1)
        chosen, seconds = chosen[~undercut], seconds[~undercut]
