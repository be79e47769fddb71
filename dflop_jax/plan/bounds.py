"""Lower bounds and memory of whole spaces of placements at once.

A resource (devices that no task shares with others) works off all groups, after the first has come
up to it and before the last has gone down from it; then come reduction and update. It waits while
its first group is above it, and again while its last one is, longer than 1F1B lets it fill with
others. No schedule of the cut's groups is faster, so leaving out what exceeds a makespan that was
reached keeps the optimum.

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
from dflop_jax.plan.placement import Outline
from dflop_jax.plan.space import Family, Kind
from dflop_jax.profile.fit import Array
from dflop_jax.records import Bucket, Plan, Remat


@dataclass(frozen=True)
class Structure:
    """The graph of a family's segments, by their number in topological order.

    modules: (module, number of the segment in it). resource: devices of each. sources, targets:
    what it reads and what reads it, of modules that the data uses. above: segments whose groups
    wait for its backward, itself included. limits: groups in flight; 0 where backward is all that
    a segment runs, or nothing.
    """

    modules: tuple[tuple[str, int], ...]
    resource: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    above: tuple[frozenset[int], ...]
    limits: tuple[int, ...]

    @property
    def by_resource(self) -> list[list[int]]:
        return [
            [i for i, r in enumerate(self.resource) if r == resource]
            for resource in sorted(set(self.resource))
        ]


def structure_of(plan: Plan, used: Mapping[str, bool]) -> Structure:
    """The graph of a plan's segments; `used` says of a module whether the data has pieces of it."""
    number = {s.name: i for i, s in enumerate(plan.segments)}
    n = len(number)
    sources: list[list[int]] = [[] for _ in range(n)]
    targets: list[list[int]] = [[] for _ in range(n)]
    fused = [True] * n
    for link in links(plan):
        u, t = number[link.source], number[link.target]
        fused[u] = False
        if used[plan.segments[u].module] and used[plan.segments[t].module]:
            sources[t].append(u)
            targets[u].append(t)
    above: list[frozenset[int]] = []
    for i in range(n):
        above.append(frozenset({i}).union(*(above[u] for u in sources[i])))
    of, limit = resources(plan), in_flight_limit(plan)
    return Structure(
        tuple((s.module, plan.segments_of(s.module).index(s)) for s in plan.segments),
        tuple(of[s.submesh] for s in plan.segments),
        tuple(map(tuple, sources)),
        tuple(map(tuple, targets)),
        tuple(above),
        tuple(
            0 if fused[number[s.name]] or not used[s.module] else limit[s.name]
            for s in plan.segments
        ),
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
    degrees: dict[tuple[str, Kind, int], set[int]] = {}
    for f in families:
        for m, kind, data in zip(names, f.kinds, f.data.T, strict=True):
            degrees.setdefault((m, kind, f.group_size), set()).update(np.unique(data).tolist())

    @cache
    def table(module: str, kind: Kind, group_size: int) -> Segments:
        data = sorted(degrees[module, kind, group_size])
        return module_table(rules, module, kind.form(1), group_size, data)

    used = {m: v.largest > 0 for m, v in rules.volumes.items()}
    tapped = bool(rules.unstaged)
    structures: dict[tuple[object, ...], Structure] = {}
    for f in families:
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, tapped and k.model) for k in f.kinds))
        if key not in structures:
            plan = rules.structure(rules.placement(f.outline(0)))
            structures[key] = structure_of(plan, used)
        modules = {
            m: table(m, kind, f.group_size).at(data)
            for m, kind, data in zip(names, f.kinds, f.data.T, strict=True)
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
        peak = _peak_bytes(structure, modules, remat)
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
    at = structure.modules
    forward = [modules[m].forward_s[k] for m, k in at]
    back = [modules[m].backward_s[remat[m]][k] for m, k in at]
    paths = _paths(structure, forward, back, [modules[m].reduce_s[k] for m, k in at])
    mean, fewest = groups.mean(axis=0), groups.min(axis=0)
    least: Array = np.zeros(mean.shape)
    updates: Array = 0.0
    for on in structure.by_resource:
        busy = mean * sum(forward[i] + back[i] for i in on)
        idle = _idle_s(structure, on, forward, back, paths, fewest)
        after = np.minimum.reduce([paths.down[i] for i in on])
        after = np.maximum(after, sum(modules[m].reduce_s[k] for m, k in (at[i] for i in on)))
        up = np.minimum.reduce([paths.up[i] for i in on])
        least = np.maximum(least, up + busy + idle + after)
        own = sum(modules[m].update_s[k] for m, k in (at[i] for i in on))
        updates = np.maximum(updates, own)
    return np.maximum(least + updates, _core_s(family, structure, forward, back, mean, rules))


def _core_s(
    family: Family,
    structure: Structure,
    forward: Sequence[Array],
    back: Sequence[Array],
    groups: Array,
    rules: Rules,
) -> Array:
    """Seconds in which the tasks' devices are worked off where no more than `concurrency` of them
    compute at once."""
    most = rules.profile.concurrency
    sizes = {
        m: np.minimum(k.stage * k.model * family.data[:, i : i + 1], most)
        for i, (m, k) in enumerate(zip(rules.n_layers, family.kinds, strict=True))
    }
    modules = [m for m, _ in structure.modules]
    device_s = sum((f + b) * sizes[m] for m, f, b in zip(modules, forward, back, strict=True))
    return groups * device_s / most


@dataclass(frozen=True)
class _Paths:
    """Of every segment, seconds that pass at least for a group from the step's start to it (`up`),
    from the end of its forward to the start of its backward (`above`), and from the end of its
    backward to that of the last reduction that waits for it (`down`)."""

    up: list[Array]
    above: list[Array]
    down: list[Array]


def _paths(
    structure: Structure,
    forward: Sequence[Array],
    back: Sequence[Array],
    reduce: Sequence[Array],
) -> _Paths:
    n = len(forward)
    up: list[Array] = [np.zeros(forward[0].shape)] * n
    above, down = list(up), list(up)
    for i in range(n):
        for u in structure.sources[i]:
            up[i] = np.maximum(up[i], up[u] + forward[u])
            # What runs no backward waits for none.
            below = np.where(back[u] > 0, back[u] + np.maximum(down[u], reduce[u]), 0.0)
            down[i] = np.maximum(down[i], below)
    for i in reversed(range(n)):
        for t in structure.targets[i]:
            above[i] = np.maximum(above[i], forward[t] + above[t] + back[t])
    down = [np.where(b > 0, d, 0.0) for b, d in zip(back, down, strict=True)]
    return _Paths(up, above, down)


def _idle_s(
    structure: Structure,
    on: Sequence[int],
    forward: Sequence[Array],
    back: Sequence[Array],
    paths: _Paths,
    fewest: Array,
) -> Array:
    """Seconds in which a resource waits while its first group is above it, and its last one.

    Before its first backward it runs forwards only, after its last forward backwards only, and of
    each segment at most as many as may be in flight. The two gaps are apart if there are more
    groups than that.
    """
    limited = [i for i in on if structure.limits[i]]
    if not limited:
        return 0.0
    if len(on) == 1:
        (i,), n = on, structure.limits[on[0]]
        first = np.maximum(0.0, paths.above[i] - (n - 1) * forward[i])
        last = np.maximum(0.0, paths.above[i] - (n - 1) * back[i])
        both = np.where(fewest > n, first + last, np.maximum(first, last))
        return np.where(back[i] > 0, both, 0.0)
    # A forward that no backward follows has no limit.
    endless = np.logical_or.reduce([(forward[i] > 0) & (back[i] == 0) for i in on])
    runs = [back[i] > 0 for i in on]
    start = np.minimum.reduce([paths.up[i] for i in on])
    firsts = [paths.up[i] + forward[i] + paths.above[i] for i in on]
    first = np.minimum.reduce([np.where(r, t, np.inf) for r, t in zip(runs, firsts, strict=True)])
    ahead = sum(structure.limits[i] * forward[i] for i in limited)
    lasts = [np.where(back[i] > 0, paths.above[i] + back[i], np.inf) for i in limited]
    last = np.minimum.reduce(lasts)
    behind: Array = 0.0
    for i in on:
        waited_by = [structure.limits[j] for j in structure.above[i] if j in limited]
        behind = behind + back[i] * min(waited_by, default=np.inf) if waited_by else np.inf
    none = endless | ~np.isfinite(first) | ~np.isfinite(last)
    before = np.where(none, 0.0, np.maximum(0.0, np.where(none, 0.0, first - start - ahead)))
    after = np.where(none, 0.0, np.maximum(0.0, np.where(none, 0.0, last) - behind))
    most = min(structure.limits[i] for i in limited)
    return np.where(fewest > most, before + after, np.maximum(before, after))


def _peak_bytes(
    structure: Structure, modules: Mapping[str, Segments], remat: Mapping[str, str]
) -> Array:
    """Bytes of the device that needs the most, with 1F1B's groups in flight: what its segments hold
    and the temporaries of one program at a time."""
    peak: Array = 0.0
    for on in structure.by_resource:
        steady: Array = 0.0
        work: Array = 0.0
        for i in on:
            module, k = structure.modules[i]
            t = modules[module]
            steady = steady + t.state[k] + t.kept[k] * max(1, structure.limits[i])
            work = np.maximum(work, t.temporaries[remat[module]][k])
        peak = np.maximum(peak, steady + work)
    return peak
