"""Steps dispatched without waiting neither block each other nor change a bit of the result; a
calibration before them does not either. What a dispatched step holds."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import optax
import pytest

from dflop_jax.records import (
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    ExchangeCapacity,
    ProgramId,
    Task,
)  # fmt: skip
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


def test_residuals_and_gradient_shards_are_gone_before_the_next_step():
    """While the step is still to be read: the next one is dispatched before that."""
    samples = plain.random_samples(Small(), 4, 1)
    plan = plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 2, 1), bucket=(36, 240))
    schedule = plain.random_schedule(plan, samples, 2, 5, text_only=(0,))
    ex = Executor(Small(), plan, optax.sgd(1.0))
    ex.init(0)
    ex.compile()
    arrays = plain.pack(Small(), plan, schedule, samples)
    shards, seen = [], []
    residuals: list = []
    forwards = sum(g.module == "vision" for g in schedule.groups)

    def spied(name, program):
        def forward(*args):
            out = program(*args)
            residuals.append([weakref.ref(a) for a in jax.tree.leaves(out["residuals"])])
            return out

        def reduce(*args):
            out = program(*args)
            shards.extend(map(weakref.ref, jax.tree.leaves(out[0])))
            return out

        def update(*args):
            assert not any(r() is not None for group in residuals for r in group)
            seen.append(sum(s() is not None for s in shards))
            return program(*args)

        return {FORWARD: forward, REDUCE: reduce, UPDATE: update}[name]

    for key, program in list(ex.programs.compiled.items()):
        if key[-1] in (FORWARD, REDUCE, UPDATE):
            ex.programs.compiled[key] = spied(key[-1], program)
    handle = ex.run_step(schedule, arrays, plain.scales_of(arrays))
    gc.collect()
    assert len(residuals) == forwards > 0
    assert all(residuals)
    assert len(shards) == sum(
        len(jax.tree.leaves(u.shard_structs)) for u in ex.programs.updates.values()
    )
    assert not any(s() is not None for s in shards)
    assert seen[0] == len(shards) > seen[1] > 0
    assert np.isfinite(handle.result().grad_norm)
    ex.close()
