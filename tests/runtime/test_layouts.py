"""A run goes on under another layout: other segments, rounds, ZeRO degrees and data ranks; and what
the degrees hold on a device."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import param_structs, state_zero_specs
from dflop_jax.train.optimizer import make_optimizer
from tests.checkpoint.checkpoint_cases import reader_of, save, saver_of
from tests.mixed import Mixed
from tests.small import Small

from . import plain
from .test_gradients import HYBRID, NANO, ODD
from .test_update import Half

TRAIN = TrainConfig(steps=20, warmup_steps=0, learning_rate=1e-2)
# Layouts of the LLM: ((first, stage, data, model), ZeRO degree and devices of a block, options).
ALONE = (0, 1, 1, 1), 1, {}
# On 6, 5 and 4 ranks, which divide different dims of the parameters, and few.
DEGREES = [((0, 1, 6, 1), 3, {}), ((0, 1, 5, 1), 1, {}), ((0, 1, 4, 1), (2, 2), {})]
# name -> (model, optimizer, layouts of the first run and of those that go on)
CASES = {
    "degrees": (Small(), "adamw", DEGREES),
    "segments": (ODD, "adamw", [ALONE, ((0, 1, 1, 1), 1, {"llm_segments": 4})]),
    "degrees under lion": (Small(), "lion", DEGREES),
    "rounds": (
        Mixed(tied=False, pattern="mgmgmgmg"), "adamw",
        [((0, 1, 1, 1), 1, {"group_size": 2}), ((0, 2, 1, 1), 1, {"rounds": 2, "group_size": 2})],
    ),
    "delta nets": (HYBRID, "adamw", [ALONE, ((0, 1, 1, 1), 1, {"llm_segments": 3})]),
}  # fmt: skip


@pytest.fixture
def make_executor():
    made = []

    def make(m, train, llm, degree, options):
        plan = plain.plan_of(m, None, llm, bucket=(0, 96), **options)
        plan = plain.with_zero(plan, llm=degree)
        made.append(Executor(m, plan, make_optimizer(train), clip_norm=1.0))
        made[-1].init(0)
        return made[-1]

    yield make
    for ex in made:
        ex.close()


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("m, optimizer, layouts", CASES.values(), ids=CASES)
def test_a_run_goes_on_under_another_layout_and_back(
    m, optimizer, layouts, make_executor, tmp_path
):
    """The run that did not change its layout goes on bit for bit."""
    samples = plain.random_samples(m, 8, 5, max_tiles=0)
    train = dataclasses.replace(TRAIN, optimizer=optimizer)
    executors = [make_executor(m, train, *layout) for layout in layouts]
    savers = [saver_of(ex, tmp_path / str(i)) for i, ex in enumerate(executors)]
    for ex in executors:
        ex.compile()
    first = executors[0]
    before = plain.losses_of(first, samples, 0, 2)
    save(savers[0], 2)
    want = plain.losses_of(first, samples, 2, 2)
    assert max(want) < max(before)
    for ex, saver in zip(executors[1:], savers[1:], strict=True):
        saver.restore(reader_of(savers[0], 2))
        save(saver, 2)
        assert plain.losses_of(ex, samples, 2, 2) == pytest.approx(want, rel=1e-5)
        savers[0].restore(reader_of(saver, 2))
        assert plain.losses_of(first, samples, 2, 2) == want


def test_an_average_of_the_parameters_is_kept_evaluated_and_resharded(make_executor, tmp_path):
    """Against one by hand in float64; of bfloat16 programs it follows the masters."""
    train = dataclasses.replace(TRAIN, ema=0.75, optimizer="lion", learning_rate=3e-3)
    half = Half(tied=False)
    samples = plain.random_samples(half, 8, 5, max_tiles=0)
    split = make_executor(half, train, (0, 1, 3, 1), 3, {})
    other = make_executor(half, train, (0, 1, 2, 1), 1, {})

    def whole(ex, tree):
        return jax.tree.map(plain.whole_of, state_zero_specs(ex.programs.segments["llm"]), tree)

    for ex in (split, other):
        ex.compile()
    want = jax.tree.map(np.float64, whole(split, split.state.masters["llm"]))
    for step in range(3):
        plain.losses_of(split, samples, step, 1)
        now = whole(split, split.state.masters["llm"])
        want = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, want, now)
    plain.losses_of(split, samples, 3, 1, norm_limit=0.0)  # a skipped step leaves the average
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
    jax.tree.map(lambda r, e: np.testing.assert_array_equal(r, e.astype(r.dtype)), read, average)
    assert other.state.params["llm"] is before
    losses = [plain.losses_of(ex, samples, 3, 1) for ex in (split, other)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def device_bytes(tree):
    """Bytes of live arrays on the first device."""
    first = jax.devices()[0]
    shards = (s for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == first)
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize("dtype, item", [("float32", 4), ("bfloat16", 2)])
def test_a_degree_says_what_a_device_holds(make_executor, dtype, item):
    """On 3 ranks, which divide every matrix's width, and no bias of 8."""
    decoder = dataclasses.replace(NANO.size.decoder, width=24, n_heads=3, n_kv_heads=1)
    size = dataclasses.replace(NANO.size, decoder=decoder)
    m = dataclasses.replace(NANO, size=size, dtype=jax.numpy.dtype(dtype))
    held, kinds = {}, ("params", "masters", "opt_state", "grads")
    for zero in (1, 2, 3):
        ex = make_executor(m, TRAIN, (0, 1, 3, 1), zero, {})
        held[zero] = {k: device_bytes(getattr(ex.state, k)) for k in kinds}
    n_whole = sum(a.size for a in jax.tree.leaves(param_structs(ex.programs.segments["llm"])))
    # Of 4 layers' biases of queries, keys and values: 24, 8 and 8, which a third of takes 3 of.
    n_split = (n_whole - 4 * (8 + 8)) // 3 + 4 * (3 + 3)
    counters = held[1]["opt_state"] - 8 * n_split
    assert 0 < counters < 100
    for zero, found in held.items():
        assert found["params"] == item * (n_split if zero == 3 else n_whole)
        assert found["masters"] == (0 if item == 4 else 4 * n_split)
        assert found["opt_state"] == 8 * n_split + counters
        assert found["grads"] == 4 * (n_split if zero >= 2 else n_whole)
