"""Gated delta nets and gated attention under the engine: segments and tensor ranks compute what one
device does."""

import functools
from dataclasses import dataclass, replace

import pytest

from models.composed import Composed
from models.llava import build
from models.qwen3_5_decoder import HybridModule
from models.qwen3_5_sizes import QWEN3_5

from . import plain
from .test_gradients import assert_trees_close, grads_of, oracle

SIZE = replace(QWEN3_5["qwen3.5-nano"].decoder, mrope_sections=())
ALONE = (0, 1, 1, 1)
# A fresh net's states are small beside their rounding, of which its norm makes more.
SHARE = 3e-4


@dataclass(frozen=True)
class Hybrid(Composed):
    """LLaVA's tower before the decoder of Qwen3.5."""

    @property
    def _plain(self):
        return {**super()._plain, "llm": HybridModule(SIZE, self.dtype)}


NANO = build("nano")
MODEL = Hybrid(NANO.size, NANO.dtype)
# name -> (LLM (first, stage, data, model), options, ZeRO degree)
CASES = {
    "tensor ranks of two segments": ((0, 1, 1, 2), {"llm_segments": 2}, 1),
    "2 x 2 ranks": ((2, 1, 2, 2), {}, 3),
}


@functools.cache
def wanted():
    return oracle(MODEL)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_plain_models(name):
    llm, options, zero = CASES[name]
    samples, _, want_loss, want = wanted()
    plan = plain.plan_of(MODEL, ALONE, llm, bucket=(36, 480), **options)
    plan = plain.with_zero(plan, llm=zero)
    schedule = plain.random_schedule(plan, samples, 1, 5)
    loss, grads, _, _ = grads_of(MODEL, plan, samples, schedule)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads, want, SHARE)
