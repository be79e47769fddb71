"""Times every task of a plan alone, on the compiled programs, before the first step.

Each process notes its own part: how long its tasks took, and when what they sent had arrived with
it. `merged` makes one price list of all parts, for the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    Group,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    SendId,
    Task,
    with_host_work,
)
from dflop_jax.runtime.communicator import send, zeros
from dflop_jax.runtime.initial_state import zero_gradients
from dflop_jax.runtime.out_of_memory import Trial
from dflop_jax.runtime.programs import GroupArrays, Programs
from dflop_jax.runtime.step import StepCall, TrainState
from dflop_jax.runtime.synthetic_batch import stand_in_arrays, stand_in_groups
from dflop_jax.simulate.task_graph import linked_shapes, segment_links, step_graph
from dflop_jax.simulate.task_order import order_tasks

Runs = dict[ProgramId | Task, list[float]]


@dataclass(frozen=True)
class Calibration:
    """Seconds that one process saw, a list of runs for each program, and for each task that runs
    once a step; runs of one number are the same run on every process.

    Attributes:
      took: until the outputs were made; only tasks on this process's devices.
      arrived: until everything under way had arrived here too; all tasks.
      host: processor seconds of the dispatching thread in that time; all tasks.
      ahead: the same for what it sends before the task runs; all tasks.
    """

    took: Runs = field(default_factory=dict)
    arrived: Runs = field(default_factory=dict)
    host: Runs = field(default_factory=dict)
    ahead: Runs = field(default_factory=dict)

    def encode(self) -> bytes:
        """Bytes that `decode` reads."""
        tables: list[list[Any]] = []
        for f in fields(self):
            runs: Runs = getattr(self, f.name)
            programs = [(k, v) for k, v in runs.items() if isinstance(k, ProgramId)]
            tables.append([programs, [(k, v) for k, v in runs.items() if isinstance(k, Task)]])
        return msgspec.json.encode(tables)

    @staticmethod
    def decode(data: bytes) -> Calibration:
        programs = list[tuple[ProgramId, list[float]]]
        tasks = list[tuple[Task, list[float]]]
        tables = msgspec.json.decode(data, type=list[tuple[programs, tasks]])
        return Calibration(*({**dict(p), **dict(t)} for p, t in tables))


def calibrate(
    programs: Programs, state: TrainState, *, repeats: int, ends: bool, sync: Callable[[], None]
) -> Calibration:
    """Run every task `repeats` times, after once to warm up, alone and awaited, on microbatches
    that stand in for a batch's; gradients are zero again afterwards. It warms up every transfer
    too.

    `ends`: also the reductions and updates, which leave other parameters and optimizer state.
    `sync` waits for the other processes, before every task.
    """
    timed = Calibration()
    plan = Plan("", programs.layout)  # tasks are timed alone, in any order
    for groups, arrays, evaluate in _steps(programs, ends=ends):
        graph = step_graph(plan.layout, groups, tuple(programs.updates), evaluate=evaluate)
        order = order_tasks(plan, graph, groups)
        for repeat in range(repeats + 1):
            into = timed if repeat else Calibration()
            call = _tried(programs, state, groups, arrays, evaluate=evaluate)
            for task in order:
                if task.group != NO_GROUP:
                    _time(call, task, ProgramId.of(task, groups[task.group]), into, sync)
                elif not groups:
                    _time(call, task, task, into, sync)
    if not ends:
        _send_norms(programs)
    for name in state.grads.keys() & programs.local:
        del state.grads[name]  # first: there may be no room for two
        state.grads[name] = zero_gradients(programs.segments[name])
    return timed


def _steps(
    programs: Programs, *, ends: bool
) -> Iterator[tuple[Sequence[Group], Sequence[GroupArrays], bool]]:
    """Steps that together have every task: (groups, arrays, whether it is an evaluation); without
    groups for the tasks of a step's end."""
    for b in range(len(programs.layout.buckets)):
        groups, arrays = stand_in_groups(programs, b)
        yield groups, arrays, False
        if less := tuple(programs.keeping):
            yield [replace(g, remat_less=less) for g in groups], arrays, False
        if programs.evaluates:
            yield groups, arrays, True
    if ends:
        yield (), (), False


def rehearse(
    programs: Programs,
    state: TrainState,
    groups: Sequence[Group],
    order: Sequence[Task],
    sync: Callable[[], None],
) -> None:
    """Run a whole step in its order, on arrays that stand in for a batch's, each task awaited: so
    all that a step holds at once meets. `sync` as for `calibrate`. Parameters and optimizer state
    are others afterwards."""
    arrays = stand_in_arrays(programs, groups)
    call = _tried(programs, state, groups, arrays)
    for task in order:
        _time(call, task, task, Calibration(), sync)


