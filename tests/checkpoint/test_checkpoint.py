"""The state of a run, saved under one plan and restored under another, bit for bit; saved while
training goes on; and what happens when it cannot be written or is of another run."""

from __future__ import annotations

import errno
import functools
import re
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint import checkpointer as checkpoint
from dflop_jax.checkpoint.checkpointer import specs_of
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.state_arrays import state_arrays
from dflop_jax.train.optimizer import make_optimizer

from ..runtime import plain
from .checkpoint_cases import (  # noqa: F401
    PLANS,
    TRAIN,
    assert_same,
    executor,
    fill,
    joined,
    model,
    reader_of,
    runs,
    save,
    saver_of,
)


def expected_shapes(m) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, from the model alone."""
    found = {}
    for name, module in m.modules.items():
        for part in ("entry", "layers", "exit"):
            tree = jax.eval_shape(functools.partial(module.init, part), jax.random.key(0))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                keys = "/".join(k.key for k in path)
                lead = (module.n_layers,) if part == "layers" else ()
                found[f"params/{name}/{part}/{keys}"] = (*lead, *leaf.shape)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_names_and_shapes_do_not_depend_on_the_plan(runs, name):
    specs = specs_of(runs(name).arrays)
    want = expected_shapes(model())
    params = {n: s.shape for n, s in specs.items() if n.startswith("params/")}
    assert params == want
    moments = {n: s.shape for n, s in specs.items() if "/mu/" in n or "/nu/" in n}
    assert sorted(moments.values()) == sorted([*want.values()] * 2)
    assert {n: (s.shape, s.dtype) for n, s in specs.items()} == {
        n: (s.shape, s.dtype) for n, s in specs_of(runs("one device each").arrays).items()
    }


# ---- saved under one plan, restored under another ----


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("source", PLANS)
def test_any_plan_reads_what_another_saved(runs, source):
    seed = list(PLANS).index(source)
    ex, saver = runs(source).ex, runs(source).saver
    fill(ex, seed)
    want = joined(ex)
    save(saver, 7, {"note": [1, "two"]})
    assert saver.error_text == ""
    reader = reader_of(saver, 7)
    assert (reader.step, reader.run_state) == (7, {"note": [1, "two"]})
    for target in PLANS:
        other = runs(target).ex
        fill(other, 50 + seed)
        before = jax.tree.map(lambda a: a.sharding, (other.state.params, other.state.opt_state))
        runs(target).saver.restore(reader)
        assert_same(joined(other), want)
        after = jax.tree.map(lambda a: a.sharding, (other.state.params, other.state.opt_state))
        assert after == before


# ---- not for this run ----


def test_frozen_parts_have_no_optimizer_state(runs, tmp_path):
    frozen = executor("4 LLM segments", freeze=("vision",))
    try:
        names = specs_of(state_arrays(frozen))
        assert {n for n in names if n.startswith("params/")} == set(expected_shapes(model()))
        moments = [n.split("/") for n in names if n.startswith("opt_state/vision/0/mu/")]
        assert {keys[4] for keys in moments} == {"exit"}  # the connector
        fill(frozen, 3)
        want = joined(frozen)
        saver = saver_of(frozen, tmp_path)
        save(saver, 2)
        fill(frozen, 4)
        saver.restore(reader_of(saver, 2))
        assert_same(joined(frozen), want)
        with pytest.raises(ValueError, match="set of frozen parts") as error:
            runs("tp 2").saver.restore(reader_of(saver, 2))
        assert "opt_state/vision" in str(error.value)
    finally:
        frozen.close()


def test_another_model_is_refused_by_name(runs, tmp_path):
    saver = saver_of(runs("one device each").ex, tmp_path)
    save(saver, 2)
    deeper = executor("one device each", n_layers=6)
    try:
        with pytest.raises(ValueError, match="another model") as error:
            saver_of(deeper, tmp_path).restore(reader_of(saver, 2))
    finally:
        deeper.close()
    assert re.match(r"checkpoint of step 2 has params/llm/layers/.*\[4, .*\[6, ", str(error.value))


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
