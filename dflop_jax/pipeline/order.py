"""Pure task lists: which program calls a step needs, what each waits for, and their order.

Runtime, scheduler and simulator all read this file, so they execute the same lists. A segment whose
output nobody reads has no forward of its own in training: its backward task computes loss and
gradient in one call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
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
    Schedule,
    Task,
)


@dataclass(frozen=True)
class Link:
    """What one segment sends another: the hidden states between two segments of a module (`edge`
    is None), or what an edge of the model carries."""

    source: str
    target: str
    edge: Edge | None = None


@dataclass(frozen=True)
class StepGraph:
    """Tasks of one step in a canonical order, and the tasks that each waits for."""

    tasks: tuple[Task, ...]
    waits_for: dict[Task, tuple[Task, ...]]

    @cached_property
    def followers(self) -> dict[Task, list[Task]]:
        """Tasks that wait for each task."""
        found: dict[Task, list[Task]] = {t: [] for t in self.tasks}
        for t in self.tasks:
            for before in self.waits_for[t]:
                found[before].append(t)
        return found


def links(layout: Layout) -> tuple[Link, ...]:
    """Everything that segments send each other, in the order of the receiving segments."""
    found: list[Link] = []
    for s in layout.segments:
        parts = layout.segments_of(s.module)
        place = parts.index(s)
        if place > 0:
            found.append(Link(parts[place - 1].name, s.name))
        for edge in layout.edges:
            if s.reads(edge):
                source = next(u for u in layout.segments_of(edge.source) if u.sends(edge))
                found.append(Link(source.name, s.name, edge))
    return tuple(found)


def fed_by(groups: Sequence[Group]) -> dict[tuple[int, str], list[int]]:
    """(group, module) -> the groups of that module that feed the group."""
    feeding: dict[tuple[int, str], list[int]] = {}
    for i, g in enumerate(groups):
        for f in g.feeds:
            feeding.setdefault((f, g.module), []).append(i)
    return feeding


def tied_ends(layout: Layout) -> dict[str, str]:
    """Segment that reads the entry's parameters of its module from another one -> that one."""
    found = {}
    for module in layout.tied:
        parts = layout.segments_of(module)
        if len(parts) > 1:
            found[parts[-1].name] = parts[0].name
    return found


def with_backward(layout: Layout, trainable: Collection[str]) -> tuple[str, ...]:
    """Segments that run backward: trainable ones, and those that read what such a one computes."""
    sources: dict[str, list[str]] = {s.name: [] for s in layout.segments}
    for link in links(layout):
        sources[link.target].append(link.source)
    needs: list[str] = []
    for s in layout.segments:
        if s.name in trainable or any(u in needs for u in sources[s.name]):
            needs.append(s.name)
    return tuple(needs)


def step_graph(
    layout: Layout,
    groups: Sequence[Group],
    trainable: Collection[str],
    *,
    evaluate: bool = False,
) -> StepGraph:
    """Graph of one step that runs `groups`; `evaluate` gives forward tasks only, those of the
    segments that end in a loss included."""
    backward = () if evaluate else with_backward(layout, trainable)
    into: dict[str, list[Link]] = {s.name: [] for s in layout.segments}
    out_of: dict[str, list[Link]] = {s.name: [] for s in layout.segments}
    for link in links(layout):
        into[link.target].append(link)
        out_of[link.source].append(link)
    sources_of = fed_by(groups)
    segments = {m: layout.segments_of(m) for m in layout.modules}
    waits: dict[Task, tuple[Task, ...]] = {}
    for i, g in enumerate(groups):
        for s in segments[g.module]:
            fused = not out_of[s.name] and not evaluate
            before: list[Task] = []
            for link in into[s.name]:
                if link.edge is None:
                    before.append(Task(link.source, i, FORWARD))
                else:
                    sources = sources_of.get((i, link.edge.source), [])
                    before += [Task(link.source, k, FORWARD) for k in sources]
            waits[Task(s.name, i, BACKWARD if fused else FORWARD)] = tuple(dict.fromkeys(before))
    for i, g in enumerate(groups):
        feeds = {groups[f].module: f for f in g.feeds}
        for s in reversed(segments[g.module]):
            if s.name not in backward or not out_of[s.name]:
                continue
            after = [Task(s.name, i, FORWARD)]
            for link in out_of[s.name]:
                fed = i if link.edge is None else feeds.get(link.edge.target)
                if fed is not None:
                    after.append(Task(link.target, fed, BACKWARD))
            waits[Task(s.name, i, BACKWARD)] = tuple(dict.fromkeys(after))
    if not evaluate:
        waits |= _step_end(layout, waits, trainable)
    return StepGraph(tuple(waits), waits)


