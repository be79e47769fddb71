"""Times every task of a plan alone, with the compiled programs, before the first step.

Each process measures how long its tasks take, and when the data that the tasks send arrives.
`merge_calibrations` merges the times of all processes into one price list for the simulator.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import Module, content_of
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
    Shape,
    Task,
    add_host_work,
)
from dflop_jax.runtime.communicator import send, zeros
from dflop_jax.runtime.initial_state import zero_gradients
from dflop_jax.runtime.out_of_memory import TolerantPrograms
from dflop_jax.runtime.programs import GroupArrays, Programs
from dflop_jax.runtime.step import StepCall, TrainState
from dflop_jax.simulate.task_graph import (
    feeding_groups,
    linked_shapes,
    segment_links,
    step_graph,
)
from dflop_jax.simulate.task_order import order_tasks

Sync = Callable[[], None]  # waits for the other processes


@dataclass(frozen=True)
class TaskRun:
    """One run of one task alone, as one process measured it. `key` is the task's program, or the
    task itself if it runs once a step.

    Attributes:
      device_s: seconds until the outputs were computed; None: the task ran on other processes.
      arrival_s: seconds until all pending transfers had arrived on this process, too.
      host_s: CPU seconds of the dispatching thread in that time.
      host_ahead_s: CPU seconds for sending the task's indices before the task runs.
    """

    key: ProgramId | Task
    device_s: float | None
    arrival_s: float
    host_s: float = 0.0
    host_ahead_s: float = 0.0


Seconds = dict[ProgramId | Task, float]
Calibration = list[TaskRun]  # one process's runs; the order is the same on every process


def calibrate(
    programs: Programs, state: TrainState, *, repeats: int, ends: bool, sync: Sync
) -> Calibration:
    """Run every task alone on synthetic microbatches: once to warm up, then `repeats` times. It
    also warms up every transfer and sets the gradients to zero.

    If `ends`, it also runs reductions and updates, which change parameters and optimizer state.
    `sync` is called before every task.
    """
    runs: Calibration = []
    plan = Plan("", programs.layout)  # the order does not matter: tasks are timed alone
    for groups, arrays, evaluate in _calibration_steps(programs, ends=ends):
        graph = step_graph(plan.layout, groups, tuple(programs.updates), evaluate=evaluate)
        order = order_tasks(plan, graph, groups)
        for repeat in range(repeats + 1):
            call = _tolerant_call(programs, state, groups, arrays, evaluate=evaluate)
            for task in order:
                if task.group == NO_GROUP and groups:
                    continue
                run = _time_task(call, task, sync)
                runs += [run] if repeat else []
    if not ends:
        _send_norms(programs)
    for name in state.grads.keys() & programs.local_segments:
        del state.grads[name]  # before the new ones: both may not fit into memory
        state.grads[name] = zero_gradients(programs.segments[name])
    return runs


def _calibration_steps(
    programs: Programs, *, ends: bool
) -> Iterator[tuple[Sequence[Group], Sequence[GroupArrays], bool]]:
    """Yield (groups, arrays, evaluate) of steps that contain every task; the last has no groups."""
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
    sync: Sync,
) -> None:
    """Run a step's tasks in order on synthetic arrays and wait for each, so that the step reaches
    its peak memory. Updates change parameters and optimizer state."""
    call = _tolerant_call(programs, state, groups, synthetic_arrays(programs, groups))
    for task in order:
        _time_task(call, task, sync)


def _tolerant_call(
    programs: Programs,
    state: TrainState,
    groups: Sequence[Group],
    arrays: Sequence[GroupArrays],
    *,
    evaluate: bool = False,
) -> StepCall:
    """Return a step's call whose programs may run out of memory, as `TolerantPrograms`."""
    tolerant: Any = TolerantPrograms(programs)
    scales = dict.fromkeys(programs.layout.modules, 1.0)
    return StepCall(tolerant, state, groups, arrays, scales, evaluate=evaluate)


