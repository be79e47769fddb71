"""Times every task of a plan alone, on the compiled programs, before the first step.

Each process measures how long its tasks take, and when the data that tasks send has arrived.
`merge_calibrations` makes one price list of all processes' times, for the simulator.
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
from dflop_jax.runtime.out_of_memory import TrialPrograms
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
    """One run of a task alone, as one process saw it. `key` is the task's program, or the task if
    it runs once a step.

    Attributes:
      device_s: seconds until the outputs were computed; None: on other processes' devices.
      arrival_s: seconds until all pending transfers had arrived here, too.
      host_s: processor seconds of the dispatching thread in that time.
      host_ahead_s: processor seconds for what it sends before the task runs.
    """

    key: ProgramId | Task
    device_s: float | None
    arrival_s: float
    host_s: float = 0.0
    host_ahead_s: float = 0.0


Seconds = dict[ProgramId | Task, float]
Calibration = list[TaskRun]  # one process's runs; run i is the same run on every process


def calibrate(
    programs: Programs, state: TrainState, *, repeats: int, ends: bool, sync: Sync
) -> Calibration:
    """Run every task alone on synthetic microbatches: once to warm up, then `repeats` times. It
    also warms up every transfer, and leaves zero gradients.

    `ends`: also run reductions and updates, which change parameters and optimizer state. `sync` is
    called before every task.
    """
    runs: Calibration = []
    plan = Plan("", programs.layout)  # any order: tasks are timed alone
    for groups, arrays, evaluate in _calibration_steps(programs, ends=ends):
        graph = step_graph(plan.layout, groups, tuple(programs.updates), evaluate=evaluate)
        order = order_tasks(plan, graph, groups)
        for repeat in range(repeats + 1):
            call = _trial_call(programs, state, groups, arrays, evaluate=evaluate)
            for task in order:
                if task.group == NO_GROUP and groups:
                    continue
                run = _time_task(call, task, sync)
                runs += [run] if repeat else []
    if not ends:
        _send_norms(programs)
    for name in state.grads.keys() & programs.local_segments:
        del state.grads[name]  # first: memory may not hold two
        state.grads[name] = zero_gradients(programs.segments[name])
    return runs


def _calibration_steps(
    programs: Programs, *, ends: bool
) -> Iterator[tuple[Sequence[Group], Sequence[GroupArrays], bool]]:
    """Steps that have every task: (groups, arrays, whether to evaluate); the last has no groups."""
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
    programs: Programs, state: TrainState, groups: Sequence[Group], order: Sequence[Task],
    sync: Sync,
) -> None:  # fmt: skip
    """Run a whole step in its order on synthetic arrays, each task awaited, so that it reaches the
    step's peak memory. It changes parameters and optimizer state."""
    call = _trial_call(programs, state, groups, synthetic_arrays(programs, groups))
    for task in order:
        _time_task(call, task, sync)


def _trial_call(
    programs: Programs, state: TrainState, groups: Sequence[Group],
    arrays: Sequence[GroupArrays], *, evaluate: bool = False,
) -> StepCall:  # fmt: skip
    """A step's call whose programs may run out of memory."""
    trial_programs: Any = TrialPrograms(programs)
    scales = dict.fromkeys(programs.layout.modules, 1.0)
    return StepCall(trial_programs, state, groups, arrays, scales, evaluate=evaluate)


def _time_task(call: StepCall, task: Task, sync: Sync) -> TaskRun:
    trial_programs: Any = call.programs
    trial_programs.check_free_memory(call.key(task))
    host_ahead_s = 0.0
    if task.direction == FORWARD:
        sync()  # no process sends before all have passed the check
        cpu_start_s = time.thread_time()
        call.send_indices(task.segment, task.group)  # as in a step, where dispatch runs ahead
        host_ahead_s = time.thread_time() - cpu_start_s
    call.wait_for_pending()
    sync()
    start, cpu_start_s = time.perf_counter(), time.thread_time()
    outputs = call.run(task)
    if trial_programs.failed:
        raise trial_programs.failed
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
    """Warm up the norms' transfers, which only a whole step makes."""
    shardings = [programs.segments[name].sharding() for name in programs.updates]
    for source in shardings:
        norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=source))
        for target in shardings:
            jax.block_until_ready(send(norm, target))


