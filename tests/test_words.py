"""The engine knows no modality: only `data/media` names one, and models do."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "dflop_jax"
ROOMS = ("runtime", "schedule", "plan", "simulate", "profile", "records", "data", "train")
MEDIA = ROOT / "data" / "media"
# Files that say a word for a reason of their own: the drawn scenes are pictures, as many tiles
# large as the configuration allows; a published tokenizer names its special token.
SAID = {"data/datasets/scenes.py": {"tiles"}, "data/text/tokenize.py": {"visual"}}
WORDS = re.compile(r"(?<![a-z])(llms?|vision|visual|audio|tiles)(?![a-z])", re.IGNORECASE)


def named(text: str) -> list[tuple[int, str]]:
    """Return (line, word) of every name and string of a source that names a modality."""
    words = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.STRING):
            words += [(token.start[0], w) for w in WORDS.findall(token.string)]
    return words


@pytest.mark.parametrize("room", ROOMS)
def test_no_modality_is_named(room):
    files = sorted(f for f in (ROOT / room).rglob("*.py") if MEDIA not in f.parents)
    assert files
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        words = named(file.read_text(encoding="utf-8"))
        assert [(line, w) for line, w in words if w.lower() not in SAID.get(name, ())] == [], name


def test_names_and_strings_are_seen():
    source = 'x = "llm"\nvision_ranks = 1\ndef f(n_tiles): ...\na.audio.b\n'
    assert [line for line, _ in named(source)] == [1, 2, 3, 4]
    assert named("projectile = fertile = 1  # the llm\n") == []
