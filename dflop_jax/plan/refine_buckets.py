"""Refinement of each policy's best candidates: they get buckets fitted to the data, and their plans
are compared on batches that the buckets were not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from dflop_jax.plan.best_first import MAX_CLOSE, BestFirstSearch, first_per_placement
from dflop_jax.plan.candidate import CLOSE_RATIO, Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import with_sub_microbatches
from dflop_jax.plan.evaluate import PlanEvaluator, buckets_with_shares
from dflop_jax.plan.memory import group_bytes
from dflop_jax.plan.time_plans import close_to_best, compare_new, screen, successive_halving
from dflop_jax.records import REMAT, Bucket, Layout, Load, Plan, Remat, ResidualBytes, SegmentPlan
from dflop_jax.schedule import BucketProblem, choose_buckets
from dflop_jax.schedule.buckets.problem import largest_first
from dflop_jax.schedule.buckets.sizes import oversize_samples, sample_capacity, spare_bucket
from dflop_jax.simulate.task_graph import segments_with_backward

# Limits of microbatches per mean batch with chosen buckets, relative to those with one bucket;
# effort "quick" tries only the last.
_GRANULARITIES = (0.6, 1.0, 1.6)
# Another policy is screened up to this ratio of its makespan to the best one, with one bucket each;
# a larger ratio takes more planning time but misses fewer good plans.
_MAX_POLICY_RATIO = 1.2
# Steps of a policy may be predicted too long, relative to another one's, by up to this factor: in
# `make demo` (two processes, 2026-11) dip took 1.50, orch 1.39, dflop 1.11 times the prediction.
PREDICTION_ERROR = 1.35
# Minimum number of candidates where memory is limited: the devices may not hold the first ones.
_MIN_CLOSE = 3
# Number of candidates, and of placements, that get chosen buckets besides the first of each other
# policy, by effort; each takes about 1 s.
_N_SIZED = {"quick": 2, "full": 3}
# Number of candidates that solve the integer program of shapes; each takes 1 to 2 s.
_N_SOLVED = 2


def refine_candidates(
    search: BestFirstSearch, ranked: Sequence[Candidate], tail: Sequence[Load]
) -> list[Plan]:
    """Return plans of the best candidates with chosen buckets, fastest first by mean of rounds.

    The fastest ranked candidates and the first of other policies get chosen buckets, with effort
    "full" at several granularities; the fastest of these also from the integer program. Each
    plan gets a bucket for the large samples of `tail`. Variants of the leading plans are tried in
    which segments have a second recompute policy, which stores more and runs while memory is free.
    """
    evaluator = search.evaluator
    if ranked[0].plan.scheduling.grouping == "arrival":
        return [with_spare_bucket(r.plan, tail, evaluator) for r in first_per_placement(ranked)]
    close = [_with_smaller_buckets(evaluator, c) for c in _close_candidates(search, ranked)]
    screened = screen(evaluator, close)
    n_sized = _N_SIZED[evaluator.config.effort]
    sizable = screened if evaluator.context.spec.max_alternatives else close_to_best(screened)
    fastest = [*screened[:n_sized], *first_per_placement(screened)[:n_sized]]
    for one in _with_first_per_policy(fastest, sizable):
        screened += _with_chosen_buckets(evaluator, one)
    screened += [more for one in screened for more in _with_divided_readers(evaluator, one)]
    compared = _with_integer_program(evaluator, successive_halving(evaluator, screened))
    compared = [replace(c, plan=with_spare_bucket(c.plan, tail, evaluator)) for c in compared]
    closest = close_to_best(compared)
    second = [
        one.with_plan(plan)
        for one in _with_first_per_policy(closest[:n_sized], closest)
        for plan in with_second_remat(one.plan, evaluator)
    ]
    plan_by_layout: dict[Layout, Plan] = {}
    for one in compare_new(evaluator, compared, second):
        makespan_s = float(np.mean(one.round_seconds))
        plan = replace(one.plan, predicted=replace(one.plan.predicted, makespan_s=makespan_s))
        plan_by_layout.setdefault(plan.layout, plan)
    return list(plan_by_layout.values())


def _with_first_per_policy(
    leading: Sequence[Candidate], candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the leading candidates, and of all others the first of every policy; each once."""
    firsts = {one.policy: one for one in reversed(candidates)}
    return list({id(one): one for one in (*leading, *firsts.values())}.values())


