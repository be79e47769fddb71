"""A made-up cost term: a module that spends FLOPs on every piece, whatever its tokens.

The module alone makes it, by how much a piece has and what a unit takes; all prices, groups and
balancing follow. On two data ranks one long piece and eight short ones are balanced by pairs of
tokens as one against eight, by their number as four against five.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from dflop_jax.data.content import content_counter
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.evaluate import simulate
from dflop_jax.plan.module_tables import HEADROOM, group_content, module_volume
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.profile.kernels import Efficiency
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import (
    BACKWARD,
    Bucket,
    DataProfile,
    Layout,
    Load,
    Plan,
    Profile,
    ProgramId,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import Correction, correct_prices

from .rows import rows_of
from .small import Text

SHAPE, LAYERS = Shape(2, 128), 3
LENGTHS = (60, *[7] * 8)
PAIR, PIECE = {"pair": 1e6}, {"piece": 1e12}  # FLOPs of a layer
GPU = find_hardware("a100-80")
ALL_LAYERS = SegmentPlan("llm", "llm", 0, LAYERS, "llm", True, True)
LAYOUT = Layout((SubmeshPlan("llm", 0, 1, 2, 1),), (ALL_LAYERS,), (Bucket((("llm", SHAPE),)),))
PLAN = Plan("dflop", LAYOUT, Scheduling(work_budget=400))


@dataclass(frozen=True)
class Spending(Text):
    """Text whose attention kernel spends FLOPs on pieces, and on pairs."""

    spent: tuple[tuple[str, float], ...] = ()
    skips = True

    @property
    def attention_flops(self):
        return dict(self.spent)

    def content(self, tokens, placed):
        assert not any(placed.values())
        return {"piece": int(tokens > 0), "pair": tokens**2}


@dataclass(frozen=True)
class Model:
    """Such text alone."""

    spent: tuple[tuple[str, float], ...]
    edges = ()
    piece_tokens = {}

    @property
    def modules(self):
        return {"llm": Spending(LAYERS, spent=self.spent)}


LOADS = [content_counter(Model(()))(Load({"llm": (n,)})) for n in LENGTHS]


def profile_of(flops):
    """The profile of a module that spends these FLOPs on content, by feature."""
    model = Model(tuple(flops.items()))
    computed = roofline_profile(model, GPU, {"llm": [SHAPE]}, [1], n_devices=2)
    return dataclasses.replace(computed, hardware=None)  # nothing takes time but programs


def unit_s(flops: float) -> float:
    """Seconds of a unit of content in all layers, forward and backward, which takes 3.5 times the
    FLOPs."""
    e = Efficiency()
    forward_s = LAYERS * flops / GPU.peak_flops("float32") / e.attention
    return forward_s * (1 + 3.5 * e.attention / e.attention_back)


def test_it_has_a_price_and_is_in_groups_steps_and_bounds():
    profile = profile_of(PAIR | PIECE)
    prices = layout_prices(PLAN.layout, CostModel(profile))
    price = prices.programs[ProgramId("llm", SHAPE, BACKWARD)]
    want = unit_s(PIECE["piece"]), unit_s(PAIR["pair"])
    assert price.content_s == pytest.approx(want)
    twice = correct_prices(prices, Correction({f"llm/{SHAPE.name}/backward": (np.log(2),) * 9}))
    got = twice.programs[ProgramId("llm", SHAPE, BACKWARD)].content_s
    assert got == pytest.approx([2 * s for s in want])
    schedule = schedule_batch(LOADS, PLAN, prices, ["llm"])
    (group,) = schedule.groups
    ranks = [[LENGTHS[p] for row in rank for p in row] for rank in rows_of(group, 2)[0]]
    assert group.content == (max(map(len, ranks)), max(sum(n * n for n in r) for r in ranks))
    step_s = price.static_s + np.dot(want, group.content)
    assert schedule.makespan_s == pytest.approx(step_s)
    assert simulate(PLAN, [LOADS], profile).makespan_s == pytest.approx(step_s)
    # The longest piece, half of all.
    bound_s = price.static_s + np.dot(want, (5, 60 * 60))
    assert schedule.lower_bound_s == pytest.approx(bound_s)


def test_the_scheduler_balances_it():
    def pieces(flops):
        prices = layout_prices(PLAN.layout, CostModel(profile_of(flops)))
        schedule = schedule_batch(LOADS, PLAN, prices, ["llm"])
        (group,) = schedule.groups
        return group.content[0], schedule.status

    assert pieces(PAIR) == (8, "optimal")
    assert pieces(PIECE) == (5, "optimal")
    assert pieces(PAIR | PIECE)[0] == 5  # a piece costs as much as a million pairs


def test_the_planner_expects_it():
    volume = module_volume("llm", LOADS, [LOADS], 18, counts_pieces=False)
    assert volume.content == (18, 2 * sum(n * n for n in LENGTHS))
    of_group = group_content(volume, np.array([3]), np.array([2]))
    assert of_group[0] == np.ceil(18 * HEADROOM / 6)


def test_samples_and_timings_of_other_features_are_refused():
    model, said = profile_of(PIECE), "profile again"
    data = DataProfile("d", 1, (Load({"llm": (7,)}),))
    with pytest.raises(ValueError, match=f"content of 'llm' .2 features.*{said}"):
        Profile(model, data)
    with pytest.raises(ValueError, match=f"lacks features .'piece'.*{said}"):
        dataclasses.replace(model, content={})
    assert Profile(model, dataclasses.replace(data, loads=tuple(LOADS))).data.loads[0] == LOADS[0]
