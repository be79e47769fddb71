"""Lower bounds and memory of whole spaces of placements at once.

No schedule of a cut's groups is faster than its bound, so leaving out what exceeds a makespan that
was reached keeps the optimum. Every quantity is the least over the options that fit; combinations
of options are listed for single candidates only (`Space.fitting`).

Arrays are [n_placements, n_cuts].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

from dflop_jax.plan.estimate import Rules, Segments, module_table
from dflop_jax.plan.options import Option
from dflop_jax.plan.placement import Form
from dflop_jax.plan.space import Family
from dflop_jax.plan.structure import (
    Least,
    Member,
    Structure,
    Tasks,
    combinations,
    least,
    least_peak,
    least_s,
    structure_of,
)
from dflop_jax.plan.uniform import as_plan
from dflop_jax.plan.volume import group_content
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Layout, Plan


@dataclass(frozen=True)
class Space:
    """Layouts of one graph at every cut, and what none of them undercuts.

    layout: of each number, without shapes, in the smallest groups. cuts, group_sizes: groups of a
    mean batch at every cut, and microbatches of a group. tables, forms, members: of every module,
    and the rows of its table that the layouts have. devices: of a segment of every module,
    [n_layouts, 1]. leasts: of every block of modules that share devices. tried: whether a candidate
    is to be tried.

    With sub-microbatches several groups of a module go with one of the others: on average `parts`
    of every module, [1, n_cuts], and `fan_in` at most, [n_cuts]; `whole` is the bucket of every cut
    that they are parts of.
    """

    policy: str
    layout: Callable[[int], Layout]
    structure: Structure
    rules: Rules
    cuts: np.ndarray
    group_sizes: np.ndarray
    tables: Mapping[str, Segments]
    forms: Mapping[str, np.ndarray]
    members: Mapping[str, Member]
    devices: Mapping[str, Array]
    leasts: Mapping[tuple[str, ...], Least]
    tried: Array = True
    parts: Mapping[str, Array] = field(default_factory=dict)
    fan_in: Sequence[int] = ()
    whole: Sequence[Bucket] = ()

    @cached_property
    def groups(self) -> Array:
        """That each sampled batch takes at least, [n_batches, n_layouts, n_cuts]."""
        return np.max([t.groups[:, self.forms[m]] for m, t in self.tables.items()], axis=0)

    @cached_property
    def trusted(self) -> Array:
        """Whether the prices of a candidate are believed."""
        each = [t.trusted[self.forms[m]] for m, t in self.tables.items()]
        return np.logical_and.reduce(each)

    @cached_property
    def fits(self) -> Array:
        """Whether memory holds a candidate with some options."""
        return np.logical_and.reduce([x.fits for x in self.leasts.values()])

    @cached_property
    def least_bytes(self) -> Array:
        """Of the device that needs most, at least."""
        return np.maximum.reduce([x.peak_bytes for x in self.leasts.values()])

    @cached_property
    def repeated(self) -> Array:
        """Whether a cut has the groups of the one before it: where shapes are at their least."""
        same: Array = np.diff(self.group_sizes)[None] == 0
        if self.whole:
            same = same & [a == b for a, b in pairwise(self.whole)]
        else:
            for m, t in self.tables.items():
                for sizes in (t.rows, t.tokens):
                    same = same & (np.diff(sizes[self.forms[m]]) == 0)
        return np.pad(same, ((0, 0), (1, 0)))

    @cached_property
    def bound_s(self) -> Array:
        """Lower bound of the mean makespan over the sampled batches with any options; infinite
        where memory is short, prices are not believed, a cut repeats the one before it or nothing
        is to be tried."""
        usable = self.trusted & self.fits & self.tried & ~self.repeated
        seconds = {
            m: s for block, x in self.leasts.items() for m, s in zip(block, x.seconds, strict=True)
        }
        found_s = self._least_s(seconds, self.groups, self.devices, slice(None))
        return np.where(usable, found_s, np.inf)

    def _least_s(
        self, seconds: Mapping[str, Any], groups: Array, devices: Mapping[str, Array], cuts: slice
    ) -> Array:
        """`structure.least_s` at some cuts."""
        parts = {m: n[:, cuts] for m, n in self.parts.items()}
        cores = self.rules.profile.concurrency
        return least_s(self.structure, seconds, groups, devices, cores, parts)

    def layout_at(self, p: int, c: int) -> Layout:
        """A layout in a cut's groups."""
        return replace(self.layout(p), group_size=int(self.group_sizes[c]))

    def plan(self, p: int, c: int, options: Mapping[str, Option] | None = None) -> Plan:
        """A candidate's plan; `options` as of `as_plan`."""
        bucket = Bucket.of({m: t.shape(self.forms[m][p], c) for m, t in self.tables.items()})
        plan = as_plan(self.layout_at(p, c), self.policy, (bucket,), self.rules, options)
        return plan.with_layout(fan_in=self.fan_in[c]) if self.fan_in else plan

    def parts_at(self, c: int) -> dict[str, int]:
        """Groups of every module that go together."""
        return {m: int(self.parts[m][0, c]) if m in self.parts else 1 for m in self.tables}

    def _blocks_at(self, p: int, c: int) -> Iterator[tuple[tuple[str, ...], list[Member]]]:
        """Each block of modules that share devices, and its members."""
        for block in self.structure.blocks:
            yield block, [self.members[m].at(self.forms[m][p], c) for m in block]

    def least_peak(self, p: int, c: int) -> tuple[float, dict[str, Option]]:
        """The options with which a candidate needs least: (bytes of the device that needs most,
        the option of every module)."""
        options: dict[str, Option] = {}
        peak_bytes = 0.0
        for block, members in self._blocks_at(p, c):
            needed, chosen = least_peak(members)
            peak_bytes = max(peak_bytes, needed)
            options |= zip(block, chosen, strict=True)
        return peak_bytes, options

    def content(self, p: int, c: int) -> dict[str, tuple[int, ...]]:
        """Content of a group of each module: of a mean batch in as many as its cut says, or fewer
        where shapes are at their least."""
        n = min(float(self.cuts[c]), float(self.groups[:, p, c].mean()))
        contents = {}
        for m, parts in self.parts_at(c).items():
            ranks = self.tables[m].data[self.forms[m][p]]
            content = group_content(self.rules.volumes[m], np.array(n * parts), ranks)
            contents[m] = tuple(map(int, content))
        return contents

    def fitting(self, p: int, c: int) -> list[dict[str, int]]:
        """The options of a candidate, by number, that fit and that no others undercut in
        everything."""
        limit = self.rules.spec.memory_bytes
        by_block = [
            [dict(zip(block, o.tolist(), strict=True)) for o in combinations(members, limit)]
            for block, members in self._blocks_at(p, c)
        ]
        chosen = [
            {m: o for block in combination for m, o in block.items()}
            for combination in product(*by_block)
        ]
        assert chosen, "a candidate fits with some options"
        return chosen

    def batches_s(
        self, p: int, c: int, options: Sequence[Mapping[str, int]], groups: Sequence[float]
    ) -> Array:
        """What no schedule of batches of so many groups undercuts with each of these options,
        [n_batches, n_options]."""

        def seconds(m: str) -> tuple[tuple[Array, ...], ...]:
            numbers = [one[m] for one in options]
            here = self.members[m].at(self.forms[m][p], c).seconds
            return tuple(tuple(a[numbers][:, None] for a in by_segment) for by_segment in here)

        each_batch = np.reshape(groups, (1, -1, 1, 1))  # is a mean of its own
        found_s: Array = self._least_s(
            {m: seconds(m) for m in self.tables},
            np.repeat(each_batch, len(options), axis=2),
            {m: n[p] for m, n in self.devices.items()},
            slice(c, c + 1),
        )
        return found_s[..., 0]

    def largest(self, p: int, cut: int, options: Mapping[str, Option] | None) -> Bucket:
        """The largest bucket of a placement that memory holds with these options, None: any, in
        groups of as many microbatches as the cut has."""
        for c in np.flatnonzero(self.group_sizes == self.group_sizes[cut]).tolist():
            if not self.trusted[p, c]:
                continue
            peaks = []
            for block, members in self._blocks_at(p, c):
                if options is not None:
                    chosen = zip(block, members, strict=True)
                    members = [m.only(m.options.index(options[n])) for n, m in chosen]
                peaks.append(least_peak(members)[0])
            if max(peaks) <= self.rules.spec.memory_bytes:
                return self.whole[c] if self.whole else self.plan(p, c).layout.buckets[0]
        raise AssertionError("the options fit at no cut")


