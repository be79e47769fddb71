"""The commands in docs/gpus.md: their flags exist, and those that only plan lead to a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dflop_jax.cli.experiment import experiment_arguments, load_experiment
from dflop_jax.config import override
from dflop_jax.config_texts import profiled_steps
from dflop_jax.train.stages import adapted, trained_parts
from models.llava import build

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
RECIPE = "experiments/llava_onevision_7b.py"


def commands() -> list[list[str]]:
    """Every `dflop` command line of the page, with the flags of its variable in place."""
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    (mine,) = [m for b in blocks for m in re.findall(r'MINE="(.*?)"', b, re.DOTALL)]
    lines = [line for b in blocks for line in b.replace("\\\n", " ").splitlines()]
    return [
        shlex.split(line.replace("$MINE", mine), comments=True)
        for line in lines
        if line.startswith("dflop ")
    ]


def overrides(words: list[str]) -> dict[str, str]:
    """The flags of a command line that change a field of the configuration."""
    known = {a.dest for a in experiment_arguments()._actions}
    pairs = zip(words, [*words[1:], ""])
    return {w[2:]: v for w, v in pairs if w.startswith("--") and w[2:] in known}


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:3])[:40])
def test_every_command_is_one(words):
    if words[1] == "report":
        return
    assert words[2] == RECIPE
    changes = overrides(words)
    given = {w[2:] for w in words if w.startswith("--")}
    assert given - changes.keys() <= {"model", "data", "explain", "resume"}
    config = override(load_experiment(str(ROOT / RECIPE)), changes)
    assert profiled_steps(config.train.profile_steps).stop <= config.train.steps


def test_flags_in_the_text_exist():
    named = set(re.findall(r"--((?:train|plan|model|data|schedule|checkpoint)\.[a-z_]+)", TEXT))
    named |= set(re.findall(r"`((?:train|plan|data|schedule|checkpoint)\.[a-z_]+)`", TEXT))
    known = {a.dest for a in experiment_arguments()._actions}
    assert named
    assert named <= known


def test_the_recipe_names_parts_that_the_model_has():
    config = load_experiment(str(ROOT / RECIPE))
    model = adapted(build(config.model.size, config.model.dtype), config.train)
    assert trained_parts(config.train, model).rates == {
        "vision": 2e-6,
        "connector": 1e-5,
        "llm": 1e-5,
    }
