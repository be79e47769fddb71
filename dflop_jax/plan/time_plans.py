"""Comparison of plans on batches that their buckets were not fitted to, by successive halving
(Karnin, Koren and Somekh 2013) with a test of paired differences: all plans run the same rounds,
the slower half drops out, and the others run twice as many, until the fastest is significant or the
work limit is reached. If devices are available, the fastest plan that fits on them is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.candidate import CLOSE_RATIO, Candidate
from dflop_jax.plan.evaluate import ROUND_WORK, PlanEvaluator
from dflop_jax.records import PLANNED_SHARE, Plan, Prices
from dflop_jax.schedule.batch import LARGE_BATCH
from dflop_jax.schedule.costs import TIE_TOLERANCE

TimePlan = Callable[[Plan], Prices]
TryStep = Callable[[Plan, Prices], None]
# Number of rounds that every plan runs, and that the last plans run.
_MIN_ROUNDS, _MAX_ROUNDS = 2, 4
# A plan runs more rounds only up to this ratio to the fastest plan in the first rounds.
_MAX_SLOWDOWN = 1.1
# A difference is significant beyond this number of standard errors, from this number of rounds on;
# differences below this share of a step count as equal.
_STANDARD_ERRORS, _MIN_TESTED_ROUNDS, _EQUAL_SHARE = 2.0, 4, 0.001
# Work units per batch besides the scheduler's limit (more for larger batches); maximum for all
# rounds after the first ones; factor of that maximum with effort "full".
_BATCH_COST, _MAX_WORK, _FULL_EFFORT_RATIO = 500, 75_000, 4
_REMEDIES = "--plan.zero 3, --train.remat layers or a smaller --data.max_tokens"


def screen(
    evaluator: PlanEvaluator, candidates: Sequence[Candidate], n: int = _MIN_ROUNDS
) -> list[Candidate]:
    """Run the candidates' first `n` rounds; return them fastest first."""
    return _fastest_first([_run_rounds(evaluator, c, n) for c in candidates], n)


