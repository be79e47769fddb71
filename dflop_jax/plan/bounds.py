"""Lower bounds and memory of whole spaces of placements at once.

A resource (devices that no task shares with others) works off all groups, after the first has come
up to it and before the last has gone down from it; then come reduction and update. No schedule of
the cut's groups is faster, so leaving out what exceeds a makespan that was reached keeps the
optimum.

Arrays are [n_placements, n_cuts].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from dflop_jax.pipeline.order import in_flight_limit, links, resources
from dflop_jax.plan.estimate import Rules, Segments, module_table
from dflop_jax.plan.placement import Form, Outline
from dflop_jax.plan.space import Family
from dflop_jax.profile.fit import Array
from dflop_jax.records import BACKWARD, FORWARD, Bucket, Direction, Remat
from dflop_jax.schedule.costs import directions
from dflop_jax.sim.memory import peaks_of


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
    tasks: tuple[tuple[Direction, ...], ...]


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
class Bounds:
    """A family's placements at every cut.

    bound_s: of the mean makespan over the sampled batches; infinite where memory is short or prices
    are not believed. groups: that each sampled batch takes at least, [n_batches, n_placements,
    n_cuts]. peak_bytes: of the device that needs the most, with the remat that is chosen (where
    nothing fits: the least of all). choice: index into `remats`, each by module.
    """

    family: Family
    cuts: np.ndarray
    bound_s: Array
    groups: Array
    peak_bytes: Array
    choice: Array
    remats: tuple[Mapping[str, Remat], ...]
    modules: Mapping[str, Segments]

    def outline(self, p: int) -> Outline:
        return self.family.outline(p)

    def bucket(self, p: int, c: int) -> Bucket:
        return Bucket.of({m: t.shape(p, c) for m, t in self.modules.items()})

    def pairs(self, p: int, c: int) -> dict[str, int]:
        """Content of a group of each module."""
        return {m: int(t.pairs[p, c]) for m, t in self.modules.items()}


def all_bounds(families: Sequence[Family], rules: Rules) -> Iterator[Bounds]:
    """Bounds of all families at all cuts."""
    names = list(rules.n_layers)
    degrees: dict[tuple[str, Form, int], set[int]] = {}
    for f in families:
        for m, form, data in zip(names, f.forms, f.data.T, strict=True):
            degrees.setdefault((m, form, f.group_size), set()).update(np.unique(data).tolist())

    @cache
    def table(module: str, form: Form, group_size: int) -> Segments:
        data = sorted(degrees[module, form, group_size])
        return module_table(rules, module, form, group_size, data)

    tapped = bool(rules.unstaged)
    structures: dict[tuple[object, ...], Structure] = {}
    for f in families:
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, tapped and k.mesh) for k in f.forms))
        if key not in structures:
            structures[key] = structure_of(f, rules)
        modules = {
            m: table(m, form, f.group_size).at(data)
            for m, form, data in zip(names, f.forms, f.data.T, strict=True)
        }
        yield _bounds(f, modules, structures[key], rules)


def _bounds(
    family: Family, modules: Mapping[str, Segments], structure: Structure, rules: Rules
) -> Bounds:
    groups = np.max([t.groups for t in modules.values()], axis=0)
    shape = groups.shape[1:]
    remats = tuple(
        dict(zip(modules, combination, strict=True))
        for combination in product(rules.remats, repeat=len(modules))
    )
    bound_s, least_bytes = np.full(shape, np.inf), np.full(shape, np.inf)
    peak_bytes, choice = np.zeros(shape), np.zeros(shape, int)
    trusted = np.logical_and.reduce([t.trusted for t in modules.values()])
    fits: list[np.ndarray] = []
    for i, remat in enumerate(remats):
        needs = [modules[m].needs[remat[m]][k] for m, k in structure.modules]
        peaks = peaks_of(needs, structure.resource, structure.in_flight)
        peak = np.maximum.reduce(list(peaks.values()))
        least_bytes = np.minimum(least_bytes, peak)
        fits.append(trusted & ((peak <= rules.memory_bytes) | (not rules.memory_bytes)))
        # Where less is computed again and that fits, this is not faster.
        less = [f for f, r in zip(fits, remats[:i]) if all(r[m] in ("none", remat[m]) for m in r)]
        useful = fits[i] & ~np.any(less, axis=0) if less else fits[i]
        if useful.any():
            took_s = _least_s(family, structure, modules, remat, groups, rules)
            better = useful & (took_s < bound_s)
            bound_s = np.where(better, took_s, bound_s)
            peak_bytes, choice = np.where(better, peak, peak_bytes), np.where(better, i, choice)
        if i == 0 and (useful | ~trusted).all():
            break
    return Bounds(
        family,
        rules.cuts(family.group_size),
        bound_s,
        groups,
        np.where(np.isfinite(bound_s), peak_bytes, least_bytes),
        choice,
        remats,
        modules,
    )


def _least_s(
    family: Family,
    structure: Structure,
    modules: Mapping[str, Segments],
    remat: Mapping[str, str],
    groups: Array,
    rules: Rules,
) -> Array:
    """Seconds that no schedule undercuts; `groups` of each sampled batch."""
    segments = range(len(structure.modules))
    forward, back, reduce, update = [], [], [], []
    for (m, k), tasks in zip(structure.modules, structure.tasks, strict=True):
        table = modules[m]
        forward.append(table.forward_s[k] * (FORWARD in tasks))
        back.append(table.backward_s[remat[m]][k] * (BACKWARD in tasks))
        reduce.append(table.reduce_s[k])
        update.append(table.update_s[k])
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
        m: np.minimum(form.n_devices * family.data[:, i : i + 1] // form.n_segments, cores)
        for i, (m, form) in enumerate(zip(rules.n_layers, family.forms, strict=True))
    }
    device_s = sum((forward[i] + back[i]) * size[structure.modules[i][0]] for i in segments)
    return np.maximum(least + updates, mean * device_s / cores)
