"""Changes the plan of a run by moving its state in memory, if there is room for the move."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from dflop_jax.hardware import GB
from dflop_jax.records import Plan
from dflop_jax.report.progress import Progress
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.move_state import StateMove, move_state, plan_move
from dflop_jax.train.plan_timer import make_executor, run_with_memory_check
from dflop_jax.train.resume import RunState, read_state
from dflop_jax.train.run_context import RunContext


@dataclass(frozen=True)
class Handover:
    """The state of a run between two plans, and the planned move of its arrays."""

    state: RunState
    source: Executor
    target: Executor
    move: StateMove
    is_saved: bool  # whether a checkpoint has the state, too


def prepare_handover(
    context: RunContext, source: Executor, plan: Plan, state: RunState, *, is_saved: bool
) -> Handover | None:
    """Return how a run moves to a plan; None if memory has no room for the move."""
    target = make_executor(context, plan)
    move = plan_move(source, target)
    if 0 < context.plannable_bytes < move.peak_bytes:
        target.close()
        return None
    as_stored = read_state(msgspec.to_builtins(state))  # by a checkpoint
    return Handover(as_stored, source, target, move, is_saved)


def move_run(handover: Handover, context: RunContext, progress: Progress) -> float:
    """Move a run's arrays to the target, on all processes together; return the seconds. All raise
    PlanTooLarge if one runs out of memory; the state is lost then."""
    source, target, move = handover.source, handover.target, handover.move
    start_s = time.perf_counter()
    run_with_memory_check(
        context.peers,
        target.plan,
        "moving the state to its layout",
        lambda sync: move_state(move, source, target, sync),
        context.config.distributed.peer_timeout_s,
    )
    seconds = time.perf_counter() - start_s
    progress.log(
        f"moved the state after step {handover.state.step} to another plan: "
        f"{1e3 * move.sent_bytes / GB:,.1f} MB between devices in {seconds:.2f} s"
    )
    return seconds
