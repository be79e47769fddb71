"""Choice between plans by steps that the run trains under each of them.

Every plan gives the same gradients, so the steps of a trial are ordinary steps of the run. Two
plans train on different batches; therefore each plan's measured seconds are divided by the
simulated seconds of the same batches, and the median of these ratios calibrates its simulated step
on one set of sampled batches, which is the same for all plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt

import numpy as np

from dflop_jax.config import Config
from dflop_jax.records import Plan, TrialResult
from dflop_jax.records.files import digest
from dflop_jax.report.metrics import WARMUP_STEPS
from dflop_jax.train.run_context import trial_steps

# Plans that a run tries: the best one of each policy of `auto`.
MAX_TRIALS = 3
# A plan is slower beyond this number of standard errors, and beyond this share of the step. In a
# simulation (steps with 6% noise, predictions 5 to 15%) half a standard error lost 0.2 to 0.3% of a
# step on average, two lost 0.4 to 0.8%.
_STANDARD_ERRORS, _MIN_SLOWDOWN = 0.5, 0.01
# Standard error of a median, times sqrt(n), over the median absolute deviation (normal noise).
_ERROR_OF_MEDIAN = 1.86
# A trial ends early from this number of measured steps on, beyond this number of standard errors
# and this share of the step.
_MIN_RATIOS, _EARLY_STANDARD_ERRORS, _MIN_EARLY_SLOWDOWN = 3, 2.0, 0.1


@dataclass(frozen=True)
class Trial:
    """A plan, and what the run measured when it trained under it."""

    plan: Plan
    predicted_s: float  # mean step by the profile, by which the search compares plans
    sampled_s: float = 0.0  # mean simulated step of the sampled batches, by the plan's own programs
    step_s: tuple[float, ...] = ()  # measured seconds of its steps after warm-up
    ratios: tuple[float, ...] = ()  # of these to the simulated seconds of the same batches
    failure: str = ""  # why the plan cannot train, if so

    @property
    def is_pending(self) -> bool:
        return not (self.ratios or self.failure)

    @property
    def calibrated_s(self) -> float:
        """Seconds of the sampled step as measured; inf before the first measured step."""
        return self.sampled_s * float(np.median(self.ratios)) if self.ratios else np.inf

    @property
    def error_s(self) -> float:
        """Standard error of `calibrated_s`."""
        deviation = np.median(np.abs(np.subtract(self.ratios, np.median(self.ratios))))
        return self.sampled_s * _ERROR_OF_MEDIAN * float(deviation) / sqrt(len(self.ratios))

    def is_slower_than(
        self,
        other: Trial,
        standard_errors: float = _STANDARD_ERRORS,
        min_slowdown: float = _MIN_SLOWDOWN,
    ) -> bool:
        """Return whether the plan takes longer than another by more than the noise."""
        noise_s = standard_errors * hypot(self.error_s, other.error_s)
        min_s = max(noise_s, min_slowdown * other.calibrated_s)
        return self.calibrated_s - other.calibrated_s > min_s


def max_trials(config: Config, first_step: int) -> int:
    """Return the maximum number of plans that a run tries; 1: it has no trials, or too few steps
    left for them."""
    n = trial_steps(config)
    return MAX_TRIALS if 0 < MAX_TRIALS * n <= config.train.steps - first_step else 1


def make_trials(plans: Sequence[Plan]) -> tuple[Trial, ...]:
    """Return pending trials of the plans of a search, best first; () for a single plan."""
    if len(plans) < 2:
        return ()
    return tuple(Trial(p, p.predicted.chosen_by_s or p.predicted.makespan_s) for p in plans)


def find_pending(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial to run next, if one is left."""
    return next((t for t in trials if t.is_pending), None)


def choose_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the lowest calibrated step; of those that are not slower beyond noise,
    the one predicted to be the fastest. None: no plan was measured."""
    measured = [t for t in trials if t.ratios]
    if not measured:
        return None
    fastest = min(measured, key=lambda t: t.calibrated_s)
    equal = [t for t in measured if not t.is_slower_than(fastest)]
    return min(equal, key=lambda t: t.predicted_s)


def _current_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial to run next, or the chosen one; None: all plans have failed."""
    return find_pending(trials) or choose_trial(trials)


