"""Commands of README.md and docs/ with stand-ins for the models and data that they name: in their
order, in one folder, each comes as far as measuring, or to its end where it measures nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflop_jax.aot import chip_profile
from dflop_jax.cli import main
from dflop_jax.train import profiling
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
    "RUN": "qwen",
}
ENDED = "check", "init"  # which measure nothing


class _Measured(Exception):
    """A command has come as far as to measure."""


@pytest.mark.slow
def test_commands_come_as_far_as_measuring(tmp_path, monkeypatch, capsys):
    """What two documents say alike is typed once: every command costs half a second."""

    def measured(*args, **kwargs):
        raise _Measured

    monkeypatch.setattr(profiling, "make_profile", measured)
    monkeypatch.setattr(chip_profile, "predict_profile", measured)
    careless_folder(tmp_path)
    (tmp_path / "mixture.yaml").write_text("- photos/train.json\n")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    typed, wrong = set[tuple[str, ...]](), {}
    for document in DOCUMENTS:
        shutil.rmtree("runs", ignore_errors=True)
        Path("my_run.py").unlink(missing_ok=True)
        n_here = 0
        for command in commands((ROOT / document).read_text(encoding="utf-8")):
            words = [STAND_INS.get(word, word) for word in command.words[1:]]
            if command.words[0] != "dflop" or not command.whole or words[0] not in COMMANDS:
                continue
            if "--help" in words:
                continue
            n_here += 1
            if tuple(words) in typed:
                continue
            typed.add(tuple(words))
            try:
                if (code := main(words)) or words[0] not in ENDED:
                    said = capsys.readouterr().err
                    wrong[f"{document}: {command}"] = f"exit code {code}: {said}"
            except _Measured:
                if words[0] in ENDED:
                    wrong[f"{document}: {command}"] = "it measures"
        assert n_here
    assert wrong == {}
