"""What a process of a run knows of its supervisor (`dflop launch`), and reports to it: both by
environment variables. Without a supervisor there is nothing to know or to report."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

# Scripts may set these themselves; `processes.find_processes` reads them.
COORDINATOR_ENV = "DFLOP_COORDINATOR"
NUM_PROCESSES_ENV = "DFLOP_NUM_PROCESSES"
PROCESS_ID_ENV = "DFLOP_PROCESS_ID"
DEVICES_ENV = "DFLOP_DEVICES_PER_PROCESS"
LOCAL_NUMBER_ENV = "DFLOP_LOCAL_PROCESSES"  # processes of the run on this host
LOCAL_INDEX_ENV = "DFLOP_LOCAL_ID"  # and which of those this is

RUN_ENV = "DFLOP_RUN"  # the name of a launch, the same at all its restarts
RESTARTS_ENV = "DFLOP_RESTARTS"  # how often the run was started again; 0: this is the first start
STEP_FILE_ENV = "DFLOP_STEP_FILE"  # a file that the first step of a start makes


def is_restart() -> bool:
    """Whether the supervisor has started this run before."""
    return os.environ.get(RESTARTS_ENV, "0") not in ("", "0")


def launch_name() -> str:
    """The name of the launch that this process belongs to; "" where nobody starts it again."""
    return os.environ.get(RUN_ENV, "")


@cache  # once a process
def report_step() -> None:
    """Report that a step is done. The supervisor waits longer before each restart without one."""
    if file := os.environ.get(STEP_FILE_ENV):
        with suppress(OSError):  # the supervisor has gone, and this process goes with it
            Path(file).touch()
