"""Runs that are started again from copies in memory: bit for bit, or from the disk."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from dflop_jax import Callback, CheckpointConfig, Trainer
from dflop_jax.cluster import shelf as shelf_module
from dflop_jax.cluster.addresses import LOOPBACK, free_port
from dflop_jax.cluster.copy_server import CopyServer
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.secret import SECRET_ENV
from dflop_jax.cluster.shelf import Shelf
from dflop_jax.cluster.told import Keepers
from dflop_jax.cluster.variables import COPIES_ENV, RESTARTS_ENV, RUN_ENV
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.loop import Loop
from dflop_jax.train.restart import check_agents, copies_of
from dflop_jax.train.results import LoopResult
from dflop_jax.train.resume import find_checkpoint

from ..plans import nano_profile
from .many import FOUR, LIMIT_S, Jobs, environment, losses, undisturbed
from .resume_cases import (  # noqa: F401
    CACHE,
    CONFIG,
    PLAN,
    STEPS,
    _in_a_folder_of_its_own,
    assert_as_whole,
    fit,
    quick,
    steps_saved,
    whole,
)

SECRET = "the secret of these tests"
COPIED = CheckpointConfig(every=6, keep=10, copy_every=2)


class Killed(Exception):
    pass


class KilledAt(Callback):
    """Plays a kill, once a step is done."""

    def __init__(self, step: int):
        self._step = step

    def after_step(self, done):
        if done.step == self._step:
            raise Killed


def killed(folder, step: int, checkpoint=COPIED) -> None:
    """A first start that comes to this step."""
    config = dataclasses.replace(CONFIG, run_dir=str(folder), checkpoint=checkpoint, **CACHE)
    trainer = Trainer(config, plan=PLAN, profile=nano_profile(), callbacks=[KilledAt(step)])
    with pytest.raises(Killed):
        trainer.fit()


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """The copies that a launch's agent keeps, with its variables set for a first start."""
    shelf = Shelf()
    server = CopyServer(shelf, LOOPBACK, SECRET.encode())
    keepers = Keepers((str(server.address),), 0, first=True)
    monkeypatch.setenv(COPIES_ENV, msgspec.json.encode(keepers).decode())
    monkeypatch.setenv(SECRET_ENV, SECRET)
    monkeypatch.setenv(RUN_ENV, "launch")
    monkeypatch.setenv(RESTARTS_ENV, "0")
    yield shelf
    server.close()


def again(monkeypatch, folder, checkpoint=COPIED):
    """The next start of the launch, whose command line says what the first one's did."""
    monkeypatch.setenv(RESTARTS_ENV, "1")
    return fit(folder, "error", checkpoint=checkpoint)


