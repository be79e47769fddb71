"""A run of two stages: killed in each and resumed it is the undisturbed one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflop_jax import Callback, Config, fit_stages
from dflop_jax.checkpoint.begin import open_saved
from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.cluster.variables import RESTARTS_ENV, RUN_ENV
from dflop_jax.train.in_stages import FINISHED
from dflop_jax.train.stage_folders import stage_folders
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, bucket, nano_profile
from .resume_cases import CACHE, CONFIG, PLAN, _in_a_folder_of_its_own, quick  # noqa: F401

STEPS = 4


class Killed(Exception):
    pass


class Kill(Callback):
    """Ends the process, as it were, in a step of a stage."""

    def __init__(self, at: int):
        self.left = at

    def before_step(self, step):
        self.left -= 1
        if self.left < 0:
            raise Killed


class Stop(Callback):
    def after_step(self, done):
        if done.step == 1:
            self.stop("enough")


def two(run_dir: str = "run", **changes) -> dict[str, Config]:
    """First the connector, then all of it, on other data by another optimizer."""
    train = dataclasses.replace(
        CONFIG.train, steps=STEPS, eval_samples=0, eval_every=0, stage="connector"
    )
    checkpoint = dataclasses.replace(CONFIG.checkpoint, every=2)
    base = dataclasses.replace(
        CONFIG, train=train, checkpoint=checkpoint, run_dir=run_dir, **CACHE, **changes
    )
    everything = dataclasses.replace(
        train, stage="full", learning_rate=1e-3, schedule="linear", optimizer="muon", ema=0.5
    )
    other = dataclasses.replace(base.data, seed=5)
    return {"connector": base, "all": dataclasses.replace(base, train=everything, data=other)}


# What trains is no part of a layout, and programs are compiled once for each of these here.
PLANS = {"connector": PLAN, "full": NANO.with_layout(buckets=(bucket(8, 176),))}


def make(config: Config, **options) -> Trainer:
    return Trainer(config, plan=PLANS[config.train.stage], profile=nano_profile(), **options)


def fit(stages, **options):
    return fit_stages(stages, make=make, **options)


def last(folder: str) -> CheckpointReader:
    return open_saved(Path(folder) / "checkpoints", None)


def arrays(folder: str) -> dict[str, bytes]:
    reader = last(folder)
    return {n: reader.read(n, [0] * len(s.shape), s.shape).tobytes()
            for n, s in reader.specs.items()}  # fmt: skip


@pytest.fixture(scope="module")
def whole(quick, tmp_path_factory):
    """The folder of a run of two stages that nothing interrupts."""
    folder = str(tmp_path_factory.mktemp("stages") / "run")
    results = fit(two(folder))
    assert [r.steps_done for r in results.values()] == [STEPS, STEPS]
    return folder


def test_a_stage_trains_what_it_says_from_where_the_one_before_ended(whole):
    first, second = arrays(f"{whole}/1-connector"), arrays(f"{whole}/2-all")
    params = {n for n in first if n.startswith("params/")}
    assert params == {n for n in second if n.startswith("params/")}
    assert all(first[n] != second[n] for n in params if n.endswith("kernel"))
    alone = fit({"connector": two("alone")["connector"]})
    assert arrays("alone/1-connector") == first
    assert list(alone) == ["connector"]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("kill", [3, STEPS + 1, STEPS + 3])
def test_killed_in_a_stage_and_resumed_it_is_as_if_nothing_had_been(whole, kill):
    with pytest.raises(Killed):
        fit(two(), callbacks=[Kill(kill)])
    results = fit(two(), existing="resume")
    assert list(results) == (["connector", "all"] if kill < STEPS else ["all"])
    for stage in ("1-connector", "2-all"):
        assert arrays(f"run/{stage}") == arrays(f"{whole}/{stage}")
    assert fit(two(), existing="resume") == {}


@pytest.mark.slow
def test_an_agent_starts_it_again_where_it_was(whole, monkeypatch):
    monkeypatch.setenv(RUN_ENV, "launch")
    with pytest.raises(Killed):
        fit(two(), existing="overwrite", callbacks=[Kill(STEPS + 3)])
    monkeypatch.setenv(RESTARTS_ENV, "1")
    assert list(fit(two(), existing="overwrite")) == ["all"]
    assert arrays("run/2-all") == arrays(f"{whole}/2-all")


def test_a_callback_ends_each_stage_alone():
    results = fit(two(), callbacks=[Stop()])
    assert [r.stopped_by for r in results.values()] == ["enough", "enough"]
    assert fit(two(), existing="resume") == {}


def test_hours_are_those_of_the_whole_run(monkeypatch):
    stages = two()
    hours = {n: dataclasses.replace(c, train=dataclasses.replace(c.train, max_hours=1e-7))
             for n, c in stages.items()}  # fmt: skip
    results = fit(hours)
    assert list(results) == ["connector"]
    assert results["connector"].preempted
    assert not Path("run/1-connector", FINISHED).exists()


def test_what_a_later_stage_cannot_do_is_said_before_the_first_one_trains(whole):
    stages = two()
    bad = dataclasses.replace(
        stages["all"], train=dataclasses.replace(stages["all"].train, freeze=("ears",))
    )
    with pytest.raises(ValueError, match="ears"):
        fit({**stages, "all": bad})
    with pytest.raises(ValueError, match=r"1-connector: holds another run; choose another run_dir"):
        fit(two(whole))
    assert not Path("run").exists()
    unsaved = dataclasses.replace(CONFIG.checkpoint, every=0)
    for changed, says in (
        ({}, "has none"),
        ({"a b": stages["all"]}, "letters, digits"),
        ({"one": stages["all"], "two": two("other")["all"]}, "other, run; give all the same"),
        ({"one": dataclasses.replace(stages["all"], run_dir="x-{time}")}, "without {time}"),
        ({"one": dataclasses.replace(stages["all"], checkpoint=unsaved)}, "checkpoint.every=0"),
    ):
        with pytest.raises(ValueError, match=says):
            fit(changed)


def test_a_later_stage_is_not_gone_on_with_from_other_parameters(whole):
    fit({"connector": two()["connector"]})
    Path("run/1-connector", FINISHED).write_text("{}")
    with pytest.raises(ValueError, match=r"finished.json: says not how the stage ended"):
        fit(two(), existing="resume")
    Path("run/1-connector", FINISHED).unlink()
    Path("run/2-all/checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="2-all: has begun, but run/1-connector is not over"):
        fit(two(), existing="resume")


def test_a_stage_is_in_a_folder_of_its_own_and_begins_with_the_one_before():
    found = stage_folders(two())
    assert [c.run_dir for c in found.values()] == ["run/1-connector", "run/2-all"]
    assert [c.model.weights for c in found.values()] == [(), ("run/1-connector",)]
