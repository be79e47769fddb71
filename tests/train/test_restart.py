"""What a run resumes that `dflop launch` starts again, and how its processes learn of an error."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import TransientError
from dflop_jax.distributed.processes import LAUNCH_ENV, RESTARTS_ENV
from dflop_jax.report.run_folder import METRICS, RunFolder
from dflop_jax.train.trainer import broadcast_error, is_restarted_run, open_run_folder


@pytest.fixture
def start(monkeypatch):
    """Play a start of a launch's processes."""

    def play(name: str, restarts: int) -> None:
        monkeypatch.setenv(LAUNCH_ENV, name)
        monkeypatch.setenv(RESTARTS_ENV, str(restarts))

    return play


def test_only_what_the_launch_has_begun_is_resumed(start, tmp_path):
    ours, old = str(tmp_path / "ours"), str(tmp_path / "old")
    with RunFolder(old):
        pass
    start("a", 0)
    assert not is_restarted_run(ours, ProcessGroup())
    with open_run_folder(ours, "overwrite"):
        pass
    assert not is_restarted_run(ours, ProcessGroup())  # the first start obeys
    assert (tmp_path / "ours" / "launch").read_text() == "a"
    start("a", 1)
    assert is_restarted_run(ours, ProcessGroup())
    assert not is_restarted_run(
        old, ProcessGroup()
    )  # of an older run, which the script has not come to
    start("b", 0)  # another launch, as after a requeue
    assert not is_restarted_run(ours, ProcessGroup())
    with open_run_folder(ours, "resume"):
        pass
    start("b", 1)
    assert is_restarted_run(ours, ProcessGroup())


def test_without_a_supervisor_nothing_changes(monkeypatch, tmp_path):
    for name in (LAUNCH_ENV, RESTARTS_ENV):
        monkeypatch.delenv(name, raising=False)
    with open_run_folder(str(tmp_path), "error") as folder:
        assert not is_restarted_run(str(tmp_path), ProcessGroup())
    assert {p.name for p in folder.path.iterdir()} == {"lock", METRICS}


def test_a_lock_that_is_held_may_be_free_later(start, tmp_path):
    start("a", 1)
    with (
        open_run_folder(str(tmp_path / "run"), "error"),
        pytest.raises(TransientError, match="another run"),
    ):
        open_run_folder(str(tmp_path / "run"), "resume")


@pytest.mark.parametrize(
    "error, says", [(jax.errors.JaxRuntimeError("gloo:\nclosed"), "gloo: closed"), (KeyError(), "")]
)
def test_an_error_that_a_loss_may_have_caused_leaves_time_for_the_loss(error, says):
    done: list[str | tuple] = []
    peers = SimpleNamespace(
        process_index=1,
        wait_for_peer_loss=lambda: done.append("notice"),
        fail=lambda *told: done.append(told),
    )
    broadcast_error(peers, error)
    line = f"process 1 stopped: {says or 'KeyError'}"
    assert done == ["notice"] * bool(says) + [(line, 1)]
