"""Task graph: the program calls of a step, and the tasks that each waits for.

Runtime, scheduler and simulator all use this module, so they execute the same tasks. A segment
without readers has no forward task in training: its backward computes loss and gradient in one
call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Edge,
    Group,
    Layout,
    Plan,
    Shape,
    Task,
)


@dataclass(frozen=True)
class SegmentLink:
    """Link over which one segment sends activations to another."""

    source: str
    target: str
    edge: Edge | None = None  # None: hidden states between two segments of a module


@dataclass(frozen=True)
class StepGraph:
    """Tasks of one step in a canonical order, and the tasks that each waits for."""

    tasks: tuple[Task, ...]
    waits_for: dict[Task, tuple[Task, ...]]

    @cached_property
    def task_index(self) -> dict[Task, int]:
        return {t: i for i, t in enumerate(self.tasks)}

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tasks that wait for each task."""
        waiting: list[list[int]] = [[] for _ in self.tasks]
        for i, t in enumerate(self.tasks):
            for input_task in self.waits_for[t]:
                waiting[self.task_index[input_task]].append(i)
        return tuple(map(tuple, waiting))


def segment_links(layout: Layout) -> tuple[SegmentLink, ...]:
    """Return all links between segments, in the order of the receiving segments."""
    all_links: list[SegmentLink] = []
    for s in layout.segments:
        segments_of_module = layout.segments_of(s.module)
        index = segments_of_module.index(s)
        if index > 0:
            all_links.append(SegmentLink(segments_of_module[index - 1].name, s.name))
        for edge in layout.edges:
            if s.reads(edge):
                source = next(u for u in layout.segments_of(edge.source) if u.sends(edge))
                all_links.append(SegmentLink(source.name, s.name, edge))
    return tuple(all_links)


def linked_shapes(layout: Layout, link: SegmentLink) -> list[tuple[Shape, Shape]]:
    """Return the pairs of source and target shapes that occur in a bucket."""
    low, high = (layout.segment(n).module for n in (link.source, link.target))
    pairs = ((b.shape(low), b.shape(high)) for b in layout.buckets)
    return list(dict.fromkeys((a, b) for a, b in pairs if a is not None and b is not None))


def feeding_groups(groups: Sequence[Group]) -> dict[tuple[int, str], list[int]]:
    """Return (group, module) -> the groups of that module that feed the group."""
    feeding: dict[tuple[int, str], list[int]] = {}
    for i, g in enumerate(groups):
        for f in g.feeds:
            feeding.setdefault((f, g.module), []).append(i)
    return feeding


def tied_segments(layout: Layout) -> dict[str, str]:
    """Return a map from each segment that reads tied embedding parameters to their owner."""
    by_module = [layout.segments_of(module) for module in layout.tied]
    return {segments[-1].name: segments[0].name for segments in by_module if len(segments) > 1}


def segments_with_backward(layout: Layout, trainable: Collection[str]) -> tuple[str, ...]:
    """Return the segments that run backward: trainable ones, and readers of such segments."""
    all_links, names = segment_links(layout), list[str]()
    for s in layout.segments:
        if s.name in trainable or any(k.target == s.name and k.source in names for k in all_links):
            names.append(s.name)
    return tuple(names)


def step_graph(
    layout: Layout, groups: Sequence[Group], trainable: Collection[str], *, evaluate: bool = False
) -> StepGraph:
    """Return the graph of one step with these groups; `evaluate`: forward tasks only."""
    backward = () if evaluate else segments_with_backward(layout, trainable)
    links_in, links_out = (defaultdict[str, list[SegmentLink]](list) for _ in range(2))
    for link in segment_links(layout):
        links_in[link.target].append(link)
        links_out[link.source].append(link)
    sources_of = feeding_groups(groups)
    segments = {m: layout.segments_of(m) for m in layout.modules}
    waits_for: dict[Task, tuple[Task, ...]] = {}
    for i, g in enumerate(groups):
        for s in segments[g.module]:
            fused = not links_out[s.name] and not evaluate
            inputs: list[Task] = []
            for link in links_in[s.name]:
                sources = sources_of.get((i, link.edge.source), []) if link.edge else [i]
                inputs += [Task(link.source, k, FORWARD) for k in sources]
            task = Task(s.name, i, BACKWARD if fused else FORWARD)
            waits_for[task] = tuple(dict.fromkeys(inputs))
    for i, g in enumerate(groups):
        for s in reversed(segments[g.module]):
            if s.name not in backward or not links_out[s.name]:
                continue
            inputs = [Task(s.name, i, FORWARD)]
            for edge, target in ((link.edge, link.target) for link in links_out[s.name]):
                fed = [f for f in g.feeds if groups[f].module == edge.target] if edge else [i]
                inputs += [Task(target, f, BACKWARD) for f in fed]
            waits_for[Task(s.name, i, BACKWARD)] = tuple(dict.fromkeys(inputs))
    if not evaluate:
        waits_for |= _step_end_tasks(layout, waits_for, trainable)
    return StepGraph(tuple(waits_for), waits_for)


