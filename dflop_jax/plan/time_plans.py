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
_FIRST, _MOST = 2, 8
# Seconds over the best ones' in the first trials up to which a plan may be the fastest after more.
_FAR = 1.1
# Standard errors of the mean difference at which plans count as told apart, once there are so many
# trials, and a share of a step that is too small to matter.
_SURE, _TELLING, _SAME = 2.0, 4, 0.001
# Seconds over the best ones' up to which more is made of a plan; a larger share costs planning time
# and misses less.
_CLOSE = 1.05
# Units of work that a batch takes besides what the scheduler may spend, of larger ones as many
# times; all of a race beyond the first trials, and that many times as many with effort "full".
_BATCH_COST, _ALL_WORK, _FULL_TIMES = 500, 75_000, 4
# Of the memory that plans fill: what a message says to plan without where no shortage is known.
_GUESSED_SHORTAGE = 0.1
_REMEDIES = "--plan.zero 3, --train.remat layers or a smaller --data.max_tokens"


def at_a_glance(evaluator: Evaluator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The plans by their first trials, the fastest first."""
    return _fastest_first([_run(evaluator, f, _FIRST) for f in candidates], _FIRST)


def close_to_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that are close to the fastest by the first trials."""
    most_s = _CLOSE * min(f.trial_s(_FIRST) for f in candidates)
    return [f for f in candidates if f.trial_s(_FIRST) <= most_s]


def race(evaluator: Evaluator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The plans, the fastest first, those that left early last; one alone runs nothing."""
    running, left = list(candidates), list[Candidate]()
    work = float(_ALL_WORK) * (_FULL_TIMES if evaluator.config.effort == "full" else 1)
    n = _FIRST
    while len(running) > 1:
        if n > _FIRST:
            work -= sum(max(0, n - len(f.trials_s)) for f in running) * _trial_cost(evaluator)
        if n > _MOST or work < 0:
            break
        best, *others = _fastest_first([_run(evaluator, f, n) for f in running], n)
        half = max(1, len(others) // 2)
        stay = [i < half and not _told_apart(f, best, n) for i, f in enumerate(others)]
        left = [f for f, stays in zip(others, stay) if not stays] + left
        running = [best, *compress(others, stay)]
        n *= 2
    return running + left


def joined(
    evaluator: Evaluator, raced: Sequence[Candidate], new: Sequence[Candidate]
) -> list[Candidate]:
    """The plans of a race and new ones that race its fastest; the fastest first, the others by the
    first trials."""
    if not new:
        return list(raced)
    fastest, *others = race(evaluator, [raced[0], *new])
    return [fastest, *_fastest_first([*others, *raced[1:]], _FIRST)]


def _run(evaluator: Evaluator, candidate: Candidate, n: int) -> Candidate:
    """The plan with the seconds of its first `n` trials, with the lookahead that suits it."""
    plan, known = candidate.plan, candidate.trials_s
    if not known and candidate.prices is None:
        plan = evaluator.with_lookahead(plan)
    more = (evaluator.trial_s(plan, i, candidate.prices) for i in range(len(known), n))
    return replace(candidate, plan=plan, trials_s=(*known, *more))


def _fastest_first(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """By the first `n` trials; of equals that of fewer buckets, then the first."""
    waiting, ordered = list(candidates), list[Candidate]()
    while waiting:
        least_s = min(f.trial_s(n) for f in waiting)
        equal = [f for f in waiting if f.trial_s(n) <= least_s * (1 + TIE_TOLERANCE)]
        ordered.append(min(equal, key=lambda f: len(f.plan.layout.buckets)))
        waiting = [f for f in waiting if f is not ordered[-1]]
    return ordered


def _trial_cost(evaluator: Evaluator) -> float:
    batches = evaluator.trial(0)
    return len(batches) * max(1.0, len(batches[0]) / LARGE_BATCH) * (TRIAL_WORK + _BATCH_COST)


def _told_apart(one: Candidate, best: Candidate, n: int) -> bool:
    """Whether a plan is surely slower than the best in the same trials, or surely as fast."""
    if n < _TELLING:
        return one.trial_s(n) > _FAR * best.trial_s(n)
    behind = np.subtract(one.trials_s[:n], best.trials_s[:n]) / np.mean(best.trials_s[:n])
    error = behind.std(ddof=1) / math.sqrt(n)
    return bool(behind.mean() > _SURE * error or abs(behind.mean()) + _SURE * error < _SAME)


class PlanTooLarge(ValueError):
    """A plan whose programs ran out of memory; `short_bytes` are missing, 0: not known. `what`: the
    message without its remedy."""

    def __init__(self, what: str, short_bytes: float = 0.0):
        super().__init__(f"{what}; give a smaller --plan.memory_bytes, {_REMEDIES}")
        self.what, self.short_bytes = what, short_bytes


def by_its_own(
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
    devices = _Devices(evaluator, time_plan, try_step)
    first = to_time(plans, n)
    for together in (first, *([p] for p in plans if p not in first)):
        alone = len(together) == 1
        judged = [j for p in together for j in devices.judged(p, is_timed=n > 0, alone=alone)]
        while judged := [j for j in judged if devices.evaluator.fits(j.plan)]:
            best, *judged = race(evaluator, judged)
            if taken := devices.after_a_step(best):
                return taken, devices.n_timed
    raise ValueError(devices.why_none())


def to_time(plans: Sequence[Plan], n: int) -> list[Plan]:
    """The first `n` plans, and `n` of the first one's policy: a policy that is far from the fastest
    takes no place of it."""
    alike = [p for p in plans if p.policy == plans[0].policy][:n]
    return [p for i, p in enumerate(plans) if i < n or p in alike]


class _Devices:
    """Tries plans on the devices at hand, and learns from those that these do not hold."""

    def __init__(self, evaluator: Evaluator, time_plan: TimePlan, try_step: TryStep):
        self._all, self._time_plan, self._try_step = evaluator, time_plan, try_step
        self._refused: list[PlanTooLarge] = []
        self.n_timed = 0

    @property
    def _short_bytes(self) -> float:
        """What plans were short of in all, which others are to leave free."""
        return sum(e.short_bytes for e in self._refused)

    @property
    def evaluator(self) -> Evaluator:
        """Of devices with so much less memory."""
        return self._all.with_less_memory(self._short_bytes)

    def judged(self, plan: Plan, *, is_timed: bool, alone: bool) -> list[Candidate]:
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
        free = plan if plan.scheduling.kept else plan.with_scheduling(lookahead=0)
        timed = evaluator.evaluate(free, by_profile_s, prices)
        if alone:
            timed = replace(timed, predicted=replace(timed.predicted, chosen_by_s=by_profile_s))
        return [Candidate(timed, prices=prices)]

    def after_a_step(self, judged: Candidate) -> Plan | None:
        """The plan once it has run a step; None where the devices do not hold that."""
        left = {
            m: max(0.0, n - self._short_bytes) for m, n in judged.plan.scheduling.free_bytes.items()
        }
        plan = judged.plan.with_scheduling(free_bytes=left)  # that groups may keep more in
        try:
            self._try_step(plan, judged.prices or self._time_plan(plan))
        except PlanTooLarge as e:
            self._refused.append(e)
            return None
        return plan

    def why_none(self) -> str:
        """One line: what was tried, and what to plan with."""
        limit = self.evaluator.rules.spec.memory_bytes
        if limit and not self._short_bytes:
            limit *= 1 - _GUESSED_SHORTAGE
        remedy = f"--plan.memory_bytes {limit:.4g}" if limit else "--plan.memory_bytes"
        last = self._refused[-1].what if self._refused else "none was tried"
        return (
            f"no plan of the fastest fits into memory ({len(self._refused)} tried): {last}; plan "
            f"for less: {remedy}, {_REMEDIES}"
        )
