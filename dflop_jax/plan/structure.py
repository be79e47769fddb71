"""The graph of a layout's segments, and the seconds that no schedule of it undercuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.plan.estimate import Rules
from dflop_jax.profile.state import Array
from dflop_jax.records import Direction, Layout, Plan
from dflop_jax.schedule.bounds.batch import ends_s, step_s
from dflop_jax.schedule.costs import directions
from dflop_jax.tasks.graph import in_flight_limit, links, resources

Tasks = tuple[tuple[Direction, ...], ...]


@dataclass(frozen=True)
class Structure:
    """The graph of a family's segments, by their number in topological order.

    modules: (module, number of the segment in it). resource: devices of each. sources: what it
    reads, of modules that the data uses. in_flight: groups that it keeps at most. tasks: what a
    group runs in it.
    """

    modules: tuple[tuple[str, int], ...]
    resource: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    tasks: Tasks

    def of(self, module: str) -> list[int]:
        """Numbers of a module's segments."""
        return [i for i, (m, _) in enumerate(self.modules) if m == module]

    def facts(self, module: str) -> tuple[Tasks, tuple[int, ...], tuple[int, ...]]:
        """(tasks, resource, groups in flight) of a module's segments; resources are counted from
        the first one of its block, so that equal modules elsewhere have equal facts."""
        block = next(b for b in self.blocks if module in b)
        first = min(self.resource[i] for m in block for i in self.of(m))
        mine = self.of(module)
        return (
            tuple(self.tasks[i] for i in mine),
            tuple(self.resource[i] - first for i in mine),
            tuple(self.in_flight[i] for i in mine),
        )

    @cached_property
    def blocks(self) -> list[tuple[str, ...]]:
        """Modules that share devices, in topological order."""
        blocks: list[tuple[str, ...]] = []
        for name in dict.fromkeys(m for m, _ in self.modules):
            mine = {self.resource[i] for i in self.of(name)}
            shared = [b for b in blocks if mine & {self.resource[i] for m in b for i in self.of(m)}]
            blocks = [b for b in blocks if b not in shared]
            blocks.append((*(m for b in shared for m in b), name))
        return blocks


def structure_of(layout: Layout, rules: Rules) -> Structure:
    """The graph of a layout, whatever its shapes."""
    number = {s.name: i for i, s in enumerate(layout.segments)}
    used = {s.name for s in layout.segments if rules.volumes[s.module].largest}
    sources: list[list[int]] = [[] for _ in number]
    for link in links(layout):
        if {link.source, link.target} <= used:
            sources[number[link.target]].append(number[link.source])
    resource, in_flight = resources(layout), in_flight_limit(Plan("", layout))
    tasks = directions(layout, rules.trainable(layout))
    return Structure(
        tuple((s.module, layout.segments_of(s.module).index(s)) for s in layout.segments),
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
    parts: Mapping[str, Array] | None = None,
) -> Array:
    """Seconds that no schedule undercuts.

    Args:
      seconds: of a group of every module in each of its segments, as in `Member`.
      groups: of each sampled batch, [n_batches, ...].
      devices: that a task of each module takes.
      cores: devices that compute at once.
      parts: groups of a module that go with one of `groups`; None: one of each.
    """
    segments = range(len(structure.modules))
    forward, back, reduce, update = (
        [seconds[m][kind][k] for m, k in structure.modules] for kind in range(4)
    )
    before, after = ends_s(structure.sources, forward, back, reduce)
    mean: Array = groups.mean(axis=0)
    begun = np.minimum(groups, 1.0).mean(axis=0)  # part of a group takes that part of one's seconds
    took_s = [
        mean * (forward[i] + back[i]) * (parts[m] if parts else 1)
        for i, (m, _) in enumerate(structure.modules)
    ]
    by_resource = [
        [i for i in segments if structure.resource[i] == r] for r in sorted(set(structure.resource))
    ]
    least = step_s(
        [sum(took_s[i] for i in on) for on in by_resource],
        [
            begun * np.minimum.reduce(np.broadcast_arrays(*(before[i] for i in on)))
            for on in by_resource
        ],
        [
            begun * np.minimum.reduce([np.where(back[i] > 0, after[i], 0.0) for i in on])
            for on in by_resource
        ],
        [sum(reduce[i] for i in on) for on in by_resource],
        [sum(update[i] for i in on) for on in by_resource],
    )
    device_s = sum(
        took * np.minimum(devices[m], cores)
        for took, (m, _) in zip(took_s, structure.modules, strict=True)
    )
    return np.maximum(least, device_s / cores)
