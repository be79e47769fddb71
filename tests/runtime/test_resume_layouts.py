"""A run goes on from a checkpoint under another layout: other segments, rounds, ZeRO degrees and
numbers of data ranks."""

import dataclasses

import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.optimizer import make_optimizer
from tests.checkpoint.checkpoint_cases import reader_of, save, saver_of
from tests.mixed import Mixed
from tests.small import Small

from . import plain
from .test_gradients import HYBRID, ODD

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


def make_executor(m, optimizer, llm, degree, options):
    plan = plain.plan_of(m, None, llm, bucket=(0, 96), **options)
    tx = make_optimizer(dataclasses.replace(TRAIN, optimizer=optimizer))
    ex = Executor(m, plain.with_zero(plan, llm=degree), tx, clip_norm=1.0)
    ex.init(0)
    ex.compile()
    return ex


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("m, optimizer, layouts", CASES.values(), ids=CASES)
def test_a_run_goes_on_under_another_layout_and_back(m, optimizer, layouts, tmp_path):
    """The run that did not change its layout goes on bit for bit."""
    samples = plain.random_samples(m, 8, 5, max_tiles=0)
    executors = [make_executor(m, optimizer, *layout) for layout in layouts]
    savers = [saver_of(ex, tmp_path / str(i)) for i, ex in enumerate(executors)]
    try:
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
    finally:
        for ex in executors:
            ex.close()