def _time_task(call: StepCall, task: Task, sync: Sync) -> TaskRun:
    programs: Any = call.programs
    programs.check_free_memory(call.key(task))
    host_ahead_s = 0.0
    if task.direction == FORWARD:
        sync()  # no process sends before all processes have passed the check
        cpu_start_s = time.thread_time()
        call.send_indices(task.segment, task.group)  # as in a step, where dispatch runs ahead
        host_ahead_s = time.thread_time() - cpu_start_s
    call.wait_for_pending()
    sync()
    start, cpu_start_s = time.perf_counter(), time.thread_time()
    outputs = call.run(task)
    if programs.failed:
        raise programs.failed
    host_s = time.thread_time() - cpu_start_s
    jax.block_until_ready(outputs)
    device_s = time.perf_counter() - start
    call.wait_for_pending()
    return TaskRun(
        task if task.group == NO_GROUP else ProgramId.for_task(task, call.groups[task.group]),
        device_s if task.segment in call.programs.local_segments else None,
        time.perf_counter() - start,
        host_s,
        host_ahead_s,
    )


def _send_norms(programs: Programs) -> None:
    """Warm up the transfers of gradient norms, which otherwise occur only in a whole step."""
    shardings = [programs.segments[name].sharding() for name in programs.updates]
    for source in shardings:
        norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=source))
        for target in shardings:
            jax.block_until_ready(send(norm, target))


def merge_calibrations(
    layout: Layout,
    calibrations: Sequence[Calibration],
    *,
    one_at_a_time: bool,
    shares_cores: bool = False,
) -> Prices:
    """Return prices of the plan's programs: the slowest process's median, plus host work.

    Args:
      one_at_a_time: the next task waits until a task's sends arrive, so a price includes them.
      shares_cores: see `Prices`.
    """
    host_s = _mean_host_seconds(calibrations)
    device_s, arrival_s = _median_of_slowest(calibrations)
    sends = {} if one_at_a_time else _send_seconds(layout, device_s, arrival_s)
    if shares_cores:  # a program gets the mean host seconds of all programs, not its own
        without_host = [list(map(_subtract_host, runs)) for runs in calibrations]
        device_s, arrival_s = _median_of_slowest(without_host)
    if one_at_a_time:
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


def _subtract_host(run: TaskRun) -> TaskRun:
    """Return a program's run without the CPU seconds of the dispatching thread."""
    if isinstance(run.key, Task):
        return run
    device_s = None if run.device_s is None else max(run.device_s - run.host_s, 0.0)
    return replace(run, device_s=device_s, arrival_s=max(run.arrival_s - run.host_s, 0.0))


def _mean_host_seconds(calibrations: Sequence[Calibration]) -> float:
    """Return the mean CPU seconds of dispatching a program of this process or of another one."""
    total_s, n_own = 0.0, 0
    for calibration in calibrations:
        for key, runs in runs_by_key(calibration).items():
            if isinstance(key, ProgramId):
                total_s += median(r.host_s for r in runs) + median(r.host_ahead_s for r in runs)
                n_own += runs[0].device_s is not None
    return total_s / n_own if n_own else 0.0


def runs_by_key(calibration: Calibration) -> dict[ProgramId | Task, list[TaskRun]]:
    """Group runs by program, or by task if the task runs once a step."""
    runs: defaultdict[ProgramId | Task, list[TaskRun]] = defaultdict(list)
    for run in calibration:
        runs[run.key].append(run)
    return runs


def _send_seconds(layout: Layout, device_s: Seconds, arrival_s: Seconds) -> dict[SendId, float]:
    """Return the seconds from a task's end to its outputs' arrival, by link and direction."""
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


def _median_of_slowest(calibrations: Sequence[Calibration]) -> tuple[Seconds, Seconds]:
    """Return (`device_s`, `arrival_s`) by key: medians over runs of the slowest process's times."""
    device_s: defaultdict[Any, list[float]] = defaultdict(list)
    arrival_s: defaultdict[Any, list[float]] = defaultdict(list)
    for runs in zip(*calibrations, strict=True):
        device_s[runs[0].key].append(max(r.device_s for r in runs if r.device_s is not None))
        arrival_s[runs[0].key].append(max(r.arrival_s for r in runs))
    return {k: median(s) for k, s in device_s.items()}, {k: median(s) for k, s in arrival_s.items()}


