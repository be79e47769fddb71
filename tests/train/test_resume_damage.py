"""Resuming from damaged checkpoints, and the parts that resuming is made of."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.format import decode_manifest, encode_manifest
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import FAILED, RunFailed, exit_code_of
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.resume import Unreadable, find_checkpoint

from ..plans import nano_profile
from .resume_cases import (  # noqa: F401
    PLAN,
    _in_a_folder_of_its_own,
    as_killed,
    assert_as_whole,
    copy_of,
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


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("what", [manifest, data_file])
def test_a_damaged_checkpoint_is_passed_over(whole, caplog, what):
    folder = as_killed(whole, saved=9, rows=11)
    damage(what(folder, 9))
    fit(folder, "resume")
    warning, aside = warnings_of(caplog)
    assert "checkpoint of step 9 is damaged, using an older one" in warning
    assert what(folder, 9).name in warning
    assert "checkpoint of step 9 stays as run/checkpoints/00000009.damaged until" in aside
    assert_as_whole(folder, whole)
    # Step 9 was saved anew, and only then the damaged one removed.
    assert steps_saved(folder) == (12, 9, 6, 3)
    assert sorted(f.name for f in (folder / "checkpoints").iterdir())[2:] == [
        "00000009", "00000012",
    ]  # fmt: skip
    caplog.clear()
    known = [Unreadable(10, "damaged", "")]
    state, _ = find_checkpoint(folder / "checkpoints", ProcessGroup(), known)
    assert state.step == 9
    assert warnings_of(caplog) == []


class Stopped(BaseException):
    """As a kill."""


@pytest.fixture
def stops_before_its_steps(monkeypatch):
    def run(self, stack):
        raise Stopped

    monkeypatch.setattr(TrainLoop, "run", run)


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def written_by_another_version(folder: Path, step: int, **changes) -> None:
    """The same checkpoint with another run state, sound to the last checksum."""
    store = CheckpointStore(folder / "checkpoints")
    reader = store.open(step)
    manifest_of = decode_manifest(manifest(folder, step).read_bytes())
    data = encode_manifest(
        dataclasses.replace(manifest_of, run_state={**reader.run_state, **changes})
    )
    manifest(folder, step).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (manifest(folder, step).parent / "COMMITTED").write_text(f"sha256 {digest} manifest.json\n")


def test_a_checkpoint_of_another_version_is_named_and_kept(whole, caplog, stops_before_its_steps):
    folder = as_killed(whole, saved=9, rows=11)
    written_by_another_version(folder, 9, version=77)
    held = contents(folder / "checkpoints/00000009")
    with pytest.raises(Stopped):
        fit(folder, "resume")
    warning, aside = warnings_of(caplog)
    assert "step 9 is of another version of this program, using an older one" in warning
    assert "version 77" in warning
    assert "00000009.other-version" in aside
    assert contents(folder / "checkpoints/00000009.other-version") == held
    assert steps_saved(folder) == (6, 3)


@pytest.mark.parametrize("damaged", [(), (3,)])
def test_what_another_version_reads_is_not_to_be_overwritten(whole, damaged):
    folder = as_killed(whole, saved=6, rows=7)
    for step in (3, 6):
        written_by_another_version(folder, step, version=77)
    for step in damaged:
        damage(data_file(folder, step))
        damage(manifest(folder, step))
    said = refused(folder)
    assert "resume by the one that wrote them" in said
    assert "overwrite" not in said
    assert steps_saved(folder) == (6, 3)


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


# ---- what is not saved ----


def test_what_cannot_be_written_at_the_end_is_an_error(whole, monkeypatch):
    """Once all is done, which is no bad input: exit code 1."""
    folder = copy_of(whole)

    def fails(self):
        self.error_text = "No space left on device"

    monkeypatch.setattr(Checkpointer, "wait", fails)
    with pytest.raises(RunFailed, match="not saved: No space left on device") as error:
        fit(folder, "resume")
    assert exit_code_of(error.value) == FAILED
    assert "\n" not in str(error.value)


# ---- the parts ----


def test_finding_checkpoints(whole, caplog):
    peers, checkpoints = ProcessGroup(), Path("checkpoints")
    assert find_checkpoint(Path("nowhere"), peers, []) is None
    shutil.copytree(whole / "checkpoints", checkpoints)
    state, reader = find_checkpoint(checkpoints, peers, [])
    assert (state.step, state.loader["step"], reader.step) == (12, 12, 12)
    assert (state.plan, state.profile) == (PLAN, nano_profile())
    assert state.settings["processes"] == 1
    for below, step in {12: 9, 9: 6, 4: 3}.items():
        known = [Unreadable(20, "damaged", ""), Unreadable(below, "damaged", "")]
        state, _ = find_checkpoint(checkpoints, peers, known)
        assert (state.step, len(known)) == (step, 2)
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        find_checkpoint(checkpoints, peers, [Unreadable(3, "damaged", "")])
    assert warnings_of(caplog) == []
    # An unfinished save is no checkpoint.
    (checkpoints / "00000012/COMMITTED").unlink()
    assert find_checkpoint(checkpoints, peers, [])[0].step == 9
