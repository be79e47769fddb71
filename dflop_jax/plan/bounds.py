"""Vectorized lower bounds of step time and memory for spaces of layouts.

No schedule is faster than its layout's bound, so the search stays exact although it skips layouts
whose bound exceeds a makespan already found. Every quantity is the minimum over the memory options
that may fit; `Space.fitting_options` lists a candidate's combinations of options. A granularity is
a number of groups per mean batch and of microbatches per group. Arrays are
[n_layouts, n_granularities].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise, product

import numpy as np

from dflop_jax.plan.memory import (
    BlockMinimum,
    MemoryOption,
    ModuleOptions,
    best_combinations,
    block_minimum,
    segment_need,
    smallest_combination,
)
from dflop_jax.plan.module_tables import ModuleTable, SearchContext, group_content, module_table
from dflop_jax.plan.placement import Parallelism
from dflop_jax.plan.space import LayoutFamily
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Direction, Layout, Plan, exchanged_features
from dflop_jax.schedule.bounds import fill_and_drain_s, step_bound_s
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.simulate.task_graph import in_flight_limit, segment_links, submesh_resources

SegmentDirections = tuple[tuple[Direction, ...], ...]
# Data-parallel degree of a module, and `exchanged_features` by edge to its readers.
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class SegmentGraph:
    """Segments of a family of layouts. Fields are indexed by segment in topological order."""

    modules: tuple[str, ...]
    resource_of: tuple[int, ...]  # number of the set of devices
    sources: tuple[tuple[int, ...], ...]  # segments read, if the data uses their modules
    in_flight: tuple[int, ...]  # maximum number of groups between forward and backward
    directions: SegmentDirections  # tasks per group

    def segments_of(self, module: str) -> list[int]:
        return [i for i, m in enumerate(self.modules) if m == module]

    def module_key(self, module: str) -> tuple[SegmentDirections, tuple[int, ...], tuple[int, ...]]:
        """Return (directions, resources, groups in flight) of a module's segments; resources count
        from the module's first, so that a module has the same key on other devices."""
        numbers = self.segments_of(module)
        first = min(self.resource_of[i] for i in numbers)
        return (
            tuple(self.directions[i] for i in numbers),
            tuple(self.resource_of[i] - first for i in numbers),
            tuple(self.in_flight[i] for i in numbers),
        )

    @cached_property
    def blocks(self) -> list[tuple[str, ...]]:
        """Groups of modules that run on exactly the same devices."""
        blocks: dict[frozenset[int], list[str]] = defaultdict(list)
        for m in dict.fromkeys(self.modules):
            blocks[frozenset(self.resource_of[i] for i in self.segments_of(m))].append(m)
        return list(map(tuple, blocks.values()))


def segment_graph(layout: Layout, context: SearchContext) -> SegmentGraph:
    """Return the layout's segment graph, which does not depend on its buckets."""
    number = {s.name: i for i, s in enumerate(layout.segments)}
    used_segments = {s.name for s in layout.segments if context.volumes[s.module].max_per_sample}
    sources: list[list[int]] = [[] for _ in number]
    for link in segment_links(layout):
        if {link.source, link.target} <= used_segments:
            sources[number[link.target]].append(number[link.source])
    resource, in_flight = submesh_resources(layout), in_flight_limit(Plan("", layout))
    directions_of = segment_directions(layout, context.trainable(layout))
    return SegmentGraph(
        tuple(s.module for s in layout.segments),
        tuple(resource[s.submesh] for s in layout.segments),
        tuple(map(tuple, sources)),
        tuple(in_flight[n] for n in number),
        tuple(directions_of[n] for n in number),
    )


