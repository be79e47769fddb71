"""What backward computes again changes no gradient, and takes less memory."""

import dataclasses

import jax
import numpy as np
import pytest

from dflop_jax.config import Config, TrainConfig
from dflop_jax.pipeline import spmd_loop
from dflop_jax.pipeline.layout import make_segments
from dflop_jax.records import BACKWARD, REMAT, Shape, with_remat
from tests.small import Small

from . import plain
from .test_gradients import NANO, PLANS, assert_trees_close, grads_of, oracle


@pytest.mark.parametrize("remat", ["layers", "dots"])
@pytest.mark.parametrize(
    "m, name",
    [(Small(), "one device"), (NANO, "llm stage 2, dp 2, tp 2 on 8, shared")],
    ids=["small", "nano"],
)
def test_gradients_are_those_of_the_plain_computation(m, name, remat):
    vision, llm, options = PLANS[name]
    samples, _, want_loss, want = oracle(m)
    plan = plain.plan_of(m, vision, llm, bucket=(36, 240), **options)
    schedule = plain.random_schedule(plan, samples, 2, seed=1, text_only=(0,))
    loss, grads, _, _ = grads_of(m, with_remat(plan, remat), samples, schedule)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads, want)


def temp_bytes(remat: str) -> int:
    """Of the LLM's backward: 8 layers, 512 tokens."""
    decoder = dataclasses.replace(NANO.size.decoder, n_layers=8)
    m = dataclasses.replace(NANO, size=dataclasses.replace(NANO.size, decoder=decoder))
    plan = plain.plan_of(m, None, (0, 1, 1, 1))
    segment = make_segments(m, with_remat(plan, remat), jax.devices())["llm"]
    compiled = segment.lower(Shape(1, 512), BACKWARD).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_each_policy_keeps_what_it_says():
    none, dots, layers = (temp_bytes(remat) for remat in ("none", "dots", "layers"))
    assert layers < dots < none
    assert layers < 0.5 * none


def test_the_configuration_knows_the_policies():
    assert tuple(spmd_loop.REMAT) == REMAT
    for remat in ("auto", *REMAT):
        assert Config(train=TrainConfig(remat=remat)).train.remat == remat
    x = np.ones(3, np.float32)
    wraps = spmd_loop.REMAT.values()
    assert all(np.array_equal(wrap(lambda a: a + 1)(x), x + 1) for wrap in wraps)
