"""What a run does that `dflop launch` starts again: where it goes on, and what it tells."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from dflop_jax.cluster import told
from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.processes import Processes
from dflop_jax.cluster.variables import (
    AGENT_ENV,
    LEAST_ENV,
    PROCESS_ID_ENV,
    RESTARTS_ENV,
    RUN_ENV,
)
from dflop_jax.config import CheckpointConfig, Config
from dflop_jax.report.run_folder import METRICS, RESTARTS, RunFolder
from dflop_jax.train import prepare
from dflop_jax.train.restart import (
    check_agents,
    is_begun,
    line_of,
    open_folder,
    tell_agent,
    tell_others,
)

from ..plans import NANO


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Play a start of a launch's processes; returns the folder in which its agent is told."""

    def play(name: str, restarts: int):
        agent = tmp_path / f"agent-{name}-{restarts}"
        agent.mkdir()
        told_of = {AGENT_ENV: agent, RUN_ENV: name, RESTARTS_ENV: restarts, PROCESS_ID_ENV: 1}
        for variable, value in told_of.items():
            monkeypatch.setenv(variable, str(value))
        return agent

    return play


def test_only_what_the_launch_has_begun_is_resumed(start, tmp_path):
    ours, old = str(tmp_path / "ours"), str(tmp_path / "old")
    with RunFolder(old):
        pass
    start("a", 0)
    assert not is_begun(ours, Peers())
    with open_folder(ours, "overwrite"):
        pass
    assert not is_begun(ours, Peers())  # the first start obeys
    assert (tmp_path / "ours" / "launch").read_text() == "a"
    start("a", 1)
    assert is_begun(ours, Peers())
    assert not is_begun(old, Peers())  # of an older run, which the script has not come to
    start("b", 0)  # another launch, as after a requeue
    assert not is_begun(ours, Peers())
    with open_folder(ours, "resume"):
        pass
    start("b", 1)
    assert is_begun(ours, Peers())


def test_without_an_agent_nothing_changes(monkeypatch, tmp_path):
    for name in (AGENT_ENV, RUN_ENV, RESTARTS_ENV):
        monkeypatch.delenv(name, raising=False)
    with open_folder(str(tmp_path), "error") as folder:
        assert not is_begun(str(tmp_path), Peers())
    told.tell_step()
    tell_agent(ValueError("no"))
    assert {p.name for p in folder.path.iterdir()} == {"lock", METRICS}


def test_a_folder_that_is_overwritten_forgets_its_restarts(start, tmp_path):
    run_dir = tmp_path / "run"
    with RunFolder(run_dir):
        (run_dir / RESTARTS).write_text("{}\n")
    start("a", 0)
    with open_folder(str(run_dir), "overwrite"):
        assert not (run_dir / RESTARTS).exists()


def test_a_lock_that_is_held_may_be_free_later(start, tmp_path):
    start("a", 1)
    with open_folder(str(tmp_path / "run"), "error"), pytest.raises(TryAgain, match="another run"):
        open_folder(str(tmp_path / "run"), "resume")


def test_what_the_agent_hears(start, tmp_path):
    agent = start("a", 0)
    assert (told.count_file(agent), told.stepped_s(agent)) == (None, None)
    assert told.failure_of(agent, 1) is None
    with open_folder(str(tmp_path / "run"), "error"):
        pass
    assert told.count_file(agent) == tmp_path / "run" / RESTARTS
    told.tell_step()
    assert told.stepped_s(agent) is not None
    tell_agent(ValueError("of two\nlines"), 7, tuple(f"row {i}" for i in range(1000)))
    heard = told.failure_of(agent, 1)
    assert heard is not None
    assert (heard.exit_code, heard.why, heard.step) == (2, "of two lines", 7)
    assert heard.samples == tuple(f"row {i}" for i in range(told.MOST_SAMPLES))
    tell_agent(TryAgain("a port"))
    assert told.failure_of(agent, 1) == told.Failure(4, "a port")
    tell_agent(KeyError())
    assert told.failure_of(agent, 1) == told.Failure(1, "KeyError")


@pytest.mark.parametrize(
    "error, waits",
    [(jax.errors.JaxRuntimeError("gloo: connection closed"), True), (KeyError("a"), False)],
)
def test_an_error_that_a_loss_may_have_caused_leaves_time_for_the_loss(error, waits):
    done: list[str | tuple] = []
    peers = SimpleNamespace(
        process=1, notice=lambda: done.append("notice"), fail=lambda *told: done.append(told)
    )
    tell_others(peers, error)
    assert done == ["notice"] * waits + [(f"process 1 stopped: {line_of(error)}", 1)]


# ---- before it meets others ----


@pytest.mark.parametrize(
    "local_index, restarts, does",
    [
        (0, 0, "forget check meet"),
        (1, 0, "meet"),
        (0, 1, "check meet"),  # which is to be quick
    ],
)
def test_the_first_process_of_a_host_looks_whether_that_is_fit(
    monkeypatch, tmp_path, local_index, restarts, does
):
    done: list[str] = []
    here = Processes(4, 2 + local_index, Address("node1", 29400), "Slurm", 2, local_index)

    def meet(*_):
        done.append("meet")
        raise TryAgain("nobody comes")

    for name, value in (
        ("use_cache", lambda folder: None),
        ("find_processes", lambda config: here),
        ("forget_unused", lambda folder, gib: done.append("forget")),
        ("check_host", lambda at, folder: done.append("check")),
        ("initialise", meet),
    ):
        monkeypatch.setattr(prepare, name, value)
    monkeypatch.setenv(RESTARTS_ENV, str(restarts))
    with pytest.raises(TryAgain, match="nobody comes"):
        prepare.set_up(Config(cache_dir=str(tmp_path / "cache")))
    assert done == does.split()


def test_one_process_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(prepare, "check_host", lambda *_: pytest.fail("it meets nobody"))
    for alone in (Processes(), Processes(1, 0, Address("node1", 29400))):
        prepare._check_host(alone, Config())


def test_what_cannot_go_on_with_fewer_is_refused_in_a_line(monkeypatch):
    config, without = Config(), Config(checkpoint=CheckpointConfig(every_s=0))
    for plan, other in ((None, config), (NANO, config), (None, without)):
        check_agents(plan, other)  # nobody asked for it
    monkeypatch.setenv(LEAST_ENV, "2")
    check_agents(None, config)
    with pytest.raises(
        ValueError, match=r"--min-processes 2 .* a plan for 2 devices; leave it out"
    ):
        check_agents(NANO, config)
    with pytest.raises(ValueError, match=r"checkpoint.every_s=0 writes none"):
        check_agents(None, without)