def _step_end(
    layout: Layout, waits: dict[Task, tuple[Task, ...]], trainable: Collection[str]
) -> dict[Task, tuple[Task, ...]]:
    """Reductions and updates. The reader of a tied parameter reduces first, so that its owner adds
    both gradients, and is updated last, by what the owner sends."""
    owner_of = tied_ends(layout)
    readers = {owner: reader for reader, owner in owner_of.items() if reader in trainable}
    names = [s.name for s in layout.segments if s.name in trainable]
    by_segment: dict[str, list[Task]] = {n: [] for n in names}
    for t in waits:
        if t.direction == BACKWARD and t.segment in by_segment:
            by_segment[t.segment].append(t)
    found: dict[Task, tuple[Task, ...]] = {}
    for n in names:
        more = [Task(readers[n], NO_GROUP, REDUCE)] if n in readers else []
        found[Task(n, NO_GROUP, REDUCE)] = (*by_segment[n], *more)
    reductions = tuple(found)
    for n in names:
        owner = owner_of.get(n)
        more = [Task(owner, NO_GROUP, UPDATE)] if owner in by_segment else []
        found[Task(n, NO_GROUP, UPDATE)] = (*reductions, *more)
    return found


def resources(layout: Layout) -> dict[str, int]:
    """Submesh name -> id of its resource; submeshes that share a device share a resource."""
    group = {m.name: i for i, m in enumerate(layout.submeshes)}
    for a in layout.submeshes:
        for b in layout.submeshes:
            if set(a.devices) & set(b.devices):
                low, high = sorted((group[a.name], group[b.name]))
                group = {n: (low if r == high else r) for n, r in group.items()}
    return group


def in_flight_limit(plan: Plan, groups: Sequence[Group] = ()) -> dict[str, int]:
    """1F1B: how many groups a segment may have forwarded but not yet run backward.

    It is the number of resources from the segment to the end of the pipeline, the classical
    warm-up depth plus one, and the plan's lookahead; segments that share devices with all that
    follow run depth-first. Where several groups of a module feed one group, it is as many times
    more; without `groups`, as many as the plan allows.
    """
    of = resources(plan.layout)
    where = {s.name: of[s.submesh] for s in plan.layout.segments}
    module = {s.name: s.module for s in plan.layout.segments}
    fed = fed_by(groups)
    depth: dict[str, int] = {}
    times: dict[str, int] = {}
    out_of: dict[str, list[str]] = {}
    for link in links(plan.layout):
        out_of.setdefault(link.source, []).append(link.target)
    for s in reversed(plan.layout.segments):
        after = out_of.get(s.name, [])
        depth[s.name] = max((depth[t] + (where[t] != where[s.name]) for t in after), default=1)
        most = plan.layout.fan_in if s.module in plan.layout.divided and not groups else 1
        widest = max((len(n) for (_, m), n in fed.items() if m == s.module), default=most)
        beyond = max((times[t] for t in after if module[t] != s.module), default=1)
        times[s.name] = widest * beyond
    return {
        n: (d + (plan.scheduling.lookahead if d > 1 else 0)) * times[n] for n, d in depth.items()
    }


def textbook_s(task: Task) -> float:
    """Durations for ordering without a profile: a backward costs two forwards."""
    return {FORWARD: 1.0, BACKWARD: 2.0}.get(task.direction, 0.0)


def order_tasks(
    plan: Plan,
    graph: StepGraph,
    groups: Sequence[Group],
    seconds: Callable[[Task], float] = textbook_s,
) -> tuple[Task, ...]:
    """One total order in which to dispatch a step's tasks; a resource runs its part of it in order.

    List scheduling with `seconds` per task: a free resource takes the ready forward task of the
    deepest segment whose in-flight limit allows it ("1f1b"; "gpipe" has no limit), else the ready
    backward task of the earliest group. Groups take their turn by the group at the pipeline's end
    that they feed. Ties break by (turn, group, segment).
    """
    ready = _Ready(plan, graph, groups)
    waiting = {t: len(graph.waits_for[t]) for t in graph.tasks}
    for t, n in waiting.items():
        if n == 0:
            ready.add(t)
    order: list[Task] = []
    running: list[tuple[float, int, Task]] = []
    busy: set[int] = set()
    changed = set(ready.where.values())  # resources that may have a task to take
    now = 0.0
    while len(order) < len(graph.tasks) or running:
        for forced in (False, True):
            for r in sorted(changed):
                if r not in busy and (task := ready.take(r, forced)) is not None:
                    heapq.heappush(running, (now + seconds(task), len(order), task))
                    order.append(task)
                    busy.add(r)
            if running:  # only where every limit is reached and nothing runs, one is passed
                break
            changed = set(ready.where.values())
        assert running, "the task graph has a cycle"
        changed = set()
        now = running[0][0]
        while running and running[0][0] == now:
            done = heapq.heappop(running)[2]
            busy.discard(ready.where[done.segment])
            changed.add(ready.where[done.segment])
            ready.done(done)
            for t in graph.followers[done]:
                waiting[t] -= 1
                if waiting[t] == 0:
                    ready.add(t)
                    changed.add(ready.where[t.segment])
    return tuple(order)


