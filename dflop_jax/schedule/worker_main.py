"""The scheduler's process: reads one request a line from stdin, writes one schedule a line.

Started by `worker.ScheduleWorker`; ends when its stdin closes, so it cannot outlive its parent.
Imports neither JAX nor cvxpy.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import msgspec

from dflop_jax.records import Plan, SampleShape, Schedule
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.online import schedule_batch


@dataclass(frozen=True)
class Setup:
    """First line: what all requests share."""

    plan: Plan
    time_limit_s: float
    max_rounds: int | None
    seed: int


@dataclass(frozen=True)
class Request:
    """A global batch to schedule; `seconds` are the bucket costs to use for it."""

    step: int
    shapes: tuple[SampleShape, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Reply:
    """A schedule, or the message of the ValueError that the batch raised."""

    step: int
    schedule: Schedule | None = None
    error: str = ""


def answer(setup: Setup, request: Request, max_rounds: int | None) -> Reply:
    """Solve one request; `max_rounds=0` gives the greedy answer."""
    try:
        schedule = schedule_batch(
            request.shapes,
            setup.plan,
            BucketCosts(request.seconds),
            step=request.step,
            time_limit_s=setup.time_limit_s,
            max_rounds=max_rounds,
            seed=setup.seed,
        )
    except ValueError as e:
        return Reply(request.step, error=str(e))
    return Reply(request.step, schedule)


def main() -> None:
    # A cluster signals all processes of a job; this one ends when its parent does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.json.decode(lines.readline(), type=Setup)
    for line in lines:
        request = msgspec.json.decode(line, type=Request)
        reply = answer(setup, request, setup.max_rounds)
        out.write(msgspec.json.encode(reply) + b"\n")
        out.flush()