def said(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_restart_goes_on_from_the_newest_copy(agent, whole, monkeypatch, capsys):
    killed("run", 10)
    held = agent.held(os.path.abspath("run"))
    assert steps_saved("run") == (6,)
    assert max(h.name.step for h in held if h.sealed) == 10
    peers = Peers()
    copies = copies_of(dataclasses.replace(CONFIG, run_dir="run", checkpoint=COPIED), peers)
    for at, step in ((None, 10), (6, 6)):  # a step that is asked for is read from the disk
        found = find_checkpoint(Path("run/checkpoints"), peers, at=at, copies=copies)
        assert (found.meta.step, found.copy is None) == (step, at is not None)
    again(monkeypatch, "run")
    text = said(capsys)
    assert "resumed after step 10 of 12, from a copy in memory" in text
    # One host has a copy twice, while the file is sent once more.
    each, most = map(float, re.findall(r"copies take ([\d.]+) MB each, ([\d.]+) MB of", text)[-1])
    assert most == pytest.approx(3 * each, abs=0.02)
    assert_as_whole("run", whole)
    assert agent.n_bytes == 0  # a run that is done has no use for them


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("what", ["a flipped bit", "no file"])
def test_a_copy_that_is_not_whole_leaves_the_disk(agent, whole, monkeypatch, capsys, what):
    killed("run", 10)
    name = max((h.name for h in agent.held(os.path.abspath("run"))), key=lambda n: n.step)
    file = agent.file(name, 0)
    if what == "a flipped bit":
        file[len(file) // 2] ^= 1
    else:
        agent._copies[name].files.clear()
    again(monkeypatch, "run")
    assert "resumed after step 6 of 12, read in" in said(capsys)
    assert_as_whole("run", whole)


def test_a_damaged_copy_and_nothing_on_disk_begin_anew(agent, whole, monkeypatch, caplog):
    only = dataclasses.replace(COPIED, every=0)
    killed("run", 5, only)
    for held in agent.held(os.path.abspath("run")):
        file = agent.file(held.name, 0)
        file[len(file) // 2] ^= 1
    again(monkeypatch, "run", only)
    assert "the copy of step 4 is damaged, using the disk" in caplog.text
    assert_as_whole("run", whole)


def test_the_disk_goes_first_where_it_is_as_new(agent, whole, monkeypatch, capsys):
    killed("run", 7)
    held = agent.held(os.path.abspath("run"))
    assert [h.name.step for h in held if h.sealed] == [4]
    again(monkeypatch, "run")
    assert "resumed after step 6 of 12, read in" in said(capsys)
    assert_as_whole("run", whole)


def test_who_goes_back_within_a_start_does_so_from_the_disk(agent, whole, monkeypatch):
    """As to judge a skipped step, or on with another plan."""
    asked: list[bool] = []

    def find(*args, copies, **more):
        asked.append(copies is not None)
        return find_checkpoint(*args, copies=copies, **more)

    def run(loop, stack, resumed):
        back_to = 11 if len(asked) == 1 else None
        return LoopResult((), (), None, STEPS, False, loop.ex.plan, back_to=back_to)

    monkeypatch.setattr(trainer_module, "find_checkpoint", find)
    monkeypatch.setattr(Loop, "run", run)
    fit(shutil.copytree(whole, "run"), "resume", checkpoint=COPIED)
    assert asked == [True, False]


def test_a_copy_that_a_host_cannot_take_is_left_out(agent, whole, monkeypatch, caplog):
    monkeypatch.setattr(shelf_module, "free_bytes", lambda: 0)
    fit("run", checkpoint=COPIED)
    warned = re.findall(r"no copy after step (\d+): .* for a copy, 0.0 GB are free", caplog.text)
    assert [*map(int, warned)] == [2, 4, 8, 10]
    assert_as_whole("run", whole)


def test_copies_without_an_agent_are_refused(monkeypatch):
    monkeypatch.delenv(COPIES_ENV, raising=False)
    config = dataclasses.replace(CONFIG, checkpoint=COPIED)
    with pytest.raises(ValueError, match="copies are kept by `dflop launch --max-restarts R`"):
        check_agents(None, config)
    check_agents(None, CONFIG)


# ---- two launchers that play hosts ----

# Appended to the experiment: at the first start, process 1 is killed after step 10.
DIES = """
import os, signal
from dflop_jax.cluster import told
from dflop_jax.train.loop import Loop
_after = Loop._after

def after(self, done, held_out, finish):
    _after(self, done, held_out, finish)
    if done == 10 and os.environ["DFLOP_PROCESS_ID"] == "1" and not told.is_restart():
        self.saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)

Loop._after = after
"""


@pytest.mark.slow
def test_a_killed_process_costs_the_steps_since_the_last_copy(tmp_path, tmp_path_factory):
    """Whose files come from the launchers of both hosts."""
    whole = undisturbed(tmp_path_factory)
    jobs = Jobs.make(tmp_path, FOUR, every=0)
    file = tmp_path / "small.py"
    file.write_text(file.read_text() + DIES)
    train = jobs.command(1, tmp_path / "run", "--checkpoint.copy_every", "4")
    at = train.index("launch") + 1
    hosts = f"--max-restarts 1 --coordinator 127.0.0.1:{free_port()} --hosts 2 --host"
    train[train.index("--devices-per-process") + 1] = "2"
    launchers = [
        subprocess.Popen(
            [*train[:at], *hosts.split(), str(host), *train[at:]],
            env=environment() | {SECRET_ENV: SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    try:
        said = [job.communicate(timeout=LIMIT_S)[0] for job in launchers]
    finally:
        for job in launchers:
            job.kill()
            job.communicate()
    assert [job.returncode for job in launchers] == [0, 0], said
    assert "resumed after step 8 of 16, from a copy in memory" in " ".join(said[0].split())
    assert losses(tmp_path / "run") == losses(whole)
