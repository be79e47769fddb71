"""Simulates steps of a plan: the task lists of the runtime, with durations in place of programs.

A resource runs its tasks in list order; a task starts when its inputs have arrived and its resource
is free. If devices share cores (`concurrency` below the device count), overlapping tasks slow each
other down in proportion to the devices they use. Sends overlap computation: each pair of submeshes
has one link per direction, which carries one send at a time, in dispatch order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    RETURN,
    SEND,
    Event,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    SendId,
    Shape,
    Task,
    Trace,
)
from dflop_jax.simulate.engine import SimJob, run_jobs
from dflop_jax.simulate.numbered_tasks import Sends, add_sends, run_in_order
from dflop_jax.simulate.task_graph import StepGraph, segment_links, segment_resources, step_graph
from dflop_jax.simulate.task_order import both_orders, schedule_order

_DISPATCH = "dispatch"  # the resource of the thread that dispatches tasks
_ROUNDING = 1e-9  # makespans that differ by less are the same


@dataclass(frozen=True)
class Noise:
    """Random deviations of durations from their predictions.

    Every task and send is multiplied by a log-normal factor of mean 1, whose logarithm has
    deviation `sigma`, drawn from (seed, step). `stragglers` also multiplies the tasks of the named
    submeshes.
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
    schedule: Schedule,
    prices: Prices,
    trainable: Collection[str],
    *,
    noise: Noise | None = None,
    synchronous: Collection[str] = (),
) -> Trace:
    """The trace of one step.

    Sends of a segment to another submesh are SEND events of that segment and group; gradients that
    come back to it are RETURN events. Their submesh is named "from → to".

    Args:
      trainable: names of the trainable segments.
      noise: factors on all durations; None: no noise.
      synchronous: submeshes that get a task only after the previous one on their devices has ended.
        One thread dispatches all tasks in order, so later tasks of every submesh wait, too.

    Raises:
      ValueError: the schedule's order is no order of this step, or a straggler is no submesh.
    """
    submeshes = [m.name for m in plan.layout.submeshes]
    if noise and (unknown := [m for m in noise.stragglers if m not in submeshes]):
        raise ValueError(
            f"straggler {unknown[0]!r} is no submesh of the plan; it has {', '.join(submeshes)}"
        )
    graph = step_graph(plan.layout, schedule.groups, trainable)
    order = schedule_order(plan, schedule, graph)
    return simulate_order(plan.layout, schedule, graph, order, prices, noise, synchronous)


def simulate_order(
    layout: Layout,
    schedule: Schedule,
    graph: StepGraph,
    order: Sequence[Task],
    prices: Prices,
    noise: Noise | None = None,
    synchronous: Collection[str] = (),
) -> Trace:
    """`simulate_step` for an order that is known to be valid for the graph."""
    submesh = {s.name: s.submesh for s in layout.segments}
    resource = segment_resources(layout)
    n_devices = {m.name: m.n_devices for m in layout.submeshes}
    slowdown = noise.stragglers if noise else {}
    seconds = task_seconds(schedule, prices)
    sends = task_sends(layout, schedule, graph, prices)
    factors = _factors(len(order), noise, schedule.step, 0)
    send_factors = _factors(sum(map(len, sends.values())), noise, schedule.step, 1)

    jobs: list[SimJob] = []
    trace_rows: list[tuple[str, str, int, str] | None] = []  # a job in the trace, None: not there
    last_job: dict[int, int] = {}  # of each resource
    dispatch_wait: tuple[int, ...] = ()  # the last of dispatch's waits
    sent: dict[Task, dict[Task, int]] = {}  # reader -> producer -> the send's job
    job_of: dict[Task, int] = {}
    for task, factor in zip(order, factors):
        mesh = submesh[task.segment]
        resource_id = resource[task.segment]
        sent_to_task = sent.get(task, {})
        waits = [sent_to_task[t] if t in sent_to_task else job_of[t] for t in graph.waits_for[task]]
        if mesh in synchronous and resource_id in last_job:
            dispatch_wait, ended = (len(jobs),), last_job[resource_id]
            jobs.append(SimJob(_DISPATCH, 0.0, (ended,)))
            trace_rows.append(None)
        job_of[task] = last_job[resource_id] = len(jobs)
        alone_s = seconds(task) * factor * slowdown.get(mesh, 1.0)
        jobs.append(SimJob(resource_id, alone_s, (*waits, *dispatch_wait), n_devices[mesh]))
        trace_rows.append((mesh, task.segment, task.group, task.direction))
        for reader, (link, send_s) in sends.get(task, {}).items():
            sent.setdefault(reader, {})[task] = len(jobs)
            jobs.append(SimJob(link, send_s * next(send_factors), (job_of[task],)))
            backward = task.direction == BACKWARD
            source = reader if backward else task
            link_name = f"{mesh} → {submesh[reader.segment]}"
            direction = RETURN if backward else SEND
            trace_rows.append((link_name, source.segment, source.group, direction))
    events = tuple(
        Event(*row, start, end)
        for row, start, end in zip(trace_rows, *run_jobs(jobs, prices.concurrency))
        if row is not None
    )
    return Trace(schedule.step, "simulated", events)