def bounded(policy: str, families: Sequence[Family], rules: Rules) -> Iterator[Space]:
    """All families at all cuts."""
    names = list(rules.n_layers)
    degrees: dict[tuple[str, Form, int], set[int]] = defaultdict(set)
    for f in families:
        for m, form, data in zip(names, f.forms, f.data.T, strict=True):
            degrees[m, form, f.stages].update(np.unique(data).tolist())

    @cache
    def table(module: str, form: Form, stages: int, tasks: Tasks) -> Segments:
        data: Array = np.array(sorted(degrees[module, form, stages]))[:, None]
        mesh, segments = replace(form.mesh, data=data), rules.segments(module, form)
        cuts = rules.cuts(stages)
        sizes = rules.row_sizes(module, cuts[0] * cuts[1], data, mesh.model)
        return module_table(rules, segments, tasks, mesh, cuts, sizes)

    @cache
    def member(
        module: str, form: Form, stages: int, tasks: Tasks, resource: tuple[int, ...],
        in_flight: tuple[int, ...],
    ) -> Member:  # fmt: skip
        return Member.of(table(module, form, stages, tasks), resource, in_flight)

    @cache
    def alone(*key: Any) -> Least:
        return least([member(*key)], rules.spec.memory_bytes)

    tapped = bool(rules.extent.unstaged)
    structures: dict[tuple[object, ...], Structure] = {}
    for f in families:
        layout = _layout_of(f, rules)
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, tapped and k.mesh) for k in f.forms))
        if key not in structures:
            structures[key] = structure_of(layout(0), rules)
        structure = structures[key]
        keys = {
            m: (m, form, f.stages, *structure.facts(m))
            for m, form in zip(names, f.forms, strict=True)
        }
        tables = {m: table(*key[:4]) for m, key in keys.items()}
        members = {m: member(*key) for m, key in keys.items()}
        columns = zip(names, f.forms, f.data.T, strict=True)
        forms, devices = {}, {}
        for m, form, data in columns:
            forms[m] = np.searchsorted(tables[m].data, data)
            devices[m] = (form.n_devices * data // form.n_segments)[:, None]
        leasts: dict[tuple[str, ...], Least] = {}
        for block in structure.blocks:
            if len(block) == 1:
                leasts[block] = alone(*keys[block[0]]).at(forms[block[0]])
            else:
                here = [members[m].at(forms[m]) for m in block]
                leasts[block] = least(here, rules.spec.memory_bytes)
        yield Space(
            policy, layout, structure, rules, *rules.cuts(f.stages), tables, forms, members,
            devices, leasts,
        )  # fmt: skip


def _layout_of(family: Family, rules: Rules) -> Callable[[int], Layout]:
    return lambda i: rules.joined(family.layout(i, rules.n_layers, rules.cut_costs))
