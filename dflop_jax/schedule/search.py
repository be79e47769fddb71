"""The cheapest set of buckets into which a global batch packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.schedule.costs import running_order
from dflop_jax.schedule.cover import Demand, cheap_covers, demand
from dflop_jax.schedule.groups import Room, Together
from dflop_jax.schedule.packing import gathered, pack
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.problem import Floats, Ints

_ATTEMPT_WORK = 400  # of one set of buckets that is tried
_COVER_WORK = 300  # vectors listed for a unit of work
_MAX_CHOICES = 400  # sets of buckets listed for packing
_FIRST_STEP = 0.001  # relative steps of cost in which sets are tried, doubling
_FEW = 24  # sets of buckets that are simply tried in order


@dataclass(frozen=True)
class _Choice:
    """Buckets of the groups, in running order; `slack` is the tightest condition's room over need,
    less 1."""

    cost: int
    slack: float
    buckets: tuple[int, ...]


def improved(room: Room, greedy: Sequence[Together], budget: Budget, seed: int) -> list[Together]:
    """An answer that costs no more than the greedy one, in running order.

    Climbs from the bound in doubling steps of cost until a set of buckets packs, then bisects
    between the last failure and the success; at each level the set with the most slack is tried.
    Where content counts and nothing is cheaper, the greedy answer's buckets are filled evenly.
    """
    rng = np.random.default_rng(seed)
    greedy_cost = room.cost(greedy)
    choices = _choices(room, greedy, budget)
    best, best_cost, failed, step = list(greedy), greedy_cost, 0.0, _FIRST_STEP
    one_by_one = len(choices) <= _FEW
    while choices and not budget.done:
        level = max(failed * (1 + step), choices[0].cost)
        if best_cost < greedy_cost:
            level = (failed + best_cost) / 2
        choice = choices[0] if one_by_one else _nearest(choices, level, failed, best_cost)
        if choice is None or choice.cost >= best_cost:
            break
        choices.remove(choice)
        answer = _packed(room, choice, budget.part(_ATTEMPT_WORK), rng)
        if answer is None:
            failed, step = choice.cost, 2 * step
            continue
        best, best_cost = answer, choice.cost
        if one_by_one:
            break
    if greedy and best_cost == greedy_cost and room.batch.anchor in room.priced:
        same = _Choice(greedy_cost, 0.0, tuple(t.bucket for t in greedy))
        best = _packed(room, same, budget.part(_ATTEMPT_WORK), rng) or best
    return room.in_order([room.shrunk(t, budget) for t in _gathered(room, best, budget)])


def _packed(
    room: Room, choice: _Choice, budget: Budget, rng: np.random.Generator
) -> list[Together] | None:
    """The batch in these buckets, one group of each; None if no packing was found."""
    size = room.capacity.group_size
    buckets = [room.buckets[b] for b in choice.buckets for _ in range(size)]
    packed = pack(room.batch, buckets, room.capacity, budget, rng)
    if packed is None:
        return None
    answer = []
    for k, b in enumerate(choice.buckets):
        together = room.together(b, packed[k * size : (k + 1) * size], budget)
        if together is None:
            return None
        if together.placed:  # an empty group need not run
            answer.append(together)
    return answer


def _gathered(room: Room, answer: list[Together], budget: Budget) -> list[Together]:
    """The answer with long pieces of the anchor next to each other, if their content costs
    something and pieces of other modules find rows then too."""
    if room.batch.anchor not in room.priced:
        return answer
    size = room.capacity.group_size
    buckets = [room.buckets[t.bucket] for t in answer for _ in range(size)]
    packed = gathered(
        room.batch, buckets, [m for t in answer for m in t.microbatches], room.capacity
    )
    if packed is None:
        return answer
    moved = [
        room.together(t.bucket, packed[k * size : (k + 1) * size], budget)
        for k, t in enumerate(answer)
    ]
    return [t for t in moved if t is not None and t.placed] if all(moved) else answer


def _choices(room: Room, greedy: Sequence[Together], budget: Budget) -> list[_Choice]:
    """Sets of buckets that cost less than the greedy answer, cheapest first."""
    ticks = room.ticks
    greedy_cost = room.cost(greedy)
    ceiling = float(greedy_cost - ticks.rest_C.min())
    wanted = demand(room.batch, room.buckets, room.capacity)
    counts_XC, _ = cheap_covers(wanted, ticks.dearest_C.astype(float), ceiling)
    budget.spend(1 + len(counts_XC) / _COVER_WORK)
    used_XC = counts_XC > 0
    rest_X = np.where(used_XC, ticks.rest_C, np.iinfo(np.int64).max).min(axis=1)
    cost_X = counts_XC @ ticks.dearest_C + np.where(used_XC.any(axis=1), rest_X, 0)
    slack_X = _slack(counts_XC, wanted)
    useful = np.flatnonzero(cost_X < greedy_cost)
    keep = useful[_spread(cost_X[useful], slack_X[useful])]
    choices = []
    for x in keep:
        chosen = np.repeat(np.arange(len(room.buckets)), counts_XC[x]).tolist()
        ordered = tuple(chosen[i] for i in running_order(chosen, ticks))
        choices.append(_Choice(int(cost_X[x]), float(slack_X[x]), ordered))
    return sorted(choices, key=lambda c: (c.cost, -c.slack, c.buckets))


def _slack(counts_XC: Ints, wanted: Demand) -> Floats:
    """[X]: room over need, less 1, of each vector's tightest condition."""
    if len(wanted.need_D) == 0:
        return np.zeros(len(counts_XC))
    share_XD = counts_XC @ wanted.room_DC.T / wanted.need_D
    return np.round(share_XD.min(axis=1) - 1, 9)


def _nearest(
    choices: Sequence[_Choice], level: float, failed: float, best: float
) -> _Choice | None:
    """The choice with the most slack at a level of cost, or the nearest to it, between what failed
    and the best so far; None when these have met."""
    between = [c for c in choices if failed < c.cost < best * (1 - _FIRST_STEP / 2)]
    if not between:
        return None
    near = [c for c in between if level <= c.cost <= level * (1 + _FIRST_STEP)]
    if near:
        return max(near, key=lambda c: c.slack)
    return min(between, key=lambda c: (abs(c.cost - level), -c.slack))


def _spread(cost_X: Ints, slack_X: Floats) -> Ints:
    """Indices of at most `_MAX_CHOICES` vectors, the cheapest first; of many only those with more
    slack than any cheaper one (no other is worth packing)."""
    order = np.lexsort((-slack_X, cost_X))
    if len(order) <= _FEW:
        return order
    record = np.maximum.accumulate(slack_X[order])
    rising = np.append(True, record[1:] > record[:-1])[: len(order)]
    return order[rising][:_MAX_CHOICES]
