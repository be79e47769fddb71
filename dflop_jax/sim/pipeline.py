"""Simulates steps of a plan: the runtime's own task lists, with durations in place of programs.

Tasks of a resource run in list order; a task starts when its inputs are there and its resource is
free. Where devices share cores (`concurrency` below the device count), tasks that overlap slow each
other down in proportion to the devices they use. Sends overlap computation: each pair of submeshes
has a link of its own per direction, which carries one send at a time, in dispatch order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflop_jax.pipeline.order import StepGraph, order_tasks, resources, step_graph, upstream
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    RETURN,
    SEND,
    Event,
    Plan,
    Schedule,
    Task,
    Trace,
)
from dflop_jax.sim.engine import Job, run

_DISPATCH = "dispatch"  # the resource of the thread that dispatches tasks


@dataclass(frozen=True)
class Noise:
    """What makes durations differ from their predictions.

    Every task and send is multiplied by a log-normal factor of its own, of mean 1 and with
    deviation `sigma` of its logarithm, drawn from (seed, step). `stragglers` multiplies the tasks
    of named submeshes on top.
    """

    seed: int = 0
    sigma: float = 0.0
    stragglers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        factors = [*self.stragglers.values()]
        good = all(0 < f < math.inf for f in factors) and 0 <= self.sigma < math.inf
        if not good or self.seed < 0:
            raise ValueError(
                f"noise needs seed >= 0, sigma >= 0 and straggler factors above 0, got {self}"
            )


def simulate_step(
    plan: Plan,
    buckets: Sequence[int],
    seconds: Mapping[Task, float],
    trainable: Collection[str],
    *,
    concurrency: float = float("inf"),
    step: int = 0,
    sends: Mapping[Task, float] | None = None,
    noise: Noise | None = None,
    awaited: Collection[str] = (),
) -> Trace:
    """Trace of one step whose groups use `buckets`.

    Args:
      seconds: duration of (segment, bucket index, direction) when run alone, and of the
        collectives of the step's end, (segment, -1, REDUCE or UPDATE); absent ones are 0.
      concurrency: devices that really compute at once.
      sends: duration of what crosses from a segment's submesh to another, by (segment, bucket
        index, FORWARD): its activations, or (segment, bucket index, BACKWARD): the gradients that
        come back to it. Absent ones take no time. In the trace they are events SEND and RETURN of
        that segment, on a submesh named "from → to".
      noise: factors on all durations; None: none.
      awaited: submeshes that are given a task only when the one before it on their devices has
        ended. One thread dispatches all tasks in order, so later tasks of any submesh wait too.

    Raises:
      ValueError: a duration is negative or not finite, or a straggler is no submesh of the plan.
    """
    where = {s.name: s.submesh for s in plan.segments}
    _check({**seconds, **(sends or {})}, noise, [m.name for m in plan.submeshes])
    graph = step_graph(plan, buckets, trainable)
    order = order_tasks(plan, graph)
    of = resources(plan)
    size = {m.name: m.n_devices for m in plan.submeshes}
    factors = _factors(len(order), noise, step, 0)
    slower = noise.stragglers if noise else {}
    links = _links(plan, graph, buckets, sends or {})
    late = _factors(sum(map(len, links.values())), noise, step, 1)

    jobs: list[Job] = []
    drawn: list[tuple[str, Task] | None] = []  # what each job is in the trace, None: nothing
    held: dict[int, int] = {}  # resource that is awaited -> its last task's job
    gate: tuple[int, ...] = ()  # the last of dispatch's waits
    arrives: dict[tuple[Task, str], int] = {}  # (producer, receiving segment) -> its send's job
    number: dict[Task, int] = {}
    for task, factor in zip(order, factors):
        on = where[task.segment]
        key = task if task.group < 0 else Task(task.segment, buckets[task.group], task.direction)
        alone = seconds.get(key, 0.0) * factor * slower.get(on, 1.0)
        waits = tuple(arrives.get((d, task.segment), number[d]) for d in graph.waits_for[task])
        if on in awaited and of[on] in held:
            gate, before = (len(jobs),), held[of[on]]
            jobs.append(Job(_DISPATCH, 0.0, (before,)))
            drawn.append(None)
        number[task] = held[of[on]] = len(jobs)
        jobs.append(Job(of[on], alone, waits + gate, size[on]))
        drawn.append((on, task))
        for to, shown, send_s in links.get(task, ()):
            link: Hashable = (on, where[to])
            arrives[task, to] = len(jobs)
            jobs.append(Job(link, send_s * next(late), (number[task],)))
            drawn.append((f"{on} → {where[to]}", shown))
    done = run(jobs, concurrency)
    events = tuple(
        Event(row[0], row[1].segment, row[1].group, row[1].direction, start, end)
        for row, start, end in zip(drawn, done.start_s, done.end_s)
        if row
    )
    return Trace(step, "simulated", events)


def _links(
    plan: Plan, graph: StepGraph, buckets: Sequence[int], sends: Mapping[Task, float]
) -> dict[Task, list[tuple[str, Task, float]]]:
    """Producing task -> (receiving segment, the send as a task of the trace, seconds)."""
    where = {s.name: s.submesh for s in plan.segments}
    crossing = [
        (u.name, s.name)
        for s in plan.segments
        for u in upstream(plan, s)
        if where[u.name] != where[s.name]
    ]
    links: dict[Task, list[tuple[str, Task, float]]] = {}
    for g, b in enumerate(buckets):
        for below, above in crossing:
            forward, backward = Task(below, g, FORWARD), Task(below, g, BACKWARD)
            there, back = sends.get(Task(below, b, FORWARD)), sends.get(Task(below, b, BACKWARD))
            if there and forward in graph.waits_for:
                links.setdefault(forward, []).append((above, Task(below, g, SEND), there))
            if back and backward in graph.waits_for:
                producer = Task(above, g, BACKWARD)
                links.setdefault(producer, []).append((below, Task(below, g, RETURN), back))
    return links


def _factors(n: int, noise: Noise | None, step: int, kind: int) -> Iterator[float]:
    """Factors of a step's `n` tasks (kind 0) or sends (kind 1), each kind from draws of its own."""
    if noise is None or noise.sigma == 0:
        return iter([1.0] * n)
    z = np.random.default_rng([noise.seed, step, kind]).standard_normal(n)
    return iter(np.exp(noise.sigma * z - noise.sigma**2 / 2).tolist())


