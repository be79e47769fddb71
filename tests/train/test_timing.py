"""Finalists are timed by all processes together, in one order; the chosen one's programs stay."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflop_jax.cluster.peers import Peers
from dflop_jax.pipeline.order import links
from dflop_jax.records import FORWARD, NO_GROUP, REDUCE, Predicted, Prices, SendId, Task
from dflop_jax.train import timing
from dflop_jax.train.timing import Finalists

from ..plans import chain, programs

PLANS = [chain(2, vision=1), chain(3, vision=1), chain(4, vision=2)]


def prices_of(plan, forward_s=1.0):
    sends = {
        SendId(k.source, k.target, shape, FORWARD): 0.25
        for k in links(plan)
        for shape in plan.shapes(plan.segment(k.target).module)
    }
    ends = {Task(s.name, NO_GROUP, REDUCE): 0.5 for s in plan.segments}
    return Prices(programs(plan, forward_s), ends, sends, concurrency=2.0)


# ---- processes, played by threads ----


class FakeExecutor:
    def __init__(self, plan):
        self.plan, self.closed, self.state = plan, False, "begun"

    def init(self, seed):
        self.state = seed

    def close(self):
        self.closed = True


@pytest.fixture
def timed(monkeypatch):
    """(process, plan) of everything that was timed, in order."""
    seen = []

    def compile_and_time(place, ex):
        assert ex.state == 7
        place.peers.barrier(f"compiled {ex.plan.n_devices}")  # as the real one: all take part
        seen.append((place.peers.process, ex.plan))
        fake = SimpleNamespace(executor=ex, n_programs=1)
        fake.prices = lambda profile: replace(prices_of(ex.plan), concurrency=profile.concurrency)
        return fake

    monkeypatch.setattr(timing, "make_executor", lambda place, plan: FakeExecutor(plan))
    monkeypatch.setattr(timing, "compile_and_time", compile_and_time)
    return seen


def finalists(peers, folder, n=3):
    config = SimpleNamespace(
        cache_dir=str(folder / "new"),
        train=SimpleNamespace(seed=7),
        plan=SimpleNamespace(finalists=n),
    )
    trained = SimpleNamespace(frozen=(), rates={"llm": 1e-3})
    place = SimpleNamespace(config=config, trained=trained, peers=peers)
    profile = SimpleNamespace(key="key", concurrency=1.5)
    return Finalists(place, profile, SimpleNamespace(log=lambda text: None))


def run_two(folder, search, n=3):
    """What both processes come to: (plan, its prices, what was taken) each."""
    here, there = socket.socketpair()

    def hub():
        mine = finalists(Peers(0, 2, {1: here}), folder, n)
        plan = search(mine)
        prices = mine.prices(plan)
        mine.choose(plan, prices)
        return plan, prices, mine.take(plan)

    def other():
        mine = finalists(Peers(1, 2, {0: there}), folder, n)
        plan, prices = mine.follow()
        return plan, prices, mine.take(plan)

    with ThreadPoolExecutor(2) as pool:
        return [f.result(20) for f in [pool.submit(hub), pool.submit(other)]]


def test_all_processes_time_the_same_plans_and_keep_the_chosen_one(timed, tmp_path):
    made = []

    def search(mine):
        made.extend(mine.prices(plan) for plan in PLANS)
        # The planner writes its figures into the plan that it chooses.
        return replace(PLANS[1], predicted=Predicted(1.0), lookahead=1, work_budget=9)

    (plan, prices, kept), (same, their_prices, theirs) = run_two(tmp_path, search)
    assert plan == same
    assert prices == their_prices == made[1]
    for process in (0, 1):
        assert [p for who, p in timed if who == process] == PLANS
    assert all(prices.concurrency == 1.5 for prices in made)
    for one in (kept, theirs):
        assert one.executor.plan == plan  # with what was predicted of it
        assert not one.executor.closed
        assert one.executor.state != 7  # the memory is free for the next


def first_of_two(mine):
    return [mine.prices(plan) for plan in PLANS[:2]] and PLANS[0]


def test_what_was_timed_before_is_read_and_not_compiled_again(timed, tmp_path):
    first = run_two(tmp_path, first_of_two)
    assert all(kept is not None for _, _, kept in first)
    timed.clear()
    again = run_two(tmp_path, first_of_two)
    assert timed == []
    assert [(plan, prices) for plan, prices, _ in again] == [first[0][:2]] * 2
    assert [kept for _, _, kept in again] == [None, None]
    assert not list((tmp_path / "new").glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"record": "PriceList", "version": 1}'])
def test_a_file_that_holds_no_prices_is_made_anew(timed, tmp_path, text):
    first = run_two(tmp_path, first_of_two)
    for file in (tmp_path / "new").iterdir():
        file.write_text(text)
    timed.clear()
    again = run_two(tmp_path, first_of_two)
    assert len(timed) == 4
    assert again[1][:2] == first[1][:2]


def test_a_search_that_times_nothing_still_tells_the_others(timed, tmp_path, monkeypatch):
    by_profile = prices_of(PLANS[2], 3.0)
    monkeypatch.setattr(timing, "plan_prices", lambda plan, profile: by_profile)
    got = run_two(tmp_path, lambda mine: PLANS[2], n=0)
    assert got == [(PLANS[2], by_profile, None)] * 2
    assert timed == []


def test_what_content_adds_to_a_program_is_the_profile_s(monkeypatch):
    plan = PLANS[0]
    own, by_profile = prices_of(plan), programs(plan, 2.0)
    by_profile = {k: replace(p, pair_s=0.5) for k, p in by_profile.items()}
    monkeypatch.setattr(timing, "merged", lambda *_, **__: own)
    monkeypatch.setattr(timing, "plan_prices", lambda *_: Prices(by_profile, concurrency=1.5))
    ex = SimpleNamespace(plan=plan, one_at_a_time=False)
    got = timing.Timed(ex, 1, ()).prices(SimpleNamespace())
    assert got.concurrency == 1.5
    assert (got.step_end, got.sends) == (own.step_end, own.sends)
    assert got.programs == {k: replace(p, pair_s=0.5) for k, p in own.programs.items()}
