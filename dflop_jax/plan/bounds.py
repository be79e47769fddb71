"""Lower bounds and memory of whole spaces of placements at once.

No schedule of a cut's groups is faster than its bound, so leaving out what exceeds a makespan that
was reached keeps the optimum. Every quantity is the least over the options that fit; combinations
of options are listed for single candidates only (`Bounds.choices`).

Arrays are [n_placements, n_cuts].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

from dflop_jax.plan.choices import Least, Member, combinations, least, least_peak
from dflop_jax.plan.estimate import Rules, Segments, module_table
from dflop_jax.plan.options import Option
from dflop_jax.plan.placement import Form
from dflop_jax.plan.space import Family
from dflop_jax.plan.structure import Structure, Tasks, least_s, structure_of
from dflop_jax.plan.volume import group_content
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Layout


@dataclass(frozen=True)
class Divided:
    """Sub-microbatches by cut: the groups of every module that go together, on average (`parts`)
    and at most (`fan_in`), and the bucket of which they are parts (`whole`)."""

    parts: tuple[dict[str, int], ...]
    fan_in: tuple[int, ...]
    whole: tuple[Bucket, ...]


@dataclass(frozen=True)
class Space:
    """Layouts of one graph at every cut.

    layout: of each number, without shapes, in the smallest groups. cuts, group_sizes: groups of a
    mean batch at every cut, and microbatches of a group. tables, forms, members: of every module,
    and the rows of its table that the layouts have. devices: of a segment of every module,
    [n_layouts, 1]. divided: None where one group of each module goes with one of the others.
    """

    layout: Callable[[int], Layout]
    structure: Structure
    rules: Rules
    cuts: np.ndarray
    group_sizes: np.ndarray
    tables: Mapping[str, Segments]
    forms: Mapping[str, np.ndarray]
    members: Mapping[str, Member]
    devices: Mapping[str, Array]
    divided: Divided | None = None

    def layout_at(self, p: int, c: int) -> Layout:
        """A layout in a cut's groups."""
        return replace(self.layout(p), group_size=int(self.group_sizes[c]))

    def bucket(self, p: int, c: int) -> Bucket:
        return Bucket.of({m: t.shape(self.forms[m][p], c) for m, t in self.tables.items()})

    def parts(self, c: int) -> dict[str, int]:
        """Groups of every module that go together."""
        return self.divided.parts[c] if self.divided else dict.fromkeys(self.tables, 1)

    def fan_in(self, c: int) -> int:
        """Groups of a module that feed one at most."""
        return self.divided.fan_in[c] if self.divided else 1

    @cached_property
    def repeated(self) -> Array:
        """Whether a cut has the groups of the one before it, [n_layouts, n_cuts]: where shapes are
        at their least."""
        same: Array = np.diff(self.group_sizes)[None] == 0
        if self.divided:
            same = same & [a == b for a, b in pairwise(self.divided.whole)]
        else:
            for m, t in self.tables.items():
                for sizes in (t.rows, t.tokens):
                    same = same & (np.diff(sizes[self.forms[m]]) == 0)
        return np.pad(same, ((0, 0), (1, 0)))

    def members_at(self, block: Sequence[str], p: int, c: int) -> list[Member]:
        return [self.members[m].at(self.forms[m][p], c) for m in block]

    def trusted(self, p: int, c: int) -> bool:
        """Whether the prices of a candidate are believed."""
        return all(bool(t.trusted[self.forms[m][p], c]) for m, t in self.tables.items())


