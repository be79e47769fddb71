"""All processes time the same plans and drop what one of them cannot hold."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from dflop_jax import TrainConfig
from dflop_jax.distributed.hang_watch import Sections
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.plan.time_plans import MemoryShortage, PlanTooLarge
from dflop_jax.records import FORWARD, NO_GROUP, REDUCE, Predicted, Prices, SendId, Shape, Task
from dflop_jax.report.wall_time import TimeLog
from dflop_jax.simulate.task_graph import segment_links
from dflop_jax.train import plan_timer
from dflop_jax.train.plan_timer import PlanTimer, run_with_memory_check
from dflop_jax.train.trainer import broadcast_errors

from ..distributed.service import make_job
from ..plans import chain, programs

PLANS = [chain(2, vision=1), chain(3, vision=1), chain(4, vision=2)]


def prices_of(plan, forward_s=1.0):
    sends = {
        SendId(k.source, k.target, shape, FORWARD): 0.25
        for k in segment_links(plan.layout)
        for shape in plan.layout.shapes(plan.layout.segment(k.target).module)
    }
    ends = {Task(s.name, NO_GROUP, REDUCE): 0.5 for s in plan.layout.segments}
    return Prices(programs(plan, forward_s), ends, sends, concurrency=2.0)


# ---- processes, played by threads ----


class FakeExecutor:
    def __init__(self, plan):
        self.plan, self.closed, self.state = plan, False, "begun"

    def init(self, seed, sync):
        sync()
        self.state = seed

    def replace_plan(self, plan):
        assert plan.layout == self.plan.layout
        self.plan = plan

    def close(self):
        self.closed = True


@pytest.fixture
def timed(monkeypatch):
    """(process, plan) of everything that was timed, in order."""
    seen = []

    def compile_and_time(place, ex, *, time_step_ends):
        assert time_step_ends
        assert ex.state == 7
        place.peers.barrier(
            f"compiled {ex.plan.layout.n_devices}"
        )  # as the real one: all take part
        seen.append((place.peers.process_index, ex.plan))
        fake = SimpleNamespace(executor=ex, n_programs=1)
        fake.prices = lambda profile: replace(prices_of(ex.plan), concurrency=profile.concurrency)
        return fake

    monkeypatch.setattr(plan_timer, "make_executor", lambda place, plan: FakeExecutor(plan))
    monkeypatch.setattr(plan_timer, "compile_and_time", compile_and_time)
    return seen


def timer_of(peers, folder, said=None):
    config = SimpleNamespace(
        cache_dir=str(folder / "new"),
        train=TrainConfig(seed=7),
        distributed=SimpleNamespace(peer_timeout_s=30.0),
    )
    trained = SimpleNamespace(frozen=(), rates={"llm": 1e-3})
    noted = {"time_log": TimeLog(), "sections": Sections()}
    place = SimpleNamespace(config=config, trained=trained, peers=peers, **noted)
    profile = SimpleNamespace(model=SimpleNamespace(key="key", concurrency=1.5))
    log = SimpleNamespace(log=(lambda text: None) if said is None else said.append)
    return PlanTimer(place, profile, log)


def run_two(folder, search, said=None):
    """What both processes come to: (plan, its prices, what was taken) each."""
    job = make_job(2)

    def hub():
        peers = job.groups[0]
        mine = timer_of(peers, folder, said)
        try:
            plan = search(mine)
            prices = mine.prices(plan)
            mine.choose(plan, prices)
        except BaseException:
            peers.fail("the test has failed")  # so that the other one waits no longer
            raise
        return plan, prices, mine.take_timed_plan(plan)

    def other():
        mine = timer_of(job.groups[1], folder)
        plan, prices = mine.serve_requests()
        return plan, prices, mine.take_timed_plan(plan)

    with ThreadPoolExecutor(2) as pool:
        results = [f.result(20) for f in [pool.submit(hub), pool.submit(other)]]
    job.stop()
    return results


def test_all_processes_time_the_same_plans_and_keep_the_chosen_one(timed, tmp_path):
    made = []

    def search(mine):
        made.extend(mine.prices(plan) for plan in PLANS)
        # The planner writes its figures into the plan that it chooses.
        return replace(PLANS[1], predicted=Predicted(1.0)).with_scheduling(
            lookahead=1, work_budget=9
        )

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


# ---- memory that one process lacks ----

SHORT = f"RESOURCE_EXHAUSTED: Attempting to allocate {3 * 2**30}. There are {2**30} free."
FAILS = {"compile": "compiling its programs", "calibrate": "timing its programs",
         "late": "timing its programs", "init": "placing its parameters"}  # fmt: skip


class Crowded(FakeExecutor):
    """An executor that runs out of memory for one plan, on one process and in one of its parts."""

    def __init__(self, process, plan, part):
        super().__init__(plan)
        self.one_at_a_time, self.does_not_hold = False, ""
        if process == 1 and plan.layout.n_devices == PLANS[1].layout.n_devices:
            self.does_not_hold = part

    def _run(self, part):
        if self.does_not_hold == part:
            raise jax.errors.JaxRuntimeError(SHORT)

    def init(self, seed, sync):
        self._run("init")
        super().init(seed, sync)

    def compile(self, on_progress, sync):
        self._run("compile")
        sync()
        sync()
        return 1

    def calibrate(self, repeats, sync, ends):
        for _ in range(3):
            sync()
            self._run("calibrate")
        self._run("late")  # when the others have done their part
        return []


@pytest.mark.parametrize("part", FAILS)
def test_what_one_process_cannot_hold_all_drop(tmp_path, monkeypatch, part):
    made, said, told = [], [], []

    def make(place, plan):
        made.append((place.peers.process_index, Crowded(place.peers.process_index, plan, part)))
        return made[-1][1]

    def search(mine):
        for plan in PLANS:
            try:
                mine.prices(plan)
            except PlanTooLarge as e:
                told.append((plan, e.short_bytes))
        return PLANS[2]

    monkeypatch.setattr(plan_timer, "make_executor", make)
    monkeypatch.setattr(
        plan_timer.TimedPlan, "prices", lambda self, profile: prices_of(self.executor.plan)
    )
    got = run_two(tmp_path, search, said=said)
    assert told == [(PLANS[1], 2 * 2**30)]
    for plan, prices, taken in got:
        assert plan == PLANS[2]
        assert prices == prices_of(plan)
        assert taken is not None
        assert taken.executor.plan == plan
    names = [line for line in said if line.startswith("dropped: ")]
    assert len(names) == 1
    assert names[0].startswith("dropped: plan test: v0 1x1x1, l0 1x1x1, l1 1x1x1; buckets vision:")
    assert names[0].endswith(f", process 1 ran out of it {FAILS[part]}, 2.00 GiB short")
    assert [ex.closed for _, ex in made if ex.plan == PLANS[1]] == [True, True]
    assert len(list((tmp_path / "new").glob("times-*"))) == 2  # it has no times


def test_the_run_ends_where_the_others_cannot_leave():
    """Process 0 waits on its device for what process 1 did not send."""
    job = make_job(2)

    def stuck(sync):
        job.wait_for_failures([0])

    def fails(sync):
        raise jax.errors.JaxRuntimeError(SHORT)

    def hub():
        run_with_memory_check(job.groups[0], PLANS[0], "in a step", stuck, 0.1)

    def other():
        with broadcast_errors(job.groups[1]):
            run_with_memory_check(job.groups[1], PLANS[0], "in a step", fails, 0.1)

    with ThreadPoolExecutor(2) as pool:
        waits, failed = pool.submit(hub), pool.submit(other)
        with pytest.raises(MemoryShortage, match=r"ran out of it in a step, 2\.00 GiB") as error:
            failed.result(20)
        assert not isinstance(error.value, PlanTooLarge)  # which all raise
        with pytest.raises((PlanTooLarge, RunFailed)):  # a real process has ended
            waits.result(20)
    job.stop()
    ((why, code),) = job.failures[0]
    assert code == 2
    assert "use a smaller --plan.memory_bytes" in why


def test_what_content_adds_to_a_program_is_the_profile_s(monkeypatch):
    """A row of 64 tokens, timed with 4 pieces of 16: 4 * 16**2 pairs at 0.5 ms, of 1 s and 2 s."""
    plan = PLANS[0]
    own, by_profile = prices_of(plan), programs(plan, 2.0)
    by_profile = {k: replace(p, content_s=(5e-4,)) for k, p in by_profile.items()}
    monkeypatch.setattr(plan_timer, "merge_calibrations", lambda *_, **__: own)
    monkeypatch.setattr(plan_timer, "layout_prices", lambda *_: Prices(by_profile, concurrency=1.5))
    modules = {"vision": SimpleNamespace(content=lambda n, placed: {}), "llm": SimpleNamespace()}
    ex = SimpleNamespace(
        plan=plan,
        one_at_a_time=False,
        model=SimpleNamespace(modules=modules, piece_tokens={"vision": 16}),
    )
    got = plan_timer.TimedPlan(ex, 1, 0, (), 1.0).prices(SimpleNamespace(shares_cores=False))
    assert got.concurrency == 1.5
    assert (got.step_end, got.sends) == (own.step_end, own.sends)
    assert got.programs.keys() == own.programs.keys()
    assert {key.shape for key in own.programs if key.segment == "l0"} == {Shape(1, 64)}
    for key, price in got.programs.items():
        pairs = 4 * 16**2 if key.segment == "l0" else 0
        assert price.content_s == (5e-4,)
        assert price.static_s == pytest.approx(own.programs[key].static_s - 5e-4 * pairs)
        assert price.seconds([2 * pairs]) == pytest.approx(
            own.programs[key].static_s + 5e-4 * pairs
        )