class _Ready:
    """Tasks that wait for nothing, by resource, and which of them a resource takes next."""

    def __init__(self, plan: Plan, graph: StepGraph, groups: Sequence[Group]):
        of = resources(plan.layout)
        self.where = {s.name: of[s.submesh] for s in plan.layout.segments}
        self._depth = {s.name: i for i, s in enumerate(plan.layout.segments)}
        self._limit = in_flight_limit(plan, groups)
        self._gpipe = plan.scheduling.order == "gpipe"
        self._turn = _turns(groups)
        self._runs_back = {t.segment for t in graph.tasks if t.direction == BACKWARD}
        self._forwarded = {(t.segment, t.group) for t in graph.tasks if t.direction == FORWARD}
        self._in_flight = dict.fromkeys(self._depth, 0)
        # By resource: forwards by segment, deepest first, and all that is not limited.
        self._forwards: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for s in reversed(plan.layout.segments):
            self._forwards.setdefault(self.where[s.name], {})[s.name] = []
        self._others: dict[int, list[tuple[int, int, int, int, str]]] = {
            r: [] for r in self._forwards
        }

    def add(self, task: Task) -> None:
        name, g = task.segment, task.group
        resource, turn = self.where[name], self._turn[g] if g >= 0 else 0
        if task.direction == FORWARD and (self._gpipe or name in self._runs_back):
            heapq.heappush(self._forwards[resource][name], (turn, g))
            return
        # A forward that no backward follows has no limit, so it only fills gaps.
        kind = {BACKWARD: 1, FORWARD: 2, REDUCE: 3, UPDATE: 4}[task.direction]
        deeper = -self._depth[name]
        place = (turn, g, deeper) if kind == 1 else (deeper, turn, g)
        heapq.heappush(self._others[resource], (kind, *place, name))

    def take(self, resource: int, forced: bool) -> Task | None:
        """The most urgent task of a resource; `forced` passes the limits of what is in flight."""
        for name, waiting in self._forwards[resource].items():
            free = self._gpipe or forced or self._in_flight[name] < self._limit[name]
            if waiting and free:
                self._in_flight[name] += name in self._runs_back
                return Task(name, heapq.heappop(waiting)[1], FORWARD)
        if not self._others[resource]:
            return None
        kind, *place, name = heapq.heappop(self._others[resource])
        direction = {1: BACKWARD, 2: FORWARD, 3: REDUCE, 4: UPDATE}[kind]
        return Task(name, place[1] if kind == 1 else place[2], direction)

    def done(self, task: Task) -> None:
        if task.direction == BACKWARD and (task.segment, task.group) in self._forwarded:
            self._in_flight[task.segment] -= 1


def _turns(groups: Sequence[Group]) -> list[int]:
    """Of every group the place of the first group at the pipeline's end that it leads to."""
    turn: dict[int, int] = {}

    def of(i: int) -> int:
        if i not in turn:
            turn[i] = min((of(f) for f in groups[i].feeds), default=i)
        return turn[i]

    return [of(i) for i in range(len(groups))]


def check_order(graph: StepGraph, order: Sequence[Task]) -> None:
    """ValueError unless `order` holds every task of the graph once, after all that it waits for."""
    seen: set[Task] = set()
    for t in order:
        if t not in graph.waits_for or t in seen:
            raise ValueError(f"the order runs {t} twice, or it is no task of this step")
        late = [d for d in graph.waits_for[t] if d not in seen]
        if late:
            raise ValueError(f"the order runs {t} before {late[0]}, for which it waits")
        seen.add(t)
    if len(seen) < len(graph.tasks):
        missing = next(t for t in graph.tasks if t not in seen)
        raise ValueError(f"the order lacks {missing}; it holds {len(seen)} of {len(graph.tasks)}")


def order_of(plan: Plan, schedule: Schedule, graph: StepGraph) -> tuple[Task, ...]:
    """The schedule's own order, checked against the graph, else list scheduling by textbook
    durations."""
    if schedule.order:
        check_order(graph, schedule.order)
        return schedule.order
    return order_tasks(plan, graph, schedule.groups)


def most_in_flight(order: Sequence[Task]) -> dict[str, int]:
    """Most groups that a segment holds at once from forward to backward, read off an order."""
    backward = {(t.segment, t.group) for t in order if t.direction == BACKWARD}
    held: dict[str, set[int]] = {}
    most: dict[str, int] = {}
    for t in order:
        groups = held.setdefault(t.segment, set())
        if t.direction == FORWARD and (t.segment, t.group) in backward:
            groups.add(t.group)
        elif t.direction == BACKWARD:
            most[t.segment] = max(most.get(t.segment, 0), len(groups | {t.group}))
            groups.discard(t.group)
        most[t.segment] = max(most.get(t.segment, 0), len(groups))
    return most
