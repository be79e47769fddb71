"""Wrong command lines end in one line with the remedy, before anything is measured."""

import runpy
import sys
from pathlib import Path

import pytest

from dflop_jax.gpu_compile import chip_profile
from dflop_jax.pipeline.executor import Executor
from dflop_jax.train import profiling
from tests.cli.command_line import refused
from tests.cli.test_refused import measured
from tests.front.wrong_lines import WRONG, careless_folder


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    return careless_folder(tmp_path_factory.mktemp("careless"))


def test_there_are_sixty():
    assert len(WRONG) == 60


@pytest.mark.parametrize("line", WRONG)
def test_one_line_says_what_and_how(careless, line, capsys, monkeypatch):
    for module, name in (
        (profiling, "time_layers"), (profiling, "roofline_profile"),
        (chip_profile, "compiled_probes"), (Executor, "compile"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, measured)
    monkeypatch.chdir(careless)
    assert WRONG[line] in refused(capsys, *line.split())
    assert not (careless / "mine.txt").exists()


@pytest.mark.parametrize("name", ["omni", "qwen3vl", "two_stages", "llava_onevision_7b"])
def test_an_experiment_runs_as_a_script(monkeypatch, capsys, name):
    file = Path(__file__).parents[2] / "experiments" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--train.steps", "many"])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(file), run_name="__main__")
    assert e.value.code == 2
    assert "dflop train: Expected `int`" in capsys.readouterr().err
