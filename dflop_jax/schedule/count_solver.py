"""Compute a batch's parameters for the integer program of its group counts (`count_program`), solve
the program with HiGHS, and pack the samples by its solution.

Shape suffixes: N samples, C buckets, K size classes, M modules, R resources, D conditions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import BACKWARD, Layout, Prices
from dflop_jax.schedule.balance_problem import Budget, Floats, Ints
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bounds import BoundTerms, bound_terms, drain_s
from dflop_jax.schedule.bucket_search import pack_into
from dflop_jax.schedule.costs import TIE_TOLERANCE, running_order, segment_directions
from dflop_jax.schedule.count_program import CountProgram, ProgramSizes
from dflop_jax.schedule.count_vectors import fractional_bound
from dflop_jax.schedule.groups import Assignment, BucketRun, PackingSpace
from dflop_jax.simulate.task_graph import segment_resources

_GAP = 1e-3  # relative MIP gap; counts that gain less are not packed
_DIGITS = 9  # decimal digits to which parameters are rounded: last bits differ between machines
_GROUP_PRICE = 1e-4  # price of all groups, as a share of a step: avoids groups that gain nothing
_SLACKS = (0.0, 0.004, 0.01, 0.02, 0.04)  # unused shares of the volume that are tried in turn
_SAFE = 1 - 10 * TIE_TOLERANCE  # HiGHS satisfies constraints to about 1e-6
# Measured units of work to build a model and to solve a node; maximum units for packing.
_MODEL_WORK, _NODE_WORK, _PACK_WORK = 100, 10, 800


_Solution = tuple[Ints, Floats]  # groups of each bucket [C], samples of each class in them [K, C]


@dataclass(frozen=True)
class BatchParameters:
    """The program's parameters for a batch."""

    values: dict[str, Floats]  # by parameter name; times are in units of `unit_s`
    class_N: Ints  # the size class of each sample
    unit_s: float
    is_bound: bool  # whether the optimum is a lower bound for every schedule

    def lower_bound_s(self, counts_C: Ints) -> float:
        """Return the program's lower bound on a step's seconds with these counts of groups."""
        v = self.values
        runs_RC = (v["runs_on"] > 0) & (counts_C > 0)
        before_RC, after_RC = (np.where(runs_RC, v[end], np.inf) for end in ("before", "after"))
        pairs_RCC = before_RC[:, :, None] + after_RC[:, None, :]
        is_one_RC = (counts_C < 2) & (v["same_end"][:, None] == 0)
        is_same_RCC = is_one_RC[:, :, None] & np.eye(len(counts_C), dtype=bool)
        least_R = np.where(is_same_RCC, np.inf, pairs_RCC).min(axis=(1, 2))
        ends_R = np.where(v["busy"] > 0, least_R, 0.0)
        alone = (v["work"] @ counts_C + v["rest"] + ends_R).max()
        shared = v["shared"] @ counts_C + v["shared_rest"][0]
        return float(max(alone, shared)) * self.unit_s


def batch_parameters(
    space: PackingSpace,
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    sizes: ProgramSizes,
    known_C: Ints,
) -> BatchParameters | None:
    """Return a batch's parameters for the buckets of `space`; None if the program has too few
    buckets. `known_C` are the counts of a known packing, by which the tightest conditions are
    chosen."""
    batch, buckets = space.batch, space.buckets
    if len(buckets) > sizes.buckets or not batch.n_samples:
        return None
    terms = bound_terms(batch, layout, prices, trainable)
    class_N = size_classes(batch, space.can_hold_CN, sizes.classes)
    values = {name: np.zeros(shape) for name, shape in sizes.parameters.items()}
    n = slice(len(buckets))
    for k in range(sizes.classes):
        members = np.flatnonzero(class_N == k)
        if not len(members):
            continue
        values["count"][k] = len(members)
        values["max_samples"][k, n] = len(members) * space.can_hold_CN[:, members].any(axis=1)
        values["min_tokens"][:, k] = [batch.tokens[m][members].min() for m in layout.modules]
    values["capacity"][:, n] = [
        [batch.microbatch_tokens(b, m) * batch.capacity.group_size for b in buckets]
        for m in layout.modules
    ]
    # The tightest volume conditions, each divided by its need.
    capacity_DC = space.demand.capacity_DC / space.demand.need_D[:, None]
    tight = np.argsort(np.round(capacity_DC @ known_C, _DIGITS), kind="stable")[: sizes.conditions]
    values["need"][: len(tight)] = 1.0
    values["volume"][: len(tight), n] = capacity_DC[tight]
    values["max_groups"][n] = 2 * np.maximum(np.ceil(space.demand.alone_C), known_C)
    unit_s = _set_time_parameters(values, space, terms, known_C)
    differ_R = _ends_differ(space, layout, trainable, values)
    values["same_end"][:] = ~differ_R | (sizes.divided > 0)
    largest_M1 = np.maximum(values["capacity"].max(axis=1, keepdims=True), 1.0)
    for name in ("capacity", "min_tokens"):
        values[name] /= largest_M1
    rounded = {name: np.round(value, _DIGITS) for name, value in values.items()}
    is_bound = sizes.divided <= 1 and _has_all_variants(space)
    return BatchParameters(rounded, class_N, unit_s, is_bound)


