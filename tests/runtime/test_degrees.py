"""What the degrees of ZeRO hold on a device, and an average that changes degree."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import param_structs, state_zero_specs
from dflop_jax.train.optimizer import make_optimizer
from models.llava import build

from ..checkpoint.checkpoint_cases import reader_of, save, saver_of
from . import plain
from .test_kinds import Half

TRAIN = TrainConfig(steps=20, warmup_steps=0, learning_rate=1e-2)
NANO = build("nano")
SAMPLES = plain.random_samples(NANO, 8, 5, max_tiles=0)


def executor(zero, data, *, block=0, dtype="float32", size=NANO.size, m=None, train=TRAIN):
    m = m or dataclasses.replace(NANO, size=size, dtype=jax.numpy.dtype(dtype))
    plan = plain.plan_of(m, None, (0, 1, data, 1), bucket=(0, 96))
    plan = plain.with_zero(plan, llm=(zero, block))
    return Executor(m, plan, make_optimizer(train), clip_norm=1.0)


def steps(ex, first, n):
    return plain.losses_of(ex, SAMPLES, first, n)


def whole(ex, tree):
    cuts = state_zero_specs(ex.programs.segments["llm"])
    return jax.tree.map(plain.whole_of, cuts, tree)


def test_an_average_of_the_parameters_is_kept_evaluated_and_resharded(tmp_path):
    """Against one by hand in float64; of bfloat16 programs it follows the masters."""
    train = dataclasses.replace(TRAIN, ema=0.75, optimizer="lion", learning_rate=3e-3)
    half = Half(tied=False, pattern="mg")
    split, other = (executor(*d, m=half, train=train) for d in ((3, 3), (1, 2)))
    try:
        for ex in (split, other):
            ex.init(0)
            ex.compile()
        want = jax.tree.map(np.float64, whole(split, split.state.masters["llm"]))
        for step in range(3):
            steps(split, step, 1)
            now = whole(split, split.state.masters["llm"])
            want = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, want, now)
        average = whole(split, split.state.opt_state["llm"]["ema"])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), average, want)
        assert {a.dtype.name for a in jax.tree.leaves(average)} == {"float32"}
        saver = saver_of(split, tmp_path)
        save(saver, 3)
        saver_of(other, tmp_path).restore(reader_of(saver, 3))
        again = whole(other, other.state.opt_state["llm"]["ema"])
        jax.tree.map(np.testing.assert_array_equal, again, average)
        before = other.state.params["llm"]
        with other.averaged():
            read = jax.tree.map(np.asarray, other.state.params["llm"])
        jax.tree.map(
            lambda r, e: np.testing.assert_array_equal(r, e.astype(r.dtype)), read, average
        )
        assert other.state.params["llm"] is before
        assert steps(split, 3, 1) == pytest.approx(steps(other, 3, 1), rel=2e-2)
    finally:
        for ex in (split, other):
            ex.close()


def device_bytes(tree):
    """Bytes of live arrays on the first device."""
    first = jax.devices()[0]
    shards = (s for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == first)
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize("dtype, item", [("float32", 4), ("bfloat16", 2)])
def test_a_degree_says_what_a_device_holds(dtype, item):
    """On 3 ranks, which divide every matrix's width, and no bias of 8."""
    decoder = dataclasses.replace(NANO.size.decoder, width=24, n_heads=3, n_kv_heads=1)
    size = dataclasses.replace(NANO.size, decoder=decoder)
    held = {}
    for zero in (1, 2, 3):
        ex = executor(zero, 3, dtype=dtype, size=size)
        ex.init(0)
        held[zero] = {k: device_bytes(getattr(ex.state, k))
                      for k in ("params", "masters", "opt_state", "grads")}  # fmt: skip
        structs = param_structs(ex.programs.segments["llm"])
        ex.close()
    sizes = {jax.tree_util.keystr(path): a.size
             for path, a in jax.tree_util.tree_leaves_with_path(structs)}  # fmt: skip
    n_whole = sum(sizes.values())
    # Of 4 layers' biases of queries, keys and values: 24, 8 and 8, which a third of takes 3 of.
    assert sum(n for name, n in sizes.items() if "bias" in name) == 4 * (24 + 8 + 8)
    n_split = (n_whole - 4 * (8 + 8)) // 3 + 4 * (3 + 3)
    counters = held[1]["opt_state"] - 8 * n_split
    assert 0 < counters < 100
    for zero, found in held.items():
        assert found["params"] == item * (n_split if zero == 3 else n_whole)
        assert found["masters"] == (0 if item == 4 else 4 * n_split)
        assert found["opt_state"] == 8 * n_split + counters
        assert found["grads"] == 4 * (n_split if zero >= 2 else n_whole)
