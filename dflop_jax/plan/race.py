"""Which plans are the fastest: all run the same trials, the slower half leaves, and what is left
runs twice as many, until these tell which is the fastest or the work for it is spent (sequential
halving, Karnin, Koren and Somekh 2013, with a test of paired differences)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import TRIAL_WORK, Evaluator
from dflop_jax.schedule.sample import LARGE_BATCH
from dflop_jax.schedule.shapes.problem import TIE

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
        equal = [f for f in waiting if f.trial_s(n) <= least_s * (1 + TIE)]
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
