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
from dflop_jax.train.timing import Finalists, read_prices, write_prices

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


# ---- files ----


def test_prices_come_back_but_for_the_concurrency(tmp_path):
    prices, file = prices_of(PLANS[2]), tmp_path / "new" / "times.json"
    write_prices(file, prices)
    assert read_prices(file) == replace(prices, concurrency=float("inf"))
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"programs": [[1, 2]]}'])
def test_another_file_holds_no_prices(tmp_path, text):
    file = tmp_path / "times.json"
    if text is not None:
        file.write_text(text)
    assert read_prices(file) is None


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
        fake.prices = lambda concurrency: replace(prices_of(ex.plan), concurrency=concurrency)
        return fake

    monkeypatch.setattr(timing, "make_executor", lambda place, plan: FakeExecutor(plan))
    monkeypatch.setattr(timing, "compile_and_time", compile_and_time)
    return seen


def finalists(peers, folder):
    config = SimpleNamespace(cache_dir=str(folder), train=SimpleNamespace(seed=7))
    trained = SimpleNamespace(frozen=(), rates={"llm": 1e-3})
    place = SimpleNamespace(config=config, trained=trained, peers=peers)
    return Finalists(place, "key", 1.5, SimpleNamespace(log=lambda text: None))


def run_two(folder, search):
    """What both processes come to: (plan, what was taken) each."""
    here, there = socket.socketpair()

    def hub():
        mine = finalists(Peers(0, 2, {1: here}), folder)
        plan = mine.choose(search(mine))
        return plan, mine.take(plan)

    def other():
        mine = finalists(Peers(1, 2, {0: there}), folder)
        plan = mine.follow()
        return plan, mine.take(plan)

    with ThreadPoolExecutor(2) as pool:
        return [f.result(20) for f in [pool.submit(hub), pool.submit(other)]]


def test_all_processes_time_the_same_plans_and_keep_the_chosen_one(timed, tmp_path):
    made = []

    def search(mine):
        made.extend(mine.time(plan) for plan in PLANS)
        # The planner writes its figures into the plan that it chooses.
        return replace(PLANS[1], predicted=Predicted(1.0), lookahead=1, work_budget=9)

    (plan, kept), (same, theirs) = run_two(tmp_path, search)
    assert plan == same
    for process in (0, 1):
        assert [p for who, p in timed if who == process] == PLANS
    assert all(prices.concurrency == 1.5 for prices in made)
    for one in (kept, theirs):
        assert one.executor.plan == plan  # with what was predicted of it
        assert not one.executor.closed
        assert one.executor.state != 7  # the memory is free for the next


def test_what_was_timed_before_is_read_and_not_compiled_again(timed, tmp_path):
    first = run_two(tmp_path, lambda mine: [mine.time(p) for p in PLANS[:2]] and PLANS[0])
    assert all(kept is not None for _, kept in first)
    timed.clear()
    again = run_two(tmp_path, lambda mine: [mine.time(p) for p in PLANS[:2]] and PLANS[0])
    assert timed == []
    assert [plan for plan, _ in again] == [PLANS[0]] * 2
    assert [kept for _, kept in again] == [None, None]


def test_a_search_that_times_nothing_still_tells_the_others(timed, tmp_path):
    assert run_two(tmp_path, lambda mine: PLANS[2]) == [(PLANS[2], None)] * 2
    assert timed == []