@dataclass(frozen=True)
class Bounds:
    """What no layout of a space undercuts at any cut, [n_layouts, n_cuts].

    bound_s: of the mean makespan over the sampled batches with any options; infinite where memory
    is short, prices are not believed, a cut repeats the one before it or nothing is to be tried.
    fits: whether memory holds it with some options. least_bytes: of the device that needs most, at
    least. groups: that each sampled batch takes at least, [n_batches, n_layouts, n_cuts].
    """

    space: Space
    bound_s: Array
    fits: Array
    least_bytes: Array
    groups: Array

    @property
    def n_candidates(self) -> int:
        """Layouts at cuts, those alike counted once."""
        return int((~self.space.repeated).sum())

    @staticmethod
    def of(space: Space, leasts: Mapping[tuple[str, ...], Least], tried: Array = True) -> Bounds:
        """The bounds of a space, from the least of every block; `tried`: whether a candidate is to
        be tried."""
        tables, forms = space.tables, space.forms
        groups = np.max([t.groups[:, forms[m]] for m, t in tables.items()], axis=0)
        trusted = np.logical_and.reduce([t.trusted[forms[m]] for m, t in tables.items()])
        fits = np.logical_and.reduce([x.fits for x in leasts.values()])
        usable = trusted & fits & tried & ~space.repeated
        bound_s = np.full(usable.shape, np.inf)
        if usable.any():
            seconds = {
                m: s for block, x in leasts.items() for m, s in zip(block, x.seconds, strict=True)
            }
            parts = _parts(space.divided, slice(None))
            cores = space.rules.profile.concurrency
            found_s = least_s(space.structure, seconds, groups, space.devices, cores, parts)
            bound_s = np.where(usable, found_s, np.inf)
        least_bytes = np.maximum.reduce([x.peak_bytes for x in leasts.values()])
        return Bounds(space, bound_s, fits, least_bytes, groups)

    def least_peak(self, p: int, c: int) -> tuple[float, dict[str, Option]]:
        """The options with which a candidate needs least: (bytes of the device that needs most,
        the option of every module)."""
        space = self.space
        options: dict[str, Option] = {}
        peak_bytes = 0.0
        for block in space.structure.blocks:
            needed, chosen = least_peak(space.members_at(block, p, c))
            peak_bytes = max(peak_bytes, needed)
            options |= zip(block, chosen, strict=True)
        return peak_bytes, options

    def content(self, p: int, c: int) -> dict[str, tuple[int, ...]]:
        """Content of a group of each module: of a mean batch in as many as its cut says, or fewer
        where shapes are at their least."""
        space = self.space
        n = min(float(space.cuts[c]), float(self.groups[:, p, c].mean()))
        parts, volumes = space.parts(c), space.rules.volumes
        data = {m: t.data[space.forms[m][p]] for m, t in space.tables.items()}
        return {
            m: tuple(map(int, group_content(volumes[m], np.array(n * parts[m]), ranks)))
            for m, ranks in data.items()
        }

    def fitting(self, p: int, c: int) -> list[dict[str, int]]:
        """The options of a candidate, by number, that fit and that no others undercut in
        everything."""
        space = self.space
        by_block = []
        for block in space.structure.blocks:
            fitting = combinations(space.members_at(block, p, c), space.rules.spec.memory_bytes)
            by_block.append([dict(zip(block, o.tolist(), strict=True)) for o in fitting])
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
        space = self.space

        def seconds(m: str) -> tuple[tuple[Array, ...], ...]:
            numbers = [one[m] for one in options]
            here = space.members[m].at(space.forms[m][p], c).seconds
            return tuple(tuple(a[numbers][:, None] for a in by_segment) for by_segment in here)

        each_batch = np.reshape(groups, (1, -1, 1, 1))  # is a mean of its own
        found_s: Array = least_s(
            space.structure,
            {m: seconds(m) for m in space.tables},
            np.repeat(each_batch, len(options), axis=2),
            {m: n[p] for m, n in space.devices.items()},
            space.rules.profile.concurrency,
            _parts(space.divided, slice(c, c + 1)),
        )[..., 0]
        return found_s

    def largest(self, p: int, cut: int, options: Mapping[str, Option] | None) -> Bucket:
        """The largest bucket of a placement that memory holds with these options, None: any, in
        groups of as many microbatches as the cut has."""
        space = self.space
        for c in np.flatnonzero(space.group_sizes == space.group_sizes[cut]).tolist():
            if not space.trusted(p, c):
                continue
            peaks = []
            for block in space.structure.blocks:
                members = space.members_at(block, p, c)
                if options is not None:
                    chosen = zip(block, members, strict=True)
                    members = [m.only(m.options.index(options[n])) for n, m in chosen]
                peaks.append(least_peak(members)[0])
            if max(peaks) <= space.rules.spec.memory_bytes:
                return space.divided.whole[c] if space.divided else space.bucket(p, c)
        raise AssertionError("the options fit at no cut")


def all_bounds(families: Sequence[Family], rules: Rules) -> Iterator[Bounds]:
    """Bounds of all families at all cuts."""
    names = list(rules.n_layers)
    degrees: dict[tuple[str, Form, int], set[int]] = {}
    for f in families:
        for m, form, data in zip(names, f.forms, f.data.T, strict=True):
            degrees.setdefault((m, form, f.stages), set()).update(np.unique(data).tolist())

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
    def alone(key: tuple[Any, ...]) -> Least:
        return least([member(*key)], rules.spec.memory_bytes)

    tapped = bool(rules.facts.unstaged)
    structures: dict[tuple[object, ...], Structure] = {}
    for f in families:
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, tapped and k.mesh) for k in f.forms))
        if key not in structures:
            structures[key] = structure_of(_layout_of(f, rules)(0), rules)
        structure = structures[key]
        keys = {
            m: (m, form, f.stages, *structure.facts(m))
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
                leasts[block] = least(here, rules.spec.memory_bytes)
        members = {m: member(*key) for m, key in keys.items()}
        space = Space(
            _layout_of(f, rules),
            structure,
            rules,
            *rules.cuts(f.stages),
            tables,
            forms,
            members,
            _devices(f, rules),
        )
        yield Bounds.of(space, leasts)


def _layout_of(family: Family, rules: Rules) -> Callable[[int], Layout]:
    return lambda i: rules.joined(family.layout(i, rules.n_layers, rules.cut_costs))


def _parts(divided: Divided | None, cuts: slice) -> dict[str, np.ndarray] | None:
    """Parts by module, [1, n_cuts]."""
    if divided is None:
        return None
    here = divided.parts[cuts]
    return {m: np.array([[parts[m] for parts in here]]) for m in here[0]}


def _devices(family: Family, rules: Rules) -> dict[str, Array]:
    """Devices of a segment of every module, [n_placements, 1]."""
    return {
        m: form.n_devices * family.data[:, i : i + 1] // form.n_segments
        for i, (m, form) in enumerate(zip(rules.n_layers, family.forms, strict=True))
    }
