"""The scheduling process: same answers as inline, restarts, no JAX, no orphan."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dflop_jax.records import Load, Shape
from dflop_jax.schedule import ScheduleWorker, schedule_batch
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


def worker_for(plan, prices, **options):
    options = {"ahead": 3, "grace_s": 60.0} | options
    return ScheduleWorker(loads_of, SolverSetup(plan, plan.layout.modules, WORK), prices, **options)


def wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("did not happen within 30 s")


def test_schedules_equal_the_inline_ones_before_and_after_new_prices(small_plan):
    """Steps up to `ahead` past the last `get` keep the old prices, whatever the timing."""
    old = make_prices(small_plan)
    new = make_prices(small_plan, factor=lambda program: 9.0 if program.segment == "a" else 1.0)
    with worker_for(small_plan, old, ahead=2, first_step=5, stop_step=11) as worker:
        got = {5: worker.get(5)[0]}
        worker.update_prices(new)
        got |= {step: worker.get(step)[0] for step in range(6, 11)}
        assert worker.n_solved_in_parent == worker.n_deaths == 0
        pid = worker.pid
    for step, schedule in got.items():
        assert without_time(schedule) == inline(step, small_plan, old if step <= 7 else new)
    assert pid is not None
    assert not runs(pid)
    worker.close()  # a second close does nothing


def test_killing_the_worker_loses_no_schedule(small_plan, caplog):
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices) as worker, caplog.at_level(logging.WARNING):
        worker.get(0)
        first = worker.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: worker.n_deaths == 1)
        for step in range(1, 7):  # whether the parent or the successor solves them
            assert without_time(worker.get(step)[0]) == inline(step, small_plan, prices)
        wait_until(lambda: worker.pid not in (None, first))
        wait_until(lambda: worker._requests[7][1].done())
        assert without_time(worker.get(7)[0]) == inline(7, small_plan, prices)
        assert worker.n_deaths == 1
    assert sum("died" in r.message for r in caplog.records) == 1


def test_late_worker_is_not_awaited_and_changes_no_schedule(small_plan, caplog, monkeypatch):
    """The child that never answers is waited for once; the parent's schedules are what its own
    would have been."""
    monkeypatch.setattr(
        "dflop_jax.child_processes.child_source", lambda *_: "import time; time.sleep(600)"
    )
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices, grace_s=0.01) as worker:
        for step in range(3):
            assert without_time(worker.get(step)[0]) == inline(step, small_plan, prices)
        assert worker.n_solved_in_parent == 3
        assert worker.n_deaths == 0
    (late,) = (r.message for r in caplog.records if "no schedule" in r.message)
    assert late.startswith("step 0: no schedule from its worker in 0.01 s; this process solves")


def test_library_output_is_not_read_as_a_schedule(small_plan, monkeypatch):
    noisy = (
        "import os, sys; sys.path[:0] = {1!r}; import {0} as w; answer = w.answer_request\n"
        "w.answer_request = lambda *a: [os.write(1, b'hello\\n'), answer(*a)][1]; w.main()"
    )
    monkeypatch.setattr("dflop_jax.child_processes.child_source", noisy.format)
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices, stop_step=1) as worker:
        assert worker.get(0)[0].groups == inline(0, small_plan, prices).groups
        assert worker.n_solved_in_parent == worker.n_deaths == 0


CHATTY = "print('hello', flush=True); import sys; sys.stdin.read()"


@pytest.mark.parametrize("program, said", [
    ("raise SystemExit(3)", ""), (CHATTY, "wrote b'hello\\n'"),
])  # fmt: skip
def test_worker_without_schedules_is_not_restarted(small_plan, monkeypatch, caplog, program, said):
    monkeypatch.setattr("dflop_jax.child_processes.child_source", lambda *_: program)
    prices = make_prices(small_plan)
    with worker_for(small_plan, prices) as worker:
        assert without_time(worker.get(0)[0]) == inline(0, small_plan, prices)
        wait_until(lambda: worker.n_deaths == 3)
        assert worker.n_solved_in_parent == 1
        assert without_time(worker.get(1)[0]) == inline(1, small_plan, prices)
        assert (worker.n_solved_in_parent, worker.n_deaths) == (2, 3)
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
        worker.request_gain(1, loads_of(1), old, old)
        got = [without_time(worker.get(step)[0]) for step in range(5)]
        assert got == [inline(step, small_plan, old) for step in range(5)]
        wait_until(lambda: worker.gain_s == 0.0)
        os.kill(worker.pid, signal.SIGKILL)
        worker.request_gain(2, loads_of(2), old, new)  # whoever answers it
        wait_until(lambda: worker.gain_s is not None)
        assert worker.gain_s == predicted_gain_s(
            loads_of(2), small_plan, old, new, small_plan.layout.modules
        )


def test_batch_that_fits_no_bucket_raises_in_the_parent(small_plan):
    def loads_of(step):
        return [Load({"b": (9999,)})]

    prices = make_prices(small_plan)
    with (
        ScheduleWorker(loads_of, SolverSetup(small_plan, ("a", "b")), prices, ahead=1) as worker,
        pytest.raises(ValueError, match="step 0: sample 0 of the batch has 9999"),
    ):
        worker.get(0)


def test_worker_imports_neither_jax_nor_cvxpy():
    code = (
        "import sys, dflop_jax.schedule.worker\n"
        "sys.exit(any(m in sys.modules for m in ('jax', 'cvxpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_worker_ends_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"  # no __main__ guard
    script.write_text(
        "import sys, time\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from tests.schedule.test_worker import worker_for\n"
        "from tests.schedule.conftest import bucket, make_plan, make_prices\n"
        "plan = make_plan([bucket(16, (1, 256))])\n"
        "worker = worker_for(plan, make_prices(plan))\n"
        "worker.get(0)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script), os.getcwd()], stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    wait_until(lambda: not runs(child))
