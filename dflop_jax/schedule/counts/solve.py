"""Solves the integer program of a batch with HiGHS, and packs the samples as it says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from dflop_jax.records import Layout, Prices
from dflop_jax.schedule.costs import running_order
from dflop_jax.schedule.counts.numbers import PRICE, Numbers, counts_of, numbers_of
from dflop_jax.schedule.counts.program import CountProgram, dealt_counts
from dflop_jax.schedule.groups import BucketRun, PackingSpace
from dflop_jax.schedule.search import packed_into
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.highs import Highs, integer_program
from dflop_jax.schedule.solver.problem import Floats, Ints

_MOST_NODES = 200  # of branch and bound; most batches take fewer than ten
_GAP = 1e-3  # relative, at which a batch counts as solved
_SLACKS = (0.0, 0.004, 0.01, 0.02, 0.04)  # room over volume that whole samples may need, in turn
_WORTH = 1e-3  # relative: counts that promise less of a gain than that are not packed
_SAFE = 1 - 1e-5  # HiGHS keeps conditions to about 1e-6
# Units of work, measured: of a model, an iteration of the simplex, a node; most of packing.
_MODEL_WORK, _ITERATION_WORK, _NODE_WORK, _PACK_WORK = 60, 0.2, 10, 400


@dataclass(frozen=True)
class Counts:
    """What the integer program says of a batch.

    answer: the groups that it asks for, packed; None where it knows none that are faster, or none
    of these could be packed. bound_s: no schedule of the plan's buckets is faster; 0: not known.
    """

    answer: list[BucketRun] | None
    bound_s: float


@dataclass(frozen=True)
class _Solved:
    """Groups of each bucket [C], and samples of each class in them [K, C]."""

    groups_C: Ints
    dealt_KC: Floats


def by_counts(
    program: CountProgram,
    room: PackingSpace,
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    known: Sequence[BucketRun],
    budget: Budget,
) -> Counts:
    """The program's answer for a batch of which an answer is known, where it promises to be faster.

    Args:
      layout, prices: in which one group takes the place of several (`sub_microbatches.widened`).
    """
    n = len(room.buckets)
    known_C = counts_of([t.bucket for t in known], n)
    numbers = numbers_of(room, layout, prices, trainable, program.sizes, known_C)
    if numbers is None:
        return Counts(None, 0.0)
    padded_C = np.zeros(program.sizes.buckets, np.int64)
    padded_C[:n] = known_C
    known_s = numbers.least_s(padded_C)
    rng = np.random.default_rng(0)
    bound_s = 0.0
    for slack in _SLACKS:
        if slack and budget.done:
            break
        wanted = numbers.with_slack(slack)
        solved, least_s = _solved(program, wanted, padded_C, budget)
        if slack == 0.0 and numbers.is_bound:
            bound_s = least_s
        if solved is None or numbers.least_s(solved.groups_C) >= (1 - _WORTH) * known_s:
            break
        chosen = np.repeat(np.arange(program.sizes.buckets), solved.groups_C).tolist()
        chosen = [chosen[i] for i in running_order(chosen, room.ticks)]
        home_N = _homes(room, numbers, solved)
        answer = packed_into(room, chosen, budget.part(_PACK_WORK), rng, home_N)
        if answer is not None:
            return Counts(room.in_order([room.shrunk(t, budget) for t in answer]), bound_s)
    return Counts(None, bound_s)


def _solved(
    program: CountProgram, numbers: Numbers, start_C: Ints, budget: Budget
) -> tuple[_Solved | None, float]:
    """(best counts within the work that is left, None where none were found; seconds that no
    counts undercut), from counts that hold the batch."""
    costs, h, entries = program.filled(numbers.values)
    n_nodes = min(_MOST_NODES, max(1, int(budget.left / _NODE_WORK)))
    solver = Highs(mip_rel_gap=_GAP, mip_max_nodes=n_nodes)
    solver.passModel(_model(program, costs, h, entries))
    first = program.buckets
    integers = np.arange(first, first + len(start_C), dtype=np.int32)
    solver.setSolution(len(start_C), integers, start_C.astype(float))
    solver.run()
    info = solver.getInfo()
    budget.spend(_MODEL_WORK + _ITERATION_WORK * max(0, info.simplex_iteration_count))
    bound = float(info.mip_dual_bound)
    least_s = bound / (1 + PRICE) * _SAFE * numbers.unit_s if np.isfinite(bound) else 0.0
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, least_s
    groups_C, dealt_KC = dealt_counts(program, np.array(solver.getSolution().col_value))
    return _Solved(groups_C, dealt_KC), least_s


def _model(program: CountProgram, costs: Floats, h: Floats, entries: Floats) -> highspy.HighsLp:
    """min costs @ x with G x >= -h, equal in the first rows; what is 0 in G is left out."""
    row, column = program.cells
    some = np.flatnonzero(entries)
    start = np.searchsorted(row[some], np.arange(program.rows + 1))
    upper = np.where(np.arange(program.rows) < program.equal, -h, np.inf)
    return integer_program(
        costs,
        (start, column[some], entries[some]),
        (-h, upper),
        program.buckets + np.arange(program.sizes.buckets),
    )


def _homes(room: PackingSpace, numbers: Numbers, solved: _Solved) -> Ints:
    """[N]: the bucket of each sample. Of a class, the largest go to the first bucket that takes
    some of it; fractions of samples are rounded, and what a bucket cannot hold goes to the first
    that can."""
    home_N = np.zeros(room.batch.n, np.int64)
    tokens_N = sum((room.batch.tokens[m] for m in room.batch.modules), np.zeros(room.batch.n))
    for k in range(int(numbers.class_N.max()) + 1):
        members = np.flatnonzero(numbers.class_N == k)
        members = members[np.argsort(-tokens_N[members], kind="stable")]
        ends_C = np.rint(np.cumsum(np.maximum(solved.dealt_KC[k], 0.0))).astype(int)
        home_N[members] = np.searchsorted(ends_C, np.arange(len(members)), side="right")
    n = len(room.buckets)
    open_CN = room.able_CN & (solved.groups_C[:n, None] > 0)
    home_N = np.minimum(home_N, n - 1)
    return np.where(open_CN[home_N, np.arange(room.batch.n)], home_N, open_CN.argmax(axis=0))
