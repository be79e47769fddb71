"""Lower bounds and memory of whole spaces of placements at once.

A resource (devices that no task shares with others) works off all groups, after the first has come
up to it and before the last has gone down from it; then come reduction and update. No schedule of
the cut's groups is faster, so leaving out what exceeds a makespan that was reached keeps the
optimum. Every quantity is the least over the options that fit; combinations of options are listed
for single candidates only (`Bounds.choices`).

Arrays are [n_placements, n_cuts].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from dflop_jax.pipeline.order import in_flight_limit, links, resources
from dflop_jax.plan.choices import Least, Member, combinations, least, least_peak
from dflop_jax.plan.estimate import Rules, Segments, module_table
from dflop_jax.plan.options import Option
from dflop_jax.plan.placement import Form, Outline
from dflop_jax.plan.space import Family
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Direction
from dflop_jax.schedule.costs import directions

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


def structure_of(family: Family, rules: Rules) -> Structure:
    """The graph that all placements of a family have."""
    plan = rules.structure(rules.placement(family.outline(0)))
    number = {s.name: i for i, s in enumerate(plan.segments)}
    used = {s.name for s in plan.segments if rules.volumes[s.module].largest}
    sources: list[list[int]] = [[] for _ in number]
    for link in links(plan):
        if {link.source, link.target} <= used:
            sources[number[link.target]].append(number[link.source])
    resource, in_flight = resources(plan), in_flight_limit(plan)
    tasks = directions(plan, [s.name for s in plan.segments if rules.trains(s)])
    return Structure(
        tuple((s.module, plan.segments_of(s.module).index(s)) for s in plan.segments),
        tuple(resource[s.submesh] for s in plan.segments),
        tuple(map(tuple, sources)),
        tuple(in_flight[n] for n in number),
        tuple(tasks[n] for n in number),
    )


@dataclass(frozen=True)
class Choice:
    """An option for every module of a candidate that fits, and what no schedule of it undercuts."""

    options: Mapping[str, Option]
    bound_s: float


@dataclass(frozen=True)
class Bounds:
    """A family's placements at every cut.

    bound_s: of the mean makespan over the sampled batches with any options; infinite where memory
    is short or prices are not believed. fits: whether memory holds it with some options.
    least_bytes: of the device that needs most, at least. groups: that each sampled batch takes at
    least, [n_batches, n_placements, n_cuts]. tables, members, forms: of every module, and the rows
    of its table that the placements have.
    """

    family: Family
    structure: Structure
    rules: Rules
    cuts: np.ndarray
    bound_s: Array
    fits: Array
    least_bytes: Array
    groups: Array
    tables: Mapping[str, Segments]
    forms: Mapping[str, np.ndarray]
    members: Mapping[str, Member]

    def outline(self, p: int) -> Outline:
        return self.family.outline(p)

    def bucket(self, p: int, c: int) -> Bucket:
        return Bucket.of({m: t.shape(self.forms[m][p], c) for m, t in self.tables.items()})

    def pairs(self, p: int, c: int) -> dict[str, int]:
        """Content of a group of each module."""
        return {m: int(t.pairs[self.forms[m][p], c]) for m, t in self.tables.items()}

    def _members(self, block: Sequence[str], p: int, c: int) -> list[Member]:
        return [self.members[m].at(self.forms[m][p], c) for m in block]

    def least_peak(self, p: int, c: int) -> tuple[float, dict[str, Option]]:
        """The options with which a candidate needs least: (bytes of the device that needs most,
        the option of every module)."""
        options: dict[str, Option] = {}
        peak_bytes = 0.0
        for block in self.structure.blocks:
            needed, chosen = least_peak(self._members(block, p, c))
            peak_bytes = max(peak_bytes, needed)
            options |= zip(block, chosen, strict=True)
        return peak_bytes, options

    def choices(self, p: int, c: int) -> list[Choice]:
        """The options of a candidate that fit and that no others undercut in everything."""
        by_block = []
        for block in self.structure.blocks:
            found = combinations(self._members(block, p, c), self.rules.memory_bytes)
            by_block.append([dict(zip(block, o.tolist(), strict=True)) for o in found])
        chosen = [
            {m: o for block in combination for m, o in block.items()}
            for combination in product(*by_block)
        ]
        assert chosen, "a candidate fits with some options"

        def seconds(m: str) -> tuple[tuple[Array, ...], ...]:
            numbers = [options[m] for options in chosen]
            here = self.members[m].at(self.forms[m][p], c).seconds
            return tuple(tuple(a[numbers][:, None] for a in by_segment) for by_segment in here)

        groups = np.broadcast_to(
            self.groups[:, p, c, None, None], (len(self.groups), len(chosen), 1)
        )
        data = np.repeat(self.family.data[p : p + 1], len(chosen), axis=0)
        every = {m: seconds(m) for m in self.tables}
        bounds_s = _least_s(self.family.forms, data, self.structure, every, groups, self.rules)
        return [
            Choice({m: self.tables[m].options[o] for m, o in options.items()}, float(bound_s))
            for options, bound_s in zip(chosen, bounds_s[:, 0], strict=True)
        ]

    def largest(self, p: int, options: Mapping[str, Option]) -> Bucket:
        """The largest bucket of a placement that memory holds with these options."""
        for c in range(len(self.cuts)):
            if not self.trusted(p, c):
                continue
            peaks = []
            for block in self.structure.blocks:
                members = self._members(block, p, c)
                picked = [
                    m.only(m.options.index(options[n])) for n, m in zip(block, members, strict=True)
                ]
                peaks.append(least_peak(picked)[0])
            if max(peaks) <= self.rules.memory_bytes:
                return self.bucket(p, c)
        raise AssertionError("the options fit at no cut")

    def trusted(self, p: int, c: int) -> bool:
        """Whether the prices of a candidate are believed."""
        return all(bool(t.trusted[self.forms[m][p], c]) for m, t in self.tables.items())


def all_bounds(families: Sequence[Family], rules: Rules) -> Iterator[Bounds]:
    """Bounds of all families at all cuts."""
    names = list(rules.n_layers)
    degrees: dict[tuple[str, Form, int], set[int]] = {}
    for f in families:
        for m, form, data in zip(names, f.forms, f.data.T, strict=True):
            degrees.setdefault((m, form, f.group_size), set()).update(np.unique(data).tolist())

    @cache
    def table(module: str, form: Form, group_size: int, tasks: Tasks) -> Segments:
        data = sorted(degrees[module, form, group_size])
        return module_table(rules, module, form, group_size, data, tasks)

    @cache
    def member(
        module: str, form: Form, group_size: int, tasks: Tasks, resource: tuple[int, ...],
        in_flight: tuple[int, ...],
    ) -> Member:  # fmt: skip
        return Member.of(table(module, form, group_size, tasks), resource, in_flight)

    @cache
    def alone(key: tuple[Any, ...]) -> Least:
        return least([member(*key)], rules.memory_bytes)

    tapped = bool(rules.unstaged)
    structures: dict[tuple[object, ...], Structure] = {}
    for f in families:
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, tapped and k.mesh) for k in f.forms))
        if key not in structures:
            structures[key] = structure_of(f, rules)
        structure = structures[key]
        keys = {
            m: (m, form, f.group_size, *structure.facts(m))
            for m, form in zip(names, f.forms, strict=True)
        }
        tables = {m: table(*key[:4]) for m, key in keys.items()}
        forms = {
            m: np.searchsorted(tables[m].data, data)
            for m, data in zip(names, f.data.T, strict=True)
        }
        leasts: dict[tuple[str, ...], Least] = {}
        for block in structure.blocks:
            if len(block) == 1:
                leasts[block] = alone(keys[block[0]]).at(forms[block[0]])
            else:
                here = [member(*keys[m]).at(forms[m]) for m in block]
                leasts[block] = least(here, rules.memory_bytes)
        members = {m: member(*key) for m, key in keys.items()}
        yield _bounds(f, structure, rules, tables, forms, leasts, members)


def _bounds(
    family: Family,
    structure: Structure,
    rules: Rules,
    tables: Mapping[str, Segments],
    forms: Mapping[str, np.ndarray],
    leasts: Mapping[tuple[str, ...], Least],
    members: Mapping[str, Member],
) -> Bounds:
    groups = np.max([t.groups[:, forms[m]] for m, t in tables.items()], axis=0)
    trusted = np.logical_and.reduce([t.trusted[forms[m]] for m, t in tables.items()])
    fits = np.logical_and.reduce([x.fits for x in leasts.values()])
    seconds = {m: s for block, x in leasts.items() for m, s in zip(block, x.seconds, strict=True)}
    usable = trusted & fits
    bound_s = np.full(usable.shape, np.inf)
    if usable.any():
        least_s = _least_s(family.forms, family.data, structure, seconds, groups, rules)
        bound_s = np.where(usable, least_s, np.inf)
    return Bounds(
        family,
        structure,
        rules,
        rules.cuts(family.group_size),
        bound_s,
        fits,
        np.maximum.reduce([x.peak_bytes for x in leasts.values()]),
        groups,
        tables,
        forms,
        members,
    )


def _least_s(
    module_forms: Sequence[Form],
    data: np.ndarray,
    structure: Structure,
    seconds: Mapping[str, tuple[tuple[Array, ...], ...]],
    groups: Array,
    rules: Rules,
) -> Array:
    """Seconds that no schedule undercuts; `groups` of each sampled batch, `seconds` of every module
    as in `Member`."""
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
    least: Array = np.zeros(mean.shape)
    updates: Array = 0.0
    for resource in sorted(set(structure.resource)):
        on = [i for i in segments if structure.resource[i] == resource]
        busy = mean * sum(forward[i] + back[i] for i in on)
        after = np.minimum.reduce([np.where(back[i] > 0, down[i], 0.0) for i in on])
        after = np.maximum(after, sum(reduce[i] for i in on))
        least = np.maximum(least, np.minimum.reduce([up[i] for i in on]) + busy + after)
        updates = np.maximum(updates, sum(update[i] for i in on))
    # No more than `concurrency` of the devices compute at once.
    cores = rules.profile.concurrency
    size = {
        m: np.minimum(form.n_devices * data[:, i : i + 1] // form.n_segments, cores)
        for i, (m, form) in enumerate(zip(rules.n_layers, module_forms, strict=True))
    }
    device_s = sum((forward[i] + back[i]) * size[structure.modules[i][0]] for i in segments)
    return np.maximum(least + updates, mean * device_s / cores)
