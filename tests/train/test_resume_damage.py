"""Resuming from damaged checkpoints, and the parts that resuming is made of."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cluster.peers import Peers
from dflop_jax.train.loop import preemption
from dflop_jax.train.resume import any_trouble, find_checkpoint

from ..plans import nano_profile
from .resume_cases import (  # noqa: F401
    PLAN,
    _in_a_folder_of_its_own,
    as_killed,
    assert_as_whole,
    compiled,
    damage,
    data_file,
    essence,
    fit,
    manifest,
    quick,
    refused,
    steps_saved,
    whole,
)

# ---- damage ----


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("dflop_jax.train")]


@pytest.mark.parametrize("what", [manifest, data_file])
def test_a_damaged_checkpoint_is_passed_over(whole, caplog, what):
    folder = as_killed(whole, saved=9, rows=11)
    damage(what(folder, 9))
    fit(folder, "resume")
    (warning,) = warnings_of(caplog)
    assert "checkpoint of step 9 is damaged, using an older one" in warning
    assert what(folder, 9).name in warning
    assert_as_whole(folder, whole)
    # Step 9 was saved anew.
    assert steps_saved(folder) == (12, 9, 6, 3)
    caplog.clear()
    assert find_checkpoint(folder / "checkpoints", Peers(), below=10).meta.step == 9
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("what", [manifest, data_file])
def test_damage_everywhere_is_refused(whole, caplog, what):
    folder = as_killed(whole, saved=6, rows=7)
    rows = essence(folder)
    for step in (3, 6):
        damage(what(folder, step))
    assert "no checkpoint is whole; start again with --overwrite" in refused(folder)
    assert [w.split(",")[0] for w in warnings_of(caplog)] == [
        f"checkpoint of step {step} is damaged" for step in (6, 3)
    ]
    assert steps_saved(folder) == (6, 3)
    assert essence(folder)[:6] == rows[:6]


# ---- the parts ----


def test_finding_checkpoints(whole, caplog):
    peers = Peers()
    assert find_checkpoint(Path("nowhere"), peers) is None
    checkpoints = shutil.copytree(whole / "checkpoints", "checkpoints")
    found = find_checkpoint(Path(checkpoints), peers)
    assert (found.meta.step, found.meta.loader["step"], found.reader.step) == (12, 12, 12)
    assert found.meta.plan == PLAN
    assert found.meta.profile == nano_profile()
    assert found.meta.processes == 1
    steps = {below: find_checkpoint(Path(checkpoints), peers, below) for below in (12, 9, 4, 3, 0)}
    assert {b: f and f.meta.step for b, f in steps.items()} == {12: 9, 9: 6, 4: 3, 3: None, 0: None}
    assert warnings_of(caplog) == []
    # An unfinished save is no checkpoint.
    (Path(checkpoints) / "00000012/COMMITTED").unlink()
    assert find_checkpoint(Path(checkpoints), peers).meta.step == 9


def test_meta_of_another_program_is_damage(caplog):
    store = CheckpointStore(Path("checkpoints"))
    store.prepare(1)
    store.commit(1, [], [store.write(1, [], [], 0)], {"step": 1})
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        find_checkpoint(Path("checkpoints"), Peers())
    assert "checkpoint of step 1 is damaged" in warnings_of(caplog)[0]


def test_trouble_is_logged_once(caplog):
    assert not any_trouble(Peers(), "k", "")
    assert warnings_of(caplog) == []
    assert any_trouble(Peers(), "k", "a 100% broken disk")
    assert warnings_of(caplog) == ["a 100% broken disk"]


def test_sigterm_is_ours_only_inside_and_only_in_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    with preemption() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)  # again: the same wish
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []

    def elsewhere():
        with preemption() as asked:
            seen.append((asked.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
    with pytest.raises(KeyError), preemption():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before
