"""Compares plans on batches that no bucket was chosen for, by successive halving (Karnin, Koren and
Somekh 2013) with a test of paired differences: all run the same trials, the slower half leaves, and
the others run twice as many, until the fastest is certain or the work is spent.

Where devices are at hand, trials are priced by the plans' own programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.candidate import CLOSE_RATIO, Candidate
from dflop_jax.plan.evaluate import TRIAL_WORK, PlanEvaluator
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE
from dflop_jax.schedule.sampled_batches import LARGE_BATCH

TimePlan = Callable[[Plan], Prices]
TryStep = Callable[[Plan, Prices], None]
# Trials that every plan runs, and that the last plans run.
_MIN_TRIALS, _MAX_TRIALS = 2, 8
# Seconds over the fastest's in the first trials, up to which a plan runs more trials.
_MAX_SLOWDOWN = 1.1
# Standard errors of the mean difference that make it certain, once there are so many trials, and
# the share of a step that is too small to matter.
_STANDARD_ERRORS, _MIN_TESTED_TRIALS, _EQUAL_SHARE = 2.0, 4, 0.001
# Units of work: of a batch beside the scheduler's limit (larger batches take more); of all trials
# beyond the first ones; and how many times that with effort "full".
_BATCH_COST, _MAX_WORK, _FULL_EFFORT_RATIO = 500, 75_000, 4
# Share of the memory that a message says to leave free where the missing bytes are not known.
_GUESSED_SHORTAGE = 0.1
_REMEDIES = "--plan.zero 3, --train.remat layers or a smaller --data.max_tokens"


def screen(evaluator: PlanEvaluator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates after their first trials, fastest first."""
    return _fastest_first([_run_trials(evaluator, c, _MIN_TRIALS) for c in candidates], _MIN_TRIALS)


