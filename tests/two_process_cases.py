"""What each process of a `ProcessPool` does: messages, and gradients of plans over processes."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

from dflop_jax.distributed.initialize import SHUTDOWN_TIMEOUT_S
from dflop_jax.distributed.messages import ProcessGroup, connection
from dflop_jax.runtime import compiling
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import state_zero_specs
from tests.runtime import plain
from tests.runtime.move_cases import check_move, fill
from tests.runtime.test_gradients import N, chunked, keep_reduced
from tests.small import Small

JOBS_OF = compiling.compile_jobs
plan_of = partial(plain.plan_of, bucket=(36, 240))
APART = "a process each, dp 4 and tp 2 x dp 2"
TUNED = "both on both, compiled by one process as on GPUs"
# Layouts of two processes of 4 devices each. All but the first one use the first device of each
# process: collectives of several CPU devices of each process could wait for each other.
PAIR_PLANS = {
    APART: partial(plan_of, vision=(0, 1, 4, 1), llm=(4, 1, 2, 2)),
    TUNED: lambda m: plain.with_zero(plan_of(m, (0, 1, 2, 1), (0, 1, 2, 1)), vision=2, llm=3),
    "tied across processes": partial(
        plan_of, vision=(0, 1, 1, 1), llm=(0, 1, 1, 1), llm_segments=2
    ),
    "two groups read one": partial(
        plan_of, vision=(0, 1, 1, 1), llm=(1, 1, 1, 1), fan_in=2, divided_readers=("llm",)
    ),
    "a loop of stages": partial(
        plan_of, vision=(0, 1, 1, 1), llm=(0, 2, 1, 1), group_size=4, rounds=2
    ),
}
# Of four processes of one device each.
FOUR_PLANS = {
    "chunks of both on two ranks of two": lambda m: chunked(
        m, 2, {"vision": 1, "llm": 2}, 2, data=2
    ),
    "tensor ranks of two data ranks that share": lambda m: plain.with_zero(
        plan_of(m, (0, 1, 2, 2), (0, 1, 2, 2)), vision=2, llm=3
    ),
    "blocks of two on four": lambda m: plain.with_zero(
        plan_of(m, (0, 1, 4, 1), (0, 1, 4, 1)), vision=(2, 2), llm=(3, 2)
    ),
}


def gradients(name: str, file: str) -> dict[str, Any]:
    """Compare this process's shards of a layout's gradients with the plain ones in a file; returns
    the process's part of the loss, and its programs in the order in which it lowered them."""
    m, want = Small(), np.load(file)
    plan = (PAIR_PLANS | FOUR_PLANS)[name](m)
    samples = plain.random_samples(m, N, 1)
    schedule = plain.random_schedule(plan, samples, 2, 5, text_only=(0,))
    firsts = {d.process_index: d for d in reversed(jax.devices())}
    devices = None if name == APART else [firsts[p] for p in sorted(firsts)]
    ex = Executor(m, plan, optax.sgd(1.0), devices=devices)
    ex.init(0)
    lowered: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "autotunes", lambda segments: name == TUNED)
        patch.setattr(compiling, "compile_jobs", partial(recorded_jobs, lowered))
        ex.compile(sync=lambda: multihost_utils.sync_global_devices("compiled"))
    ex.calibrate(repeats=0)
    arrays = plain.pack(m, plan, schedule, samples)
    scales = plain.scales_of(arrays)
    captured = keep_reduced(ex, set(ex.trainable) & ex.programs.local_segments)
    result = ex.run_step(schedule, arrays, scales).local_result()
    n_compared = sum(
        compare_shards(ex.programs.segments[n], tree, want) for n, tree in captured.items()
    )
    assert n_compared > 0 or not ex.programs.local_segments
    ex.close()
    return {"loss": result.sums.get("llm.loss_sum", 0.0) * scales["llm"], "lowered": lowered}


def recorded_jobs(lowered: list[str], programs):
    """The programs of a layout, whose keys are noted in the order in which they are lowered."""

    def job(key, lower):
        lowered.append(str(key))
        return lower()

    return {key: partial(job, key, lower) for key, lower in JOBS_OF(programs).items()}


def compare_shards(segment, tree, want) -> int:
    """Compare this process's shards of a segment's gradients; returns how many there are."""
    zero_specs, n_compared = state_zero_specs(segment), 0
    specs = jax.tree.leaves({p: zero_specs[p] for p in tree})
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs, strict=True):
        key = jax.tree_util.keystr(path)
        full = want[f"['{segment.plan.module}']{key}"]
        scale = np.abs(full).max()
        if key.startswith("['layers']"):
            full = full[list(segment.layer_order)]
        full = spec.to_stored(full)
        for shard in leaf.addressable_shards:
            difference = np.abs(np.asarray(shard.data) - full[shard.index]).max()
            assert difference <= 1e-5 * scale, (segment.name, key)
            n_compared += 1
    return n_compared


def moves(folder: str) -> list[int]:
    """Move a state from a process each to both, and there again; returns the bytes sent of each."""
    m, peers = Small(), process_group()
    firsts = {d.process_index: d for d in reversed(jax.devices())}
    devices = [firsts[p] for p in sorted(firsts)]
    apart, both = plan_of(m, (0, 1, 1, 1), (1, 1, 1, 1)), PAIR_PLANS[TUNED](m)
    tx = optax.adam(1e-3)
    source, target, other = (Executor(m, plan, tx, devices=devices) for plan in (apart, both, both))
    fill(source, 1)
    sent = [
        check_move(before, after, Path(folder, str(i)), peers).sent_bytes
        for i, (before, after) in enumerate([(source, target), (target, other)])
    ]
    for ex in (source, target, other):
        ex.close()
    return sent


# ---- messages ----

SIZES = [0, 1, 1000, 10_000_000]  # bytes


def process_group() -> ProcessGroup:
    joined = connection()
    assert joined is not None
    return ProcessGroup(joined.process_id, joined.num_processes, joined.client)


def messages() -> dict[str, Any]:
    """What this process receives, and what is left with the service."""
    joined, group = connection(), process_group()
    assert joined is not None
    found: dict[str, Any] = {"process": group.process_index}
    values = [os.urandom(n) for n in SIZES]
    found["sizes"] = [
        len(group.broadcast("sizes", v if group.is_primary else None, bytes)) for v in values
    ]
    found["gathered"] = [group.gather("same", str(group.process_index) * 2, str) for _ in range(3)]
    found["all"] = group.all_gather("all", group.process_index + 0.5, float)
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while not (group.is_primary or group.clock_offset_s or time.monotonic() > deadline):
        time.sleep(0.05)
    group.barrier("measured")
    time.sleep(0.2)  # the other has read and deleted the last one
    kept = joined.client.key_value_dir_get_bytes("dflop")
    sent = [k for k, _ in kept if "/broadcast/" in k or "/gather/" in k]
    found["left"] = [k for k in sent if "/close/" not in k]  # the other process may close already
    found["offset_s"] = group.clock_offset_s
    group.close()
    return found
