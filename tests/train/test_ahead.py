"""The plan for fewer processes, searched while others train: by a made-up search."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from dflop_jax import Config, PlanConfig
from dflop_jax.cluster.variables import FEWER_ENV
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.replan import BetterPlan, Question, SearchFacts, better_plan
from dflop_jax.records import PriceList
from dflop_jax.train import ahead
from dflop_jax.train.ahead import PlanAhead
from dflop_jax.train.meta import same_value
from dflop_jax.train.recount import find_plan

from ..plans import NANO, nano_profile

UNDER = {"processes": 4, "devices": 8, "plan.zero": "1"}
FACTS = SearchFacts(
    8, 16, PlanConfig(node=8), 0.0, "auto", "auto", 32, (), (0, 0, 1, 1, 2, 2, 3, 3)
)


class Search:
    """A search that answers when it is told to."""

    begun: list[Search] = []

    def __init__(self, question: Question):
        self.question, self.answer, self.open = question, None, True
        self.begun.append(self)

    def close(self) -> None:
        self.open = False


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Make what searches ahead, of process 0 of four, in a run folder."""
    monkeypatch.setattr(Search, "begun", [])
    monkeypatch.setattr(ahead, "PlanSearch", Search)
    monkeypatch.setattr(ahead, "search_facts", lambda place, profile: FACTS)
    monkeypatch.setattr(ahead, "planned_under", lambda place: dict(UNDER))
    config = dataclasses.replace(Config(), run_dir=str(tmp_path))

    def make(fewer: int, said: list[str], is_hub: bool = True) -> PlanAhead:
        monkeypatch.setenv(FEWER_ENV, str(fewer))
        peers = SimpleNamespace(count=4, is_hub=is_hub)
        place = SimpleNamespace(config=config, peers=peers, devices=[None] * 8)
        return PlanAhead(place, nano_profile(), said.append)

    return make


def test_a_plan_is_searched_once_and_kept(make, tmp_path):
    said: list[str] = []
    one = make(3, said)
    for _ in range(3):
        one.look()
    (search,) = Search.begun
    facts = search.question.facts
    assert search.question.plan is None
    assert (facts.n_devices, facts.config.node) == (6, 6)
    assert facts.processes == (0, 0, 1, 1, 2, 2)
    assert search.question.profile.model.concurrency == 0.75 * nano_profile().model.concurrency
    search.answer = BetterPlan(NANO)
    for _ in range(3):
        one.look()
    assert said == ["the plan for 3 processes is ready"]
    assert not search.open
    under = UNDER | {"processes": 3, "devices": 6}
    known = find_plan(tmp_path, under, same_value)
    assert known is not None
    assert known.plan == NANO
    prices = plan_prices(NANO.layout, search.question.profile.model)
    assert known.prices == PriceList.of(prices)
    # The next start knows it.
    make(3, said).look()
    assert len(Search.begun) == 1


def test_that_nothing_fits_is_said_before_it_matters(make):
    said: list[str] = []
    one = make(2, said)
    one.look()
    Search.begun[0].answer = BetterPlan(why="no plan: nothing fits")
    for _ in range(2):
        one.look()
    assert said == ["with 2 processes the run would not go on: no plan: nothing fits"]


@pytest.mark.parametrize("fewer, is_hub", [(0, True), (3, False)])
def test_nobody_else_searches(make, fewer, is_hub):
    one = make(fewer, [], is_hub)
    one.look()
    one.close()
    assert Search.begun == []


def test_a_search_ends_with_the_run(make):
    one = make(3, [])
    one.look()
    one.close()
    assert not Search.begun[0].open


def test_without_a_plan_the_best_is_the_answer():
    profile = nano_profile()
    question = Question(profile, None, FACTS)
    found = better_plan(question, lambda *_: SimpleNamespace(plan=NANO))
    assert found == BetterPlan(NANO)

    def nothing(*_):
        raise ValueError("nothing fits")

    assert better_plan(question, nothing) == BetterPlan(why="no plan: nothing fits")
