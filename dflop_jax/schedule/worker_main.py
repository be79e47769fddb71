"""The scheduler's process: reads one request a line from stdin, writes one answer a line.

Started by `worker.ScheduleWorker`; ends when its stdin closes, so it cannot outlive its parent.
Imports neither JAX nor cvxpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflop_jax.children import begin, ignore_signals
from dflop_jax.records import Load, Plan, PriceList, Prices, Schedule, from_json, to_json
from dflop_jax.schedule.correction import predicted_gain_s
from dflop_jax.schedule.counts.program import CountProgram
from dflop_jax.schedule.online import schedule_batch


@dataclass(frozen=True)
class SolverSetup:
    """First line: what all requests share; `program`: the integer program of the plan, where its
    groups are balanced."""

    plan: Plan
    trainable: tuple[str, ...]
    work: int | None = None
    program: CountProgram | None = None
    seed: int = 0


@dataclass(frozen=True)
class BatchRequest:
    """A global batch to schedule; `prices` where they are not those of the request before.

    With `corrected` prices the answer is what scheduling by them gains, in place of a schedule.
    """

    step: int
    loads: tuple[Load, ...]
    prices: PriceList | None = None
    corrected: PriceList | None = None


@dataclass(frozen=True)
class ScheduleReply:
    """A schedule or a gain in seconds, or the message of the ValueError that the batch raised."""

    step: int
    schedule: Schedule | None = None
    gain_s: float = 0.0
    error: str = ""


def answer(setup: SolverSetup, request: BatchRequest, prices: Prices) -> ScheduleReply:
    """Solve one request."""
    loads, corrected = request.loads, request.corrected
    try:
        if corrected is not None:
            gain_s = predicted_gain_s(loads, setup.plan, prices, corrected.prices, setup.trainable)
            return ScheduleReply(request.step, gain_s=gain_s)
        schedule = schedule_batch(
            loads,
            setup.plan,
            prices,
            setup.trainable,
            step=request.step,
            program=setup.program,
            work=setup.work,
            seed=setup.seed,
        )
    except ValueError as e:
        return ScheduleReply(request.step, error=str(e))
    return ScheduleReply(request.step, schedule)


def main() -> None:
    ignore_signals()
    lines, out = begin()
    setup = from_json(lines.readline(), SolverSetup)
    prices = Prices({})
    for line in lines:
        request = from_json(line, BatchRequest)
        prices = request.prices.prices if request.prices else prices
        reply = answer(setup, request, prices)
        out.write(to_json(reply) + b"\n")
        out.flush()