# ---- synthetic batches ----

# A device that multiplies zeros draws less power and clocks higher, and attention skips empty rows.
# So values are random and rows are full.

# Pieces per row where their number does not change the timed programs.
PIECES_PER_ROW = 4
VALUE_STD = 0.05  # standard deviation of random parameters and activations: none overflows
_N_RANDOM_VALUES = 65521  # random numbers to repeat; a prime, so that no two rows are equal


def random_values(shape: tuple[int, ...], dtype: Any, below: int) -> np.ndarray:
    """Return random values of a shape and dtype; integers are below `below`."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    values: Any
    if dtype.kind == "b":
        values = rng.random(_N_RANDOM_VALUES) < 0.5
    elif dtype.kind in "iu":
        values = rng.integers(0, min(below, np.iinfo(dtype).max + 1), _N_RANDOM_VALUES)
    else:  # bfloat16, too
        values = rng.standard_normal(_N_RANDOM_VALUES) * VALUE_STD
    return np.resize(values.astype(dtype), shape)


def packed_field(
    name: str, shape: tuple[int, ...], dtype: Any, n_pieces: int, below: int
) -> np.ndarray:
    """Return a field [microbatches, rows, ...] of full rows of about `n_pieces` equal pieces."""
    if name not in ("segment_ids", "positions", "weights"):
        return random_values(shape, dtype, below)
    tokens = shape[2]
    length = -(-tokens // n_pieces)
    row = {
        "segment_ids": np.arange(tokens) // length + 1,
        "positions": np.arange(tokens) % length,
        "weights": np.ones(tokens),
    }[name]
    row = row.reshape(tokens, *[1] * (len(shape) - 3)).astype(dtype)
    return np.broadcast_to(row, shape)


def content_of_rows(module: Module, shape: Shape, n_pieces: int = PIECES_PER_ROW) -> dict[str, int]:
    """Return the content of the rows that `packed_field` makes, by feature."""
    length = -(-shape.tokens // n_pieces)
    whole, rest = divmod(shape.tokens, length)
    of_whole, of_rest = content_of(module, length), content_of(module, rest)
    return {name: shape.rows * (whole * n + of_rest[name]) for name, n in of_whole.items()}


def synthetic_groups(
    programs: Programs, bucket: int
) -> tuple[tuple[Group, ...], tuple[GroupArrays, ...]]:
    """Return one group without samples for each module of a bucket, and arrays of full rows."""
    layout = programs.layout
    shapes = dict(layout.buckets[bucket].shapes)
    index_of = {m: i for i, m in enumerate(shapes)}
    groups = []
    for m, shape in shapes.items():
        feeds = tuple(index_of[t] for t in layout.targets(m) if t in index_of)
        groups.append(Group(m, shape, feeds, microbatches=layout.group_size))
    return tuple(groups), synthetic_arrays(programs, groups)


def synthetic_arrays(programs: Programs, groups: Sequence[Group]) -> tuple[GroupArrays, ...]:
    """Return arrays of full rows for the groups; the samples of the groups do not matter."""
    feeding, found = feeding_groups(groups), []
    for n, group in enumerate(groups):
        fields: dict[str, np.ndarray] = {}
        source_indices: dict[int, tuple[np.ndarray, ...]] = {}
        for s in programs.layout.segments_of(group.module):
            for field, a in programs.signature(s.name, group.shape).fields.items():
                below = programs.model.vocab_size
                fields[field] = packed_field(field, a.shape, a.dtype, PIECES_PER_ROW, below)
            for link in programs.incoming_links[s.name]:
                for i in feeding.get((n, link.edge.source), ()) if link.edge else ():
                    exchange = programs.exchange(link, groups[i].shape, group.shape)
                    source_indices[i] = exchange.synthetic_indices()
        found.append(GroupArrays(fields, source_indices))
    return tuple(found)
