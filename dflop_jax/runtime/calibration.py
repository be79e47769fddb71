"""Times every task of a plan alone, on the compiled programs, before the first step.

Each process measures how long its tasks take, and when the data that tasks send has arrived.
`merge_calibrations` makes one price list of all processes' times, for the simulator.
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
    add_host_work,
)
from dflop_jax.runtime.communicator import send, zeros
from dflop_jax.runtime.initial_state import zero_gradients
from dflop_jax.runtime.out_of_memory import TrialPrograms
from dflop_jax.runtime.programs import GroupArrays, Programs
from dflop_jax.runtime.step import StepCall, TrainState
from dflop_jax.runtime.synthetic_batch import synthetic_arrays, synthetic_groups
from dflop_jax.simulate.task_graph import linked_shapes, segment_links, step_graph
from dflop_jax.simulate.task_order import order_tasks

Runs = dict[ProgramId | Task, list[float]]


@dataclass(frozen=True)
class Calibration:
    """Seconds of one process: a list of runs for each program, and for each task that runs once a
    step. Run i is the same run on every process.

    Attributes:
      device_s: until the outputs were computed; only tasks on this process's devices.
      arrival_s: until all pending transfers had arrived here, too; all tasks.
      host_s: processor seconds of the dispatching thread in that time; all tasks.
      host_ahead_s: processor seconds for what it sends before the task runs; all tasks.
    """

    device_s: Runs = field(default_factory=dict)
    arrival_s: Runs = field(default_factory=dict)
    host_s: Runs = field(default_factory=dict)
    host_ahead_s: Runs = field(default_factory=dict)

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
    """Run every task alone on synthetic microbatches: once to warm up, then `repeats` times. It
    also warms up every transfer, and leaves zero gradients.

    `ends`: also run reductions and updates, which change parameters and optimizer state. `sync`
    waits for the other processes, before every task.
    """
    calibration = Calibration()
    plan = Plan("", programs.layout)  # any order: tasks are timed alone
    for groups, arrays, evaluate in _calibration_steps(programs, ends=ends):
        graph = step_graph(plan.layout, groups, tuple(programs.updates), evaluate=evaluate)
        order = order_tasks(plan, graph, groups)
        for repeat in range(repeats + 1):
            recorded = calibration if repeat else Calibration()
            call = _trial_call(programs, state, groups, arrays, evaluate=evaluate)
            for task in order:
                if task.group != NO_GROUP:
                    _time_task(
                        call, task, ProgramId.for_task(task, groups[task.group]), recorded, sync
                    )
                elif not groups:
                    _time_task(call, task, task, recorded, sync)
    if not ends:
        _send_norms(programs)
    for name in state.grads.keys() & programs.local_segments:
        del state.grads[name]  # first: memory may not hold two
        state.grads[name] = zero_gradients(programs.segments[name])
    return calibration


def _calibration_steps(
    programs: Programs, *, ends: bool
) -> Iterator[tuple[Sequence[Group], Sequence[GroupArrays], bool]]:
    """Steps that together have every task: (groups, arrays, whether it is an evaluation). The step
    for reductions and updates has no groups."""
    for b in range(len(programs.layout.buckets)):
        groups, arrays = synthetic_groups(programs, b)
        yield groups, arrays, False
        if less := tuple(programs.less_remat):
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
    """Run a whole step in its order on synthetic arrays, each task awaited, so that it reaches the
    step's peak memory. `sync` as for `calibrate`. It changes parameters and optimizer state."""
    arrays = synthetic_arrays(programs, groups)
    call = _trial_call(programs, state, groups, arrays)
    for task in order:
        _time_task(call, task, task, Calibration(), sync)


def _trial_call(
    programs: Programs,
    state: TrainState,
    groups: Sequence[Group],
    arrays: Sequence[GroupArrays],
    *,
    evaluate: bool = False,
) -> StepCall:
    """A step's call whose programs may run out of memory."""
    trial_programs: Any = TrialPrograms(programs)
    scales = dict.fromkeys(programs.layout.modules, 1.0)
    return StepCall(trial_programs, state, groups, arrays, scales, evaluate=evaluate)


