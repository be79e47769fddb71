"""Pure task lists: which program calls a step needs, what each waits for, and their order.

Runtime and simulator both read this file, so they execute the same lists. The last LLM segment
has no forward of its own: its backward task computes loss and gradient in one call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Plan, SegmentPlan, Task


@dataclass(frozen=True)
class StepGraph:
    """Tasks of one step in a canonical order, and the tasks that each waits for."""

    tasks: tuple[Task, ...]
    waits_for: dict[Task, tuple[Task, ...]]


def upstream(plan: Plan, segment: SegmentPlan) -> tuple[SegmentPlan, ...]:
    """Segments whose output `segment` reads."""
    parts = plan.segments_of(segment.module)
    at = parts.index(segment)
    if at > 0:
        return (parts[at - 1],)
    if segment.module != "llm":
        return ()
    return tuple(plan.segments_of(m)[-1] for m in plan.modules if m != "llm")


def downstream(plan: Plan, segment: SegmentPlan) -> SegmentPlan | None:
    """The segment that reads the output of `segment`; None for the last of the LLM."""
    return _readers(plan).get(segment.name)


def _readers(plan: Plan) -> dict[str, SegmentPlan]:
    """Segment name -> the segment that reads its output; the last of the LLM is absent."""
    return {u.name: s for s in plan.segments for u in upstream(plan, s)}


def with_backward(plan: Plan, trainable: Collection[str]) -> tuple[str, ...]:
    """Segments that run backward: trainable ones, and those below a trainable one."""
    needs: list[str] = []
    for s in plan.segments:
        if s.name in trainable or any(u.name in needs for u in upstream(plan, s)):
            needs.append(s.name)
    return tuple(needs)


def step_graph(
    plan: Plan,
    group_buckets: Sequence[int],
    trainable: Collection[str],
    *,
    evaluate: bool = False,
) -> StepGraph:
    """Graph of one step whose groups use `group_buckets` (indices into `plan.buckets`).

    Encoders are skipped for buckets without their items. `evaluate` gives forward tasks only, the
    last LLM segment's included.
    """
    backward = () if evaluate else with_backward(plan, trainable)
    final = plan.segments[-1].name
    inputs = {s.name: upstream(plan, s) for s in plan.segments}
    readers = _readers(plan)
    waits: dict[Task, tuple[Task, ...]] = {}
    for g, b in enumerate(group_buckets):
        live = [s for s in plan.segments if plan.buckets[b].items(s.module) > 0]
        names = {s.name for s in live}
        for s in live:
            below = tuple(Task(u.name, g, FORWARD) for u in inputs[s.name] if u.name in names)
            fused = s.name == final and not evaluate
            waits[Task(s.name, g, BACKWARD if fused else FORWARD)] = below
        for s in reversed(live):
            above = readers.get(s.name)
            if s.name in backward and above is not None:
                waits[Task(s.name, g, BACKWARD)] = (
                    Task(above.name, g, BACKWARD),
                    Task(s.name, g, FORWARD),
                )
    if not evaluate:
        named = [s for s in plan.segments if s.name in trainable]
        for s in named:
            waits[Task(s.name, -1, REDUCE)] = tuple(
                t for t in waits if t.segment == s.name and t.direction == BACKWARD
            )
        norms = tuple(Task(s.name, -1, REDUCE) for s in named)
        for s in named:
            waits[Task(s.name, -1, UPDATE)] = norms
    return StepGraph(tuple(waits), waits)


def resources(plan: Plan) -> dict[str, int]:
    """Submesh name -> id of its resource; submeshes that share a device share a resource."""
    group = {m.name: i for i, m in enumerate(plan.submeshes)}
    for a in plan.submeshes:
        for b in plan.submeshes:
            if set(a.devices) & set(b.devices):
                low, high = sorted((group[a.name], group[b.name]))
                group = {n: (low if r == high else r) for n, r in group.items()}
    return group


def stations(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Modules that share devices, and so run one after the other; the LLM's are the last."""
    of = resources(plan)
    found: list[tuple[tuple[str, ...], set[int]]] = []
    for module in plan.modules:
        here = {of[s.submesh] for s in plan.segments_of(module)}
        joined = [f for f in found if f[1] & here]
        found = [f for f in found if not f[1] & here]
        modules = tuple(m for f in joined for m in f[0])
        found.append(((*modules, module), here.union(*(f[1] for f in joined))))
    return tuple(modules for modules, _ in found)