def _tried(
    programs: Programs,
    state: TrainState,
    groups: Sequence[Group],
    arrays: Sequence[GroupArrays],
    *,
    evaluate: bool = False,
) -> StepCall:
    """A step's call of programs that may be too large for the memory."""
    trial: Any = Trial(programs)
    scales = dict.fromkeys(programs.layout.modules, 1.0)
    return StepCall(trial, state, groups, arrays, scales, evaluate=evaluate)


def _time(
    call: StepCall, task: Task, key: ProgramId | Task, into: Calibration, sync: Callable[[], None]
) -> None:
    trial: Any = call.programs
    trial.check_room(call.key(task))
    ahead_s = 0.0
    if task.direction == FORWARD:
        sync()  # nothing is sent before all know that all go on
        begun_s = time.thread_time()
        call.collect(task.segment, task.group)  # as in a step, where dispatch runs ahead
        ahead_s = time.thread_time() - begun_s
    into.ahead.setdefault(key, []).append(ahead_s)
    call.settle()
    sync()
    start, begun_s = time.perf_counter(), time.thread_time()
    outputs = call.run(task)
    if trial.failed:
        raise trial.failed
    into.host.setdefault(key, []).append(time.thread_time() - begun_s)
    jax.block_until_ready(outputs)
    took = time.perf_counter() - start
    call.settle()
    into.arrived.setdefault(key, []).append(time.perf_counter() - start)
    if task.segment in call.programs.local:
        into.took.setdefault(key, []).append(took)


def _send_norms(programs: Programs) -> None:
    """The norms' transfers, which only a whole step would make."""
    for name in programs.updates:
        here = programs.segments[name].sharding()
        norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=here))
        for other in programs.updates:
            there = programs.segments[other].sharding()
            jax.block_until_ready(send(norm, there))


def merged(
    layout: Layout, parts: Sequence[Calibration], *, one_at_a_time: bool, shares_cores: bool = False
) -> Prices:
    """Prices of the plan's own programs: medians over the runs, of the slowest process in each,
    with the work of the host.

    Args:
      one_at_a_time: every task's sends are awaited before the next task, so they are part of it.
      shares_cores: as for `Prices`.
    """
    host_s = _host_s(parts)
    sends = {} if one_at_a_time else _sends(layout, parts)
    if shares_cores:  # the mean over all programs takes the place of what each took in its runs
        parts = [
            replace(p, took=_less(p.took, p.host), arrived=_less(p.arrived, p.host)) for p in parts
        ]
    took = _slowest([p.took for p in parts])
    if one_at_a_time:
        arrived = _slowest([p.arrived for p in parts])
        took = {k: max(arrived[k], s) for k, s in took.items()}
    return Prices(
        {
            k: Price(float(with_host_work(s, host_s, shares_cores=shares_cores)))
            for k, s in took.items()
            if isinstance(k, ProgramId)
        },
        {k: s for k, s in took.items() if isinstance(k, Task)},
        sends,
        host_s=host_s,
        shares_cores=shares_cores,
    )


def _less(runs: Runs, host: Runs) -> Runs:
    """Programs' runs without what the dispatching thread did for them meanwhile."""
    return {
        k: [max(s - h, 0.0) for s, h in zip(v, host[k], strict=True)]
        if isinstance(k, ProgramId) and k in host
        else v
        for k, v in runs.items()
    }


def _host_s(parts: Sequence[Calibration]) -> float:
    """Processor seconds that a process's dispatching thread needs for each program on its devices,
    with what it does for programs of others; the mean of all processes."""
    total_s, n_own = 0.0, 0
    for part in parts:
        for runs in (part.host, part.ahead):
            total_s += sum(median(s) for k, s in runs.items() if isinstance(k, ProgramId) and s)
        n_own += sum(isinstance(k, ProgramId) for k in part.took)
    return total_s / n_own if n_own else 0.0


def _sends(layout: Layout, parts: Sequence[Calibration]) -> dict[SendId, float]:
    """What a task's outputs need to arrive after they were made, by what they were sent for."""
    took, arrived = _slowest([p.took for p in parts]), _slowest([p.arrived for p in parts])
    sends: dict[SendId, float] = {}
    for link in segment_links(layout):
        low, high = layout.segment(link.source), layout.segment(link.target)
        if low.submesh == high.submesh:
            continue
        for low_shape, high_shape in linked_shapes(layout, link):
            there, back = (ProgramId(low.name, low_shape, d) for d in (FORWARD, BACKWARD))
            sent_back = ProgramId(high.name, high_shape, BACKWARD)
            for receiver, producer in ((there, there), (back, sent_back)):
                if receiver in took and producer in took:
                    key = SendId(low.name, high.name, high_shape, producer.direction)
                    sends[key] = max(0.0, arrived[producer] - took[producer])
    return sends


def _slowest(parts: Sequence[Runs]) -> dict[ProgramId | Task, float]:
    runs: dict[ProgramId | Task, list[list[float]]] = {}
    for part in parts:
        for key, seconds in part.items():
            runs.setdefault(key, []).append(seconds)
    return {k: median(map(max, zip(*seconds, strict=True))) for k, seconds in runs.items()}
