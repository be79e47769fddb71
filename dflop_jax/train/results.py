"""What the steps of a run came to, under one plan and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.records import Plan
from dflop_jax.train.evaluate import Evaluation
from dflop_jax.train.redecide import NewPlan


@dataclass(frozen=True)
class LoopResult:
    """What the steps of one call gave; `stopped_by` is why a callback ended them, `next` the
    plan that `plan` is to be changed for."""

    losses: tuple[float, ...]
    compiles: tuple[int, ...]
    evaluation: Evaluation | None
    steps_done: int
    preempted: bool
    plan: Plan
    next: NewPlan | None = None
    stopped_by: str = ""


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
      losses: of the steps that this call ran.
      evaluation: that of the last step, None without held-out samples.
      steps_done: steps of the whole run so far.
      preempted: a signal ended it before its last step; what was reached is saved, where
        checkpoints are.
      stopped_by: why a callback ended it before its last step; "" where none did.
    """

    run_dir: Path
    losses: tuple[float, ...]
    evaluation: Evaluation | None
    compiles_after_warmup: int
    steps_done: int
    preempted: bool
    stopped_by: str = ""


def fit_result(run_dir: str, results: Sequence[LoopResult]) -> FitResult:
    """How a run ended, from what its loops gave."""
    last = results[-1]
    return FitResult(
        Path(run_dir),
        _losses(results),
        last.evaluation,
        sum(n for r in results for n in r.compiles[1:]),
        last.steps_done,
        last.preempted,
        last.stopped_by,
    )


def _losses(results: Sequence[LoopResult]) -> tuple[float, ...]:
    """Of the steps of all loops, each once, as it was run last."""
    of_steps: dict[int, float] = {}
    for r in results:
        of_steps |= enumerate(r.losses, r.steps_done - len(r.losses))
    return tuple(of_steps[step] for step in sorted(of_steps))
