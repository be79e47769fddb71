"""An experiment of several stages on the command line."""

import argparse
import json
from pathlib import Path

import pytest

from dflop_jax.cli.front_door import asked, asked_stages
from dflop_jax.cli.main import _parser
from dflop_jax.train import in_stages
from dflop_jax.train.results import FitResult
from tests.cli.command_line import EXPERIMENT, refused, run

TWO = (
    EXPERIMENT.replace("def config", "def one")
    + """

def config():
    from dataclasses import replace
    base = one()
    return {"first": replace(base, train=replace(base.train, stage="connector")), "all": base}
"""
)


@pytest.fixture(autouse=True)
def _two():
    Path("two.py").write_text(TWO)


def words(*args) -> argparse.Namespace:
    return _parser().parse_known_args(["train", *args])[0]


def test_flags_hold_for_every_stage_and_one_may_be_named():
    stages = asked_stages(words("two.py", "--train.steps", "7", "--run_dir", "else"))
    assert [(n, a.config.train.stage, a.config.train.steps) for n, a in stages.items()] == [
        ("first", "connector", 7), ("all", "full", 7)]  # fmt: skip
    one = asked(words("two.py", "--only", "all", "--run_dir", "else")).config
    assert (one.run_dir, one.model.weights) == ("else/2-all", ("else/1-first",))
    assert asked(words("two.py", "--only", "first")).config.model.weights == ()


def test_all_stages_are_trained_and_answered(capsys, monkeypatch):
    seen = {}

    def fit_stages(configs, *, make, existing, **options):
        seen.update(configs=configs, existing=existing)
        for config in configs.values():
            make(config)
        return {n: FitResult(Path("run") / n, (3.0, 2.0), None, 0, 2, n == "all") for n in configs}

    monkeypatch.setattr(in_stages, "fit_stages", fit_stages)
    code, out, _ = run(capsys, "train", "two.py", "--resume", "auto", "--json")
    answer = json.loads(out)
    assert code == answer["exit_code"] == 3  # as its last stage was preempted
    assert seen["existing"] == "resume"
    assert list(seen["configs"]) == ["first", "all"]
    assert [a["exit_code"] for a in answer["stages"].values()] == [0, 3]
    assert answer["stages"]["all"]["last_loss"] == 2.0


@pytest.mark.parametrize(
    "args, says",
    [
        (["plan", "two.py"], r"has several stages; name one, as --only first (first, all)"),
        (["train", "two.py", "--only", "last"], "no such stage; name one, as --only first"),
        (["train", "nano.py", "--only", "all"], "the experiment is one run; leave it out"),
        (["train", "two.py", "--resume", "3"], "--resume 3 is for one stage; name it, as --only"),
        (["train", "two.py", "--plan-file", "nano_plan.json"], "--plan-file is for one stage"),
        (["train", "two.py", "--only", "all"], "run/1-first: no such folder of weights or run"),
    ],
)
def test_what_is_for_one_stage_names_it(capsys, args, says):
    assert says in refused(capsys, *args)


@pytest.mark.parametrize("made", ["{}", "{'': one()}", "{'a': 3}", "[one()]"])
def test_what_is_no_stages_is_refused(capsys, made):
    Path("two.py").write_text(TWO.replace("return {", f"return {made}\n    return {{"))
    assert "or a dict of them by the names of stages" in refused(capsys, "plan", "two.py")
