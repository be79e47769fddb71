"""The graph of a layout's segments, and the seconds that no schedule of it undercuts.

A resource (devices that no task shares with others) works off all groups, after the first has come
up to it and before the last has gone down from it; then come reduction and update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.plan.estimate import Rules
from dflop_jax.profile.state import Array
from dflop_jax.records import Direction, Layout, Plan
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
    # Seconds from the step's start until a group comes up to a segment, and from the end of its
    # backward there until the last reduction that waits for it; what runs no backward waits for
    # none.
    up: list[Array] = [np.zeros(groups.shape[1:]) for _ in segments]
    down: list[Array] = list(up)
    for i in segments:
        for u in structure.sources[i]:
            up[i] = np.maximum(up[i], up[u] + forward[u])
            below = np.where(back[u] > 0, back[u] + np.maximum(down[u], reduce[u]), 0.0)
            down[i] = np.maximum(down[i], below)
    mean: Array = groups.mean(axis=0)
    took_s = [
        mean * (forward[i] + back[i]) * (parts[m] if parts else 1)
        for i, (m, _) in enumerate(structure.modules)
    ]
    least: Array = np.zeros(mean.shape)
    updates: Array = 0.0
    for resource in sorted(set(structure.resource)):
        on = [i for i in segments if structure.resource[i] == resource]
        after = np.minimum.reduce([np.where(back[i] > 0, down[i], 0.0) for i in on])
        after = np.maximum(after, sum(reduce[i] for i in on))
        before = np.minimum.reduce([up[i] for i in on])
        least = np.maximum(least, before + sum(took_s[i] for i in on) + after)
        updates = np.maximum(updates, sum(update[i] for i in on))
    device_s = sum(
        took * np.minimum(devices[m], cores)
        for took, (m, _) in zip(took_s, structure.modules, strict=True)
    )
    return np.maximum(least + updates, device_s / cores)
