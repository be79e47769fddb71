"""Sixty wrong command lines, each as a process: one line, the exit code of bad input, how soon.

Command:  python benchmarks/wrong_lines.py [--json FILE]
Minutes:  about 3 on two cores
Expected: exit code 2 and one line of all, none after 10 s

The lines are those of tests/front/wrong_lines.py: flags misspelt in every place, files that are not
there, things of the wrong kind, impossible sizes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.cluster.ending import BAD_INPUT
from tests.front.wrong_lines import WRONG, careless_folder

ROOT = Path(__file__).resolve().parent.parent
TARGET_S, LIMIT_S = 10.0, 600.0


@dataclass(frozen=True)
class Refusal:
    """How a wrong command line ended. `right`: with the exit code, one line, and its remedy;
    `cpu_s`: what it computed, which other work on the machine does not change."""

    line: str
    right: bool
    exit_code: int
    lines: int
    seconds: float
    cpu_s: float
    said: str


def refusal(line: str, folder: Path) -> Refusal:
    """What becomes of a command line in a folder."""
    begun_s, before_s = time.perf_counter(), children_s()
    done = subprocess.run(
        [sys.executable, "-m", "dflop_jax.cli", *line.split()],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    seconds = time.perf_counter() - begun_s
    said = done.stderr.strip()
    lines = len(said.splitlines())
    right = done.returncode == BAD_INPUT and lines == 1 and WRONG[line] in said
    return Refusal(
        line,
        right,
        done.returncode,
        lines,
        round(seconds, 1),
        round(children_s() - before_s, 1),
        said[-300:],
    )


def children_s() -> float:
    """Seconds that this process's children, all that are over, have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_json(parser)
    args = parser.parse_args(arguments)
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory(prefix="wrong.") as temporary:
        folder = careless_folder(Path(temporary))
        for line in WRONG:
            rows.append(refusal(line, folder))
    late = [r for r in rows if r.seconds > TARGET_S]
    table = Table(
        "command lines", "as they should", f"after {TARGET_S:.0f} s", "slowest s", "most CPU s"
    )
    right = sum(r.right for r in rows)
    slowest, most = max(r.seconds for r in rows), max(r.cpu_s for r in rows)
    table.add_row(*map(str, (len(rows), right, len(late), slowest, most)))
    Console().print(table)
    for r in rows:
        if not r.right:
            Console().print(
                f"{r.line}: exit {r.exit_code}, {r.lines} lines: {r.said}", markup=False
            )


if __name__ == "__main__":
    main()
