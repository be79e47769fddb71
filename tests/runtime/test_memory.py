"""What a step that has been dispatched still holds."""

import gc
import weakref

import jax
import numpy as np
import optax

from dflop_jax.records import FORWARD, REDUCE, UPDATE
from dflop_jax.runtime.executor import Executor
from tests.small import Small

from . import plain

MODEL = Small()


def test_residuals_and_gradient_shards_are_gone_before_the_next_step():
    """While the step is still to be read: the next one is dispatched before that."""
    samples = plain.random_samples(MODEL, 4, 1)
    plan = plain.plan_of(MODEL, (0, 1, 1, 1), (1, 1, 2, 1), bucket=(36, 240))
    schedule = plain.random_schedule(plan, samples, 2, 5, text_only=(0,))
    ex = Executor(MODEL, plan, optax.sgd(1.0))
    ex.init(0)
    ex.compile()
    arrays = plain.pack(MODEL, plan, schedule, samples)
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
