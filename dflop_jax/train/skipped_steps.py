"""Steps whose update is left out: gradients that are not finite, or a norm that leaps.

The devices decide (`runtime.update`), by a limit that is known when the step is dispatched. The
step before is in flight then, so norms count from the second step after theirs on, and a resumed
run sets the same limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dflop_jax.report.metrics import SkippedUpdate
from dflop_jax.runtime.step_result import StepResult

# Steps whose norms make the running median: more follow a falling norm later, fewer are moved by
# a single batch.
NORM_WINDOW = 128
# Norms that are needed before one counts as a spike; in the first steps they change by themselves.
MIN_NORMS = 16
NOT_FINITE, SPIKE = "not finite", "spike"
_REMEDY = {
    NOT_FINITE: "lower train.learning_rate, or look at the samples that metrics.jsonl names there",
    SPIKE: "raise train.loss_spike (0: off), or lower train.learning_rate",
}


@dataclass(frozen=True)
class SkippedSteps:
    """What a run knows of its skipped steps after some step.

    Attributes:
      count: updates that were left out so far.
      in_a_row: those since the last update that was made.
      norms: (step, global gradient norm) of the last updates.
    """

    count: int = 0
    in_a_row: int = 0
    norms: tuple[tuple[int, float], ...] = ()

    def with_step(self, step: int, norm: float, applied: bool) -> SkippedSteps:
        """The same after one more step."""
        if not applied:
            return replace(self, count=self.count + 1, in_a_row=self.in_a_row + 1)
        norms = (*self.norms, (step, norm))[-NORM_WINDOW:]
        return replace(self, in_a_row=0, norms=norms)

    def norm_limit(self, step: int, spike: float) -> float:
        """Above which norm a step is left out: `spike` times the running median; infinite with
        `spike` 0 and while few norms are known."""
        past_norms = [norm for norm_step, norm in self.norms if norm_step < step - 1]
        if not spike or len(past_norms) < MIN_NORMS:
            return math.inf
        return spike * median(past_norms)


def describe_skip(skipped: SkippedUpdate) -> str:
    """Why a step is skipped, in words."""
    if skipped.why == SPIKE:
        return "its gradient norm is above train.loss_spike times the usual one"
    first, *other_modules = skipped.modules or ("all modules together",)
    rest = f", then those of {', '.join(other_modules)}" if other_modules else ""
    return f"gradients of {first} were not finite{rest}"


def make_skipped_update(
    result: StepResult, names: Callable[[], Sequence[str]]
) -> SkippedUpdate | None:
    """Why a step changed no parameter, with the names of its samples; None: it did."""
    if result.applied:
        return None
    cause = SPIKE if math.isfinite(result.grad_norm) else NOT_FINITE
    return SkippedUpdate(cause, result.not_finite, tuple(names()))


def find_end_reason(
    step: int, skipped: SkippedUpdate | None, n_in_a_row: int, max_bad_steps: int
) -> str:
    """Why the `n` skipped steps in a row up to this one end the run; "" where they do not."""
    if skipped is None or n_in_a_row < max_bad_steps:
        return ""
    steps = f"step {step}" if n_in_a_row == 1 else f"the {n_in_a_row} steps up to {step}"
    return f"{steps} changed no parameter: {describe_skip(skipped)}; {_REMEDY[skipped.why]}"