def close_to_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates within `CLOSE_RATIO` of the fastest in the first rounds."""
    max_s = CLOSE_RATIO * min(c.mean_round_s(_MIN_ROUNDS) for c in candidates)
    return [c for c in candidates if c.mean_round_s(_MIN_ROUNDS) <= max_s]


def successive_halving(
    evaluator: PlanEvaluator, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return candidates fastest first, early dropouts last; a single candidate runs no round."""
    running, left = list(candidates), list[Candidate]()
    batches = evaluator.round_batches(0)
    round_work = len(batches) * max(1.0, len(batches[0]) / LARGE_BATCH) * (ROUND_WORK + _BATCH_COST)
    work = float(_MAX_WORK) * (_FULL_EFFORT_RATIO if evaluator.config.effort == "full" else 1)
    n = _MIN_ROUNDS
    while len(running) > 1:
        if n > _MIN_ROUNDS:
            work -= sum(max(0, n - len(c.round_seconds)) for c in running) * round_work
        if n > _MAX_ROUNDS or work < 0:
            break
        fastest, *others = screen(evaluator, running, n)
        half = max(1, len(others) // 2)
        stays = [c for c in others[:half] if not _is_decided(c, fastest, n)]
        left = [c for c in others if not any(c is one for one in stays)] + left
        running = [fastest, *stays]
        n *= 2
    return running + left


def compare_new(
    evaluator: PlanEvaluator, compared: Sequence[Candidate], new: Sequence[Candidate]
) -> list[Candidate]:
    """Compare `new` with the first of `compared`; return the fastest, then the others by rounds."""
    if not new:
        return list(compared)
    fastest, *others = successive_halving(evaluator, [compared[0], *new])
    return [fastest, *_fastest_first([*others, *compared[1:]], _MIN_ROUNDS)]


def _run_rounds(evaluator: PlanEvaluator, candidate: Candidate, n: int) -> Candidate:
    """Return the candidate with its best lookahead and the seconds of its first `n` rounds."""
    plan, run_seconds = candidate.plan, candidate.round_seconds
    if not run_seconds:
        plan = evaluator.with_lookahead(plan)
    more = (evaluator.simulate_round(plan, i) for i in range(len(run_seconds), n))
    return replace(candidate, plan=plan, round_seconds=(*run_seconds, *more))


def _fastest_first(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """Sort by the first `n` rounds; ties by number of buckets, then by the given order."""
    unordered, ordered = list(candidates), list[Candidate]()
    while unordered:
        fastest_s = min(c.mean_round_s(n) for c in unordered)
        equal = [c for c in unordered if c.mean_round_s(n) <= fastest_s * (1 + TIE_TOLERANCE)]
        ordered.append(min(equal, key=lambda c: len(c.plan.layout.buckets)))
        unordered = [c for c in unordered if c is not ordered[-1]]
    return ordered


def _is_decided(candidate: Candidate, fastest: Candidate, n: int) -> bool:
    """Return whether a candidate is significantly slower than the fastest, or equal to it."""
    if n < _MIN_TESTED_ROUNDS:
        return candidate.mean_round_s(n) > _MAX_SLOWDOWN * fastest.mean_round_s(n)
    fastest_s = fastest.round_seconds[:n]
    slower = np.subtract(candidate.round_seconds[:n], fastest_s) / np.mean(fastest_s)
    margin = _STANDARD_ERRORS * slower.std(ddof=1) / math.sqrt(n)
    return bool(slower.mean() > margin or abs(slower.mean()) + margin < _EQUAL_SHARE)


class MemoryShortage(ValueError):
    """Raised on a process where a plan's programs run out of memory by `short_bytes` (0: unknown),
    while the others may wait for its data on their devices."""

    def __init__(self, reason: str, short_bytes: float = 0.0):
        super().__init__(f"{reason}; use a smaller --plan.memory_bytes, {_REMEDIES}")
        self.reason, self.short_bytes = reason, short_bytes


class PlanTooLarge(MemoryShortage):
    """Raised instead on all processes together, so that the run can go on under another plan."""


def choose_fitting_plan(
    evaluator: PlanEvaluator, plans: Sequence[Plan], time_plan: TimePlan, try_step: TryStep
) -> tuple[Plan, PlanEvaluator]:
    """Return the first plan that fits on the devices, with predictions from the times of its own
    programs, and the evaluator with the memory that plans may fill.

    A plan that runs out of memory is dropped, and later plans must leave its missing bytes free.
    ValueError: no plan fits.
    """
    refused, missing_bytes, with_all_memory = list[PlanTooLarge](), 0.0, evaluator
    for plan in plans:
        try:
            if evaluator.fits(plan):
                timed, prices = _time_candidate(evaluator, plan, time_plan)
                if evaluator.fits(timed):
                    free = timed.scheduling.free_bytes.items()
                    left = {m: max(0.0, n - missing_bytes) for m, n in free}
                    timed = timed.with_scheduling(free_bytes=left)
                    try_step(timed, prices)
                    return timed, evaluator
        except PlanTooLarge as e:
            refused.append(e)
            missing_bytes += e.short_bytes
            evaluator = with_all_memory.with_less_memory(missing_bytes)
    limit = evaluator.context.spec.memory_bytes
    if not missing_bytes:  # unknown
        limit *= PLANNED_SHARE
    remedy = f"--plan.memory_bytes {limit:.4g}" if limit else "--plan.memory_bytes"
    last = refused[-1].reason if refused else "none was tried"
    raise ValueError(
        f"none of the fastest plans fits into memory ({len(refused)} tried): {last}; use "
        f"{remedy}, {_REMEDIES}"
    )


def _time_candidate(
    evaluator: PlanEvaluator, plan: Plan, time_plan: TimePlan
) -> tuple[Plan, Prices]:
    """Return the plan evaluated by the times of its own programs, and these."""
    plan = evaluator.evaluate(plan, plan.predicted.makespan_s)
    by_profile_s = plan.predicted.makespan_s
    prices = time_plan(plan)
    plan = plan if plan.scheduling.residuals else plan.with_scheduling(lookahead=0)
    plan = evaluator.evaluate(plan, by_profile_s, prices)
    return replace(plan, predicted=replace(plan.predicted, chosen_by_s=by_profile_s)), prices
