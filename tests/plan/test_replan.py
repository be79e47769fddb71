"""The question whether another plan is faster for other samples, and how it travels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from dflop_jax import PlanConfig
from dflop_jax.pipeline.layout import can_join
from dflop_jax.plan import replan
from dflop_jax.plan.predict import simulate
from dflop_jax.plan.replan import BetterPlan, Question, SearchFacts, better_plan
from dflop_jax.plan.search import SearchResult, search_plan
from dflop_jax.records import DataProfile, Predicted, SubmeshPlan

from ..plans import NANO, bucket, load, nano_profile
from ..test_reached import ROOT, exported, imported_by, sources, used

PLAN = NANO.with_layout(buckets=(bucket(32, 256),))
LOADS = tuple(load(2, 40 + i) for i in range(12))
FACTS = SearchFacts(
    2, 4, PlanConfig(policy="dflop", buckets=1, effort="quick", sampled_batches=2),
    0.0, "auto", "auto", 32, (), (),
)  # fmt: skip


def asked(**data) -> Question:
    data = {"source": "d", "n_total": 12, "loads": LOADS, "tail": (load(9, 90),), **data}
    profile = dataclasses.replace(nano_profile(), data=DataProfile(**data))
    return Question(profile, PLAN, FACTS)


def answered(buckets) -> BetterPlan:
    plan = dataclasses.replace(PLAN, predicted=Predicted(1.0)).with_layout(buckets=buckets)
    return better_plan(asked(), lambda *_: SearchResult(plan, (), 0, 0, 0, 0))


def test_a_search_beside_steps_gives_way_to_them(monkeypatch):
    """Before it reads what is asked; here nothing is."""
    done: list[int | str] = []
    lines = SimpleNamespace(readline=lambda: done.append("read") or b"")
    monkeypatch.setattr(replan, "ignore_signals", lambda: None)
    monkeypatch.setattr(replan, "begin", lambda: (lines, None))
    monkeypatch.setattr(replan.os, "nice", done.append)
    replan.main()
    niceness, *rest = done
    assert niceness >= 10
    assert rest == ["read"]


def test_the_same_programs_are_no_other_plan():
    assert answered(PLAN.layout.buckets) == BetterPlan(why="the plan is still the best")


def test_no_plan_at_all():
    def nothing(*_):
        raise ValueError("nothing fits")

    why = "no plan for the samples of late: nothing fits"
    assert better_plan(asked(), nothing) == BetterPlan(why=why)


def test_a_plan_has_room_for_all_that_is_trained_on():
    why = "the best plan leaves out 1 samples that are trained on"
    assert answered((bucket(8, 80),)) == BetterPlan(why=why)
    assert answered((bucket(9, 90),)).why != why


def test_what_it_saves_is_simulated_on_the_latest_batches():
    assert answered((bucket(64, 512),)).why == "the best plan for them is not faster"
    got = answered((bucket(16, 224),))
    batches = [LOADS[4:8], LOADS[8:]]
    now_s, then_s = (
        simulate(p, batches, asked().profile.model).makespan_s for p in (PLAN, got.plan)
    )
    assert got.share == pytest.approx(1 - then_s / now_s)
    assert 0 < got.share < 1


def test_the_search_is_that_of_the_run_and_travels_as_json():
    question = asked()
    again = msgspec.json.decode(msgspec.json.encode(question), type=Question)
    assert again == question
    profile = question.profile
    best = search_plan(profile.model, profile.data, FACTS.spec()).plan
    got = better_plan(again)
    assert got.plan == best
    assert msgspec.json.decode(msgspec.json.encode(got), type=BetterPlan) == got


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("processes", [(0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1)])
def test_devices_that_cannot_join(platform, processes):
    devices = [SimpleNamespace(platform=platform, process_index=p) for p in processes]
    facts = dataclasses.replace(FACTS, processes=processes if platform == "cpu" else ())
    allowed = facts.spec().allowed
    for first in range(4):
        for n in range(1, 5 - first):
            want = can_join(devices[first : first + n])
            assert allowed(SubmeshPlan("m", first, 1, n, 1)) == want


def test_the_child_imports_no_jax():
    trees = sources(ROOT)
    names = exported(trees, ROOT)
    seen = imported_by("dflop_jax.plan.replan", trees)
    assert "dflop_jax.plan.search" in seen
    assert "jax" not in {name.split(".")[0] for m in seen for name in used(m, trees, names)}
