"""What a process of a run knows of its supervisor (`dflop launch`), and reports to it.

Both go by environment variables; without a supervisor there is nothing to know or to report.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from dflop_jax.cluster.variables import RESTARTS_ENV, RUN_ENV, STEP_FILE_ENV


def is_restart() -> bool:
    """Whether the supervisor has started this run before."""
    return os.environ.get(RESTARTS_ENV, "0") not in ("", "0")


def launch_name() -> str:
    """The name of the launch that this process belongs to; "" where nobody starts it again."""
    return os.environ.get(RUN_ENV, "")


def report_step() -> None:
    """Report that a step is done. The supervisor waits longer before each restart without one."""
    if file := os.environ.get(STEP_FILE_ENV):
        _touch(file)


@cache  # once a process
def _touch(file: str) -> None:
    with suppress(OSError):  # the supervisor has gone, and this process goes with it
        Path(file).touch()