@dataclass(frozen=True)
class Space:
    """Layouts with one segment graph at every granularity, with their lower bounds."""

    policy: str
    build_layout: Callable[[int], Layout]  # from its number; no buckets, smallest group size
    graph: SegmentGraph
    context: SearchContext
    groups_per_batch: np.ndarray  # [n_granularities]
    group_sizes: np.ndarray  # microbatches per group, [n_granularities]
    tables: Mapping[str, ModuleTable]  # by module
    table_rows: Mapping[str, np.ndarray]  # row of the module's table for each layout, by module
    module_options: Mapping[str, ModuleOptions]
    block_minima: Mapping[tuple[str, ...], BlockMinimum]  # by block of modules that share devices
    is_allowed: Array = True  # whether the search may use a layout at a granularity
    # Mean number per group of the other modules, by module, [1, n_granularities]; missing: 1.
    sub_microbatches: Mapping[str, Array] = field(default_factory=dict)
    fan_in: Sequence[int] = ()  # maximum number of sub-microbatches per group, [n_granularities]
    whole_buckets: Sequence[Bucket] = ()  # before division into sub-microbatches

    @cached_property
    def min_groups(self) -> Array:
        """Minimum number of groups of each sampled batch, [n_batches, n_layouts, ...]."""
        return np.max([t.min_groups[:, self.table_rows[m]] for m, t in self.tables.items()], axis=0)

    @cached_property
    def is_trusted(self) -> Array:
        """Whether the cost model is trusted for the shapes of all modules."""
        each = [t.is_trusted[self.table_rows[m]] for m, t in self.tables.items()]
        return np.logical_and.reduce(each)

    @cached_property
    def fits(self) -> Array:
        """Whether the layout fits into memory with some options."""
        return np.logical_and.reduce([x.fits for x in self.block_minima.values()])

    @cached_property
    def min_peak_bytes(self) -> Array:
        """Lower bound of the maximum bytes per device."""
        return np.maximum.reduce([x.peak_bytes for x in self.block_minima.values()])

    @cached_property
    def is_repeated(self) -> Array:
        """Whether a granularity has the same shapes as the previous one."""
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
        """Lower bound of the mean makespan with any options; inf: not searched."""
        is_usable = self.is_trusted & self.fits & self.is_allowed & ~self.is_repeated
        seconds: dict[str, Sequence[Array]] = {}
        for block, x in self.block_minima.items():
            seconds |= zip(block, x.seconds, strict=True)
        bounds_s = self._step_bounds_s(seconds, self.min_groups, slice(None), slice(None))
        return np.where(is_usable, bounds_s, np.inf)

    def _step_bounds_s(
        self,
        seconds: Mapping[str, Sequence[Array]],
        groups: Array,
        layouts: int | slice,
        columns: slice,
    ) -> Array:
        """Return lower bounds of the mean step time for the selected `layouts` and granularities
        (`columns`). `groups` is the number per batch, [n_batches, ...]; `seconds` lists each
        segment's forward, backward, reduce and update time."""
        graph, cores = self.graph, self.context.profile.concurrency
        forward, backward, reduce, update = (
            [s[kind] for m in dict.fromkeys(graph.modules) for s in seconds[m]] for kind in range(4)
        )
        before_s, after_s = fill_and_drain_s(graph.sources, forward, backward, reduce)
        after_s = [np.where(b > 0, a, 0.0) for a, b in zip(after_s, backward, strict=True)]
        mean_groups: Array = groups.mean(axis=0)
        # A fraction of a group takes that fraction of a group's time.
        first_group = np.minimum(groups, 1.0).mean(axis=0)
        n_subs = {m: n[:, columns] for m, n in self.sub_microbatches.items()}
        work_s = [
            mean_groups * (f + b) * n_subs.get(m, 1)
            for f, b, m in zip(forward, backward, graph.modules, strict=True)
        ]
        by_resource: dict[int, list[int]] = defaultdict(list)
        for i, r in enumerate(graph.resource_of):
            by_resource[r].append(i)

        def minimum(values: Sequence[Array]) -> list[Array]:
            each = ([values[i] for i in numbers] for numbers in by_resource.values())
            return [first_group * np.minimum.reduce(np.broadcast_arrays(*v)) for v in each]

        def total(values: Sequence[Array]) -> list[Array]:
            return [sum(values[i] for i in numbers) for numbers in by_resource.values()]

        resource_s = step_bound_s(
            total(work_s), minimum(before_s), minimum(after_s), total(reduce), total(update)
        )
        devices = {m: t.n_devices[self.table_rows[m]][layouts] for m, t in self.tables.items()}
        module_work_s = zip(graph.modules, work_s, strict=True)
        device_s = sum(s * np.minimum(devices[m], cores) for m, s in module_work_s)
        return np.maximum(resource_s, device_s / cores)

    def layout_at(self, p: int, c: int) -> Layout:
        """Return layout `p` with the group size of granularity `c`, without buckets."""
        return replace(self.build_layout(p), group_size=int(self.group_sizes[c]))

    def plan(self, p: int, c: int, options: Mapping[str, MemoryOption] | None = None) -> Plan:
        """Build a layout's plan at a granularity; `options` as for `SearchContext.build_plan`."""
        shapes = {m: t.shape(self.table_rows[m][p], c) for m, t in self.tables.items()}
        bucket = Bucket.from_shapes(shapes)
        plan = self.context.build_plan(self.layout_at(p, c), self.policy, (bucket,), options)
        return plan.with_layout(fan_in=self.fan_in[c]) if self.fan_in else plan

    def sub_microbatches_at(self, c: int) -> dict[str, int]:
        """Return every module's number of sub-microbatches per group of the others."""
        n_subs = self.sub_microbatches
        return {m: int(n_subs[m][0, c]) if m in n_subs else 1 for m in self.tables}

    def _blocks_at(self, p: int, c: int) -> Iterator[tuple[tuple[str, ...], list[ModuleOptions]]]:
        """Yield each block of modules that share devices with the modules' options."""
        for block in self.graph.blocks:
            yield block, [self.module_options[m].select(self.table_rows[m][p], c) for m in block]

    def smallest_options(self, p: int, c: int) -> tuple[float, dict[str, MemoryOption]]:
        """Return (maximum bytes per device, options by module) that need the least memory."""
        options: dict[str, MemoryOption] = {}
        peak_bytes = 0.0
        for block, modules in self._blocks_at(p, c):
            block_bytes, chosen = smallest_combination(modules)
            peak_bytes = max(peak_bytes, block_bytes)
            options |= zip(block, chosen, strict=True)
        return peak_bytes, options

    def contents_at(self, p: int, c: int) -> dict[str, tuple[int, ...]]:
        """Return the content per group of each module if a mean batch is split evenly."""
        n = min(float(self.groups_per_batch[c]), float(self.min_groups[:, p, c].mean()))
        contents = {}
        for m, n_subs in self.sub_microbatches_at(c).items():
            ranks = self.tables[m].data[self.table_rows[m][p]]
            content = group_content(self.context.volumes[m], np.array(n * n_subs), ranks)
            contents[m] = tuple(map(int, content))
        return contents

    def fitting_options(self, p: int, c: int) -> list[dict[str, int]]:
        """Return the Pareto-optimal combinations that fit, each {module: number of its option}."""
        limit = self.context.spec.memory_bytes
        by_block = [
            [dict(zip(block, o.tolist(), strict=True)) for o in best_combinations(modules, limit)]
            for block, modules in self._blocks_at(p, c)
        ]
        chosen = [{m: o for d in each for m, o in d.items()} for each in product(*by_block)]
        assert chosen, "a candidate fits with some options"
        return chosen

    def batch_bounds_s(
        self, p: int, c: int, options: Sequence[Mapping[str, int]], groups: Sequence[float]
    ) -> Array:
        """Return bounds of batches with these numbers of groups, [n_batches, n_options]."""
        seconds = {}
        for m in self.tables:
            numbers = [one[m] for one in options]
            module_seconds = self.module_options[m].select(self.table_rows[m][p], c).seconds
            seconds[m] = [s[:, numbers][..., None] for s in module_seconds]
        # A first axis of length 1 keeps the mean over batches from mixing them.
        each_batch = np.repeat(np.reshape(groups, (1, -1, 1, 1)), len(options), axis=2)
        bounds_s: Array = self._step_bounds_s(seconds, each_batch, p, slice(c, c + 1))
        return bounds_s[..., 0]

    def largest_bucket(self, p: int, c: int, options: Mapping[str, MemoryOption] | None) -> Bucket:
        """Return the largest bucket that fits into memory with these options (None: any)."""
        for i in np.flatnonzero(self.group_sizes == self.group_sizes[c]).tolist():
            if not self.is_trusted[p, i]:
                continue
            peaks = []
            for block, modules in self._blocks_at(p, i):
                if options is not None:
                    chosen = zip(block, modules, strict=True)
                    modules = [m.with_option(m.options.index(options[n])) for n, m in chosen]
                peaks.append(smallest_combination(modules)[0])
            if max(peaks) <= self.context.spec.memory_bytes:
                whole = self.whole_buckets
                return whole[i] if whole else self.plan(p, i).layout.buckets[0]
        raise AssertionError("the options fit at no granularity")


