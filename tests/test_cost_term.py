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

from dflop_jax.contract import content_flops_of
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
from dflop_jax.records.features import WINDOWS, seen
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
    most = dict(zip(CONTENT, group.content, strict=True))
    assert most["pair"] == max(sum(n * n for n in r) for r in ranks)
    assert most["piece"] == max(map(len, ranks))
    step_s = price.static_s + np.dot(want, group.content)
    assert schedule.makespan_s == pytest.approx(step_s)
    assert simulate(PLAN, [LOADS], profile).makespan_s == pytest.approx(step_s)
    # The longest piece, half of all.
    bound_s = price.static_s + np.dot(want, by_feature({"pair": 60 * 60, "piece": 5}))
    assert schedule.lower_bound_s == pytest.approx(bound_s)


def test_the_scheduler_balances_it(profile_of):
    def pieces(flops):
        prices = plan_prices(PLAN.layout, profile_of(flops))
        schedule = schedule_batch(LOADS, PLAN, prices, ["llm"])
        (group,) = schedule.groups
        return dict(zip(CONTENT, group.content, strict=True))["piece"], schedule.status

    assert pieces(PAIR) == (8, "optimal")
    assert pieces(PIECE) == (5, "optimal")
    assert pieces(PAIR | PIECE)[0] == 5  # a piece costs as much as a million pairs


def test_the_planner_expects_it(profile_of):
    profile_of({})
    volume = volume_of("llm", LOADS, [LOADS], 18, counts_pieces=False)
    content = dict(zip(CONTENT, volume.content, strict=True))
    assert (content["pair"], content["piece"]) == (2 * sum(n * n for n in LENGTHS), 18)
    of_group = group_content(volume, np.array([3]), np.array([2]))
    assert of_group[[*CONTENT].index("piece")] == np.ceil(18 * ROOM / 6)


def test_all_else_is_as_without_it(profile_of):
    """A feature that no module spends on changes no price."""
    with_it = profile_of(PAIR)
    del CONTENT["piece"]
    module = dataclasses.replace(Spending(LAYERS), pair_flops=PAIR["pair"])
    model = SimpleNamespace(modules={"llm": module}, edges=(), piece_tokens={})
    without = roofline_profile(model, GPU, {"llm": [SHAPE]}, [1], n_devices=2)
    assert with_it.timings == without.timings


@dataclass(frozen=True)
class Windowed(Spending):
    """Text whose attention sees so many tokens at most."""

    window: int = 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_priced_by_what_is_seen(window):
    """In groups, too: a piece four windows long costs what its tokens see, one by one."""
    for n in (0, 1, window - 1, window, window + 1, 4 * window):
        assert seen(n, window) == sum(min(i + 1, window) for i in range(n))
    shape = Shape(1, 4 * window)
    flops = PAIR["pair"]
    module = Windowed(LAYERS, pair_flops=flops, window=window)
    model = SimpleNamespace(modules={"llm": module}, edges=(), piece_tokens={})
    profile = roofline_profile(model, GPU, {"llm": [shape]}, [1], n_devices=2)
    layout = dataclasses.replace(PLAN.layout, buckets=(Bucket((("llm", shape),)),))
    price = plan_prices(layout, profile).programs[ProgramId("llm", shape, BACKWARD)]
    want = by_feature({f"seen_in_{window}": unit_s(2 * flops)})
    assert price.content_s == pytest.approx(want)
    loads = [Load({"llm": (4 * window,)})] * 2
    schedule = schedule_batch(loads, dataclasses.replace(PLAN, layout=layout),
                              plan_prices(layout, profile), ["llm"])  # fmt: skip
    step_s = price.static_s + unit_s(2 * flops) * sum(min(i + 1, window) for i in range(4 * window))
    assert sum(price.static_s + np.dot(want, g.content) for g in schedule.groups) == pytest.approx(
        step_s * len(schedule.groups)
    )


def test_another_window_has_no_price_of_its_own():
    flops = {w: content_flops_of(Windowed(LAYERS, pair_flops=1e6, window=w)) for w in (0, 100, 512)}
    assert flops == {0: {"pair": 1e6}, 100: {"pair": 1e6}, 512: {"seen_in_512": 2e6}}
    assert content_flops_of(Windowed(LAYERS, window=512)) == {}
