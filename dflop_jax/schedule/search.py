"""The cheapest set of buckets into which a global batch packs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.records import Bucket, SampleShape
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.cover import Capacity, cheap_covers, demand
from dflop_jax.schedule.groups import Groups, greedy_groups, predict_s, running_order
from dflop_jax.schedule.packing import Packed, pack
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

_ATTEMPT_ROUNDS = 400  # pairs of rows priced per set of buckets tried
_MAX_CHOICES = 400  # sets of buckets listed for packing
_SIMULATED = 32  # sets of buckets that a caller's simulator ranks
_FIRST_STEP = 0.001  # relative steps of predicted time in which sets are tried, doubling
_FEW = 24  # sets of buckets that are simply tried in order


def best_groups(
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    costs: BucketCosts,
    *,
    max_rounds: int,
    deadline_s: float = math.inf,
    seed: int = 0,
) -> tuple[Groups, float, str]:
    """(groups in running order, a lower bound on their makespan or 0, status): the greedy groups,
    or better ones found within `max_rounds` pairs of rows priced. Every sample must fit."""
    greedy = greedy_groups(shapes, buckets, capacity, costs)
    if max_rounds <= 0 or not shapes:
        return greedy, 0.0, "greedy" if shapes else "optimal"
    return _Search(shapes, buckets, capacity, costs, seed).run(greedy, max_rounds, deadline_s)


@dataclass(frozen=True)
class _Choice:
    """Buckets of the groups, in running order; `slack` is the tightest condition's room over need,
    less 1."""

    predicted_s: float
    slack: float
    buckets: list[int]


class _Search:
    """Sets of buckets in order of what they would cost, packed until one holds the samples."""

    def __init__(
        self,
        shapes: Sequence[SampleShape],
        buckets: Sequence[Bucket],
        capacity: Capacity,
        costs: BucketCosts,
        seed: int,
    ):
        self.shapes, self.buckets, self.capacity = shapes, buckets, capacity
        self.costs, self.seed = costs, seed

    def run(self, greedy: Groups, rounds: int, deadline_s: float) -> tuple[Groups, float, str]:
        """(groups, lower bound or 0, status), never worse than the greedy groups.

        Climbs from the bound in doubling steps until a set packs, then bisects between the last
        failure and the success; at each level the set with the most slack is tried.
        """
        greedy_s = predict_s(greedy, self.costs)
        choices, bound_s = self._choices(greedy, greedy_s)
        best, best_s, failed_s, step = greedy, greedy_s, 0.0, _FIRST_STEP
        one_by_one = len(choices) <= _FEW
        while choices and rounds > 0 and time.perf_counter() < deadline_s:
            level_s = max(failed_s * (1 + step), choices[0].predicted_s)
            if best is not greedy:
                level_s = (failed_s + best_s) / 2
            choice = choices[0] if one_by_one else _at(choices, level_s, failed_s, best_s)
            if choice is None or choice.predicted_s >= best_s * (1 - ROUNDING):
                break
            choices.remove(choice)
            packed, left = self._pack(choice, min(rounds, _ATTEMPT_ROUNDS), deadline_s)
            rounds -= min(rounds, _ATTEMPT_ROUNDS) - left + 1
            if packed is not None:
                size = self.capacity.group_size
                best = [
                    (b, packed[i * size : (i + 1) * size]) for i, b in enumerate(choice.buckets)
                ]
                best_s = choice.predicted_s
            else:
                failed_s, step = choice.predicted_s, 2 * step
        return best, bound_s, "optimal" if best_s <= bound_s * (1 + ROUNDING) else "feasible"

    def _pack(self, choice: _Choice, rounds: int, deadline_s: float) -> tuple[Packed | None, int]:
        buckets = [self.buckets[b] for b in choice.buckets for _ in range(self.capacity.group_size)]
        return pack(
            self.shapes,
            buckets,
            self.capacity,
            rounds=rounds,
            deadline_s=deadline_s,
            seed=self.seed,
        )

    def _choices(self, greedy: Groups, greedy_s: float) -> tuple[list[_Choice], float]:
        """Choices better than greedy, best first, and a lower bound on the makespan of every
        choice (0: none proved here)."""
        size = self.capacity.group_size
        seconds = np.array(self.costs.seconds)
        cost_C = seconds.max(axis=1) * size
        fill_C = seconds.sum(axis=1) - seconds.max(axis=1)
        ceiling = sum(cost_C[b] for b, _ in greedy) + fill_C.max() - fill_C.min()
        wanted = demand(self.shapes, self.buckets, self.capacity)
        counts_XC, complete = cheap_covers(wanted, cost_C, ceiling)
        time_X = counts_XC @ cost_C + np.where(counts_XC > 0, fill_C, np.inf).min(axis=1)
        own = self.costs.makespan_s is None
        bound_s = float(time_X.min(initial=np.inf)) if complete and own else 0.0
        slack_X = (counts_XC @ wanted.room_DC.T / wanted.need_D).min(axis=1) - 1
        useful = (
            np.flatnonzero(time_X < greedy_s * (1 - ROUNDING)) if own else np.arange(len(time_X))
        )
        keep = useful[_spread(time_X[useful], slack_X[useful], _MAX_CHOICES if own else _SIMULATED)]
        choices = []
        for x in keep:
            chosen = running_order(
                np.repeat(np.arange(len(cost_C)), counts_XC[x]).tolist(), self.costs
            )
            each = [b for b in chosen for _ in range(size)]
            choices.append(_Choice(self.costs.predict_s(each), float(slack_X[x]), chosen))
        choices.sort(key=lambda c: (c.predicted_s, -c.slack, c.buckets))
        return [c for c in choices if c.predicted_s < greedy_s * (1 - ROUNDING)], bound_s


def _at(
    choices: Sequence[_Choice], level_s: float, failed_s: float, best_s: float
) -> _Choice | None:
    """The choice with the most slack at a level of predicted time, or the nearest to it, between
    what failed and the best so far; None when these have met."""
    between = [c for c in choices if failed_s < c.predicted_s < best_s * (1 - _FIRST_STEP / 2)]
    if not between:
        return None
    level = [c for c in between if level_s <= c.predicted_s <= level_s * (1 + _FIRST_STEP)]
    if level:
        return max(level, key=lambda c: c.slack)
    return min(between, key=lambda c: (abs(c.predicted_s - level_s), -c.slack))


def _spread(time_X: Floats, slack_X: Floats, most: int) -> Ints:
    """Indices of at most `most` vectors, the fastest first; of many only those with more slack
    than any faster one (no other is worth packing)."""
    order = np.lexsort((-slack_X, time_X))
    if len(order) <= _FEW:
        return order
    record = np.maximum.accumulate(slack_X[order])
    rising = np.append(True, record[1:] > record[:-1])[: len(order)]
    return order[rising][:most]