def _close_candidates(search: BestFirstSearch, ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates close to the first, and the best of other policies."""
    best_s, n = ranked[0].lower_bound_s, _MIN_CLOSE * (search.context.spec.memory_bytes > 0)
    max_s = CLOSE_RATIO * best_s
    close = [r for i, r in enumerate(ranked) if i < n or r.lower_bound_s <= max_s][:MAX_CLOSE]
    other_policies = sorted(search.policies - {r.policy for r in close})
    has_trials = search.context.spec.max_alternatives > 0
    max_s = best_s * (PREDICTION_ERROR if has_trials else _MAX_POLICY_RATIO)
    return close + [c for p in other_policies for c in search.screen_policy(p, max_s)]


def _with_smaller_buckets(evaluator: PlanEvaluator, candidate: Candidate) -> Candidate:
    plan, n = candidate.plan, candidate.microbatches
    buckets = tuple(buckets_with_shares(plan.layout, evaluator.context))
    smaller = _chosen_by(plan.with_layout(buckets=buckets), "shares of the largest")
    return replace(candidate, plan=smaller, one_bucket_plan=plan, max_microbatches=n)


def _chosen_by(plan: Plan, method: str) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, buckets_by=method))


def _with_chosen_buckets(evaluator: PlanEvaluator, candidate: Candidate) -> list[Candidate]:
    """Return the candidate with chosen buckets at each granularity that the effort allows."""
    config, largest = evaluator.config, candidate.largest_buckets()[0]
    ratios = _GRANULARITIES[-1:] if config.effort == "quick" else _GRANULARITIES
    counts = {max(1, round(ratio * candidate.max_microbatches)) for ratio in ratios}
    sized = []
    for n in sorted({min(n, config.max_microbatches) for n in counts}, reverse=True):
        sized += _choose_buckets(evaluator, candidate, largest, n, "quick", with_milp=False)
    return sized


def _with_integer_program(
    evaluator: PlanEvaluator, compared: Sequence[Candidate]
) -> list[Candidate]:
    """Return the candidates and variants with the integer program's buckets, fastest first."""
    sized: dict[int, Candidate] = {}  # candidates with chosen buckets, by id of the ranked plan
    for one in compared:
        variants = (c for c in compared if c.ranked_plan is one.ranked_plan and c.bucket_choice)
        if first := next(variants, None):  # None: no choice of buckets fits
            sized.setdefault(id(one.ranked_plan), first)
    to_solve = list(sized.values())[:_N_SOLVED]
    solved = [c for one in to_solve for c in _solve_integer_program(evaluator, one)]
    new = [c for c in solved if all(c.plan.layout != one.plan.layout for one in compared)]
    return compare_new(evaluator, compared, new)


def _solve_integer_program(evaluator: PlanEvaluator, candidate: Candidate) -> list[Candidate]:
    """Return the candidate with the integer program's buckets under each limit of their size."""
    n, effort = candidate.max_microbatches, evaluator.config.effort
    start = candidate.bucket_choice if effort == "quick" else None
    by_layout: dict[Layout, Candidate] = {}
    for largest in candidate.largest_buckets():
        for one in _choose_buckets(evaluator, candidate, largest, n, effort, start=start):
            by_layout.setdefault(one.plan.layout, one)
    solved = by_layout.values()
    return [c for one in solved for c in (one, *_with_divided_readers(evaluator, one))]


def _with_divided_readers(evaluator: PlanEvaluator, candidate: Candidate) -> list[Candidate]:
    """Return the candidate with sub-microbatches in modules that only read others, if policy `dip`
    divides no module yet and the plan fits into memory. The ranking ignores this variant, whose
    gain is smaller than the error of its equal groups."""
    layout = candidate.plan.layout
    if candidate.plan.policy != DIP or layout.divided:
        return []
    readers = [m for m in layout.modules if layout.sources(m) and not layout.targets(m)]
    divided = with_sub_microbatches(layout, evaluator.context, readers)
    plan = replace(candidate.plan, layout=divided).with_scheduling(lookahead=0)
    return [candidate.with_plan(plan)] if divided != layout and evaluator.fits(plan) else []


def _choose_buckets(
    evaluator: PlanEvaluator,
    candidate: Candidate,
    largest: Bucket | None,
    max_microbatches: int,
    effort: str,
    **options: Any,
) -> list[Candidate]:
    """Return the candidate with its best buckets, up to the `largest` and to shapes with trusted
    prices; [] if they do not fit. `options` are passed to `choose_buckets`."""
    context, plan = evaluator.context, candidate.ranked_plan
    layout = replace(plan.layout, fan_in=1)
    limits = {
        m: max(context.max_trusted_tokens(m), max((s.size for s in layout.shapes(m)), default=0))
        for m in layout.modules
    }
    for m, shape in largest.shapes if largest else ():
        limits[m] = min(limits[m], shape.size)

    def make_plan(chosen: Layout) -> Plan:
        if plan.policy == DIP:
            chosen = with_sub_microbatches(chosen, context, plan.layout.divided_readers)
        return replace(plan, layout=chosen)

    problem = BucketProblem(
        layout,
        context.price_layout,
        context.spec.global_batch,
        n_buckets=evaluator.config.buckets,
        trainable=context.trainable(layout),
        piece_tokens=context.profile.piece_tokens,
        token_multiple=context.spec.token_multiple,
        max_tokens={m: int(n) for m, n in limits.items() if n < np.inf},
        max_microbatches=max_microbatches,
        make_plan=make_plan,
    )
    try:
        choice = choose_buckets(evaluator.loads, problem, effort=effort, **options)
        plan = evaluator.with_cheapest_options(problem.with_buckets(choice.buckets))
    except ValueError:  # the largest sample does not fit into memory with a full bucket
        return []
    plan = _chosen_by(plan, choice.method)
    sized = candidate.with_plan(plan, max_microbatches=max_microbatches, bucket_choice=choice)
    return [sized] if evaluator.fits(plan) else []


def with_second_remat(plan: Plan, evaluator: PlanEvaluator) -> list[Plan]:
    """Return a fitting plan for each second recompute policy that saves more residuals; the
    scheduler uses it for groups while memory is free (`schedule.memory_plan`). [] if no segment
    recomputes."""
    context, layout = evaluator.context, plan.layout
    if not context.spec.memory_bytes or plan.scheduling.grouping != "balanced":
        return []
    backward = set(segments_with_backward(layout, context.trainable(layout)))

    def keeps_more(s: SegmentPlan, remat: Remat) -> bool:
        is_weaker = remat in REMAT[: REMAT.index(s.remat)]
        is_priced = remat in context.costs.priced_policies(s.module)
        return is_weaker and is_priced and s.name in backward and context.costs.has_forward(s)

    plans = []
    for remat in get_args(Remat):
        segments = (
            replace(s, remat_less=remat) if keeps_more(s, remat) else s for s in layout.segments
        )
        second = plan.with_layout(segments=tuple(segments))
        if second != plan and evaluator.fits(second):
            plans.append(_with_free_bytes(second, backward, evaluator))
    return plans


def _with_free_bytes(plan: Plan, backward: set[str], evaluator: PlanEvaluator) -> Plan:
    """Return the plan with residual bytes by group shape and free bytes per device by submesh."""
    layout, costs, residuals = plan.layout, evaluator.context.costs, []
    for s in layout.segments:
        second = s if s.remat_less is None else s.with_less_remat
        for shape in layout.shapes(s.module) if s.name in backward else ():
            n_bytes, more = (group_bytes(layout, costs, x, shape) for x in (s, second))
            residuals.append(ResidualBytes(s.name, shape, n_bytes, more - n_bytes))
    limit = evaluator.context.spec.memory_bytes
    free = {name: limit - peak for name, peak in evaluator.peak_bytes_limit(plan).items()}
    return plan.with_scheduling(residuals=tuple(residuals), free_bytes=free)


def with_spare_bucket(plan: Plan, tail: Sequence[Load], evaluator: PlanEvaluator) -> Plan:
    """Return the plan with a bucket for samples of `tail` that are larger than the profiled ones;
    unchanged if that bucket does not fit into memory (then `data.oversize` applies)."""
    oversize = [tail[i] for i in oversize_samples(tail, plan)] if tail else []
    if not oversize:
        return plan
    layout, context = plan.layout, evaluator.context
    capacity, multiple = sample_capacity(plan), context.spec.token_multiple
    spare = spare_bucket(oversize, capacity, context.profile.piece_tokens, multiple)
    # Sub-microbatches have one shape; a sample may use all that feed one group.
    divided = {m: layout.shapes(m)[0] for m in layout.divided if layout.shapes(m)}
    spare = Bucket(tuple((m, divided.get(m, shape)) for m, shape in spare.shapes))
    with_spare = plan.with_layout(buckets=largest_first((*layout.buckets, spare)))
    return with_spare if evaluator.fits(with_spare) else plan
