"""Folders named by the time, and steps that are said by epochs."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dflop_jax import Config, TrainConfig
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.processes import LAUNCH_ENV, RESTARTS_ENV
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.train import run_dir
from dflop_jax.train.choose_plan import describe_data
from dflop_jax.train.run_context import RunContext, with_step_count
from dflop_jax.train.run_dir import resolve_run_dir

PATTERN = "runs[1]/a-{time}"  # what glob would take for letters


@pytest.fixture
def settle(monkeypatch, tmp_path):
    """Names of folders at a time, which does not pass."""
    monkeypatch.chdir(tmp_path)

    def at(time, resume=False, pattern=PATTERN):
        monkeypatch.setattr(run_dir.time, "strftime", lambda how: time)
        return resolve_run_dir(pattern, ProcessGroup(), resume=resume)

    return at


def test_no_run_meets_another_one(settle):
    assert settle("1", pattern="mine") == "mine"
    assert settle("1") == "runs[1]/a-1"
    RunFolder("runs[1]/a-1").close()
    assert [settle("1"), settle("2")] == ["runs[1]/a-1-2", "runs[1]/a-2"]


def test_resuming_finds_the_newest(settle):
    assert settle("1", resume=True) == "runs[1]/a-1"
    for name in ("a-1", "a-3", "b-4"):
        RunFolder(f"runs[1]/{name}").close()
    assert settle("5", resume=True) == "runs[1]/a-3"
    assert settle("5") == "runs[1]/a-5"


def test_a_restart_goes_on_in_the_folder_of_its_launch(settle, monkeypatch):
    RunFolder("runs[1]/a-1", launch="mine").close()
    RunFolder("runs[1]/a-2", launch="another").close()
    monkeypatch.setenv(LAUNCH_ENV, "mine")
    assert settle("3") == "runs[1]/a-3"
    monkeypatch.setenv(RESTARTS_ENV, "1")
    assert settle("3") == "runs[1]/a-1"
    monkeypatch.setenv(LAUNCH_ENV, "a third")
    assert settle("3") == "runs[1]/a-3"


@dataclass
class Rows:
    """So many samples."""

    name: str
    n: int

    def __len__(self):
        return self.n


@pytest.mark.parametrize(
    "epochs, n, steps, batch",
    [
        (1, 64, 8, 8),
        (1, 65, 9, 8),
        (0.5, 64, 4, 8),
        (3, 1, 3, 1),
        (0, 6, 7, 6),
        (0, 9, 7, 8),
        (1e-6, 9, 1, 8),
    ],
)
def test_epochs_say_the_steps(epochs, n, steps, batch):
    config = Config(train=TrainConfig(steps=7, epochs=epochs, global_batch=8))
    model = SimpleNamespace()
    train = with_step_count(RunContext(config, model, [], ProcessGroup()), n).config.train
    assert (train.steps, train.epochs, train.global_batch) == (steps, 0, batch)
    said = describe_data(Rows("rows", n), train, 8)
    assert said.startswith(f"data: rows: {n} samples; {steps} steps of {batch} samples")
    assert ("(train.global_batch 8 is lowered, there are no more)" in said) == (n < 8)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_warm_up_that_was_set_is_no_longer_than_the_epochs(ratio):
    train = TrainConfig(epochs=1, global_batch=8, warmup_steps=9, warmup_ratio=ratio)
    place = RunContext(Config(train=train), SimpleNamespace(), [], ProcessGroup())
    if ratio:
        assert with_step_count(place, 64).config.train.steps == 8
        return
    with pytest.raises(ValueError, match="warmup_steps=9 is longer than the run of 8 steps"):
        with_step_count(place, 64)
