"""Which plans are the fastest: all run the same trials, the slower half leaves, and what is left
runs twice as many, until these tell which is the fastest or the work for it is spent (sequential
halving, Karnin, Koren and Somekh 2013, with a test of paired differences).

Where devices are at hand, trials are priced by the plans' own programs, as far as memory holds
these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import TRIAL_WORK, Evaluator
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE
from dflop_jax.schedule.sampled_batches import LARGE_BATCH

TimePlan = Callable[[Plan], Prices]
TryStep = Callable[[Plan, Prices], None]
# Trials that every plan runs, and that the last ones do at most.
_MIN_TRIALS, _MAX_TRIALS = 2, 8
# Seconds over the best ones' in the first trials up to which a plan may be the fastest after more.
_MAX_SLOWDOWN = 1.1
# Standard errors of the mean difference at which plans count as told apart, once there are so many
# trials, and a share of a step that is too small to matter.
_STANDARD_ERRORS, _MIN_TESTED_TRIALS, _EQUAL_SHARE = 2.0, 4, 0.001
# Seconds over the best ones' up to which more is made of a plan; a larger share costs planning time
# and misses less.
_CLOSE_RATIO = 1.05
# Units of work that a batch takes besides what the scheduler may spend, of larger ones as many
# times; all of a race beyond the first trials, and that many times as many with effort "full".
_BATCH_COST, _MAX_WORK, _FULL_EFFORT_RATIO = 500, 75_000, 4
# Of the memory that plans fill: what a message says to plan without where no shortage is known.
_GUESSED_SHORTAGE = 0.1
_REMEDIES = "--plan.zero 3, --train.remat layers or a smaller --data.max_tokens"


def screen(evaluator: Evaluator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The plans by their first trials, the fastest first."""
    return _fastest_first([_run_trials(evaluator, f, _MIN_TRIALS) for f in candidates], _MIN_TRIALS)


