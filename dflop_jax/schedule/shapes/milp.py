"""The MILP behind `choose_buckets`: which candidate buckets to compile for sampled batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from dflop_jax.records import Bucket, Load
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.cover import Demand, demand
from dflop_jax.schedule.shapes.evaluate import roomiest_first
from dflop_jax.schedule.shapes.sizes import Buckets, BucketSpec, SecondsOf
from dflop_jax.schedule.solver.problem import Floats

_SLACK = 1.004  # room over volume that packing whole samples needs
_GAP = 0.004  # relative, at which the MILP counts as solved
_IDLE_PRICE = 0.2  # of a second in a module that is not the slowest: padding there is not free


def group_price(seconds: Mapping[str, float]) -> float:
    """What a group adds to a batch: its slowest module's time, and a share of the others'."""
    slowest, total = max(seconds.values()), sum(seconds.values())
    return slowest + _IDLE_PRICE * (total - slowest)


def solve_choice(
    candidates: Sequence[Bucket],
    batches: Sequence[Sequence[Load]],
    spec: BucketSpec,
    seconds: SecondsOf,
    *,
    must_hold: Batch,
    max_nodes: int,
) -> Buckets:
    """The MILP: binary z[c] (compiled), integer n[s, c] (groups of c that batch s runs).

    min  mean_s sum_c price[c] n[s, c] + fill
    s.t. n[s, c] <= most[s, c] z[c], sum z <= K, every batch's conditions met (`cover.demand`),
         each load of `must_hold` held by some z[c] = 1, fill >= (sum - max)[c] z[c].

    Branch and bound ends after `max_nodes` nodes, with the best answer so far: work, not time.
    """
    import cvxpy as cp  # imports JAX: not before it is needed, and never in the worker process

    capacity = spec.capacity
    times = [dict(seconds(b)) for b in candidates]
    price_C = np.array([group_price(t) for t in times])
    fill_C = np.array([sum(t.values()) - max(t.values()) for t in times])
    unit = float(price_C.max())
    price_C, fill_C = np.round(price_C / unit, 9), np.round(fill_C / unit, 9)
    n = cp.Variable((len(batches), len(candidates)), integer=True)
    z = cp.Variable(len(candidates), boolean=True)
    fill = cp.Variable(nonneg=True)
    limits = [n >= 0, cp.sum(z) <= spec.n_buckets, fill >= cp.multiply(fill_C, z)]
    for s, loads in enumerate(batches):
        want = demand(Batch(loads, tuple(spec.ranks)), candidates, capacity)
        most_C = np.ceil(_SLACK * _alone(want))
        limits += [n[s] <= cp.multiply(most_C, z), want.room_DC @ n[s] >= _SLACK * want.need_D]
    able_CN = np.array([must_hold.able(b, capacity) for b in candidates], float)
    limits.append(able_CN.T @ z >= 1)
    problem = cp.Problem(cp.Minimize(cp.sum(n @ price_C) / len(batches) + fill), limits)
    with warnings.catch_warnings():  # the best answer within the nodes is what is asked for
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        problem.solve(solver=cp.HIGHS, threads=1, mip_rel_gap=_GAP, mip_max_nodes=max_nodes)
    on_C = np.zeros(len(candidates)) if z.value is None else z.value
    chosen = [b for b, on in zip(candidates, on_C, strict=True) if on > 0.5]
    if not must_hold.able_any(chosen, capacity).all():
        chosen = list(roomiest_first(candidates)[:1])  # no answer in so many nodes
    return roomiest_first(chosen)


def _alone(want: Demand) -> Floats:
    """[C]: groups of one bucket that cover all it can help to cover."""
    room_DC = np.where(want.room_DC > 0, want.room_DC, np.inf)
    return (want.need_D[:, None] / room_DC).max(axis=0, initial=0.0)
