"""A process of the multi-process gradient test: runs plans and compares its shards of every
gradient with the plain computation, which the parent left in a file."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from dflop_jax.runtime import compiling
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import state_zero_specs
from tests.small import Small

from . import plain
from .test_dip import chunked
from .test_gradients import N, keep_reduced

# (processes, devices of each) -> name -> plan: submeshes on processes of their own, with differing
# (data, model) on the two sides, and on the same processes. Every layout compiles on every process,
# so they are few.
LAYOUTS = {
    (2, 4): {
        "a process each, dp 4 and tp 2 x dp 2": lambda m: plan_of(m, (0, 1, 4, 1), (4, 1, 2, 2)),
    },
    (2, 1): {
        "1+1, two groups read one": lambda m: plan_of(
            m, (0, 1, 1, 1), (1, 1, 1, 1), fan_in=2, divided_readers=("llm",)
        ),
        "a loop of stages over processes": lambda m: plan_of(
            m, (0, 1, 1, 1), (0, 2, 1, 1), group_size=4, rounds=2
        ),
        "tied across processes": lambda m: plan_of(
            m, (0, 1, 1, 1), (0, 1, 1, 1), llm_segments=2
        ),
        "both on both": lambda m: plain.with_zero(
            plan_of(m, (0, 1, 2, 1), (0, 1, 2, 1)), vision=2, llm=3
        ),
    },
    (4, 1): {
        "chunks of both on two ranks of two": lambda m: chunked(
            m, 2, {"vision": 1, "llm": 2}, 2, data=2
        ),
        "tensor ranks of two data ranks that share": lambda m: plain.with_zero(
            plan_of(m, (0, 1, 2, 2), (0, 1, 2, 2)), vision=2, llm=3
        ),
        "blocks of two on four": lambda m: plain.with_zero(
            plan_of(m, (0, 1, 4, 1), (0, 1, 4, 1)), vision=(2, 2), llm=(3, 2)
        ),
    },
}  # fmt: skip
plan_of = partial(plain.plan_of, bucket=(36, 240))


def main(args: list[str]) -> None:
    want = np.load(args[0])
    local = jax.local_device_count()
    for name, make_plan in LAYOUTS[jax.process_count(), local].items():
        check(want, name, make_plan(Small()))
        print("equal:", name, flush=True)


def print_order():
    """Print the programs, which are those of all processes, as they are about to compile."""
    jobs = compiling.compile_jobs

    def told(programs):
        def job(key, lower):
            print("compiles:", key, flush=True)
            return lower()

        return {key: partial(job, key, lower) for key, lower in jobs(programs).items()}

    compiling.compile_jobs = told


def check(want, name, plan):
    m = Small()
    samples = plain.random_samples(m, N, 1)
    schedule = plain.random_schedule(plan, samples, 2, 5, text_only=(0,))
    ex = Executor(m, plan, optax.sgd(1.0))
    ex.init(0)
    if name.startswith("both on"):
        compiling.autotunes = lambda segments: True  # as on GPUs
        print_order()
    ex.compile(sync=lambda: multihost_utils.sync_global_devices("compiled"))
    ex.calibrate(repeats=0)
    arrays = plain.pack(m, plan, schedule, samples)
    scales = plain.scales_of(arrays)
    captured = keep_reduced(ex, set(ex.trainable) & ex.programs.local_segments)
    part = ex.run_step(schedule, arrays, scales).local_result()
    compared = 0
    for n, tree in captured.items():
        segment = ex.programs.segments[n]
        s, cuts = segment.plan, state_zero_specs(segment)
        of_tree = jax.tree.leaves({p: cuts[p] for p in tree})
        for (path, leaf), cut in zip(
            jax.tree_util.tree_leaves_with_path(tree), of_tree, strict=True
        ):
            at = jax.tree_util.keystr(path)
            full = want[f"['{s.module}']{at}"]
            scale = np.abs(full).max()
            full = full[list(segment.layer_order)] if at.startswith("['layers']") else full
            full = cut.to_stored(full)
            for shard in leaf.addressable_shards:
                w, g = full[shard.index], np.asarray(shard.data)
                assert np.abs(g - w).max() <= 1e-5 * scale, (name, n, at)
                compared += 1
    assert compared > 0 or not ex.programs.local_segments
    print("loss", part.sums.get("llm.loss_sum", 0.0) * scales["llm"])
    ex.close()