def merge_calibrations(
    layout: Layout, calibrations: Sequence[Calibration], *, one_at_a_time: bool,
    shares_cores: bool = False,
) -> Prices:  # fmt: skip
    """Prices of the plan's programs: the median over runs of the slowest process, plus host work.

    Args:
      one_at_a_time: a task's sends are awaited before the next task, so they count as its time.
      shares_cores: as for `Prices`.
    """
    host_s = _mean_host_seconds(calibrations)
    device_s, arrival_s = _median_of_slowest(calibrations)
    sends = {} if one_at_a_time else _send_seconds(layout, device_s, arrival_s)
    if shares_cores:  # the mean over programs replaces each program's own host seconds
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
    """A program's run without the host seconds of the dispatching thread."""
    if isinstance(run.key, Task):
        return run
    device_s = None if run.device_s is None else max(run.device_s - run.host_s, 0.0)
    return replace(run, device_s=device_s, arrival_s=max(run.arrival_s - run.host_s, 0.0))


def _mean_host_seconds(calibrations: Sequence[Calibration]) -> float:
    """Mean processor seconds of dispatching a program, other processes' programs included."""
    total_s, n_own = 0.0, 0
    for calibration in calibrations:
        for key, runs in runs_by_key(calibration).items():
            if isinstance(key, ProgramId):
                total_s += median(r.host_s for r in runs) + median(r.host_ahead_s for r in runs)
                n_own += runs[0].device_s is not None
    return total_s / n_own if n_own else 0.0


def runs_by_key(calibration: Calibration) -> dict[ProgramId | Task, list[TaskRun]]:
    """The runs of each program, or of a task that runs once a step."""
    runs: defaultdict[ProgramId | Task, list[TaskRun]] = defaultdict(list)
    for run in calibration:
        runs[run.key].append(run)
    return runs


def _send_seconds(layout: Layout, device_s: Seconds, arrival_s: Seconds) -> dict[SendId, float]:
    """Seconds from the end of a task to the arrival of its outputs, by link and direction."""
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
    """(`device_s`, `arrival_s`): the median over runs of the slowest process."""
    device_s: defaultdict[Any, list[float]] = defaultdict(list)
    arrival_s: defaultdict[Any, list[float]] = defaultdict(list)
    for runs in zip(*calibrations, strict=True):
        device_s[runs[0].key].append(max(r.device_s for r in runs if r.device_s is not None))
        arrival_s[runs[0].key].append(max(r.arrival_s for r in runs))
    return {k: median(s) for k, s in device_s.items()}, {k: median(s) for k, s in arrival_s.items()}


# ---- synthetic batches ----

# A device that multiplies zeros draws little power and clocks higher, and attention skips empty
# rows, so values are random and rows are full.

# Pieces in a row, if their number does not change the timed programs.
PIECES_PER_ROW = 4
VALUE_STD = 0.05  # standard deviation of random parameters and activations: none overflows
_N_RANDOM_VALUES = 65521  # random numbers that are repeated; a prime, so that no two rows are alike


def random_values(shape: tuple[int, ...], dtype: Any, below: int) -> np.ndarray:
    """Values of a shape and dtype, integers from 0 to `below`."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    values: Any
    if dtype.kind == "b":
        values = rng.random(_N_RANDOM_VALUES) < 0.5
    elif dtype.kind in "iu":
        values = rng.integers(0, min(below, np.iinfo(dtype).max + 1), _N_RANDOM_VALUES)
    else:  # bfloat16 too
        values = rng.standard_normal(_N_RANDOM_VALUES) * VALUE_STD
    return np.resize(values.astype(dtype), shape)


def packed_field(
    name: str, shape: tuple[int, ...], dtype: Any, n_pieces: int, below: int
) -> np.ndarray:
    """A field [microbatches, rows, ...] of full rows with about `n_pieces` equal pieces."""
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
    """Content of the rows of `packed_field`, by feature."""
    length = -(-shape.tokens // n_pieces)
    whole, rest = divmod(shape.tokens, length)
    of_whole, of_rest = content_of(module, length), content_of(module, rest)
    return {name: shape.rows * (whole * n + of_rest[name]) for name, n in of_whole.items()}


def synthetic_groups(
    programs: Programs, bucket: int
) -> tuple[tuple[Group, ...], tuple[GroupArrays, ...]]:
    """One group without samples for every module of a bucket, and arrays of full rows."""
    layout = programs.layout
    shapes = dict(layout.buckets[bucket].shapes)
    index_of = {m: i for i, m in enumerate(shapes)}
    groups = []
    for m, shape in shapes.items():
        feeds = tuple(index_of[t] for t in layout.targets(m) if t in index_of)
        groups.append(Group(m, shape, feeds, microbatches=layout.group_size))
    return tuple(groups), synthetic_arrays(programs, groups)


def synthetic_arrays(programs: Programs, groups: Sequence[Group]) -> tuple[GroupArrays, ...]:
    """Arrays of full rows for these groups, whatever samples the groups hold."""
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
