"""The lookahead that a plan gets at a glance: what suits it and memory holds."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.plan.evaluate import LOOKAHEADS
from dflop_jax.plan.search import evaluator_of
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.schedule import quick_schedule

from .cases import BATCH, CONFIG, data_profile, model_profile, run


@pytest.mark.parametrize("vision, pays", [(0.3, False), (3.0, True)])
def test_plans_look_as_far_ahead_as_pays(vision, pays):
    """Against schedules with every lookahead: one is not worth memory for half a percent."""
    profile = model_profile(vision)
    plan = run("dflop", 4, profile=profile, refine=False).plan.with_scheduling(lookahead=0)
    config = replace(CONFIG, drift=0.0)

    def evaluator(memory_bytes):
        return evaluator_of(profile, data_profile(), SearchSpec(4, BATCH, config, memory_bytes))

    free = evaluator(0.0)
    names = free.rules.trainable(plan.layout)

    def mean_s(lookahead):
        ahead, prices = plan.with_scheduling(lookahead=lookahead), free.prices(plan.layout)
        batches = free.unseen[: max(2, len(free.unseen) // 2)]
        each = [quick_schedule(b, ahead, prices, names, 100).makespan_s for b in batches]
        return float(np.mean(each))

    without_s = mean_s(0)
    least_s = min(map(mean_s, LOOKAHEADS))
    assert (least_s < 0.995 * without_s) == pays
    chosen = free.with_lookahead(plan).scheduling.lookahead
    assert mean_s(chosen) <= 1.005 * least_s
    assert (chosen > 0) == pays
    least_bytes = min(free.most_bytes(plan.with_scheduling(lookahead=n)) for n in LOOKAHEADS)
    assert evaluator(least_bytes - 1).with_lookahead(plan) == plan