def next_plan(trials: Sequence[Trial]) -> Plan | None:
    """Return the plan of the next trial, or the chosen one; None: all plans have failed."""
    trial = _current_trial(trials)
    return trial.plan if trial else None


def drop_pending(trials: Sequence[Trial], failure: str) -> tuple[Trial, ...]:
    """Return the trials without the current plan: that of the pending trial, or the chosen one."""
    current = _current_trial(trials)
    return drop_failed(trials, {plan_key(current.plan): failure} if current else {})


def drop_failed(trials: Sequence[Trial], reasons: Mapping[str, str]) -> tuple[Trial, ...]:
    """Return the trials without the plans that `reasons` names by `plan_key`."""
    failures = (t.failure or reasons.get(plan_key(t.plan), "") for t in trials)
    return tuple(
        replace(t, ratios=(), step_s=(), failure=failure) if failure else t
        for t, failure in zip(trials, failures, strict=True)
    )


def plan_key(plan: Plan) -> str:
    """Return a name of the plan that stays when its figures change."""
    return digest((plan.policy, plan.layout))


def list_results(trials: Sequence[Trial]) -> tuple[TrialResult, ...]:
    """Return the figures of trials for the report, each with its outcome."""
    return tuple(
        TrialResult(
            t.plan.policy,
            t.predicted_s,
            float(np.median(t.step_s)) if t.step_s else 0.0,
            t.calibrated_s if t.ratios else 0.0,
            len(t.ratios),
            _outcome(t, trials),
        )
        for t in trials
    )


def _outcome(trial: Trial, trials: Sequence[Trial]) -> str:
    if trial.failure:
        return f"dropped: {trial.failure}"
    if trial.is_pending:
        return "not measured yet"
    measured = [t for t in trials if t.ratios]
    fastest, chosen = min(measured, key=lambda t: t.calibrated_s), choose_trial(trials)
    slower = f"{trial.calibrated_s / fastest.calibrated_s - 1:.1%} slower"
    if find_pending(trials) is None and trial is chosen:
        near = f"{slower} than the fastest, within noise, and predicted to be faster"
        return "chosen: " + ("the fastest" if trial is fastest else near)
    if trial.is_slower_than(fastest):
        return f"{slower} than the fastest"
    return "within noise of the fastest"


class TrialRun:
    """The steps of a run under the plan of a pending trial.

    Args:
      n_steps: steps to train; the first ones only warm up.
      sampled_s: mean simulated step of the sampled batches, on process 0.
    """

    def __init__(self, trials: Sequence[Trial], first_step: int, n_steps: int, sampled_s: float):
        pending = find_pending(trials)
        assert pending is not None
        self._trials, self._pending = trials, pending
        self._trial = replace(pending, sampled_s=sampled_s)
        self._first_measured = first_step + min(WARMUP_STEPS, n_steps - 1)
        self.stop_step = first_step + n_steps

    def add_step(self, step: int, step_s: float, simulated_s: float) -> None:
        """Add a finished step with its measured and its simulated seconds."""
        if step >= self._first_measured:
            t = self._trial
            ratios = (*t.ratios, step_s / simulated_s)
            self._trial = replace(t, step_s=(*t.step_s, step_s), ratios=ratios)

    @property
    def is_decided(self) -> bool:
        """Whether the plan is much slower than another one, so that the trial can end early."""
        best = choose_trial(self._trials)
        return (
            best is not None
            and len(self._trial.ratios) >= _MIN_RATIOS
            and self._trial.is_slower_than(best, _EARLY_STANDARD_ERRORS, _MIN_EARLY_SLOWDOWN)
        )

    def results(self) -> tuple[Trial, ...]:
        """Return all trials, this one with what was measured."""
        return tuple(self._trial if t is self._pending else t for t in self._trials)
