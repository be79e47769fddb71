"""Commands of README.md and docs/ with stand-ins for the models and data that they name: in their
order, in one folder, each comes as far as measuring, or to its end where it measures nothing."""

from __future__ import annotations

import shutil

import pytest

from dflop_jax.cli import main
from dflop_jax.gpu_compile import chip_profile
from dflop_jax.train import choice, profiling
from tests.documents import ROOT, commands
from tests.front.wrong_lines import careless_folder

DOCUMENTS = ("README.md", "docs/one_command.md", "docs/first_hour.md", "docs/training.md")
# What needs a run, a network or a terminal has tests of its own, and so has compiling for a chip.
COMMANDS = ("check", "init", "train", "plan", "profile", "simulate")
STAND_INS = {
    "HF_FOLDER": "qwen",
    "OWNER/NAME": "qwen",
    "train.json": "photos/train.json",
    "first/train.json": "photos/train.json",
    "mixture.yaml": "mixture.yaml",
    "PATH": "photos",
}
ENDED = "check", "init"  # which measure nothing


class _Measured(Exception):
    """A command has come as far as to measure."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = careless_folder(tmp_path_factory.mktemp("stand-ins"))
    (made / "mixture.yaml").write_text("- photos/train.json\n")
    (made / "experiments").symlink_to(ROOT / "experiments")
    return made


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_come_as_far_as_measuring(document, folder, monkeypatch, capsys):
    def measured(*args, **kwargs):
        raise _Measured

    for where in (profiling, choice):
        monkeypatch.setattr(where, "make_profile", measured)
    monkeypatch.setattr(chip_profile, "predicted_profile", measured)
    monkeypatch.chdir(folder)
    shutil.rmtree("runs", ignore_errors=True)
    (folder / "my_run.py").unlink(missing_ok=True)
    n_typed, wrong = 0, {}
    for command in commands((ROOT / document).read_text(encoding="utf-8")):
        words = [STAND_INS.get(word, word) for word in command.words[1:]]
        if command.words[0] != "dflop" or not command.whole or words[0] not in COMMANDS:
            continue
        if "--help" in words:
            continue
        n_typed += 1
        try:
            if (code := main(words)) or words[0] not in ENDED:
                wrong[str(command)] = f"exit code {code}: {capsys.readouterr().err}"
        except _Measured:
            if words[0] in ENDED:
                wrong[str(command)] = "it measures"
    assert n_typed
    assert wrong == {}
