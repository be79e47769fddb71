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

from dflop_jax.plan.module_tables import ModuleTable, SearchContext, module_table
from dflop_jax.plan.one_bucket import build_plan
from dflop_jax.plan.option_combinations import (
    BlockMinimum,
    ModuleOptions,
    SegmentDirections,
    SegmentGraph,
    best_combinations,
    block_minimum,
    segment_graph,
    smallest_combination,
    step_lower_bound_s,
)
from dflop_jax.plan.options import MemoryOption
from dflop_jax.plan.placement import Parallelism
from dflop_jax.plan.space import LayoutFamily
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
    build_layout: Callable[[int], Layout]
    graph: SegmentGraph
    context: SearchContext
    groups_per_batch: np.ndarray
    group_sizes: np.ndarray
    tables: Mapping[str, ModuleTable]
    table_rows: Mapping[str, np.ndarray]
    module_options: Mapping[str, ModuleOptions]
    devices: Mapping[str, Array]
    block_minima: Mapping[tuple[str, ...], BlockMinimum]
    is_tried: Array = True
    groups_together: Mapping[str, Array] = field(default_factory=dict)
    fan_in: Sequence[int] = ()
    whole_buckets: Sequence[Bucket] = ()

    @cached_property
    def min_groups(self) -> Array:
        """That each sampled batch takes at least, [n_batches, n_layouts, n_cuts]."""
        return np.max([t.min_groups[:, self.table_rows[m]] for m, t in self.tables.items()], axis=0)

    @cached_property
    def is_trusted(self) -> Array:
        """Whether the prices of a candidate are believed."""
        each = [t.is_trusted[self.table_rows[m]] for m, t in self.tables.items()]
        return np.logical_and.reduce(each)

    @cached_property
    def fits(self) -> Array:
        """Whether memory holds a candidate with some options."""
        return np.logical_and.reduce([x.fits for x in self.block_minima.values()])

    @cached_property
    def min_peak_bytes(self) -> Array:
        """Of the device that needs most, at least."""
        return np.maximum.reduce([x.min_peak_bytes for x in self.block_minima.values()])

    @cached_property
    def is_repeated(self) -> Array:
        """Whether a cut has the groups of the one before it: where shapes are at their least."""
        is_equal: Array = np.diff(self.group_sizes)[None] == 0
        if self.whole_buckets:
            is_equal = is_equal & [a == b for a, b in pairwise(self.whole_buckets)]
        else:
            for m, t in self.tables.items():
                for sizes in (t.rows, t.tokens):
                    is_equal = is_equal & (np.diff(sizes[self.table_rows[m]]) == 0)
        return np.pad(is_equal, ((0, 0), (1, 0)))

    @cached_property
    def lower_bound_s(self) -> Array:
        """Lower bound of the mean makespan over the sampled batches with any options; infinite
        where memory is short, prices are not believed, a cut repeats the one before it or nothing
        is to be tried."""
        is_usable = self.is_trusted & self.fits & self.is_tried & ~self.is_repeated
        seconds = {
            m: s
            for block, x in self.block_minima.items()
            for m, s in zip(block, x.seconds, strict=True)
        }
        bounds_s = self._step_bounds_s(seconds, self.min_groups, self.devices, slice(None))
        return np.where(is_usable, bounds_s, np.inf)

    def _step_bounds_s(
        self,
        seconds: Mapping[str, Any],
        groups: Array,
        devices: Mapping[str, Array],
        columns: slice,
    ) -> Array:
        """`structure.least_s` at some cuts."""
        groups_together = {m: n[:, columns] for m, n in self.groups_together.items()}
        cores = self.context.profile.concurrency
        return step_lower_bound_s(self.graph, seconds, groups, devices, cores, groups_together)

    def layout_at(self, p: int, c: int) -> Layout:
        """A layout in a cut's groups."""
        return replace(self.build_layout(p), group_size=int(self.group_sizes[c]))

    def plan(self, p: int, c: int, options: Mapping[str, MemoryOption] | None = None) -> Plan:
        """A candidate's plan; `options` as of `as_plan`."""
        bucket = Bucket.from_shapes(
            {m: t.shape(self.table_rows[m][p], c) for m, t in self.tables.items()}
        )
        plan = build_plan(self.layout_at(p, c), self.policy, (bucket,), self.context, options)
        return plan.with_layout(fan_in=self.fan_in[c]) if self.fan_in else plan

    def groups_together_at(self, c: int) -> dict[str, int]:
        """Groups of every module that go together."""
        return {
            m: int(self.groups_together[m][0, c]) if m in self.groups_together else 1
            for m in self.tables
        }

    def _blocks_at(self, p: int, c: int) -> Iterator[tuple[tuple[str, ...], list[ModuleOptions]]]:
        """Each block of modules that share devices, and its members."""
        for block in self.graph.blocks:
            yield block, [self.module_options[m].select(self.table_rows[m][p], c) for m in block]

    def smallest_options(self, p: int, c: int) -> tuple[float, dict[str, MemoryOption]]:
        """The options with which a candidate needs least: (bytes of the device that needs most,
        the option of every module)."""
        options: dict[str, MemoryOption] = {}
        peak_bytes = 0.0
        for block, members in self._blocks_at(p, c):
            block_bytes, chosen = smallest_combination(members)
            peak_bytes = max(peak_bytes, block_bytes)
            options |= zip(block, chosen, strict=True)
        return peak_bytes, options

    def contents_at(self, p: int, c: int) -> dict[str, tuple[int, ...]]:
        """Content of a group of each module: of a mean batch in as many as its cut says, or fewer
        where shapes are at their least."""
        n = min(float(self.groups_per_batch[c]), float(self.min_groups[:, p, c].mean()))
        contents = {}
        for m, n_together in self.groups_together_at(c).items():
            ranks = self.tables[m].data[self.table_rows[m][p]]
            content = group_content(self.context.volumes[m], np.array(n * n_together), ranks)
            contents[m] = tuple(map(int, content))
        return contents

    def fitting_options(self, p: int, c: int) -> list[dict[str, int]]:
        """The options of a candidate, by number, that fit and that no others undercut in
        everything."""
        limit = self.context.spec.memory_bytes
        by_block = [
            [dict(zip(block, o.tolist(), strict=True)) for o in best_combinations(members, limit)]
            for block, members in self._blocks_at(p, c)
        ]
        chosen = [
            {m: o for block in combination for m, o in block.items()}
            for combination in product(*by_block)
        ]
        assert chosen, "a candidate fits with some options"
        return chosen

    def batch_bounds_s(
        self, p: int, c: int, options: Sequence[Mapping[str, int]], groups: Sequence[float]
    ) -> Array:
        """What no schedule of batches of so many groups undercuts with each of these options,
        [n_batches, n_options]."""

        def seconds(m: str) -> tuple[tuple[Array, ...], ...]:
            numbers = [one[m] for one in options]
            module_seconds = self.module_options[m].select(self.table_rows[m][p], c).seconds
            return tuple(
                tuple(a[numbers][:, None] for a in by_segment) for by_segment in module_seconds
            )

        groups_by_batch = np.reshape(groups, (1, -1, 1, 1))  # is a mean of its own
        bounds_s: Array = self._step_bounds_s(
            {m: seconds(m) for m in self.tables},
            np.repeat(groups_by_batch, len(options), axis=2),
            {m: n[p] for m, n in self.devices.items()},
            slice(c, c + 1),
        )
        return bounds_s[..., 0]

    def largest_bucket(
        self, p: int, granularity: int, options: Mapping[str, MemoryOption] | None
    ) -> Bucket:
        """The largest bucket of a placement that memory holds with these options, None: any, in
        groups of as many microbatches as the cut has."""
        for c in np.flatnonzero(self.group_sizes == self.group_sizes[granularity]).tolist():
            if not self.is_trusted[p, c]:
                continue
            peaks = []
            for block, members in self._blocks_at(p, c):
                if options is not None:
                    chosen = zip(block, members, strict=True)
                    members = [m.with_option(m.options.index(options[n])) for n, m in chosen]
                peaks.append(smallest_combination(members)[0])
            if max(peaks) <= self.context.spec.memory_bytes:
                return (
                    self.whole_buckets[c]
                    if self.whole_buckets
                    else self.plan(p, c).layout.buckets[0]
                )
        raise AssertionError("the options fit at no cut")


