"""Steps dispatched without waiting neither block each other nor change a bit of the result; a
calibration before them does not either."""

import dataclasses

import jax
import optax
import pytest

from dflop_jax.records import NO_GROUP, ExchangeCapacity, ProgramId, Task
from dflop_jax.runtime.executor import Executor
from dflop_jax.simulate.task_graph import SegmentLink
from tests.small import Small

from . import plain

LAYOUTS = {
    "all on the same 8 devices": ((0, 1, 8, 1), (0, 1, 8, 1), 1),
    "4 + 4": ((0, 1, 4, 1), (4, 1, 2, 2), 1),
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_in_flight_equal_steps_awaited(name):
    vision, llm, group_size = LAYOUTS[name]
    model = Small()
    samples = plain.random_samples(model, 12, 0)
    plan = plain.plan_of(model, vision, llm, bucket=(8, 96), group_size=group_size)
    first = dataclasses.replace(plan.layout.segments[0], remat="layers", remat_less="none")
    plan = plan.with_layout(segments=(first, *plan.layout.segments[1:]))
    schedule = plain.random_schedule(plan, samples, 4, seed=1)
    groups = [
        dataclasses.replace(g, remat_less=("vision",) if i % 2 and g.module == "vision" else ())
        for i, g in enumerate(schedule.groups)
    ]
    schedule = dataclasses.replace(schedule, groups=tuple(groups))
    arrays = plain.pack(model, plan, schedule, samples)
    scales = {"llm": 1e-2}
    ex = Executor(model, plan, optax.adam(1e-3), clip_norm=1.0)
    try:
        ex.compile()
        ex.init(0)
        handles = [ex.run_step(schedule, arrays, scales) for _ in range(6)]
        flying = [h.result().sums["llm.loss_sum"] for h in handles]
        times = ex.calibrate(1, ends=True)
        ex.init(0)
        awaited = [
            ex.run_step(schedule, arrays, scales).result().sums["llm.loss_sum"] for i in range(6)
        ]
    finally:
        ex.close()
    assert flying == awaited
    assert awaited[-1] < awaited[0]
    want = {
        ProgramId(s.name, shape, kind, less)
        for s in plan.layout.segments
        for shape in plan.layout.shapes(s.module)
        for kind in ("forward", "backward")
        for less in (False, True)
        if (s.name, kind) != ("llm", "forward") and (s.name == "vision" or not less)
    } | {Task(n, NO_GROUP, d) for n in ex.trainable for d in ("reduce", "update")}
    assert {run.key for run in times} == want
    assert all(0 < run.device_s <= run.arrival_s for run in times)
    assert ex.awaited == {"vision", "llm"}  # several CPU devices of one process


def test_rounds_of_an_exchange_end_one_by_one():
    """On devices of a CPU, whose collectives could wait for each other's threads: a room so small
    that features need several rounds."""
    model = Small()
    samples = plain.random_samples(model, 12, 0)
    plan = plain.plan_of(model, (0, 1, 4, 1), (4, 1, 2, 1), bucket=(36, 240))
    low, high = plan.layout.shapes("vision")[0], plan.layout.shapes("llm")[0]
    room = ExchangeCapacity("vision", "llm", low, high, 0.01)
    plan = plan.with_layout(exchange_capacities=(room,))
    schedule = plain.random_schedule(plan, samples, 2, seed=1)
    arrays = plain.pack(model, plan, schedule, samples)
    ex = Executor(model, plan, optax.adam(1e-3))
    outputs = {True: [], False: []}  # by direction
    try:
        ex.compile()
        ex.init(0)
        for key, program in list(ex.programs.compiled.items()):
            if isinstance(key[1], SegmentLink):

                def spy(*args, program=program, seen=outputs[key[-1]]):
                    assert all(x.is_ready() for each in seen for x in jax.tree.leaves(each))
                    seen.append(program(*args))
                    return seen[-1]

                ex.programs.compiled[key] = spy
        assert ex.programs.serial_segments == {"vision", "llm"}
        ex.run_step(schedule, arrays, {"llm": 1e-2}).result()
    finally:
        ex.close()
    n_groups = sum(bool(g.feeds) for g in schedule.groups)
    assert len(outputs[True]) == len(outputs[False]) > n_groups  # some have several rounds


def test_nothing_waits_where_each_process_has_one_device():
    plan = plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 1, 1), bucket=(36, 240))
    ex = Executor(Small(), plan, optax.adam(1e-3))
    try:
        assert ex.programs.serial_segments == ex.awaited == frozenset()
    finally:
        ex.close()
