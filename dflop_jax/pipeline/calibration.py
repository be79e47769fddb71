"""Times every task of a plan alone, on the compiled programs, before the first step.

Each process notes its own part: how long its tasks took, and when what they sent had arrived with
it. `merged` makes one table of all parts, for the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from dflop_jax.pipeline.communicator import Communicator, zeros
from dflop_jax.pipeline.order import upstream
from dflop_jax.pipeline.programs import Programs
from dflop_jax.pipeline.step import State, StepCall
from dflop_jax.records import BACKWARD, FORWARD, UPDATE, Plan, Task

Samples = dict[Task, list[float]]


@dataclass(frozen=True)
class Calibration:
    """Seconds that one process saw, a list of runs for each (segment, bucket index, direction) and
    (segment, -1, REDUCE or UPDATE); runs of one number are the same run on every process.

    Attributes:
      took: until the outputs were made; only tasks on this process's devices.
      arrived: until everything under way had arrived here too; all tasks.
    """

    took: Samples = field(default_factory=dict)
    arrived: Samples = field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode((list(self.took.items()), list(self.arrived.items())))

    @staticmethod
    def decode(data: bytes) -> Calibration:
        rows = list[tuple[Task, list[float]]]
        return Calibration(*map(dict, msgspec.json.decode(data, type=tuple[rows, rows])))


def calibrate(
    programs: Programs,
    state: State,
    communicator: Communicator,
    *,
    repeats: int,
    ends: bool,
    sync: Callable[[], None],
) -> Calibration:
    """Run every task `repeats` times, after once to warm up, alone and awaited, on empty
    microbatches: gradients stay zero. It warms up every transfer too.

    `ends`: also the reductions and updates, these on copies of parameters and optimizer state.
    `sync` waits for the other processes, before every task.
    """
    found = Calibration()
    for b in range(len(programs.plan.buckets)):
        group = programs.empty_group(b)
        for evaluate in (False, True) if programs.evaluates else (False,):
            order = [t for t in programs.order([b], evaluate)[1] if t.group >= 0]
            for repeat in range(repeats + 1):
                into = found if repeat else Calibration()
                call = StepCall(programs, state, communicator, [group], 0.0)
                for task in order:
                    key = Task(task.segment, b, task.direction)
                    _time(call, task, key, into, sync)
    if ends:
        for repeat in range(repeats + 1):
            into = found if repeat else Calibration()
            call = StepCall(programs, state, communicator, [], 0.0)
            for task in programs.order([], False)[1]:
                held = _set_aside(state, programs, task)
                _time(call, task, task, into, sync)
                if held:
                    state.params[task.segment], state.opt_state[task.segment] = held
    else:
        _send_norms(programs, communicator)
    return found


def _time(
    call: StepCall, task: Task, key: Task, into: Calibration, sync: Callable[[], None]
) -> None:
    if task.direction == FORWARD:
        call.collect(task.segment, task.group)  # as in a step, where dispatch runs ahead
    call.settle()
    sync()
    start = time.perf_counter()
    jax.block_until_ready(call.run(task))
    took = time.perf_counter() - start
    call.settle()
    into.arrived.setdefault(key, []).append(time.perf_counter() - start)
    if task.segment in call.programs.local:
        into.took.setdefault(key, []).append(took)


def _set_aside(state: State, programs: Programs, task: Task) -> tuple[Any, Any] | None:
    """Parameters and optimizer state that the task would change; copies take their place."""
    name = task.segment
    if task.direction != UPDATE or name not in programs.local:
        return None
    held = state.params[name], state.opt_state[name]
    state.params[name], state.opt_state[name] = jax.block_until_ready(jax.tree.map(jnp.copy, held))
    return held


def _send_norms(programs: Programs, communicator: Communicator) -> None:
    """The norms' transfers, which only a whole step would make."""
    for name in programs.trainable:
        here = programs.segments[name].sharding()
        norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=here))
        for other in programs.trainable:
            there = programs.segments[other].sharding()
            jax.block_until_ready(communicator.send(norm, there))


@dataclass(frozen=True)
class TaskSeconds:
    """What the simulator takes: `seconds` of tasks and `sends` between submeshes."""

    seconds: Mapping[Task, float]
    sends: Mapping[Task, float]


def merged(plan: Plan, parts: Sequence[Calibration], *, one_at_a_time: bool) -> TaskSeconds:
    """Medians over the runs, of the slowest process in each.

    Args:
      one_at_a_time: every task's sends are awaited before the next task, so they are part of it.
    """
    took = _slowest([p.took for p in parts])
    arrived = _slowest([p.arrived for p in parts])
    if one_at_a_time:
        return TaskSeconds({t: max(arrived[t], s) for t, s in took.items()}, {})
    on = {s.name: s.submesh for s in plan.segments}
    sends: dict[Task, float] = {}
    for above in plan.segments:
        for below in (u for u in upstream(plan, above) if on[u.name] != on[above.name]):
            for b in range(len(plan.buckets)):
                for task, producer in (
                    (Task(below.name, b, FORWARD), Task(below.name, b, FORWARD)),
                    (Task(below.name, b, BACKWARD), Task(above.name, b, BACKWARD)),
                ):
                    if task in took and producer in took:
                        sends[task] = max(0.0, arrived[producer] - took[producer])
    return TaskSeconds(took, sends)


def _slowest(parts: Sequence[Samples]) -> dict[Task, float]:
    found: dict[Task, list[list[float]]] = {}
    for part in parts:
        for task, runs in part.items():
            found.setdefault(task, []).append(runs)
    return {t: median(map(max, zip(*runs, strict=True))) for t, runs in found.items()}