def _time_task(
    call: StepCall,
    task: Task,
    key: ProgramId | Task,
    recorded: Calibration,
    sync: Callable[[], None],
) -> None:
    trial_programs: Any = call.programs
    trial_programs.check_free_memory(call.key(task))
    host_ahead_s = 0.0
    if task.direction == FORWARD:
        sync()  # no process sends before all have passed the check
        cpu_start_s = time.thread_time()
        call.send_indices(task.segment, task.group)  # as in a step, where dispatch runs ahead
        host_ahead_s = time.thread_time() - cpu_start_s
    recorded.host_ahead_s.setdefault(key, []).append(host_ahead_s)
    call.wait_for_pending()
    sync()
    start, cpu_start_s = time.perf_counter(), time.thread_time()
    outputs = call.run(task)
    if trial_programs.failed:
        raise trial_programs.failed
    recorded.host_s.setdefault(key, []).append(time.thread_time() - cpu_start_s)
    jax.block_until_ready(outputs)
    device_s = time.perf_counter() - start
    call.wait_for_pending()
    recorded.arrival_s.setdefault(key, []).append(time.perf_counter() - start)
    if task.segment in call.programs.local_segments:
        recorded.device_s.setdefault(key, []).append(device_s)


def _send_norms(programs: Programs) -> None:
    """Warm up the norms' transfers, which only a whole step makes."""
    for name in programs.updates:
        source = programs.segments[name].sharding()
        norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=source))
        for target_name in programs.updates:
            target = programs.segments[target_name].sharding()
            jax.block_until_ready(send(norm, target))


def merge_calibrations(
    layout: Layout,
    calibrations: Sequence[Calibration],
    *,
    one_at_a_time: bool,
    shares_cores: bool = False,
) -> Prices:
    """Prices of the plan's programs: the median over runs of the slowest process, plus host work.

    Args:
      one_at_a_time: a task's sends are awaited before the next task, so they count as its time.
      shares_cores: as for `Prices`.
    """
    host_s = _mean_host_seconds(calibrations)
    sends = {} if one_at_a_time else _send_seconds(layout, calibrations)
    if shares_cores:  # the mean over programs replaces each program's own host seconds
        calibrations = [
            replace(
                p,
                device_s=_subtract_host(p.device_s, p.host_s),
                arrival_s=_subtract_host(p.arrival_s, p.host_s),
            )
            for p in calibrations
        ]
    device_s = _median_of_slowest([p.device_s for p in calibrations])
    if one_at_a_time:
        arrival_s = _median_of_slowest([p.arrival_s for p in calibrations])
        device_s = {k: max(arrival_s[k], s) for k, s in device_s.items()}
    return Prices(
        {
            k: Price(float(add_host_work(s, host_s, shares_cores=shares_cores)))
            for k, s in device_s.items()
            if isinstance(k, ProgramId)
        },
        {k: s for k, s in device_s.items() if isinstance(k, Task)},
        sends,
        host_s=host_s,
        shares_cores=shares_cores,
    )


def _subtract_host(runs: Runs, host: Runs) -> Runs:
    """Programs' runs minus the host seconds of the dispatching thread."""
    return {
        k: [max(s - h, 0.0) for s, h in zip(v, host[k], strict=True)]
        if isinstance(k, ProgramId) and k in host
        else v
        for k, v in runs.items()
    }


def _mean_host_seconds(calibrations: Sequence[Calibration]) -> float:
    """Processor seconds of the dispatching thread per program on the process's devices, including
    its work for other processes' programs; the mean over processes."""
    total_s, n_own = 0.0, 0
    for calibration in calibrations:
        for runs in (calibration.host_s, calibration.host_ahead_s):
            total_s += sum(median(s) for k, s in runs.items() if isinstance(k, ProgramId) and s)
        n_own += sum(isinstance(k, ProgramId) for k in calibration.device_s)
    return total_s / n_own if n_own else 0.0


def _send_seconds(layout: Layout, calibrations: Sequence[Calibration]) -> dict[SendId, float]:
    """Seconds from the end of a task to the arrival of its outputs, by link and direction."""
    device_s = _median_of_slowest([p.device_s for p in calibrations])
    arrival_s = _median_of_slowest([p.arrival_s for p in calibrations])
    sends: dict[SendId, float] = {}
    for link in segment_links(layout):
        low, high = layout.segment(link.source), layout.segment(link.target)
        if low.submesh == high.submesh:
            continue
        for low_shape, high_shape in linked_shapes(layout, link):
            forward, backward = (ProgramId(low.name, low_shape, d) for d in (FORWARD, BACKWARD))
            target_backward = ProgramId(high.name, high_shape, BACKWARD)
            for receiver, producer in ((forward, forward), (backward, target_backward)):
                if receiver in device_s and producer in device_s:
                    key = SendId(low.name, high.name, high_shape, producer.direction)
                    sends[key] = max(0.0, arrival_s[producer] - device_s[producer])
    return sends


def _median_of_slowest(runs_by_process: Sequence[Runs]) -> dict[ProgramId | Task, float]:
    runs: dict[ProgramId | Task, list[list[float]]] = {}
    for process_runs in runs_by_process:
        for key, seconds in process_runs.items():
            runs.setdefault(key, []).append(seconds)
    return {k: median(map(max, zip(*seconds, strict=True))) for k, seconds in runs.items()}