def close_to_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are close to the fastest in the first trials."""
    max_s = CLOSE_RATIO * min(c.mean_trial_s(_MIN_TRIALS) for c in candidates)
    return [c for c in candidates if c.mean_trial_s(_MIN_TRIALS) <= max_s]


def successive_halving(
    evaluator: PlanEvaluator, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """The candidates, fastest first, those that left early last; a single one runs no trial."""
    running, left = list(candidates), list[Candidate]()
    batches = evaluator.trial_batches(0)
    trial_work = len(batches) * max(1.0, len(batches[0]) / LARGE_BATCH) * (TRIAL_WORK + _BATCH_COST)
    work = float(_MAX_WORK) * (_FULL_EFFORT_RATIO if evaluator.config.effort == "full" else 1)
    n = _MIN_TRIALS
    while len(running) > 1:
        if n > _MIN_TRIALS:
            work -= sum(max(0, n - len(c.trial_seconds)) for c in running) * trial_work
        if n > _MAX_TRIALS or work < 0:
            break
        fastest, *others = _fastest_first([_run_trials(evaluator, c, n) for c in running], n)
        half = max(1, len(others) // 2)
        stays = [c for c in others[:half] if not _is_decided(c, fastest, n)]
        left = [c for c in others if not any(c is one for one in stays)] + left
        running = [fastest, *stays]
        n *= 2
    return running + left


def compare_new(
    evaluator: PlanEvaluator, compared: Sequence[Candidate], new: Sequence[Candidate]
) -> list[Candidate]:
    """The fastest of `new` candidates and the first of those that were `compared`, then all others
    by their first trials."""
    if not new:
        return list(compared)
    fastest, *others = successive_halving(evaluator, [compared[0], *new])
    return [fastest, *_fastest_first([*others, *compared[1:]], _MIN_TRIALS)]


def _run_trials(evaluator: PlanEvaluator, candidate: Candidate, n: int) -> Candidate:
    """The candidate with the seconds of its first `n` trials, and with its best lookahead."""
    plan, run_seconds, prices = candidate.plan, candidate.trial_seconds, candidate.prices
    if not run_seconds and prices is None:
        plan = evaluator.with_lookahead(plan)
    more = (evaluator.simulate_trial(plan, i, prices) for i in range(len(run_seconds), n))
    return replace(candidate, plan=plan, trial_seconds=(*run_seconds, *more))


def _fastest_first(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """By the first `n` trials; of equal ones that with fewer buckets, then the first."""
    unordered, ordered = list(candidates), list[Candidate]()
    while unordered:
        fastest_s = min(c.mean_trial_s(n) for c in unordered)
        equal = [c for c in unordered if c.mean_trial_s(n) <= fastest_s * (1 + TIE_TOLERANCE)]
        ordered.append(min(equal, key=lambda c: len(c.plan.layout.buckets)))
        unordered = [c for c in unordered if c is not ordered[-1]]
    return ordered


def _is_decided(candidate: Candidate, fastest: Candidate, n: int) -> bool:
    """Whether a candidate is certainly slower than the fastest, or certainly as fast."""
    if n < _MIN_TESTED_TRIALS:
        return candidate.mean_trial_s(n) > _MAX_SLOWDOWN * fastest.mean_trial_s(n)
    fastest_s = fastest.trial_seconds[:n]
    slower = np.subtract(candidate.trial_seconds[:n], fastest_s) / np.mean(fastest_s)
    margin = _STANDARD_ERRORS * slower.std(ddof=1) / math.sqrt(n)
    return bool(slower.mean() > margin or abs(slower.mean()) + margin < _EQUAL_SHARE)


class PlanTooLarge(ValueError):
    """A plan whose programs ran out of memory.

    short_bytes: missing bytes; 0: not known. reason: the message without its remedy.
    """

    def __init__(self, reason: str, short_bytes: float = 0.0):
        super().__init__(f"{reason}; give a smaller --plan.memory_bytes, {_REMEDIES}")
        self.reason, self.short_bytes = reason, short_bytes


def choose_by_timing(
    evaluator: PlanEvaluator,
    plans: Sequence[Plan],
    n: int,
    time_plan: TimePlan,
    try_step: TryStep,
) -> tuple[Plan, int]:
    """(the fastest plan by the times of its own programs, with the predictions that these give; how
    many plans were timed).

    About the first `n` plans are timed (0: none, the profile chooses the first), and the others one
    by one where memory holds none of these. A plan that memory does not hold is dropped, and the
    others leave free what it was short of.

    Raises:
      ValueError: memory holds none.
    """
    session = _TimingSession(evaluator, time_plan, try_step)
    finalists = plans_to_time(plans, n)
    for plan_set in (finalists, *([p] for p in plans if p not in finalists)):
        alone = len(plan_set) == 1
        timed = [
            c for p in plan_set for c in session.time_candidate(p, is_timed=n > 0, alone=alone)
        ]
        while timed := [c for c in timed if session.evaluator.fits(c.plan)]:
            fastest, *timed = successive_halving(evaluator, timed)
            if chosen := session.run_step(fastest):
                return chosen, session.n_timed
    raise ValueError(session.explain_failure())


def plans_to_time(plans: Sequence[Plan], n: int) -> list[Plan]:
    """The first `n` plans, and the first `n` of the first one's policy, so that slower policies
    take no place of these."""
    same_policy = [p for p in plans if p.policy == plans[0].policy][:n]
    return [p for i, p in enumerate(plans) if i < n or p in same_policy]


class _TimingSession:
    """Tries plans on the devices at hand, and learns from those that these do not hold."""

    def __init__(self, evaluator: PlanEvaluator, time_plan: TimePlan, try_step: TryStep):
        self._evaluator, self._time_plan, self._try_step = evaluator, time_plan, try_step
        self._refused: list[PlanTooLarge] = []
        self.n_timed = 0

    @property
    def _missing_bytes(self) -> float:
        """Bytes that all refused plans were short of, which others leave free."""
        return sum(e.short_bytes for e in self._refused)

    @property
    def evaluator(self) -> PlanEvaluator:
        """The evaluator for devices with so much less memory."""
        return self._evaluator.with_less_memory(self._missing_bytes)

    def time_candidate(self, plan: Plan, *, is_timed: bool, alone: bool) -> list[Candidate]:
        """The plan evaluated by its own times, or by the profile's; none where the devices do not
        hold it. `alone`: no other plan is timed with it, so the profile chose it."""
        evaluator = self.evaluator
        if not evaluator.fits(plan):
            return []
        plan = evaluator.evaluate(plan, plan.predicted.makespan_s)
        if not is_timed:
            return [Candidate(plan)]
        by_profile_s = plan.predicted.makespan_s
        try:
            prices = self._time_plan(plan)
        except PlanTooLarge as e:
            self._refused.append(e)
            return []
        self.n_timed += 1
        plan = plan if plan.scheduling.residuals else plan.with_scheduling(lookahead=0)
        plan = evaluator.evaluate(plan, by_profile_s, prices)
        if alone:
            plan = replace(plan, predicted=replace(plan.predicted, chosen_by_s=by_profile_s))
        return [Candidate(plan, prices=prices)]

    def run_step(self, candidate: Candidate) -> Plan | None:
        """The plan after it has run a step; None where the devices do not hold that."""
        free, missing = candidate.plan.scheduling.free_bytes, self._missing_bytes
        plan = candidate.plan.with_scheduling(
            free_bytes={m: max(0.0, n - missing) for m, n in free.items()}
        )
        try:
            self._try_step(plan, candidate.prices or self._time_plan(plan))
        except PlanTooLarge as e:
            self._refused.append(e)
            return None
        return plan

    def explain_failure(self) -> str:
        """One line: which plans were tried, and what to plan with."""
        limit = self.evaluator.context.spec.memory_bytes
        if limit and not self._missing_bytes:
            limit *= 1 - _GUESSED_SHORTAGE
        remedy = f"--plan.memory_bytes {limit:.4g}" if limit else "--plan.memory_bytes"
        last = self._refused[-1].reason if self._refused else "none was tried"
        return (
            f"no plan of the fastest fits into memory ({len(self._refused)} tried): {last}; plan "
            f"for less: {remedy}, {_REMEDIES}"
        )