def _check(seconds: Mapping[Task, float], noise: Noise | None, submeshes: Sequence[str]) -> None:
    bad = next((k for k, v in seconds.items() if not 0 <= v < math.inf), None)
    if bad is not None:
        raise ValueError(
            f"{bad} takes {seconds[bad]} s; durations must be finite and not negative: "
            "profile again, or mend the table"
        )
    unknown = next((m for m in (noise.stragglers if noise else {}) if m not in submeshes), None)
    if unknown is not None:
        raise ValueError(
            f"straggler {unknown!r} is no submesh of the plan; it has {', '.join(submeshes)}"
        )


def simulate_schedules(
    plan: Plan,
    schedules: Sequence[Schedule],
    seconds: Mapping[Task, float],
    trainable: Collection[str],
    *,
    concurrency: float = float("inf"),
    sends: Mapping[Task, float] | None = None,
    noise: Noise | None = None,
    awaited: Collection[str] = (),
) -> Trace:
    """Steps one after another in one trace; groups keep counting."""
    events: list[Event] = []
    offset, first_group = 0.0, 0
    for schedule in schedules:
        buckets = [group[0].bucket for group in schedule.groups]
        one = simulate_step(
            plan,
            buckets,
            seconds,
            trainable,
            concurrency=concurrency,
            step=schedule.step,
            sends=sends,
            noise=noise,
            awaited=awaited,
        )
        events += [
            replace(
                e,
                group=e.group + first_group if e.group >= 0 else e.group,
                start_s=e.start_s + offset,
                end_s=e.end_s + offset,
            )
            for e in one.events
        ]
        offset += one.makespan_s
        first_group += len(buckets)
    return Trace(schedules[0].step if schedules else 0, "simulated", tuple(events))