def _ends_differ(
    space: PackingSpace,
    layout: Layout,
    trainable: Collection[str],
    values: Mapping[str, Floats],
) -> NDArray[np.bool_]:
    """Return whether the first and the last task of each resource are of different groups, [R]: its
    only segment runs one task of a group, and the batch needs two groups that run there. False
    where this does not matter, since the time before or after is equal for all groups: conditions
    without effect lead the solver to counts that pack less often."""
    tasks, resource_of = segment_directions(layout, trainable), segment_resources(layout)
    runs_on_RC = values["runs_on"][:, : len(space.buckets)]
    differ_R = np.zeros(len(runs_on_RC), bool)
    for r, runs_on_C in enumerate(runs_on_RC):
        there = [tasks[s.name] for s in layout.segments if resource_of[s.name] == r]
        if there == [(BACKWARD,)] and fractional_bound(space.demand, runs_on_C) > 1:
            used = np.flatnonzero(runs_on_C)
            differ_R[r] = all(np.ptp(values[end][r, used]) > 0 for end in ("before", "after"))
    return differ_R


def _has_all_variants(space: PackingSpace) -> bool:
    """Return whether the buckets include every combination of modules that a bucket's run may need.
    A module without pieces in a microbatch has no group. A part without pieces does not run either;
    with one divided module, the buckets include every number of parts."""
    absences = {frozenset[str](), *space.batch.missing_modules}
    modules = frozenset(space.batch.modules)
    missing = {b.shapes: modules - {m for m, _ in b.shapes} for b in space.buckets}
    variants = {
        tuple((m, s) for m, s in shapes if m not in absent)
        for (shapes, lacks), absent in product(missing.items(), absences)
        if lacks <= absent
    }
    is_closed = all(a & b in absences for a, b in product(absences, absences))
    return is_closed and variants <= {(), *missing}


def _set_time_parameters(
    values: dict[str, Floats], space: PackingSpace, terms: BoundTerms, known_C: Ints
) -> float:
    """Set the parameters that are times, in place; return their unit in seconds."""
    n = slice(len(space.buckets))
    work_LC = np.transpose(
        [
            sum(terms.weights[m] @ terms.costs.static_s[m, s] for m, s in b.shapes)
            for b in space.buckets
        ]
    )
    work_RC, shared_C = work_LC[:-1], work_LC[-1]
    ends = [terms.end_times({m: [s] for m, s in b.shapes}) for b in space.buckets]
    before_RC, after_RC = (np.array(end).T for end in zip(*ends, strict=True))
    there_RC = np.isfinite(before_RC)
    tail_RC = np.array(drain_s(after_RC, terms.reduce_R, terms.update_R, terms.awaited_R))
    # A resource is busy in every solution if some sample fits only buckets that run there.
    busy_R = (there_RC[:, :, None] | ~space.can_hold_CN).all(axis=1).any(axis=1)
    unit_s = float((work_RC @ known_C).max()) or 1.0
    values["work"][:, n] = work_RC / unit_s
    values["rest"][:] = terms.rest_L[:-1] / unit_s
    for name, end_RC in (("before", before_RC), ("after", tail_RC)):
        values[name][:, n] = np.where(there_RC, end_RC, 0.0) * terms.idle_R[:, None] / unit_s
    values["runs_on"][:, n] = there_RC
    values["busy"][:] = busy_R
    values["shared"][n] = shared_C / unit_s
    values["shared_rest"][0] = terms.rest_L[-1] / unit_s
    values["price"][n] = _GROUP_PRICE * work_RC.mean(axis=0) / unit_s
    return unit_s


def size_classes(batch: Batch, able_CN: NDArray[np.bool_], max_classes: int) -> Ints:
    """Return the size class of each sample, [N]. Samples of a class fit the same buckets, and all
    classes have about equal tokens; beyond `max_classes` kinds, the last kinds share a class."""
    _, kind_N = np.unique(able_CN, axis=1, return_inverse=True)
    kind_N = np.minimum(kind_N.ravel(), max_classes - 1)
    tokens_MN = np.array([batch.tokens[m] for m in batch.modules]).reshape(-1, batch.n_samples)
    size_N = (tokens_MN / np.maximum(tokens_MN.max(axis=1, keepdims=True), 1)).sum(axis=0)
    order = np.lexsort((size_N, kind_N))
    n_slices = max_classes - int(kind_N.max())
    volume_N = np.cumsum(size_N[order]) - size_N[order] / 2
    slice_N = np.floor(np.round(volume_N / (size_N.sum() or 1.0) * n_slices, _DIGITS))
    starts_N = (np.diff(kind_N[order]) > 0) | (np.diff(slice_N) > 0)
    class_N = np.zeros(batch.n_samples, np.int64)
    class_N[order[1:]] = np.cumsum(starts_N)
    return class_N