def close_to_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that are close to the fastest by the first trials."""
    max_s = _CLOSE_RATIO * min(f.mean_trial_s(_MIN_TRIALS) for f in candidates)
    return [f for f in candidates if f.mean_trial_s(_MIN_TRIALS) <= max_s]


def successive_halving(evaluator: Evaluator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The plans, the fastest first, those that left early last; one alone runs nothing."""
    running, eliminated = list(candidates), list[Candidate]()
    work = float(_MAX_WORK) * (_FULL_EFFORT_RATIO if evaluator.config.effort == "full" else 1)
    n_trials = _MIN_TRIALS
    while len(running) > 1:
        if n_trials > _MIN_TRIALS:
            work -= sum(max(0, n_trials - len(f.trial_seconds)) for f in running) * _trial_cost(
                evaluator
            )
        if n_trials > _MAX_TRIALS or work < 0:
            break
        fastest, *others = _fastest_first(
            [_run_trials(evaluator, f, n_trials) for f in running], n_trials
        )
        half = max(1, len(others) // 2)
        stays_running = [
            i < half and not _is_decided(f, fastest, n_trials) for i, f in enumerate(others)
        ]
        eliminated = [f for f, stays in zip(others, stays_running) if not stays] + eliminated
        running = [fastest, *compress(others, stays_running)]
        n_trials *= 2
    return running + eliminated


def compare_new(
    evaluator: Evaluator, compared: Sequence[Candidate], new: Sequence[Candidate]
) -> list[Candidate]:
    """The plans of a race and new ones that race its fastest; the fastest first, the others by the
    first trials."""
    if not new:
        return list(compared)
    fastest, *others = successive_halving(evaluator, [compared[0], *new])
    return [fastest, *_fastest_first([*others, *compared[1:]], _MIN_TRIALS)]


def _run_trials(evaluator: Evaluator, candidate: Candidate, n_trials: int) -> Candidate:
    """The plan with the seconds of its first `n` trials, with the lookahead that suits it."""
    plan, trial_seconds = candidate.plan, candidate.trial_seconds
    if not trial_seconds and candidate.prices is None:
        plan = evaluator.with_lookahead(plan)
    more = (
        evaluator.simulate_trial(plan, i, candidate.prices)
        for i in range(len(trial_seconds), n_trials)
    )
    return replace(candidate, plan=plan, trial_seconds=(*trial_seconds, *more))


def _fastest_first(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """By the first `n` trials; of equals that of fewer buckets, then the first."""
    unordered, ordered = list(candidates), list[Candidate]()
    while unordered:
        fastest_s = min(f.mean_trial_s(n) for f in unordered)
        equal = [f for f in unordered if f.mean_trial_s(n) <= fastest_s * (1 + TIE_TOLERANCE)]
        ordered.append(min(equal, key=lambda f: len(f.plan.layout.buckets)))
        unordered = [f for f in unordered if f is not ordered[-1]]
    return ordered


def _trial_cost(evaluator: Evaluator) -> float:
    batches = evaluator.trial_batches(0)
    return len(batches) * max(1.0, len(batches[0]) / LARGE_BATCH) * (TRIAL_WORK + _BATCH_COST)


def _is_decided(candidate: Candidate, fastest: Candidate, n: int) -> bool:
    """Whether a plan is surely slower than the best in the same trials, or surely as fast."""
    if n < _MIN_TESTED_TRIALS:
        return candidate.mean_trial_s(n) > _MAX_SLOWDOWN * fastest.mean_trial_s(n)
    differences = np.subtract(candidate.trial_seconds[:n], fastest.trial_seconds[:n]) / np.mean(
        fastest.trial_seconds[:n]
    )
    error = differences.std(ddof=1) / math.sqrt(n)
    return bool(
        differences.mean() > _STANDARD_ERRORS * error
        or abs(differences.mean()) + _STANDARD_ERRORS * error < _EQUAL_SHARE
    )


class PlanTooLarge(ValueError):
    """A plan whose programs ran out of memory; `short_bytes` are missing, 0: not known. `what`: the
    message without its remedy."""

    def __init__(self, reason: str, short_bytes: float = 0.0):
        super().__init__(f"{reason}; give a smaller --plan.memory_bytes, {_REMEDIES}")
        self.reason, self.short_bytes = reason, short_bytes


def choose_by_timing(
    evaluator: Evaluator,
    plans: Sequence[Plan],
    n: int,
    time_plan: TimePlan,
    try_step: TryStep,
) -> tuple[Plan, int]:
    """The fastest plan by the times of its own programs, with the figures that these give, and how
    many were timed: of the first about `n` (0: the first, by the profile) that memory holds when
    they are tried, and of the others where it holds none of these.

    Whatever memory does not hold is dropped, and what it was short of is left free by the others.

    Raises:
      ValueError: it holds none.
    """
    session = _TimingSession(evaluator, time_plan, try_step)
    finalists = plans_to_time(plans, n)
    for plan_set in (finalists, *([p] for p in plans if p not in finalists)):
        is_only = len(plan_set) == 1
        candidates = [
            j for p in plan_set for j in session.time_candidate(p, is_timed=n > 0, is_only=is_only)
        ]
        while candidates := [j for j in candidates if session.evaluator.fits(j.plan)]:
            fastest, *candidates = successive_halving(evaluator, candidates)
            if chosen := session.try_one_step(fastest):
                return chosen, session.n_timed
    raise ValueError(session.explain_failure())


def plans_to_time(plans: Sequence[Plan], n: int) -> list[Plan]:
    """The first `n` plans, and `n` of the first one's policy: a policy that is far from the fastest
    takes no place of it."""
    same_policy = [p for p in plans if p.policy == plans[0].policy][:n]
    return [p for i, p in enumerate(plans) if i < n or p in same_policy]


class _TimingSession:
    """Tries plans on the devices at hand, and learns from those that these do not hold."""

    def __init__(self, evaluator: Evaluator, time_plan: TimePlan, try_step: TryStep):
        self._evaluator, self._time_plan, self._try_step = evaluator, time_plan, try_step
        self._refused: list[PlanTooLarge] = []
        self.n_timed = 0

    @property
    def _missing_bytes(self) -> float:
        """What plans were short of in all, which others are to leave free."""
        return sum(e.short_bytes for e in self._refused)

    @property
    def evaluator(self) -> Evaluator:
        """Of devices with so much less memory."""
        return self._evaluator.with_less_memory(self._missing_bytes)

    def time_candidate(self, plan: Plan, *, is_timed: bool, is_only: bool) -> list[Candidate]:
        """The plan, judged by its own times, or by the profile's; nothing where the devices do not
        hold it. `alone`: the profile chose it."""
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
        plan_to_evaluate = plan if plan.scheduling.residuals else plan.with_scheduling(lookahead=0)
        timed = evaluator.evaluate(plan_to_evaluate, by_profile_s, prices)
        if is_only:
            timed = replace(timed, predicted=replace(timed.predicted, chosen_by_s=by_profile_s))
        return [Candidate(timed, prices=prices)]

    def try_one_step(self, candidate: Candidate) -> Plan | None:
        """The plan once it has run a step; None where the devices do not hold that."""
        free_bytes = {
            m: max(0.0, n - self._missing_bytes)
            for m, n in candidate.plan.scheduling.free_bytes.items()
        }
        plan = candidate.plan.with_scheduling(free_bytes=free_bytes)  # that groups may keep more in
        try:
            self._try_step(plan, candidate.prices or self._time_plan(plan))
        except PlanTooLarge as e:
            self._refused.append(e)
            return None
        return plan

    def explain_failure(self) -> str:
        """One line: what was tried, and what to plan with."""
        limit = self.evaluator.context.spec.memory_bytes
        if limit and not self._missing_bytes:
            limit *= 1 - _GUESSED_SHORTAGE
        remedy = f"--plan.memory_bytes {limit:.4g}" if limit else "--plan.memory_bytes"
        last = self._refused[-1].reason if self._refused else "none was tried"
        return (
            f"no plan of the fastest fits into memory ({len(self._refused)} tried): {last}; plan "
            f"for less: {remedy}, {_REMEDIES}"
        )
