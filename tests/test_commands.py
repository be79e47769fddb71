"""Every command in README.md, CONTRIBUTING.md and docs/ is one that the real parsers take, and
every file and heading that these lead to is there.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from dflop_jax.aot import chip_profile
from dflop_jax.cli import main
from dflop_jax.cli.experiment import experiment_arguments, overrides
from dflop_jax.cli.main import COMMANDS, _parser
from dflop_jax.config import Config, override
from dflop_jax.train import profiling
from tests.benchmarks.scripts import module
from tests.documents import DOCUMENTS, LINKS, ROOT, Command, commands, files, slugs
from tests.front.wrong_lines import careless_folder

NAMES = {c.name for c in COMMANDS}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class _Parsed(Exception):
    """A script has parsed its arguments."""


def why_refused(command: Command, capsys) -> str:
    """What the program of a command says against it, "" for nothing."""
    try:
        {"dflop": _dflop, "python": _python, "make": _make}[command.words[0]](command)
    except SystemExit as e:
        said = capsys.readouterr().err.strip()
        lacks = ("required" in said or "expected" in said) and not command.whole
        return "" if e.code == 0 or lacks else said
    except (ValueError, AssertionError) as e:
        return str(e)
    return ""


def _dflop(command: Command) -> None:
    words = command.words[1:]
    if len(words) < 2:
        assert not words or words[0] in NAMES, f"no command {words[0]}"
        return
    args, extra = _parser().parse_known_args(words)
    assert not extra, f"unknown: {' '.join(extra)}"
    if args.command == "launch":
        rest = tuple(w for w in args.process if w != "--")
        if rest[:1] in (("dflop",), ("python",)):
            (_dflop if rest[0] == "dflop" else _python)(Command(rest, command.whole))
    elif hasattr(args, "experiment"):
        override(Config(), overrides(args))


def _python(command: Command) -> None:
    words = list(command.words[1:])
    if words[:2] == ["-m", "pytest"]:
        return  # whose files are looked for as all others are
    if words[:1] == ["-m"]:
        is_package = (ROOT / words[1].replace(".", "/")).is_dir()
        script = importlib.import_module(words[1] + ".__main__" * is_package)
        words = words[2:]
    elif words and words[0].startswith("benchmarks/"):
        script, words = module(Path(words[0]).stem), words[1:]
    else:
        return
    with pytest.MonkeyPatch.context() as patch:
        whole = argparse.ArgumentParser.parse_args

        def parse(self, args=None, namespace=None):
            whole(self, args, namespace)
            raise _Parsed

        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", ["script", *words])
        with pytest.raises(_Parsed):
            script.main()


def _make(command: Command) -> None:
    targets = [w for w in command.words[1:] if "=" not in w]
    assert {t for t in targets if t.islower()} <= TARGETS, f"no target {targets}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_parses(document, capsys):
    found = commands((ROOT / document).read_text(encoding="utf-8"))
    refused = {str(c): why for c in found if (why := why_refused(c, capsys))}
    assert refused == {}


def test_every_flag_in_a_sentence_exists():
    known = {a.dest for a in experiment_arguments()._actions}
    rooms = "train|plan|model|data|schedule|checkpoint"
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(rf"--((?:{rooms})\.[a-z_]+)", text))
        assert named <= known, document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_heading_is_there(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [name for name in files(text) if not any(ROOT.glob(name))]
    for link in LINKS.findall(text):
        name, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere
        target = ((ROOT / document).parent / name).resolve() if name else ROOT / document
        there = target.exists()
        if there and heading:
            there = heading in slugs(target.read_text(encoding="utf-8"))
        if not there:
            missing.append(link)
    assert missing == []


# ---- what commands do ----

# With stand-ins for the models and data that they name; what needs a run, a network or a terminal
# has tests of its own, and so has compiling for a chip.
TYPED = ("README.md", "docs/one_command.md", "docs/first_hour.md", "docs/training.md")
MEASURES = ("train", "plan", "profile", "simulate")
STAND_INS = {
    "HF_FOLDER": "qwen",
    "OWNER/NAME": "qwen",
    "train.json": "photos/train.json",
    "first/train.json": "photos/train.json",
    "PATH": "photos",
    "RUN": "qwen",
}


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
    for document in TYPED:
        shutil.rmtree("runs", ignore_errors=True)
        Path("my_run.py").unlink(missing_ok=True)
        found = commands((ROOT / document).read_text(encoding="utf-8"))
        lines = {tuple(STAND_INS.get(word, word) for word in c.words): c for c in found if c.whole}
        lines = {words: line for words, line in lines.items() if len(words) > 1}
        for (program, command, *rest), line in lines.items():
            words = (command, *rest)
            if program != "dflop" or "--help" in words or words in typed:
                continue
            if command not in (*MEASURES, "check", "init"):
                continue
            typed.add(words)
            try:
                code = main(words)
            except _Measured:
                code = "it measures"
            if code != ("it measures" if command in MEASURES else 0):
                wrong[f"{document}: {line}"] = f"{code}: {capsys.readouterr().err}"
        assert lines
    assert wrong == {}
