"""Simulates steps of a plan: the runtime's own task lists, with durations in place of programs.

Tasks of a resource run in list order; a task starts when its inputs are there and its resource is
free. Where devices share cores (`concurrency` below the device count), tasks that overlap slow each
other down in proportion to the devices they use. Sends overlap computation: each pair of submeshes
has a link of its own per direction, which carries one send at a time, in dispatch order.
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
from dflop_jax.simulate.engine import Job, run
from dflop_jax.simulate.numbered_tasks import Sent, run_in_order, sent_by
from dflop_jax.simulate.task_graph import StepGraph, links, resources, step_graph
from dflop_jax.simulate.task_order import both_orders, order_of

_DISPATCH = "dispatch"  # the resource of the thread that dispatches tasks
_ROUNDING = 1e-9  # makespans that differ by less are the same


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
    schedule: Schedule,
    prices: Prices,
    trainable: Collection[str],
    *,
    noise: Noise | None = None,
    awaited: Collection[str] = (),
) -> Trace:
    """Trace of one step.

    What crosses from a segment to another submesh are events SEND of that segment and group, and
    RETURN for the gradients that come back to it, on a submesh named "from → to".

    Args:
      trainable: names of the segments that train.
      noise: factors on all durations; None: none.
      awaited: submeshes that are given a task only when the one before it on their devices has
        ended. One thread dispatches all tasks in order, so later tasks of any submesh wait too.

    Raises:
      ValueError: the schedule's order is none of this step, or a straggler is no submesh.
    """
    submeshes = [m.name for m in plan.layout.submeshes]
    if noise and (unknown := [m for m in noise.stragglers if m not in submeshes]):
        raise ValueError(
            f"straggler {unknown[0]!r} is no submesh of the plan; it has {', '.join(submeshes)}"
        )
    graph = step_graph(plan.layout, schedule.groups, trainable)
    order = order_of(plan, schedule, graph)
    return simulate_order(plan.layout, schedule, graph, order, prices, noise, awaited)


def simulate_order(
    layout: Layout,
    schedule: Schedule,
    graph: StepGraph,
    order: Sequence[Task],
    prices: Prices,
    noise: Noise | None = None,
    awaited: Collection[str] = (),
) -> Trace:
    """`simulate_step` by an order that is known to be one of the graph."""
    submesh = {s.name: s.submesh for s in layout.segments}
    resource = resources(layout)
    n_devices = {m.name: m.n_devices for m in layout.submeshes}
    slower = noise.stragglers if noise else {}
    seconds = task_seconds(schedule, prices)
    sends = sends_of(layout, schedule, graph, prices)
    factors = _factors(len(order), noise, schedule.step, 0)
    send_factors = _factors(sum(map(len, sends.values())), noise, schedule.step, 1)

    jobs: list[Job] = []
    shown: list[tuple[str, str, int, str] | None] = []  # a job in the trace, None: not there
    last_job: dict[int, int] = {}  # of each resource
    gate: tuple[int, ...] = ()  # the last of dispatch's waits
    sent: dict[Task, dict[Task, int]] = {}  # reader -> producer -> the send's job
    job_of: dict[Task, int] = {}
    for task, factor in zip(order, factors):
        name = submesh[task.segment]
        on = resource[name]
        came = sent.get(task, {})
        waits = [came[t] if t in came else job_of[t] for t in graph.waits_for[task]]
        if name in awaited and on in last_job:
            gate, ended = (len(jobs),), last_job[on]
            jobs.append(Job(_DISPATCH, 0.0, (ended,)))
            shown.append(None)
        job_of[task] = last_job[on] = len(jobs)
        alone_s = seconds(task) * factor * slower.get(name, 1.0)
        jobs.append(Job(on, alone_s, (*waits, *gate), n_devices[name]))
        shown.append((name, task.segment, task.group, task.direction))
        for reader, (link, send_s) in sends.get(task, {}).items():
            sent.setdefault(reader, {})[task] = len(jobs)
            jobs.append(Job(link, send_s * next(send_factors), (job_of[task],)))
            back = task.direction == BACKWARD
            source = reader if back else task
            to = f"{name} → {submesh[reader.segment]}"
            shown.append((to, source.segment, source.group, RETURN if back else SEND))
    events = tuple(
        Event(*row, start, end)
        for row, start, end in zip(shown, *run(jobs, prices.concurrency))
        if row is not None
    )
    return Trace(schedule.step, "simulated", events)


def task_seconds(schedule: Schedule, prices: Prices) -> Callable[[Task], float]:
    """`prices.task_s` of this schedule's tasks, which looks every program up once."""
    first: dict[tuple[Shape, tuple[str, ...]], int] = {}
    alike = [first.setdefault((g.shape, g.remat_less), i) for i, g in enumerate(schedule.groups)]
    programs: dict[tuple[str, int, str], Price | None] = {}

    def seconds(task: Task) -> float:
        if task.group == NO_GROUP:
            return prices.step_end.get(task, 0.0)
        key = task.segment, alike[task.group], task.direction
        if key not in programs:
            programs[key] = prices.programs.get(ProgramId.of(task, schedule.groups[task.group]))
        price = programs[key]
        return price.of(schedule.groups[task.group].content) if price else 0.0

    return seconds


