"""Solves the integer program of a batch with HiGHS, and packs the samples as it says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dflop_jax.records import Layout, Prices
from dflop_jax.schedule.costs import running_order
from dflop_jax.schedule.counts.numbers import PRICE, Numbers, numbers_of
from dflop_jax.schedule.counts.program import CountProgram
from dflop_jax.schedule.groups import BucketRun, PackingSpace
from dflop_jax.schedule.search import packed_into
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.problem import Floats, Ints

_MOST_NODES = 200  # of branch and bound; most batches take fewer than ten
_GAP = 1e-3  # relative, at which a batch counts as solved
_SLACKS = (0.0, 0.004, 0.01, 0.02, 0.04)  # room over volume that whole samples may need, in turn
_WORTH = 1e-3  # relative: counts that promise less of a gain than that are not packed
_SAFE = 1 - 1e-5  # HiGHS keeps conditions to about 1e-6
# Units of work, measured: of a model, a node; most of packing.
_MODEL_WORK, _NODE_WORK, _PACK_WORK = 100, 10, 400


_Solved = tuple[Ints, Floats]  # groups of each bucket [C], samples of each class in them [K, C]


def by_counts(
    program: CountProgram,
    room: PackingSpace,
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    known: Sequence[BucketRun],
    budget: Budget,
) -> tuple[list[BucketRun] | None, float]:
    """(groups that the program asks for, packed; None where it knows none that are faster than the
    known answer, or none of these could be packed; seconds that no schedule of the plan's buckets
    undercuts, 0: not known).

    Args:
      layout, prices: in which one group takes the place of several (`sub_microbatches.widened`).
    """
    n = len(room.buckets)
    known_C = np.bincount(np.array([t.bucket for t in known], int), minlength=n)
    numbers = numbers_of(room, layout, prices, trainable, program.sizes, known_C)
    if numbers is None:
        return None, 0.0
    padded_C = np.pad(known_C, (0, program.sizes.buckets - n))
    known_s = numbers.least_s(padded_C)
    rng = np.random.default_rng(0)
    bound_s = 0.0
    for slack in _SLACKS:
        if slack and budget.done:
            break
        wanted = numbers.with_slack(slack)
        solved, least_s = _solved(program, wanted, budget)
        if slack == 0.0 and numbers.is_bound:
            bound_s = least_s
        if solved is None or numbers.least_s(solved[0]) >= (1 - _WORTH) * known_s:
            break
        chosen = np.repeat(np.arange(program.sizes.buckets), solved[0]).tolist()
        chosen = [chosen[i] for i in running_order(chosen, room.ticks)]
        home_N = _homes(room, numbers, solved)
        answer = packed_into(room, chosen, budget.part(_PACK_WORK), rng, home_N)
        if answer is not None:
            return room.in_order([room.shrunk(t, budget) for t in answer]), bound_s
    return None, bound_s


def _solved(
    program: CountProgram, numbers: Numbers, budget: Budget
) -> tuple[_Solved | None, float]:
    """(best counts within the work that is left, None where none were found; seconds that no
    counts undercut)."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second to load
    from scipy.sparse import csr_array

    costs, h, entries = program.filled(numbers.values)
    k, c, first = program.sizes.classes, program.sizes.buckets, program.buckets
    is_integer = np.zeros(program.columns)
    is_integer[first : first + c] = 1
    rows = csr_array((entries, program.cells), (program.rows, program.columns))
    upper = np.where(np.arange(program.rows) < program.equal, -h, np.inf)
    n_nodes = min(_MOST_NODES, max(1, int(budget.left / _NODE_WORK)))
    found = milp(
        costs,
        integrality=is_integer,
        bounds=Bounds(),
        constraints=LinearConstraint(rows, -h, upper),
        options={"mip_rel_gap": _GAP, "node_limit": n_nodes},
    )
    budget.spend(_MODEL_WORK + _NODE_WORK * (found.mip_node_count or 0))
    bound = found.mip_dual_bound
    is_finite = bound is not None and np.isfinite(bound)
    least_s = bound / (1 + PRICE) * _SAFE * numbers.unit_s if is_finite else 0.0
    if found.x is None:
        return None, least_s
    groups_C = np.rint(found.x[first : first + c]).astype(np.int64)
    dealt = found.x[program.dealt : program.dealt + k * c]
    return (groups_C, dealt.reshape(k, c, order="F")), least_s


def _homes(room: PackingSpace, numbers: Numbers, solved: _Solved) -> Ints:
    """[N]: the bucket of each sample. Of a class, the largest go to the first bucket that takes
    some of it; fractions of samples are rounded, and what a bucket cannot hold goes to the first
    that can."""
    groups_C, dealt_KC = solved
    home_N = np.zeros(room.batch.n, np.int64)
    tokens_N = sum((room.batch.tokens[m] for m in room.batch.modules), np.zeros(room.batch.n))
    for k in range(int(numbers.class_N.max()) + 1):
        members = np.flatnonzero(numbers.class_N == k)
        members = members[np.argsort(-tokens_N[members], kind="stable")]
        ends_C = np.rint(np.cumsum(np.maximum(dealt_KC[k], 0.0))).astype(int)
        home_N[members] = np.searchsorted(ends_C, np.arange(len(members)), side="right")
    n = len(room.buckets)
    open_CN = room.able_CN & (groups_C[:n, None] > 0)
    home_N = np.minimum(home_N, n - 1)
    return np.where(open_CN[home_N, np.arange(room.batch.n)], home_N, open_CN.argmax(axis=0))
