"""What the documents say to type: their commands, the files that they name, their links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    str(f.relative_to(ROOT))
    for f in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"))
)
PROGRAMS = ("dflop", "python", "make")
_FENCES = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_OVER = re.compile(r"^(\|\||&&|;|\||>|2>|&)$")  # words after which another command begins


@dataclass(frozen=True)
class Command:
    """A command of a document: its words from the program's name on; `whole`: it can be typed as it
    stands, and does not only name a flag of it in a sentence."""

    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return " ".join(self.words)


def commands(text: str) -> list[Command]:
    """The commands of a document that start one of our programs, in its order."""
    found: list[Command] = []
    known: dict[str, str] = {}  # what variables are set to, here or in a block before
    for language, block in _FENCES.findall(text):
        if language in ("", "bash", "sh", "console"):
            found += [Command(words, True) for words in _of_block(block, known)]
    for code in _INLINE.findall(_FENCES.sub("", text)):
        words = _words(code, {})
        if words and words[0] in PROGRAMS:  # where a letter stands for a number
            numbered = ("1" if re.fullmatch(r"[A-Z]", w) else w for w in words)
            found.append(Command(tuple(numbered), False))
    return found


def _of_block(block: str, known: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for line in block.replace("\\\n", " ").splitlines():
        if set_here := re.match(r"(\w+)=('[^']*'|\"[^\"]*\"|\S*)", line):
            known[set_here[1]] = set_here[2].strip("'\"")
        words = _words(line, known)
        for at, word in enumerate(words):
            if Path(word).name in PROGRAMS:
                yield (Path(word).name, *words[at + 1 :])
                break


def _words(line: str, known: dict[str, str]) -> list[str]:
    """The words of a line's first command, variables that are known put in their place, without
    "..." and the brackets of what may be left out."""
    for name, value in known.items():
        line = re.sub(rf"\$\{{?{name}\b\}}?", lambda _, v=value: v, line)
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation mark of a sentence
        return []
    over = next((i for i, w in enumerate(words) if _OVER.match(w)), len(words))
    plain = (w.strip("[]") for w in words[:over])
    return [w for w in plain if w not in ("...", "")]


FILES = re.compile(
    r"(?<![\w./])(?:README|CONTRIBUTING|CHANGELOG|(?:experiments|benchmarks|models|tests|docs|"
    r"dflop_jax|\.ci)/)[\w./*{},-]*\w"
)
LINKS = re.compile(r"\]\(([^)\s]+)\)")


def files(text: str) -> set[str]:
    """Files and folders of the repository that a document names."""
    return {name for name in FILES.findall(text) if "yours" not in name}


def slugs(text: str) -> set[str]:
    """What a link to a heading may name, as GitHub makes it."""
    heads = re.findall(r"^#+ (.*)$", _FENCES.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