def make_module_options(
    table: ModuleTable, resources: Sequence[int], in_flight: Sequence[Array]
) -> ModuleOptions:
    """Return memory and time by option, given each segment's resource and groups in flight."""
    needs = map(segment_need, resources, table.n_bytes, in_flight)
    return ModuleOptions(table.options, tuple(needs), table.seconds)


def bound_families(
    policy: str, families: Sequence[LayoutFamily], context: SearchContext
) -> Iterator[Space]:
    """Yield the space of each family of layouts at all granularities."""
    names, limit, edges = list(context.n_layers), context.spec.memory_bytes, context.profile.edges
    all_ranks: dict[tuple[str, Parallelism, int], set[Ranks]] = defaultdict(set)
    for f in families:
        for m, parallelism, ranks in zip(names, f.parallelisms, _ranks(f, context), strict=True):
            all_ranks[m, parallelism, f.max_stages].update(ranks)
    row_of = {key: {r: i for i, r in enumerate(sorted(rs))} for key, rs in all_ranks.items()}

    @cache
    def build_table(
        module: str, parallelism: Parallelism, max_stages: int, directions: SegmentDirections
    ) -> ModuleTable:
        data, *by_edge = np.array([*row_of[module, parallelism, max_stages]]).T[..., None]
        mesh, segments = replace(parallelism.mesh, data=data), context.segments(module, parallelism)
        groups, group_sizes = context.granularities(max_stages)
        sent = list(zip((e for e in edges if e.source == module), by_edge, strict=True))
        return module_table(
            context,
            segments,
            directions,
            mesh,
            (groups, group_sizes),
            context.row_shapes(module, groups * group_sizes, data, mesh.model),
            exchanged={s.name: sum(n for e, n in sent if s.sends(e)) for s in segments},
        )

    Key = tuple[str, Parallelism, int, SegmentDirections, tuple[int, ...], tuple[int, ...]]

    @cache
    def build_options(key: Key) -> ModuleOptions:
        return make_module_options(build_table(*key[:4]), *key[4:])

    @cache
    def module_minimum(key: Key) -> BlockMinimum:
        return block_minimum([build_options(key)], limit)

    has_taps = bool(context.space_limits.unstaged)
    graphs: dict[tuple[object, ...], SegmentGraph] = {}
    for f in families:
        layout = partial(_build_layout, context, f)
        # Edges that leave from intermediate layers depend on how layers are split into segments.
        graph_key = f.blocks, tuple((k.n_segments, has_taps and k.mesh) for k in f.parallelisms)
        if graph_key not in graphs:
            graphs[graph_key] = segment_graph(layout(0), context)
        graph = graphs[graph_key]
        of_modules = list(zip(names, f.parallelisms, _ranks(f, context), strict=True))
        keys = {m: (m, k, f.max_stages, *graph.module_key(m)) for m, k, _ in of_modules}
        tables = {m: build_table(*key[:4]) for m, key in keys.items()}
        rows = {m: np.array([*map(row_of[keys[m][:3]].get, ranks)]) for m, _, ranks in of_modules}
        options = {m: build_options(key) for m, key in keys.items()}
        minima = {
            block: module_minimum(keys[block[0]]).select(rows[block[0]])
            if len(block) == 1
            else block_minimum([options[m].select(rows[m]) for m in block], limit)
            for block in graph.blocks
        }
        sizes = context.granularities(f.max_stages)
        yield Space(policy, layout, graph, context, *sizes, tables, rows, options, minima)


def _ranks(family: LayoutFamily, context: SearchContext) -> list[list[Ranks]]:
    """Return by module the `Ranks` of each layout."""
    data, by_module = dict(zip(context.n_layers, family.data.T, strict=True)), []
    for module, n in data.items():
        readers = (data[e.target] for e in context.profile.edges if e.source == module)
        columns = [n, *(exchanged_features(n, reader) for reader in readers)]
        by_module.append(list(zip(*(column.tolist() for column in columns), strict=True)))
    return by_module


def _build_layout(context: SearchContext, family: LayoutFamily, i: int) -> Layout:
    layout = family.layout(i, context.n_layers, context.layer_costs)
    return context.with_edges(layout)
