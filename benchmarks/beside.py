"""Step times of another commit and of this one, by turns: each runs its own `two_process.py`.

Command:  python benchmarks/beside.py COMMIT [--runs 3] [options of two_process.py]
Minutes:  those of two_process.py, twice for every run
Expected: this commit's steps take no longer than the other's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The code of a commit, in a folder of its own."""
    git = partial(subprocess.run, cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        git(["git", "worktree", "add", "--quiet", "--detach", str(code), commit])
        try:
            yield code
        finally:
            git(["git", "worktree", "remove", "--force", str(code)])


def step_times(root: Path, options: Sequence[str]) -> str:
    """What a checkout's benchmark says of its policies."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "benchmarks/two_process.py", *options, "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": str(root)}
        subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
        policies = json.loads(file.read_text())["policies"]
    return ", ".join(f"{name} {1e3 * p['step_s']:.0f} ms" for name, p in policies.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit", help="what to run beside this checkout")
    parser.add_argument("--runs", type=int, default=3, help="turns (default 3)")
    args, options = parser.parse_known_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs} must be at least 1")
    known = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{args.commit}^{{commit}}"],
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    if known.returncode:
        parser.error(f"{args.commit} is no commit of this repository")
    with checkout(args.commit) as other:
        for run in range(1, args.runs + 1):
            for name, root in ((args.commit, other), ("this one", ROOT)):
                print(f"run {run}, {name}: {step_times(root, options)}", flush=True)


if __name__ == "__main__":
    main()
