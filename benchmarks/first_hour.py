"""The commands of docs/first_hour.md, in its order, in a folder of their own: does each end well,
and after how many seconds?

Command:  python benchmarks/first_hour.py [--commands check,generate] [--json FILE]
Minutes:  about 5 on two idle cores; all but `make demo`, which has its own figures, and `watch`,
          which does not end
Expected: exit code 0 of all
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from json_rows import Rows, add_json
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.documents import commands

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first_hour.md"
NOT_RUN = ("watch",)


@dataclass(frozen=True)
class Typed:
    """How a command of the page ended; `said` are its last words."""

    command: str
    exit_code: int
    seconds: float
    said: str


def typed(words: Sequence[str], folder: Path) -> Typed:
    """What becomes of a command in a folder; experiments are those of this checkout."""
    begun_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    seconds = round(time.perf_counter() - begun_s, 1)
    return Typed(" ".join(words), done.returncode, seconds, done.stdout.strip()[-300:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", help="of dflop, with commas between; default: all")
    add_json(parser)
    args = parser.parse_args(arguments)
    text = PAGE.read_text(encoding="utf-8")
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory(prefix="first.") as temporary:
        folder = Path(temporary)
        (folder / "experiments").symlink_to(ROOT / "experiments")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            rows.append(typed(["-c", block], folder))
        for command in commands(text):
            name = command.words[1] if command.words[0] == "dflop" and command.whole else ""
            asked = name in args.commands.split(",") if args.commands else name not in NOT_RUN
            if name and asked:
                rows.append(typed(["-m", "dflop_jax.cli", *command.words[1:]], folder))
    failed = [row for row in rows if row.exit_code]
    whole_s = sum(row.seconds for row in rows)
    Console().print(f"{len(rows)} commands, {len(failed)} failed, {whole_s:.0f} s")
    for row in failed:
        Console().print(f"{row.command}: exit {row.exit_code}: {row.said}", markup=False)


if __name__ == "__main__":
    main()
