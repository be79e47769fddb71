"""What a process and the agent of its host (`dflop launch`) tell each other.

The agent tells by variables: which start this is, of which launch, how few processes the run may go
on with, and the name of a folder.
The process tells by small files in that folder, each written whole or not at all: where the run's
restarts are to be counted, that it has done a step, and what it failed by. Without an agent all of
this does nothing.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec

from dflop_jax.cluster.variables import (
    AGENT_ENV,
    FEWER_ENV,
    LEAST_ENV,
    PROCESS_ID_ENV,
    RESTARTS_ENV,
    RUN_ENV,
)

_BEGUN, _STEP, _FAILURE = "begun", "step", "failure"
MOST_WORDS = 2000  # characters of a failure's reason
MOST_SAMPLES = 64  # of its batch that are named


class Failure(msgspec.Struct, frozen=True):
    """What a process failed by, by itself: an exit code, a line, the step it was at (None: before
    the first), the samples of that step's batch, and the host that is to blame; "": its own.
    `broken`: a device computes wrong and will again, one of process `process` (None: nobody knows).
    """

    exit_code: int
    why: str
    step: int | None = None
    samples: tuple[str, ...] = ()
    host: str = ""
    broken: bool = False
    process: int | None = None


# ---- the process's side ----


def is_restart() -> bool:
    """Whether an agent has started this run before."""
    return os.environ.get(RESTARTS_ENV, "0") not in ("", "0")


def launch_name() -> str:
    """The name of the launch that this process belongs to; "" without an agent that restarts."""
    return os.environ.get(RUN_ENV, "")


def start_number() -> int:
    """The number of this start of its launch, from 1."""
    return 1 + _number(RESTARTS_ENV)


def least_processes() -> int:
    """With how few processes the run goes on where others are gone; 0: with all only."""
    return _number(LEAST_ENV)


def fewer_processes() -> int:
    """How many the run would have without one host, or one process of a single host; 0: it would
    not go on."""
    return _number(FEWER_ENV)


def _number(name: str) -> int:
    return int(os.environ.get(name) or 0)


def tell_begun(count_file: Path) -> None:
    """The run has begun, and its restarts are to be counted in that file."""
    _write(_BEGUN, str(count_file.resolve()).encode())


def tell_step() -> None:
    """The run has done a step; only the first one after a start is news."""
    if folder := os.environ.get(AGENT_ENV):
        _tell_first_step(folder)


@cache
def _tell_first_step(folder: str) -> None:
    _write(_STEP, b"")


def tell_failure(failure: Failure) -> None:
    """This process ends by an error of its own."""
    short = msgspec.structs.replace(
        failure, why=failure.why[:MOST_WORDS], samples=failure.samples[:MOST_SAMPLES]
    )
    _write(f"{_FAILURE}-{os.environ.get(PROCESS_ID_ENV, '0')}", msgspec.json.encode(short))


def _write(name: str, content: bytes) -> None:
    folder = os.environ.get(AGENT_ENV)
    if not folder:
        return
    file = Path(folder, name)
    try:
        file.with_suffix(".part").write_bytes(content)
        file.with_suffix(".part").rename(file)
    except OSError:  # the agent has gone, and this process goes with it
        return


# ---- the agent's side ----


def count_file(folder: Path) -> Path | None:
    """Where the run's restarts are to be counted; None where it has not begun."""
    file = folder / _BEGUN
    return Path(file.read_text()) if file.exists() else None


def stepped_s(folder: Path) -> float | None:
    """When the first step since a start was done, in seconds since 1970; None before."""
    file = folder / _STEP
    return file.stat().st_mtime if file.exists() else None


def failure_of(folder: Path, process: int) -> Failure | None:
    """What a process failed by; None where it told nothing."""
    file = folder / f"{_FAILURE}-{process}"
    return msgspec.json.decode(file.read_bytes(), type=Failure) if file.exists() else None
