"""How `dflop train` ends when a signal comes, with a trainer that trains nothing; and what commands
print: notes that wait for a mistake to be found, and tables that fit."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_jax.cli import main, plan
from dflop_jax.cli.terminal import DelayedNotes, make_table, show
from dflop_jax.config import Config, DistributedConfig
from dflop_jax.distributed import process_exit
from dflop_jax.train import trainer

LIMIT_S = 30.0
DEMO = ["train", "experiments/demo.py"]
NOTHING = "saves nothing, give the command again"


@pytest.fixture
def runs(monkeypatch):
    """Gives `dflop train` a trainer whose `fit` is the function that the test says; returns what
    its peers were told."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    told = []
    peers = SimpleNamespace(process_index=1, is_primary=False, close=lambda: None)
    peers.fail = lambda *words: told.append(words)

    def use(fit):
        def make(config, **_):
            return SimpleNamespace(config=config, peers=peers, fit=lambda: fit(config))

        monkeypatch.setattr(trainer, "Trainer", make)
        return told

    return use


def preempted(config):
    return trainer.FitResult(Path(config.run_dir), (3.0, 2.0), None, 0, 2, True)


@pytest.mark.parametrize("every_s, code", [("50", 3), ("0", 1)])
def test_a_preempted_run_has_an_exit_code_of_its_own(runs, capsys, every_s, code):
    runs(preempted)
    assert main([*DEMO, "--json", "--checkpoint.every_s", every_s]) == code
    assert f'"exit_code": {code}' in capsys.readouterr().out


@pytest.mark.parametrize(
    "signum, flags, code, says",
    [
        (signal.SIGINT, "--checkpoint.every_s 50", 3, "--resume auto goes on"),
        (signal.SIGTERM, "--checkpoint.every_s 0", 1, f"a run without checkpoints {NOTHING}"),
        (signal.SIGHUP, "--dry-run", 1, f"a dry run {NOTHING}"),
    ],
)
def test_a_signal_while_no_step_runs_ends_all_at_once(runs, monkeypatch, signum, flags, code, says):
    ended, over = [], threading.Event()

    def fit(config):
        os.kill(os.getpid(), signum)
        assert over.wait(LIMIT_S)
        raise ValueError("the end of this test")

    exits = "exit_with_message"
    monkeypatch.setattr(process_exit, exits, lambda *words: (ended.append(words), over.set()))
    monkeypatch.setattr(signal, "getsignal", lambda s: signal.SIG_DFL)  # under nohup, too
    told = runs(fit)
    main([*DEMO, *flags.split()])
    reason = f"ended: {signum.name} came while no step ran"
    assert told == [(f"process 1 {reason}", code)]
    assert ended == [(f"{reason}; {says}", code)]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_others_are_told_of_an_error_before_anything_is_cleaned_up(monkeypatch):
    """What is cleaned up may wait for what the others compute."""
    order = []

    def fit(self, stack):
        stack.callback(order.append, "cleaned up")
        raise ValueError("no room")

    monkeypatch.setattr(trainer.Trainer, "_fit_plan", fit)
    run = object.__new__(trainer.Trainer)
    watched = DistributedConfig(hang_factor=0)
    run.context = SimpleNamespace(config=Config(distributed=watched), devices=[])
    run.peers = SimpleNamespace(process_index=1, fail=lambda why, code: order.append((why, code)))
    with pytest.raises(ValueError, match="no room"):
        run.fit()
    assert order[:2] == [("process 1 stopped: no room", 2), "cleaned up"]


# ---- what commands print ----


LIMIT_S = 30.0


def shown(capsys):
    return capsys.readouterr().err.splitlines()


def test_notes_wait_until_they_are_ready(capsys):
    notes = DelayedNotes()
    notes.add("a")
    assert shown(capsys) == []
    notes.add("b", shows_now=True)
    notes.add("c")
    assert shown(capsys) == ["a", "b", "c"]
    notes.show()
    assert shown(capsys) == []


def placements(name):
    one = SimpleNamespace(
        policy="dflop", name=name, microbatches=8, group_size=2, makespan_s=0.4, peak_bytes=44e9,
        saving="vision dots, llm zero 3 layers", busy_s={"vision": 0.1, "llm": 0.5},
    )  # fmt: skip
    other = SimpleNamespace(**vars(one) | {"makespan_s": 0.5})
    counts = {"n_evaluated": 9, "n_candidates": 9, "n_placements": 9, "n_fit": 9}
    return plan.ranking_table(SimpleNamespace(candidates=[one, other], **counts), True)


def of_runs(name):
    return make_table(
        "", ("figure", *(f"run-{i}" for i in range(8))), [(name, *["1,234.5 ms"] * 8)]
    )


@pytest.mark.parametrize("make, figures", [(placements, ["40.98", "500.0"]), (of_runs, ["1,2"])])
@pytest.mark.parametrize("name", ["vision 1 x 8 x 1 @ 0 " * 3, "x" * 120])
def test_a_table_fits_into_a_terminal_and_loses_nothing(make, figures, name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(make(name))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert all(figure in out for figure in figures)
    assert out.count("x") >= name.count("x")
