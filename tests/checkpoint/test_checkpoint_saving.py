"""Saving while training goes on, and stores that fail."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint import checkpointer as checkpoint
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.optimizer import make_optimizer

from ..runtime import plain
from .checkpoint_cases import (  # noqa: F401
    TRAIN,
    assert_same,
    fill,
    joined,
    model,
    reader_of,
    runs,
    save,
    saver_of,
)

# ---- while training goes on ----


@pytest.fixture(scope="module")
def training():
    """An executor whose steps can be run, and the next step's arrays."""
    plan = plain.plan_of(model(), (0, 1, 1, 1), (1, 1, 2, 1))
    plan = plan.with_layout(buckets=plan.layout.buckets[:1])
    ex = Executor(model(), plan, make_optimizer(TRAIN), clip_norm=1.0)
    ex.init(0)
    ex.compile()
    samples = plain.random_samples(model(), 6, 0)
    schedule = plain.random_schedule(ex.plan, samples, 1, 0)
    yield ex, (schedule, plain.pack(model(), ex.plan, schedule, samples), {"llm": 1e-3})
    ex.close()


class SlowNumpy:
    """Numpy for the checkpoint's thread, whose copies begin when `allowed` and take a while."""

    def __init__(self, pause_s: float):
        self.allowed, self._pause_s = threading.Event(), pause_s

    zeros = staticmethod(np.zeros)

    def array(self, data):
        assert self.allowed.wait(60)
        time.sleep(self._pause_s)
        self._pause_s = 0.0
        return np.array(data)


def test_the_step_saved_is_not_the_one_dispatched_after_it(training, tmp_path, monkeypatch):
    ex, step = training
    ex.run_step(*step).result()
    before = joined(ex)
    saver = saver_of(ex, tmp_path)
    slow = SlowNumpy(0.3)
    monkeypatch.setattr(checkpoint, "np", slow)
    meta: Future = Future()
    saver.save(1, meta)
    wait_copied = ex.before_update
    stalls = []

    def before_update():
        # Forward and backward were dispatched while nothing had been copied.
        slow.allowed.set()
        wait_copied()
        stalls.append(saver.stall_s)

    ex.before_update = before_update
    ex.run_step(*step).result()
    assert stalls[0] >= 0.3  # the first update waited for the copy
    assert stalls[-1] - stalls[0] < 0.3  # the others found it done
    meta.set_result({})
    saver.wait()
    after = joined(ex)
    assert (before[1], after[1]) == ({1}, {2})
    differ = jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), before[0], after[0]))
    assert np.mean(differ) > 0.9
    saver.restore(reader_of(saver, 1))
    assert_same(joined(ex), before)


def test_a_restored_step_runs_as_the_first_time(training, tmp_path):
    ex, step = training
    saver = saver_of(ex, tmp_path)
    save(saver, 5)
    first = ex.run_step(*step).result()
    want = joined(ex)
    saver.restore(reader_of(saver, 5))
    again = ex.run_step(*step).result()
    assert (again.sums, again.grad_norm) == (first.sums, first.grad_norm)
    assert_same(joined(ex), want)


def test_a_checkpoint_is_committed_after_its_rows(runs, tmp_path):
    saver = saver_of(runs("one device each").ex, tmp_path)
    meta: Future = Future()
    saver.save(1, meta)
    (thread,) = (t for t in threading.enumerate() if t.name == "checkpoint")
    thread.join(0.5)  # long enough to write, were it not to wait
    assert thread.is_alive()
    assert CheckpointStore(tmp_path).steps() == ()
    meta.set_result({})
    saver.wait()
    assert CheckpointStore(tmp_path).steps() == (1,)


def test_a_save_waits_for_the_one_before(runs, tmp_path):
    """So that saves by steps are at the same steps in every run, however slow the disk."""
    saver = saver_of(runs("one device each").ex, tmp_path)
    late, known = Future(), Future()
    known.set_result({})
    saver.save(1, late)
    begun = threading.Thread(target=saver.save, args=(2, known))
    begun.start()
    begun.join(0.1)
    assert begun.is_alive()
    late.set_result({})
    begun.join(60)
    saver.wait()
    assert CheckpointStore(tmp_path).steps() == (2, 1)


# ---- a store that fails ----


@pytest.mark.parametrize("call", ["prepare", "write", "commit"])
def test_a_full_disk_costs_one_checkpoint(training, tmp_path, monkeypatch, caplog, call):
    ex, step = training
    saver = saver_of(ex, tmp_path)
    save(saver, 1)
    works = getattr(CheckpointStore, call)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, call, fail)
    save(saver, 2)
    assert "No space left on device" in saver.error_text
    assert [r.getMessage() for r in caplog.records] == [
        f"no checkpoint after step 2: {saver.error_text}"
    ]
    assert CheckpointStore(tmp_path).steps() == (1,)
    ex.run_step(*step).result()
    monkeypatch.setattr(CheckpointStore, call, works)
    caplog.clear()
    save(saver, 3)
    assert (saver.error_text, caplog.records) == ("", [])
    assert CheckpointStore(tmp_path).steps() == (3, 1)
    want = joined(ex)
    fill(ex, 9)
    saver.restore(reader_of(saver, 3))
    assert_same(joined(ex), want)


def test_a_step_saved_before_is_reported_and_kept(runs, tmp_path, caplog):
    ex = runs("one device each").ex
    fill(ex, 1)
    saver = saver_of(ex, tmp_path)
    save(saver, 4)
    want = joined(ex)
    fill(ex, 2)
    save(saver, 4)
    assert "this checkpoint exists" in saver.error_text
    assert len(caplog.records) == 1
    saver.restore(reader_of(saver, 4))
    assert_same(joined(ex), want)


def test_our_own_mistakes_are_not_swallowed(runs, tmp_path, monkeypatch):
    saver = saver_of(runs("one device each").ex, tmp_path)
    monkeypatch.setattr(CheckpointStore, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(saver, 1)
    assert CheckpointStore(tmp_path).steps() == ()