def sends_of(layout: Layout, schedule: Schedule, graph: StepGraph, prices: Prices) -> Sent:
    """What each task sends to other submeshes: task -> reader -> ((submesh, submesh), seconds).
    Sizes are those of the group that reads the activations."""
    submesh = {s.name: s.submesh for s in layout.segments}
    joined = {(k.source, k.target) for k in links(layout) if submesh[k.source] != submesh[k.target]}
    first: dict[Shape, int] = {}
    shapes = [first.setdefault(g.shape, i) for i, g in enumerate(schedule.groups)]
    known: dict[tuple[str, str, int, str], float] = {}
    sends: dict[Task, dict[Task, tuple[object, float]]] = {}
    for reader in graph.tasks if joined and prices.sends else ():
        for producer in graph.waits_for[reader]:
            if producer.direction not in (FORWARD, BACKWARD):
                continue
            back = producer.direction == BACKWARD
            source, target = (reader, producer) if back else (producer, reader)
            if (source.segment, target.segment) not in joined:
                continue
            key = source.segment, target.segment, shapes[target.group], producer.direction
            if key not in known:
                shape = schedule.groups[target.group].shape
                send = SendId(source.segment, target.segment, shape, producer.direction)
                known[key] = prices.sends.get(send, 0.0)
            if known[key]:
                link = submesh[producer.segment], submesh[reader.segment]
                sends.setdefault(producer, {})[reader] = link, known[key]
    return sends


def _factors(n: int, noise: Noise | None, step: int, kind: int) -> Iterator[float]:
    """Factors of a step's `n` tasks (kind 0) or sends (kind 1), each kind from draws of its own."""
    if noise is None or noise.sigma == 0:
        return iter([1.0] * n)
    z = np.random.default_rng([noise.seed, step, kind]).standard_normal(n)
    return iter(np.exp(noise.sigma * z - noise.sigma**2 / 2).tolist())


def with_order(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """The schedule with the order of tasks that is fastest in simulation, and its makespan.

    List scheduling by textbook durations is compared with list scheduling by the prices, which does
    not always beat it: the first choice of a greedy rule may be wrong with the right numbers. The
    second is taken where it is faster by more than rounding.
    """
    graph = step_graph(plan.layout, schedule.groups, trainable)
    seconds = task_seconds(schedule, prices)
    makespan_s = makespan_by(plan, schedule, graph, prices)
    order, priced = both_orders(plan, graph, schedule.groups, seconds)
    best_s = makespan_s(order)
    if priced != order and (other_s := makespan_s(priced)) < best_s * (1 - _ROUNDING):
        order, best_s = priced, other_s
    return replace(schedule, order=tuple(graph.tasks[i] for i in order), makespan_s=best_s)


def makespan_by(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices
) -> Callable[[Sequence[int]], float]:
    """What the simulator says of orders, given as numbers of the graph's tasks. Where nothing slows
    tasks down it is read off the ends of what each waits for, without a trace."""
    layout, of = plan.layout, resources(plan.layout)
    devices = dict.fromkeys(of.values(), 0)
    for m in layout.submeshes:
        devices[of[m.name]] = max(devices[of[m.name]], m.n_devices)
    if sum(devices.values()) > prices.concurrency:

        def simulated(order: Sequence[int]) -> float:
            tasks = [graph.tasks[i] for i in order]
            return simulate_order(layout, schedule, graph, tasks, prices).makespan_s

        return simulated
    ids = sorted(devices)
    submesh = {s.name: s.submesh for s in layout.segments}
    resource = [ids.index(of[submesh[t.segment]]) for t in graph.tasks]
    task_s = list(map(task_seconds(schedule, prices), graph.tasks))
    out, n_links = sent_by(graph, sends_of(layout, schedule, graph, prices))

    def read_off(order: Sequence[int]) -> float:
        return run_in_order(order, resource, task_s, out, [0.0] * len(ids), [0.0] * n_links)[1]

    return read_off


def simulate_schedules(
    plan: Plan,
    schedules: Sequence[Schedule],
    prices: Prices,
    trainable: Collection[str],
    *,
    noise: Noise | None = None,
    awaited: Collection[str] = (),
) -> Trace:
    """Steps one after another in one trace; groups keep counting."""
    events: list[Event] = []
    offset, first_group = 0.0, 0
    for schedule in schedules:
        one = simulate_step(plan, schedule, prices, trainable, noise=noise, awaited=awaited)
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
