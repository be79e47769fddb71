"""The plan for fewer processes, searched while others train: by a made-up search."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_jax import Config, PlanConfig
from dflop_jax.cluster.variables import FEWER_ENV
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.replan import BetterPlan, Question, SearchFacts, better_plan
from dflop_jax.records import Plan, PriceList
from dflop_jax.train import ahead, programs_ahead
from dflop_jax.train.ahead import PlanAhead
from dflop_jax.train.meta import same_value
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.programs_ahead import ProgramsAhead
from dflop_jax.train.recount import find_plan

from ..cluster.launched import wait_for
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
        peers = SimpleNamespace(count=4, is_hub=is_hub, process=3)
        place = Workplace(config, None, [SimpleNamespace(platform="cpu")] * 8, peers)
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


class Compiling:
    """An executor whose programs are compiled when they are let to."""

    def __init__(self, place: Workplace, plan: Plan):
        self.devices, self.plan = place.devices, plan
        self.thread = threading.get_native_id()
        self.let, self.ended, self.closed = threading.Semaphore(0), False, False

    def compile(self, on_progress: Callable[[int, int], None], known: object) -> None:
        for done in range(3):
            try:
                on_progress(done, 3)
            except BaseException:
                self.ended = True
                raise
            self.let.acquire()

    def close(self) -> None:
        self.closed = True


class Processes:
    """The parts of some processes, of four with two devices each, in programs for three."""

    def __init__(self, folder: Path):
        (folder / "plans").mkdir()
        self.config = dataclasses.replace(Config(), run_dir=str(folder))
        self.plan: Plan | None = None
        self.said: list[str] = []
        self.made: list[Compiling] = []

    def part(self, process: int, platform: str = "cpu") -> ProgramsAhead:
        def make(place: Workplace, plan: Plan) -> Compiling:
            self.made.append(Compiling(place, plan))
            return self.made[-1]

        devices = [SimpleNamespace(platform=platform, id=i) for i in range(8)]
        peers = SimpleNamespace(count=4, is_hub=process == 0, process=process)
        place = Workplace(self.config, None, devices, peers)
        return ProgramsAhead(place, 3, 6, lambda: self.plan, self.said.append, make)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    monkeypatch.setattr(programs_ahead, "LOOK_EVERY_S", 0.0)
    return Processes(tmp_path)


def looked_at(parts: list[ProgramsAhead]) -> None:
    """Look often enough that all that can be seen is."""
    for part in parts * 2:
        part.look()
        if part._thread:
            part._thread.join()


def test_every_process_compiles_what_it_will_be_as_one_of_fewer(processes, monkeypatch):
    gave_way: set[tuple[int, int]] = set()

    def note(kind: int, thread: int, niceness: int) -> None:
        assert kind == os.PRIO_PROCESS
        gave_way.add((thread, niceness))

    monkeypatch.setattr(os, "setpriority", note)
    parts = [processes.part(i) for i in range(4)]
    looked_at(parts)
    assert processes.made == []  # no plan yet
    processes.plan = NANO
    for i, part in enumerate(parts):
        part.look()
        wait_for(lambda i=i: len(processes.made) == min(i + 1, 3))  # the fourth has none
    for made in processes.made:
        assert [d.id for d in made.devices] == list(range(6))
        assert processes.said == []
        made.let.release(3)
        parts[processes.made.index(made)]._thread.join()
    looked_at(parts)
    (said,) = processes.said
    assert said.startswith("the programs for 3 processes are compiled, in ")
    assert all(made.closed and not made.ended for made in processes.made)
    assert gave_way == {(made.thread, 19) for made in processes.made}  # and no other thread
    # The next start has them, those of another plan it has not.
    looked_at([processes.part(i) for i in range(4)])
    assert len(processes.made) == 3
    processes.plan = dataclasses.replace(NANO, layout=dataclasses.replace(NANO.layout, fan_in=7))
    other = processes.part(1)
    other.look()
    wait_for(lambda: len(processes.made) == 4)
    processes.made[-1].let.release(3)
    other.close()


def test_a_run_that_ends_waits_for_one_program(processes):
    processes.plan = NANO
    part = processes.part(0)
    part.look()
    wait_for(lambda: bool(processes.made))
    (made,) = processes.made
    closing = threading.Thread(target=part.close)
    closing.start()
    made.let.release()
    closing.join()
    assert made.ended
    assert made.closed
    assert processes.said == []


def test_on_gpus_nothing_is_compiled_beside_steps(processes):
    processes.plan = NANO
    looked_at([processes.part(0, platform="gpu")])
    assert processes.made == []
