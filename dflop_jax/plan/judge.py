"""Which of a few evaluated plans is the fastest: where the batches that judged them do not tell the
leaders apart, these run more, in rounds, until they do or the work for it is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.evaluate import COMPARED_WORK, Evaluator
from dflop_jax.plan.finalist import Finalist, fastest_of
from dflop_jax.schedule.sample import LARGE_BATCH

# Of the fastest plan's seconds, by which a plan may be behind and be a leader; with twice as much
# the work ends after half as many rounds, and no choice of ten set-ups changed.
_MAY_LEAD = 0.02
# Standard errors of the mean difference at which plans count as told apart, and a share of a step
# that is too small to matter; with twice as many, or half of it, more rounds are needed.
_SURE, _SAME = 2.0, 0.001
# Units of work that a batch takes besides what the scheduler may spend, of larger ones as many
# times; all of them together, about a second's, and that many times as many with effort "full".
_BATCH_COST, _ALL_WORK, _FULL_TIMES = 150, 6_000, 4


def fastest(evaluator: Evaluator, judged: Sequence[Finalist]) -> Finalist:
    """The plan of least seconds, of all batches that it and the other leaders have run."""
    best_s = fastest_of(judged).seconds
    leaders = [j for j in judged if j.seconds <= (1 + _MAY_LEAD) * best_s]
    rounds: list[list[float]] = [[] for _ in leaders]
    left = float(_ALL_WORK) * (_FULL_TIMES if evaluator.config.effort == "full" else 1)
    for number in range(evaluator.n_rounds):
        if len(leaders) < 2:
            break
        batches = evaluator.round_batches(number)
        times = max(1.0, len(batches[0]) / LARGE_BATCH)
        left -= len(leaders) * len(batches) * times * (COMPARED_WORK + _BATCH_COST)
        if left < 0:
            break
        for leader, spans in zip(leaders, rounds):
            spans.append(evaluator.round_s(leader.plan, leader.prices, batches))
        first = fastest_of(_with_rounds(evaluator, leaders, rounds))
        place = next(i for i, leader in enumerate(leaders) if leader.plan is first.plan)
        in_race = [i for i, r in enumerate(rounds) if i == place or not _slower(r, rounds[place])]
        leaders, rounds = [leaders[i] for i in in_race], [rounds[i] for i in in_race]
    return fastest_of(_with_rounds(evaluator, leaders, rounds))


def _with_rounds(
    evaluator: Evaluator, leaders: Sequence[Finalist], rounds: Sequence[Sequence[float]]
) -> list[Finalist]:
    """The plans with the mean over the batches that judged them and those of the rounds."""
    before = len(evaluator.unseen)
    return [
        replace(one, seconds=(before * one.seconds + sum(spans)) / (before + len(spans)))
        for one, spans in zip(leaders, rounds)
    ]


def _slower(one: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a plan is surely slower than the best in the same rounds, or surely as fast."""
    behind = np.subtract(one, best) / np.mean(best)
    error = behind.std(ddof=1) / math.sqrt(len(behind)) if len(behind) > 1 else math.inf
    return bool(behind.mean() > _SURE * error or abs(behind.mean()) + _SURE * error < _SAME)
