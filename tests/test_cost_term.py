"""A made-up cost term: a module that spends FLOPs on every piece, whatever its tokens.

Two facts make it, a line in `CONTENT` and what the module says; all prices, groups and balancing
follow. On two data ranks one long piece and eight short ones are balanced by pairs of tokens as one
against eight, by their number as four against five.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.plan.predict import simulate
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.volume import ROOM, group_content, volume_of
from dflop_jax.profile.efficiency import Efficiency
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import (
    BACKWARD,
    CONTENT,
    Bucket,
    Layout,
    Load,
    Plan,
    ProgramId,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    by_feature,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import Correction, corrected

from .rows import rows_of
from .small import Text

SHAPE, LAYERS = Shape(2, 128), 3
LENGTHS = (60, *[7] * 8)
LOADS = [Load({"llm": (n,)}) for n in LENGTHS]
PAIR, PIECE = {"pair": 1e6}, {"piece": 1e12}  # FLOPs of a layer
GPU = find_hardware("a100-80")
PLAN = Plan(
    "dflop",
    Layout(
        (SubmeshPlan("llm", 0, 1, 2, 1),),
        (SegmentPlan("llm", "llm", 0, LAYERS, "llm", True, True),),
        (Bucket((("llm", SHAPE),)),),
    ),
    Scheduling(work_budget=400),
)


@dataclass(frozen=True)
class Spending(Text):
    """Text whose attention kernel spends FLOPs on pairs, and on pieces."""

    pair_flops: float = 0.0
    piece_flops: float = 0.0


@pytest.fixture
def profile_of(monkeypatch):
    """Profiles of a module that spends these FLOPs on content, by feature, where pieces count."""
    monkeypatch.setitem(CONTENT, "piece", np.ones_like)

    def profile(flops):
        module = Spending(LAYERS, **{f"{name}_flops": n for name, n in flops.items()})
        model = SimpleNamespace(modules={"llm": module}, edges=(), piece_tokens={})
        computed = roofline_profile(model, GPU, {"llm": [SHAPE]}, [1], n_devices=2)
        return dataclasses.replace(computed, hardware=None)  # nothing takes time but programs

    return profile


def unit_s(flops: float) -> float:
    """Seconds of a unit of content in all layers, forward and backward, which takes 2.5 times the
    FLOPs."""
    e = Efficiency()
    forward_s = LAYERS * flops / GPU.peak_flops("float32") / e.attention
    return forward_s * (1 + 2.5 * e.attention / e.attention_back)


def test_it_has_a_price_and_is_in_groups_steps_and_bounds(profile_of):
    profile = profile_of(PAIR | PIECE)
    prices = plan_prices(PLAN.layout, profile)
    price = prices.programs[ProgramId("llm", SHAPE, BACKWARD)]
    want = by_feature({"pair": unit_s(PAIR["pair"]), "piece": unit_s(PIECE["piece"])})
    assert price.content_s == pytest.approx(want)
    twice = corrected(prices, Correction({f"llm/{SHAPE.name}/backward": (np.log(2),) * 9}))
    assert twice.programs[ProgramId("llm", SHAPE, BACKWARD)].content_s == pytest.approx(
        [2 * s for s in want]
    )
    schedule = schedule_batch(LOADS, PLAN, prices, ["llm"])
    (group,) = schedule.groups
    ranks = [[LENGTHS[p] for row in rank for p in row] for rank in rows_of(group, 2)[0]]
    most = [max(sum(n * n for n in r) for r in ranks), max(map(len, ranks))]
    assert group.content == tuple(most)
    step_s = price.static_s + want[0] * most[0] + want[1] * most[1]
    assert schedule.makespan_s == pytest.approx(step_s)
    assert simulate(PLAN, [LOADS], profile).makespan_s == pytest.approx(step_s)
    bound_s = price.static_s + want[0] * 60 * 60 + want[1] * 5  # the longest piece, half of all
    assert schedule.lower_bound_s == pytest.approx(bound_s)


def test_the_scheduler_balances_it(profile_of):
    def pieces(flops):
        prices = plan_prices(PLAN.layout, profile_of(flops))
        schedule = schedule_batch(LOADS, PLAN, prices, ["llm"])
        (group,) = schedule.groups
        return group.content[1], schedule.status

    assert pieces(PAIR) == (8, "optimal")
    assert pieces(PIECE) == (5, "optimal")
    assert pieces(PAIR | PIECE)[0] == 5  # a piece costs as much as a million pairs


def test_the_planner_expects_it(profile_of):
    profile_of({})
    volume = volume_of("llm", LOADS, [LOADS], 18, counts_pieces=False)
    assert volume.content == (2 * sum(n * n for n in LENGTHS), 18)
    assert group_content(volume, np.array([3]), np.array([2]))[1] == np.ceil(18 * ROOM / 6)


def test_all_else_is_as_without_it(profile_of):
    """A feature that no module spends on changes no price."""
    with_it = profile_of(PAIR)
    del CONTENT["piece"]
    module = dataclasses.replace(Spending(LAYERS), pair_flops=PAIR["pair"])
    model = SimpleNamespace(modules={"llm": module}, edges=(), piece_tokens={})
    without = roofline_profile(model, GPU, {"llm": [SHAPE]}, [1], n_devices=2)
    assert with_it.timings == without.timings