def task_seconds(schedule: Schedule, prices: Prices) -> Callable[[Task], float]:
    """A function that returns the seconds of a task like `prices.task_s`, but looks every program
    up only once."""
    first_group: dict[tuple[Shape, tuple[str, ...]], int] = {}
    kinds = [(g.shape, g.remat_less) for g in schedule.groups]
    same_program = [first_group.setdefault(kind, i) for i, kind in enumerate(kinds)]
    programs: dict[tuple[str, int, str], Price | None] = {}

    def seconds(task: Task) -> float:
        if task.group == NO_GROUP:
            return prices.step_end.get(task, 0.0)
        key = task.segment, same_program[task.group], task.direction
        if key not in programs:
            programs[key] = prices.programs.get(
                ProgramId.for_task(task, schedule.groups[task.group])
            )
        price = programs[key]
        return price.seconds(schedule.groups[task.group].content) if price else 0.0

    return seconds


def task_sends(layout: Layout, schedule: Schedule, graph: StepGraph, prices: Prices) -> Sends:
    """The sends of each task to other submeshes: task -> reader -> ((submesh, submesh), seconds).
    The size of a send is that of the group that reads the activations."""
    submesh = {s.name: s.submesh for s in layout.segments}
    linked = [(k.source, k.target) for k in segment_links(layout)]
    crossing = {(a, b) for a, b in linked if submesh[a] != submesh[b]}
    first_group: dict[Shape, int] = {}
    shapes = [first_group.setdefault(g.shape, i) for i, g in enumerate(schedule.groups)]
    send_seconds: dict[tuple[str, str, int, str], float] = {}
    sends: dict[Task, dict[Task, tuple[object, float]]] = {}
    for reader in graph.tasks if crossing and prices.sends else ():
        for producer in graph.waits_for[reader]:
            if producer.direction not in (FORWARD, BACKWARD):
                continue
            backward = producer.direction == BACKWARD
            source, target = (reader, producer) if backward else (producer, reader)
            if (source.segment, target.segment) not in crossing:
                continue
            key = source.segment, target.segment, shapes[target.group], producer.direction
            if key not in send_seconds:
                shape = schedule.groups[target.group].shape
                send = SendId(source.segment, target.segment, shape, producer.direction)
                send_seconds[key] = prices.sends.get(send, 0.0)
            if send_seconds[key]:
                link = submesh[producer.segment], submesh[reader.segment]
                sends.setdefault(producer, {})[reader] = link, send_seconds[key]
    return sends


def _factors(n: int, noise: Noise | None, step: int, kind: int) -> Iterator[float]:
    """Noise factors of a step's `n` tasks (kind 0) or sends (kind 1), with separate draws for each
    kind."""
    if noise is None or noise.sigma == 0:
        return iter([1.0] * n)
    z = np.random.default_rng([noise.seed, step, kind]).standard_normal(n)
    return iter(np.exp(noise.sigma * z - noise.sigma**2 / 2).tolist())


def with_list_order(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """The schedule with the faster of two list-scheduled orders in simulation, and its makespan.

    One order uses textbook durations, the other the prices. The second does not always win, since
    the first choice of a greedy rule may be wrong with exact durations; it is used if it is faster
    by more than rounding.
    """
    graph = step_graph(plan.layout, schedule.groups, trainable)
    seconds = task_seconds(schedule, prices)
    makespan_s = makespan_function(plan, schedule, graph, prices)
    order, priced = both_orders(plan, graph, schedule.groups, seconds)
    best_s = makespan_s(order)
    if priced != order and (other_s := makespan_s(priced)) < best_s * (1 - _ROUNDING):
        order, best_s = priced, other_s
    return replace(schedule, order=tuple(graph.tasks[i] for i in order), makespan_s=best_s)


def makespan_function(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices
) -> Callable[[Sequence[int]], float]:
    """A function from an order, as numbers of the graph's tasks, to its simulated makespan in
    seconds. Where no task slows another down, it needs no trace."""
    layout, resource_of = plan.layout, segment_resources(plan.layout)
    devices = [0] * (max(resource_of.values()) + 1)
    for s in layout.segments:
        r = resource_of[s.name]
        devices[r] = max(devices[r], layout.submesh(s.submesh).n_devices)
    resource = [resource_of[t.segment] for t in graph.tasks]
    task_s = list(map(task_seconds(schedule, prices), graph.tasks))
    successors, n_links = add_sends(graph, task_sends(layout, schedule, graph, prices))

    def simulated_s(order: Sequence[int]) -> float:
        if sum(devices) > prices.concurrency:
            tasks = [graph.tasks[i] for i in order]
            return simulate_order(layout, schedule, graph, tasks, prices).makespan_s
        free_s, link_free_s = [0.0] * len(devices), [0.0] * n_links
        return run_in_order(order, resource, task_s, successors, free_s, link_free_s)[1]

    return simulated_s


def simulate_schedules(
    plan: Plan,
    schedules: Sequence[Schedule],
    prices: Prices,
    trainable: Collection[str],
    *,
    noise: Noise | None = None,
    synchronous: Collection[str] = (),
) -> Trace:
    """The trace of consecutive steps; group numbers continue from step to step."""
    events: list[Event] = []
    offset, first_group = 0.0, 0
    for schedule in schedules:
        one = simulate_step(plan, schedule, prices, trainable, noise=noise, synchronous=synchronous)
        events += [
            replace(
                e,
                group=e.group + first_group if e.group != NO_GROUP else e.group,
                start_s=e.start_s + offset,
                end_s=e.end_s + offset,
            )
            for e in one.events
        ]
        offset += one.makespan_s
        first_group += len(schedule.groups)
    return Trace(schedules[0].step if schedules else 0, "simulated", tuple(events))
