"""A process that waits, with everything imported, to run what would otherwise start anew.

`dflop launch` keeps one for each process that it would start again (`cluster.group`). It opens no
device: which ones it may use is among the variables that it is told, with what to run. It ends when
its pipe closes, so it does not outlive the launcher.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Sequence

from dflop_jax.report.spent import end_wait

# What training imports, most of its start; models import flax. Modules import what they need by
# themselves, so that one too few costs time only.
MODULES = ("jax", "flax", "dflop_jax.cli.main", "dflop_jax.train.trainer")


def main() -> None:
    """Wait for one line, and become what it says; the pipe's number is the last argument."""
    # Without the folder of this package (see `children.program`) and that of a command.
    path = sys.path[1 if sys.flags.safe_path else 2 :]
    pipe = int(sys.argv[-1])
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    with open(pipe, "rb") as orders:
        line = orders.readline()
    if not line.endswith(b"\n"):
        return
    end_wait()
    job = json.loads(line)
    os.environ.update(job["environment"])
    run(job["arguments"], path)


def run(arguments: Sequence[str], path: Sequence[str]) -> None:
    """Run what `python ARGUMENTS` runs: a script, `-m MODULE` or `-c CODE`; `path` is where modules
    are looked for beside the command's own folder."""
    what, rest = arguments[0], [*arguments[1:]]
    if what in ("-c", "-m"):
        folder, (what, *rest) = "" if what == "-c" else os.getcwd(), rest
    else:
        folder = os.path.dirname(os.path.realpath(what))
    sys.path[:] = path if sys.flags.safe_path else [folder, *path]
    if arguments[0] == "-c":
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [what, *rest]
    if arguments[0] == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")