def assign_by_counts(
    program: CountProgram,
    space: PackingSpace,
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    assignment: Assignment,
    budget: Budget,
) -> tuple[list[BucketRun] | None, float]:
    """Return (an assignment with the program's counts, a lower bound in seconds for every schedule
    in the plan's buckets). The assignment is None if the program finds no counts that are faster
    than the given assignment's, or if they do not pack. The bound is 0 if unknown. `layout` and
    `prices` come from `merge_sub_microbatches`."""
    n = len(space.buckets)
    known_C = np.bincount(np.array([t.bucket for t in assignment], int), minlength=n)
    numbers = batch_parameters(space, layout, prices, trainable, program.sizes, known_C)
    if numbers is None:
        return None, 0.0
    padded_known_C = np.pad(known_C, (0, program.sizes.buckets - n))
    known_bound_s = numbers.lower_bound_s(padded_known_C)
    rng = np.random.default_rng(0)
    bound_s = 0.0
    for slack in _SLACKS:
        if slack and budget.is_spent:
            break
        # Whole samples leave room unused, so volumes are enlarged by the slack.
        larger = {name: (1 + slack) * numbers.values[name] for name in ("need", "min_tokens")}
        widened = replace(numbers, values=numbers.values | larger)
        solved, least_s = _solve(program, widened, budget)
        if slack == 0.0 and numbers.is_bound:
            bound_s = least_s
        if solved is None or numbers.lower_bound_s(solved[0]) >= (1 - _GAP) * known_bound_s:
            break
        chosen = np.repeat(np.arange(program.sizes.buckets), solved[0]).tolist()
        chosen = [chosen[i] for i in running_order(chosen, space.ticks)]
        bucket_N = _buckets_of_samples(space, numbers, solved)
        packed = pack_into(space, chosen, budget.sub_budget(_PACK_WORK), rng, bucket_N)
        if packed is not None:
            return space.sort_runs([space.shrink(t, budget) for t in packed]), bound_s
    return None, bound_s


def _solve(
    program: CountProgram, numbers: BatchParameters, budget: Budget
) -> tuple[_Solution | None, float]:
    """Return (the best solution within the remaining work, or None; a lower bound in seconds)."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second to load

    costs, h, matrix = program.fill(numbers.values)
    k, c, first = program.sizes.classes, program.sizes.buckets, program.buckets
    is_integer = np.zeros(program.columns)
    is_integer[first : first + c] = 1
    upper = np.where(np.arange(program.rows) < program.equal, -h, np.inf)
    # Most batches need fewer than ten nodes; half of the work remains for packing.
    n_nodes = max(1, int(budget.remaining / 2 / _NODE_WORK))
    result = milp(
        costs,
        integrality=is_integer,
        bounds=Bounds(),
        constraints=LinearConstraint(matrix, -h, upper),
        options={"mip_rel_gap": _GAP, "node_limit": n_nodes},
    )
    budget.spend(_MODEL_WORK + _NODE_WORK * (result.mip_node_count or 0))
    bound = result.mip_dual_bound
    bound = bound if bound is not None and np.isfinite(bound) else 0.0
    least_s = bound / (1 + _GROUP_PRICE) * _SAFE * numbers.unit_s
    if result.x is None:
        return None, least_s
    groups_C = np.rint(result.x[first : first + c]).astype(np.int64)
    samples = result.x[program.samples : program.samples + k * c]
    return (groups_C, samples.reshape(k, c, order="F")), least_s


def _buckets_of_samples(space: PackingSpace, numbers: BatchParameters, solved: _Solution) -> Ints:
    """Return the bucket of each sample, [N]. A class is divided among buckets by the solution's
    counts, largest samples first; a sample that does not fit goes to the first bucket that holds
    it."""
    groups_C, samples_KC = solved
    bucket_N = np.zeros(space.batch.n_samples, np.int64)
    tokens_N = np.sum([space.batch.tokens[m] for m in space.batch.modules], axis=0)
    for k in range(int(numbers.class_N.max()) + 1):
        members = np.flatnonzero(numbers.class_N == k)
        members = members[np.argsort(-tokens_N[members], kind="stable")]
        ends_C = np.rint(np.cumsum(np.maximum(samples_KC[k], 0.0))).astype(int)
        bucket_N[members] = np.searchsorted(ends_C, np.arange(len(members)), side="right")
    n = len(space.buckets)
    open_CN = space.can_hold_CN & (groups_C[:n, None] > 0)
    bucket_N = np.minimum(bucket_N, n - 1)
    is_open_N = open_CN[bucket_N, np.arange(len(bucket_N))]
    return np.where(is_open_N, bucket_N, open_CN.argmax(axis=0))