def in_flight_limit(plan: Plan) -> dict[str, int]:
    """1F1B: how many groups a segment may have forwarded but not yet run backward.

    It is the number of resources from the segment to the end of the pipeline, the classical
    warm-up depth plus one, and the plan's lookahead; segments that share devices with all that
    follow run depth-first.
    """
    of, readers = resources(plan), _readers(plan)
    limits: dict[str, int] = {}
    for s in plan.segments:
        passed, at = [of[s.submesh]], readers.get(s.name)
        while at is not None:
            if of[at.submesh] != passed[-1]:
                passed.append(of[at.submesh])
            at = readers.get(at.name)
        limits[s.name] = len(passed) + (plan.lookahead if len(passed) > 1 else 0)
    return limits


def unit_seconds(task: Task) -> float:
    """Textbook durations for ordering without a profile: backward costs two forwards."""
    return {FORWARD: 1.0, BACKWARD: 2.0}.get(task.direction, 0.0)


def order_tasks(
    plan: Plan, graph: StepGraph, seconds: Callable[[Task], float] = unit_seconds
) -> tuple[Task, ...]:
    """One total order in which to dispatch a step's tasks; a resource runs its part of it in order.

    List scheduling with `seconds` per task: a free resource takes the ready forward task of the
    deepest segment whose in-flight limit allows it ("1f1b"; "gpipe" has no limit), else the ready
    backward task of the lowest group. Ties break by (group, segment).
    """
    of = resources(plan)
    where = {s.name: of[s.submesh] for s in plan.segments}
    depth = {s.name: i for i, s in enumerate(plan.segments)}
    limit = in_flight_limit(plan)
    runs_back = {t.segment for t in graph.tasks if t.direction == BACKWARD}
    waiting = {t: len(graph.waits_for[t]) for t in graph.tasks}
    followers: dict[Task, list[Task]] = {t: [] for t in graph.tasks}
    for t in graph.tasks:
        for d in graph.waits_for[t]:
            followers[d].append(t)
    ready: dict[int, list[Task]] = {r: [] for r in set(where.values())}
    for t, n in waiting.items():
        if n == 0:
            ready[where[t.segment]].append(t)
    in_flight = dict.fromkeys(depth, 0)
    gpipe = plan.order == "gpipe"

    def urgency(t: Task) -> tuple[int, int, int]:
        if t.direction == BACKWARD:
            return (1, t.group, -depth[t.segment])
        # A forward below its limit feeds the stages after it: it goes first, and the limit then
        # makes the two alternate. Without a backward nothing limits it, so it only fills gaps.
        early = 0 if gpipe or t.segment in runs_back else 2
        return ({FORWARD: early, REDUCE: 3, UPDATE: 4}[t.direction], -depth[t.segment], t.group)

    def pick(resource: int) -> Task | None:
        allowed = [
            t
            for t in ready[resource]
            if t.direction != FORWARD
            or gpipe
            or t.segment not in runs_back
            or in_flight[t.segment] < limit[t.segment]
        ]
        return min(allowed, key=urgency, default=None)

    order: list[Task] = []
    running: list[tuple[float, int, Task]] = []
    busy: set[int] = set()
    changed = set(ready)  # resources that may have a task to take
    now = 0.0
    while len(order) < len(graph.tasks) or running:
        for r in sorted(changed):
            if r not in busy and (task := pick(r)) is not None:
                ready[r].remove(task)
                in_flight[task.segment] += task.direction == FORWARD
                heapq.heappush(running, (now + seconds(task), len(order), task))
                order.append(task)
                busy.add(r)
        assert running, "the task graph has a cycle"
        changed.clear()
        now = running[0][0]
        while running and running[0][0] == now:
            done = heapq.heappop(running)[2]
            busy.discard(where[done.segment])
            changed.add(where[done.segment])
            forwarded = Task(done.segment, done.group, FORWARD) in waiting
            in_flight[done.segment] -= done.direction == BACKWARD and forwarded
            for t in followers[done]:
                waiting[t] -= 1
                if waiting[t] == 0:
                    ready[where[t.segment]].append(t)
                    changed.add(where[t.segment])
    return tuple(order)
