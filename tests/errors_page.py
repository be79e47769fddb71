"""What the program says of mistakes, read from its source by `ast`: docs/errors.md, and which of
the messages say nothing of what to do.

    python -m tests.errors_page    # writes docs/errors.md (make errors)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
SAID = ("ValueError", "TryAgain", "RunFailed", "FolderInUse")
# Rooms whose messages are reasons within another one, which says what to do: why a record, a
# picture or a file of an index is no good.
REASONS = ("data/datasets/", "data/media/", "data/text/", "data/pool/", "data/bounds.py",
           "data/decoded.py", "data/packing.py", "data/sample.py")  # fmt: skip
# Functions that are called from Python: what they ask for is the remedy.
LIBRARY = ("checkpoint/format.py", "checkpoint/layout.py", "checkpoint/reader.py", "contract.py",
           "profile/collectives.py", "profile/roofline.py", "records/", "report/metrics.py",
           "schedule/solver/", "sim/", "tasks/")  # fmt: skip
SECTIONS = {
    "cli": "Command lines", "config": "Fields", "front": "Models and data by name",
    "data": "Data", "weights": "Published weights", "plan": "Plans", "schedule": "Schedules",
    "profile": "Profiles", "pipeline": "Plans and models", "gpu_compile": "GPUs that are not here",
    "hardware": "GPUs that are not here", "train": "Runs", "checkpoint": "Checkpoints",
    "report": "Run folders and reports", "folders": "Run folders and reports",
    "record_files": "Files of records", "cluster": "Many processes", "generate": "Answers",
    "evaluate": "Answers",
    "verify": "Verification",
}  # fmt: skip

# How a remedy is told from a fact: what is asked for, what is allowed, or what is known.
_ASKS = """add ask begin break call check choose close connect continue convert copy cut do download
    drop end export fix free freeze give install keep leave let look lower make mend merge move name
    open pass pip plan point profile put raise read remove rename repair report return run save say
    see set shorten show sort split start take train try use wait wrap write"""
REMEDY = re.compile(
    rf"(?:^|[;:,?—] |[(]|\b(?:or|and|then|else|to) )(?:{'|'.join(_ASKS.split())})\b"
    r"|did you mean|\bmust\b|\bis not one of\b|\bat least \d|\bknown: "
    r"|; (?:it has|it may|the model has|there are|what trains|the first is) "
    r"|\bchmod \d|\bdflop \w|\{[^{}]*(?:remedy|hint|advice|_HOW|why_none|why_nothing)[^{}]*\}",
    re.IGNORECASE,
)


@dataclass(frozen=True, order=True)
class Message:
    """A message with "…" for what it fills in; `raw` has the expressions there."""

    file: str
    text: str
    raw: str

    @property
    def is_whole(self) -> bool:
        """Whether it stands alone, and is not put together elsewhere or part of another."""
        words = re.sub(r"\{.*?\}", "", self.raw)
        return bool(re.search(r"[a-z]{3}", words)) and not self.file.startswith(REASONS + LIBRARY)

    @property
    def says_what_to_do(self) -> bool:
        return bool(REMEDY.search(self.raw))


def messages(root: Path = ROOT / "dflop_jax") -> list[Message]:
    """Those of every `raise` of an error that a command says in a line."""
    found: set[Message] = set()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        for raw in _raised(ast.parse(file.read_text(encoding="utf-8"))):
            text = re.sub(r"\{[^{}]*\}", "…", raw)
            found.add(Message(name, " ".join(text.split()), raw))
    return sorted(found)


def _raised(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        called = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(called, ast.Call) and called.args and ast.unparse(called.func) in SAID:
            yield from _texts(called.args[0])


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be, what is filled in between braces."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(
                str(v.value) if isinstance(v, ast.Constant) else _filled(v) for v in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (a + b for a in _texts(left) for b in _texts(right))
        case ast.IfExp(body=one, orelse=other):
            yield from _texts(one)
            yield from _texts(other)
        case _:
            yield _filled(node)


def _filled(node: ast.AST) -> str:
    inside = node.value if isinstance(node, ast.FormattedValue) else node
    return "{" + re.sub(r"[{}]", "", ast.unparse(inside)) + "}"


def page(found: list[Message]) -> str:
    """docs/errors.md."""
    lines = [
        "# Error messages",
        "",
        'Made from the source by `make errors`; "…" is filled in. Each is one line on standard',
        "error, with exit code 2, or 4 where the same command may do later. See",
        "[When things go wrong](when_things_go_wrong.md).",
        "",
    ]
    titles = list(dict.fromkeys(SECTIONS.values()))
    for title in titles:
        texts = sorted({m.text for m in found if m.is_whole and _title(m) == title})
        if texts:
            lines += [f"## {title}", "", *(f"- {_escaped(text)}" for text in texts), ""]
    reasons = sorted({m.text for m in found if m.file.startswith(REASONS) and len(m.text) > 4})
    lines += [
        "## Why a record or a file of data is no good",
        "",
        "Such a record is named, counted and replaced by another; `dflop check` shows all. Mend or",
        "remove it, or raise `data.max_bad_fraction`. A file of which this is said is to be",
        "written or downloaded again.",
        "",
        *(f"- {_escaped(text)}" for text in reasons),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _title(message: Message) -> str:
    room = message.file.partition("/")[0].removesuffix(".py")
    return SECTIONS.get(room, SECTIONS["config"])


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>`|\[\]])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page(messages()), encoding="utf-8")
