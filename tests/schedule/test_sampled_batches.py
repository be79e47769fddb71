"""Global batches that plans are chosen and judged by."""

import numpy as np
import pytest

from dflop_jax.records import Load
from dflop_jax.schedule.sampled_batches import DRIFT, drifted_batches, sample_batches

LOADS = [Load({"vision": (256,) * n, "llm": (10 * n + 20 * (n % 3) + 1,)}) for n in range(40)]
MODULES = ("vision", "llm")


def mean(batches, module):
    return np.mean([load.tokens(module) for b in batches for load in b])


@pytest.mark.parametrize("loads", [LOADS, LOADS[:1], [Load({"llm": (7,)})]])
def test_sampled_batches_depend_on_the_seed(loads):
    for draw in (
        lambda seed: sample_batches(loads, 8, 3, seed),
        lambda seed: drifted_batches(loads, MODULES, 8, 3, seed),
    ):
        batches = draw(0)
        assert [len(b) for b in batches] == [8, 8, 8]
        assert batches == draw(0)
        assert all(load in loads for b in batches for load in b)
        assert (draw(1) != batches) == (len(loads) > 1)
    assert drifted_batches(loads, MODULES, 8, 0) == []


def test_drifted_batches_alternate_in_direction():
    batches = drifted_batches(LOADS, MODULES, 4000, 20)
    for module in MODULES:
        each = np.array([load.tokens(module) for load in LOADS])
        moved = np.array([(mean([b], module) - each.mean()) / each.std() for b in batches])
        assert (np.abs(moved) < 3 * DRIFT).all()
        assert np.abs(moved).max() > DRIFT / 2
        assert (moved[::2] * moved[1::2]).mean() < 0  # the other way in every second
        assert abs(moved.mean()) < DRIFT / 4