def _step_end_tasks(
    layout: Layout, waits: dict[Task, tuple[Task, ...]], trainable: Collection[str]
) -> dict[Task, tuple[Task, ...]]:
    """Return the inputs of reductions and updates. The reader of a tied parameter reduces first, so
    that the owner adds both gradients, and is updated last, with values from the owner."""
    owner_of = tied_segments(layout)
    readers = {owner: reader for reader, owner in owner_of.items() if reader in trainable}
    names = [s.name for s in layout.segments if s.name in trainable]
    by_segment: dict[str, list[Task]] = {n: [] for n in names}
    for t in waits:
        if t.direction == BACKWARD and t.segment in by_segment:
            by_segment[t.segment].append(t)
    reductions, updates = ({n: Task(n, NO_GROUP, d) for n in names} for d in (REDUCE, UPDATE))
    waits_for: dict[Task, tuple[Task, ...]] = {}
    for n in names:
        tied_task = [reductions[readers[n]]] if n in readers else []
        waits_for[reductions[n]] = (*by_segment[n], *tied_task)
    for n in names:
        tied_task = [updates[owner_of[n]]] if owner_of.get(n) in updates else []
        waits_for[updates[n]] = (*reductions.values(), *tied_task)
    return waits_for


def submesh_resources(layout: Layout) -> dict[str, int]:
    """Return each submesh's resource number; submeshes that share a device share a resource."""
    group = {m.name: i for i, m in enumerate(layout.submeshes)}
    for a in layout.submeshes:
        for b in layout.submeshes:
            if set(a.devices) & set(b.devices):
                low, high = sorted((group[a.name], group[b.name]))
                group = {n: (low if r == high else r) for n, r in group.items()}
    ids = sorted(set(group.values()))
    return {n: ids.index(r) for n, r in group.items()}


def segment_resources(layout: Layout) -> dict[str, int]:
    """Return the resource number of each segment's submesh."""
    resource = submesh_resources(layout)
    return {s.name: resource[s.submesh] for s in layout.segments}


def in_flight_changes(order: Sequence[Task]) -> list[int]:
    """Return for each task +1 (forward with a backward in `order`), -1 (its backward) or 0."""
    sign = {FORWARD: 1, BACKWARD: -1}
    forwards, backwards = ({(t.segment, t.group) for t in order if t.direction == d} for d in sign)
    open_groups = forwards & backwards
    return [sign.get(t.direction, 0) * ((t.segment, t.group) in open_groups) for t in order]


def in_flight_limit(plan: Plan, groups: Sequence[Group] = ()) -> dict[str, int]:
    """Return each segment's maximum number of groups in flight under 1F1B: the number of resources
    from the segment to the end of the pipeline (the warm-up depth plus one) plus the plan's
    lookahead. Segments that share devices with all later ones run depth-first. If several groups of
    a module feed one group, the limit is multiplied by their number (without `groups`: `fan_in`).
    """
    layout, resource = plan.layout, segment_resources(plan.layout)
    module = {s.name: s.module for s in layout.segments}
    fed, readers_of = feeding_groups(groups), defaultdict[str, list[str]](list)
    for link in segment_links(layout):
        readers_of[link.source].append(link.target)
    depth: dict[str, int] = {}
    n_fed: dict[str, int] = {}  # number of groups per group at the end of the pipeline
    for s in reversed(layout.segments):
        n, readers = s.name, readers_of[s.name]
        depth[n] = max((depth[t] + (resource[t] != resource[n]) for t in readers), default=1)
        feeds_one = s.module in layout.divided and layout.targets(s.module)
        fan_in = layout.fan_in if feeds_one and not groups else 1
        widest = max((len(f) for (_, m), f in fed.items() if m == s.module), default=fan_in)
        n_fed[n] = widest * max((n_fed[t] for t in readers if module[t] != s.module), default=1)
    lookahead = plan.scheduling.lookahead
    return {n: (d + (lookahead if d > 1 else 0)) * n_fed[n] for n, d in depth.items()}
