"""The scheduling process: same answers as inline, restarts, no JAX, no orphan."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest

from dflop_jax.records import Load, PriceList, Shape
from dflop_jax.schedule import ScheduleWorker, schedule_batch
from dflop_jax.schedule import worker as worker_module
from dflop_jax.schedule.baselines import Baselines
from dflop_jax.schedule.correction import predicted_gain_s
from dflop_jax.schedule.worker import SolverSetup
from tests.processes import runs
from tests.schedule.conftest import make_batch, make_prices

WORK = 200


def loads_of(step):
    return make_batch(np.random.default_rng(step), 40)


def without_time(schedule):
    return dataclasses.replace(schedule, elapsed_s=0.0)


def inline(step, plan, prices):
    solved = schedule_batch(loads_of(step), plan, prices, plan.layout.modules, step=step, work=WORK)
    return without_time(solved)


def worker_for(plan, prices, baselines=None, **options):
    options = {"ahead": 3, "grace_s": 60.0} | options
    setup = SolverSetup(plan, plan.layout.modules, WORK, baselines=baselines)
    return closing(ScheduleWorker(options.pop("loads_of", loads_of), setup, prices, **options))


def pid_of(worker):
    return worker._child.pid if worker._child else None


@pytest.fixture
def n_solved_here(monkeypatch):
    """The number of batches that this process has solved in the child's place, by calling it."""
    solved, answer = [], worker_module.answer_request

    def count(*args):
        solved.append(args)
        return answer(*args)

    monkeypatch.setattr(worker_module, "answer_request", count)
    return lambda: len(solved)


def wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("did not happen within 30 s")


def test_schedules_equal_the_inline_ones_before_and_after_new_prices(small_plan, n_solved_here):
    """Steps up to `ahead` past the last `get` keep the old prices, whatever the timing."""
    old = make_prices(small_plan)
    new = make_prices(small_plan, factor=lambda program: 9.0 if program.segment == "a" else 1.0)
    with worker_for(small_plan, old, ahead=2, first_step=5, stop_step=11) as worker:
        got = {5: worker.get(5)[0]}
        worker.update_prices(new)
        got |= {step: worker.get(step)[0] for step in range(6, 11)}
        assert n_solved_here() == 0
        pid = pid_of(worker)
    for step, schedule in got.items():
        assert without_time(schedule) == inline(step, small_plan, old if step <= 7 else new)
    assert pid is not None
    assert not runs(pid)
    worker.close()  # a second close does nothing


def test_killing_the_worker_loses_no_schedule(small_plan, caplog):
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices) as worker, caplog.at_level(logging.WARNING):
        worker.get(0)
        first = pid_of(worker)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "died" in caplog.text)
        for step in range(1, 7):  # whether the parent or the successor solves them
            assert without_time(worker.get(step)[0]) == inline(step, small_plan, prices)
        wait_until(lambda: pid_of(worker) not in (None, first))
        wait_until(lambda: worker._requests[7][1].done())
        assert without_time(worker.get(7)[0]) == inline(7, small_plan, prices)
    assert sum("died" in r.message for r in caplog.records) == 1


def test_late_worker_is_not_awaited(small_plan, caplog, monkeypatch, n_solved_here):
    """The child that never answers is waited for once; the parent's schedules are what its own
    would have been."""
    monkeypatch.setattr(
        "dflop_jax.child_processes.child_source", lambda *_: "import time; time.sleep(600)"
    )
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices, grace_s=0.01) as worker:
        for step in range(3):
            assert without_time(worker.get(step)[0]) == inline(step, small_plan, prices)
        assert n_solved_here() == 3
    (late,) = (r.message for r in caplog.records if "no schedule" in r.message)
    assert late.startswith(
        "step 0: no schedule from the worker in 0.01 s; the training process solves"
    )


CHATTY = "print('hello', flush=True); import sys; sys.stdin.read()"


@pytest.mark.parametrize("program, said", [
    ("raise SystemExit(3)", ""), (CHATTY, "wrote b'hello\\n'"),
])  # fmt: skip
def test_worker_without_schedules_is_not_restarted(
    small_plan, monkeypatch, caplog, program, said, n_solved_here
):
    monkeypatch.setattr("dflop_jax.child_processes.child_source", lambda *_: program)
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices) as worker:
        assert without_time(worker.get(0)[0]) == inline(0, small_plan, prices)
        wait_until(lambda: caplog.text.count("worker died") == 3)
        assert without_time(worker.get(1)[0]) == inline(1, small_plan, prices)
        assert n_solved_here() == 2
    assert caplog.text.count("worker died") == 3
    assert said in caplog.text


def test_gain_is_computed_after_pending_schedules(small_plan):
    """And the batches after it are scheduled by their own prices."""
    old = make_prices(small_plan)
    new = make_prices(small_plan, factor=lambda p: 3.0 if p.shape == Shape(1, 256) else 1.0)
    with worker_for(small_plan, old, ahead=2) as worker:
        worker.request_gain(0, loads_of(0), old, new)
        wait_until(lambda: worker.gain_s is not None)
        assert all(future.done() for _, future in worker._requests.values())
        expected = predicted_gain_s(loads_of(0), small_plan, old, new, small_plan.layout.modules)
        assert worker.gain_s == expected > 0
        assert without_time(worker.get(0)[0]) == inline(0, small_plan, old)
        os.kill(pid_of(worker), signal.SIGKILL)
        worker.request_gain(2, loads_of(2), old, new)  # whoever answers it
        gain_s = predicted_gain_s(loads_of(2), small_plan, old, new, small_plan.layout.modules)
        wait_until(lambda: worker.gain_s == gain_s)


def test_every_tenth_batch_is_simulated_under_baselines_if_that_is_cheap(small_plan):
    """Where steps take an hour; not where they take a microsecond. A dead child's is lost."""
    prices = make_prices(small_plan)
    baselines = Baselines({}, PriceList.from_prices(prices))
    options = {"loads_of": lambda step: loads_of(step)[:3], "ahead": 1, "first_step": 8}
    with worker_for(small_plan, prices, baselines, **options) as worker:
        worker.get(8)
        os.kill(pid_of(worker), signal.SIGKILL)
        found = {}
        for step in range(8, 31):
            worker.get(step + 1)
            wait_until(worker._requests[step + 2][1].done)
            found[step] = worker.take_baselines(step, 3600.0 if step < 19 else 1e-6)
    found.pop(9)  # from whichever child
    (step_s,) = found.pop(19).values()
    small, modules = loads_of(19)[:3], small_plan.layout.modules
    longest_first = schedule_batch(small, small_plan, prices, modules, work=0)
    assert step_s == pytest.approx(longest_first.makespan_s)
    assert not any(found.values())


def test_batch_that_fits_no_bucket_raises_in_the_parent(small_plan):
    prices, large = make_prices(small_plan), [Load({"b": (9999,)})]
    with (
        worker_for(small_plan, prices, loads_of=lambda step: large) as worker,
        pytest.raises(ValueError, match="step 0: sample 0 of the batch has 9999"),
    ):
        worker.get(0)


def test_worker_ends_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"  # no __main__ guard
    script.write_text(
        "import sys, time\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from tests.schedule.test_worker import worker_for\n"
        "from tests.schedule.conftest import bucket, make_plan, make_prices\n"
        "plan = make_plan([bucket(16, (1, 256))])\n"
        "worker = worker_for(plan, make_prices(plan)).thing\n"
        "worker.get(0)\n"
        "print(worker._child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script), os.getcwd()], stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    wait_until(lambda: not runs(child))