def bound_families(
    policy: str, families: Sequence[LayoutFamily], context: SearchContext
) -> Iterator[Space]:
    """All families at all cuts."""
    names = list(context.n_layers)
    degrees: dict[tuple[str, Parallelism, int], set[int]] = defaultdict(set)
    for f in families:
        for m, parallelism, data in zip(names, f.parallelisms, f.data.T, strict=True):
            degrees[m, parallelism, f.max_stages].update(np.unique(data).tolist())

    @cache
    def build_table(
        module: str, parallelism: Parallelism, max_stages: int, directions: SegmentDirections
    ) -> ModuleTable:
        data: Array = np.array(sorted(degrees[module, parallelism, max_stages]))[:, None]
        mesh, segments = replace(parallelism.mesh, data=data), context.segments(module, parallelism)
        granularities = context.granularities(max_stages)
        row_shapes = context.row_shapes(
            module, granularities[0] * granularities[1], data, mesh.model
        )
        return module_table(context, segments, directions, mesh, granularities, row_shapes)

    @cache
    def build_options(
        module: str, parallelism: Parallelism, max_stages: int, directions: SegmentDirections,
        resources: tuple[int, ...],
        in_flight: tuple[int, ...],
    ) -> ModuleOptions:  # fmt: skip
        return ModuleOptions.from_table(
            build_table(module, parallelism, max_stages, directions), resources, in_flight
        )

    @cache
    def module_minimum(*key: Any) -> BlockMinimum:
        return block_minimum([build_options(*key)], context.spec.memory_bytes)

    has_taps = bool(context.space_limits.unstaged)
    graphs: dict[tuple[object, ...], SegmentGraph] = {}
    for f in families:
        layout = _layout_builder(f, context)
        # Where an edge leaves from between layers, it depends on the split of the layers as well.
        key = (f.blocks, tuple((k.n_segments, has_taps and k.mesh) for k in f.parallelisms))
        if key not in graphs:
            graphs[key] = segment_graph(layout(0), context)
        graph = graphs[key]
        keys = {
            m: (m, parallelism, f.max_stages, *graph.module_key(m))
            for m, parallelism in zip(names, f.parallelisms, strict=True)
        }
        tables = {m: build_table(*key[:4]) for m, key in keys.items()}
        module_options = {m: build_options(*key) for m, key in keys.items()}
        columns = zip(names, f.parallelisms, f.data.T, strict=True)
        table_rows, devices = {}, {}
        for m, parallelism, data in columns:
            table_rows[m] = np.searchsorted(tables[m].data, data)
            devices[m] = (parallelism.n_devices * data // parallelism.n_segments)[:, None]
        block_minima: dict[tuple[str, ...], BlockMinimum] = {}
        for block in graph.blocks:
            if len(block) == 1:
                block_minima[block] = module_minimum(*keys[block[0]]).select(table_rows[block[0]])
            else:
                block_options = [module_options[m].select(table_rows[m]) for m in block]
                block_minima[block] = block_minimum(block_options, context.spec.memory_bytes)
        yield Space(
            policy, layout, graph, context,
            *context.granularities(f.max_stages), tables, table_rows,
            module_options,
            devices, block_minima,
        )  # fmt: skip


def _layout_builder(family: LayoutFamily, context: SearchContext) -> Callable[[int], Layout]:
    return lambda i: context.with_edges(
        family.layout(i, context.n_layers, context.layer_costs_by_degree)
    )
