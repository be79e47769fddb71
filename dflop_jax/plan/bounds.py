"""Lower bounds and memory of whole spaces of placements at once.

A station (segments that share devices) works off all groups, after the first has come up to it
and before the last has gone down from it; then come reduction and update. It waits while the first
group is above it, and again while the last one is, longer than 1F1B lets it fill with others. No
schedule of the cut's bucket is faster, so leaving out what exceeds a makespan that was reached
keeps the optimum.

Arrays are [n_placements, n_cuts].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from dflop_jax.plan.estimate import Family, Rules, Segments, module_table
from dflop_jax.plan.placement import Form, Outline
from dflop_jax.profile.fit import Array
from dflop_jax.records import Bucket


@dataclass(frozen=True)
class Bounds:
    """Placements whose modules have forms of one family each, at every cut.

    bound_s: of the mean makespan over the sampled batches; infinite where memory is short.
    groups: that each sampled batch takes at least, [n_batches, n_placements, n_cuts]. peak_bytes:
    of the device that needs the most, with the remat that is chosen (where nothing fits: the least
    of all). choice: index into `remats`, each by module.
    """

    outlines: tuple[Outline, ...]
    cuts: np.ndarray
    bound_s: Array
    groups: Array
    peak_bytes: Array
    choice: Array
    remats: tuple[Mapping[str, str], ...]
    items: Mapping[str, Array]
    row_tokens: Array

    def bucket(self, p: int, c: int) -> Bucket:
        items = {m: int(a[p, c]) for m, a in self.items.items()}
        return Bucket(
            tiles=items.get("vision", 0),
            tokens=int(self.row_tokens[p, c]),
            rows=items["llm"],
            windows=items.get("audio", 0),
        )


def all_bounds(outlines: Sequence[Outline], rules: Rules) -> Iterator[Bounds]:
    """Bounds of all outlines at all cuts, family by family."""
    names = list(rules.n_layers)
    families: dict[tuple[int, bool, tuple[Family, ...]], list[Outline]] = {}
    degrees: dict[tuple[str, Family], set[int]] = {}
    for o in outlines:
        forms = (*o.encoders, o.llm)
        shares = bool(o.encoders) and o.llm_first == 0
        key = (o.group_size, shares, tuple(map(_family, forms)))
        families.setdefault(key, []).append(o)
        for m, f in zip(names, forms, strict=True):
            degrees.setdefault((m, _family(f)), set()).add(f.mesh[1])

    @cache
    def table(module: str, family: Family, group_size: int) -> Segments:
        return module_table(rules, module, family, group_size, sorted(degrees[module, family]))

    for (group_size, shares, kinds), members in families.items():
        data = zip(*([f.mesh[1] for f in (*o.encoders, o.llm)] for o in members))
        modules = {
            m: table(m, kind, group_size).at(d)
            for m, kind, d in zip(names, kinds, data, strict=True)
        }
        yield _bounds(tuple(members), modules, shares, group_size, rules)


def _family(form: Form) -> Family:
    return form.n_segments, form.mesh[0], form.mesh[2]


def _bounds(
    outlines: tuple[Outline, ...],
    modules: Mapping[str, Segments],
    shares: bool,
    group_size: int,
    rules: Rules,
) -> Bounds:
    every = np.max([t.groups for t in modules.values()], axis=0)
    groups = every.mean(axis=0)
    remats = tuple(
        dict(zip(modules, combination, strict=True))
        for combination in product(rules.remats, repeat=len(modules))
    )
    bound_s = np.full(groups.shape, np.inf)
    least_bytes = np.full(groups.shape, np.inf)
    peak_bytes, choice = np.zeros(groups.shape), np.zeros(groups.shape, int)
    for i, remat in enumerate(remats):
        took_s = _least_s(outlines, modules, remat, shares, every, rules)
        peak = _peak_bytes(modules, remat, shares)
        least_bytes = np.minimum(least_bytes, peak)
        fits = (peak <= rules.memory_bytes) | (not rules.memory_bytes)
        better = fits & (took_s < bound_s)
        bound_s = np.where(better, took_s, bound_s)
        peak_bytes, choice = np.where(better, peak, peak_bytes), np.where(better, i, choice)
    return Bounds(
        outlines,
        rules.cuts(group_size),
        bound_s,
        every,
        np.where(np.isfinite(bound_s), peak_bytes, least_bytes),
        choice,
        remats,
        {m: t.items for m, t in modules.items()},
        modules["llm"].tokens,
    )


def _stations(
    modules: Mapping[str, Segments], remat: Mapping[str, str], shares: bool
) -> list[tuple[Array, Array, Array]]:
    """(forward, backward, reduction) seconds of the segments on each set of devices, in order."""
    found: list[tuple[Array, Array, Array]] = []
    for m, t in modules.items():
        for forward, back, end in zip(t.forward_s, t.backward_s[remat[m]], t.reduce_s, strict=True):
            # Encoders share devices; with `shares` the LLM is there too.
            if found and (shares or (m != "llm" and m != next(iter(modules)))):
                before = found.pop()
                forward, back, end = before[0] + forward, before[1] + back, before[2] + end
            found.append((forward, back, end))
    return found


def _least_s(
    outlines: Sequence[Outline],
    modules: Mapping[str, Segments],
    remat: Mapping[str, str],
    shares: bool,
    every: Array,
    rules: Rules,
) -> Array:
    """`every`: groups of each sampled batch."""
    stations = _stations(modules, remat, shares)
    groups, fewest = every.mean(axis=0), every.min(axis=0)
    least: Array = np.zeros(groups.shape)
    up: Array = 0.0  # until the first group reaches a station
    down: Array = 0.0  # from its last backward to the last reduction below
    for (forward, back, end), idle in zip(stations, _idle_s(stations, fewest), strict=True):
        down = np.maximum(down, end)
        least = np.maximum(least, up + groups * (forward + back) + idle + down)
        # What runs no backward (no items, frozen) waits for none.
        up, down = up + forward, np.where(back > 0, down + back, 0.0)
    least = least + np.max([u for t in modules.values() for u in t.update_s], axis=0)
    # No more than `concurrency` devices compute at once.
    most = rules.costs.profile.concurrency
    device_s = np.zeros(groups.shape)
    for (m, t), sizes in zip(modules.items(), zip(*map(_sizes, outlines)), strict=True):
        at_once = np.minimum(np.array(sizes)[:, None], most)
        for forward, back in zip(t.forward_s, t.backward_s[remat[m]], strict=True):
            device_s = device_s + groups * (forward + back) * at_once
    return np.maximum(least, device_s / most)


def _idle_s(stations: Sequence[tuple[Array, Array, Array]], fewest: Array) -> list[Array]:
    """Of each station, while the first and the last group are above it. At most `in_flight` groups
    are forwarded and not yet run backward, so that many less one fill the gap."""
    found: list[Array] = []
    above: Array = 0.0
    for in_flight, (forward, back, _) in enumerate(reversed(stations), 1):
        first = np.maximum(0.0, above - (in_flight - 1) * forward)
        last = np.maximum(0.0, above - (in_flight - 1) * back)
        found.append(np.where((back > 0) & (fewest > in_flight), first + last, 0.0))
        above = above + forward + back
    return found[::-1]


def _sizes(outline: Outline) -> list[int]:
    """Devices of one segment of each module."""
    return [f.n_devices // f.n_segments for f in (*outline.encoders, outline.llm)]


def _peak_bytes(modules: Mapping[str, Segments], remat: Mapping[str, str], shares: bool) -> Array:
    """Of the device that needs the most, with 1F1B's groups in flight (`CostModel.peak_bytes`)."""
    depth = 0 if shares else len(modules["llm"])
    together: Array = 0.0  # on the devices that several modules share
    work: Array = 0.0
    most: Array = 0.0
    for m, t in modules.items():
        for k, (state, kept) in enumerate(zip(t.state, t.kept, strict=True)):
            in_flight = 1 if shares else len(t) - k + (depth if m != "llm" else 0)
            steady, temporaries = state + kept * in_flight, t.temporaries[remat[m]][k]
            if shares or (m != "llm" and len(t) == 1):
                together, work = together + steady, np.maximum(work, temporaries)
            else:
                most = np.maximum(most, steady + temporaries)
    return np.maximum(most, together + work)
