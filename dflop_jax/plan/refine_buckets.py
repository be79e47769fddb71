"""The last choice among plans by the profile: candidates of several policies get buckets of their
own, and what comes of them races by batches that no shape was sized for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from dflop_jax.plan.best_first import CLOSE_RATIO, MAX_CLOSE, BestFirstSearch, first_of_placements
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.memory import group_bytes
from dflop_jax.plan.one_bucket import buckets_with_shares
from dflop_jax.plan.time_plans import close_to_best, compare_new, screen, successive_halving
from dflop_jax.records import (
    REMAT,
    Bucket,
    Layout,
    Load,
    Plan,
    Remat,
    ResidualBytes,
    SegmentPlan,
    Shape,
)
from dflop_jax.schedule import BucketProblem, choose_buckets
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples, sample_capacity, spare_bucket
from dflop_jax.schedule.buckets.problem import largest_first
from dflop_jax.simulate.task_graph import segments_with_backward

# Microbatches that chosen buckets cut a mean batch into at most, over those of the one bucket; each
# is a choice of buckets more, and with effort "quick" the finest alone is tried.
_GRANULARITIES = (0.6, 1.0, 1.6)
# Makespan by one bucket over the best one's, up to which another policy gets a look; a larger one
# costs planning time and misses less.
_MAX_POLICY_RATIO = 1.2
# Candidates, and placements of them, whose buckets are chosen, besides the first of other policies,
# by effort; each takes a second or so.
_N_SIZED = {"quick": 2, "full": 3}
# Candidates that the integer program of shapes is asked for, a second or two each.
_N_INTEGER_PROGRAMS = 2
# Groups of plans with shorter rows, over those with longer ones, up to which the plan is judged;
# with twice as many, plans win by chance whose groups just hold the batches that judge.
_MAX_GROUP_RATIO = 1.2


def refine_candidates(
    ranking: BestFirstSearch, ranked: Sequence[Candidate], tail: Sequence[Load]
) -> list[Plan]:
    """Plans of candidates with suitable buckets, the fastest first, with about their makespans: of
    the fastest of those that are ranked and of the first of other policies, with effort "full" with
    several granularities of buckets; the integer program of shapes is then asked for the fastest,
    and second recompute policies are tried for plans with room for the samples of `tail`."""
    evaluator = ranking.evaluator
    if ranked[0].plan.scheduling.grouping == "arrival":
        return [with_spare_bucket(r.plan, tail, evaluator) for r in first_of_placements(ranked)]
    close = [_with_smaller_buckets(evaluator, c) for c in _close_candidates(ranking, ranked)]
    screened = screen(evaluator, close)
    n_sized = _N_SIZED[evaluator.config.effort]
    firsts = {candidate.policy: candidate for candidate in reversed(close_to_best(screened))}
    leading = [*screened[:n_sized], *first_of_placements(screened)[:n_sized], *firsts.values()]
    for candidate in {id(candidate): candidate for candidate in leading}.values():
        if candidate.ranked.layout != candidate.plan.layout:
            screened.append(replace(candidate, plan=candidate.ranked, trial_seconds=()))
        screened += _with_shorter_rows(evaluator, candidate)
        screened += _with_chosen_buckets(evaluator, candidate)
    screened += [
        divided for candidate in screened for divided in _with_divided_readers(evaluator, candidate)
    ]
    compared = _with_integer_program(evaluator, successive_halving(evaluator, screened))
    compared = [replace(f, plan=with_spare_bucket(f.plan, tail, evaluator)) for f in compared]
    second = [
        replace(candidate, plan=plan, trial_seconds=())
        for candidate in close_to_best(compared)
        for plan in with_second_remat(candidate.plan, evaluator)
    ]
    plan_by_layout: dict[Layout, Plan] = {}
    for candidate in compare_new(evaluator, compared, second):
        predicted = replace(
            candidate.plan.predicted, makespan_s=float(np.mean(candidate.trial_seconds))
        )
        plan_by_layout.setdefault(
            candidate.plan.layout, replace(candidate.plan, predicted=predicted)
        )
    return list(plan_by_layout.values())


def _close_candidates(ranking: BestFirstSearch, ranked: Sequence[Candidate]) -> list[Candidate]:
    """What is close to the first by one bucket, or one of the first that are timed: many just hold
    the batches that they are ranked by, and not others. And about the best of every other policy,
    as far as these are not far behind: with one bucket policies compare otherwise than with chosen
    ones."""
    n, best_s = ranking.evaluator.config.finalists, ranked[0].lower_bound_s
    close = [r for i, r in enumerate(ranked) if i < n or r.lower_bound_s <= CLOSE_RATIO * best_s][
        :MAX_CLOSE
    ]
    other_policies = sorted(ranking.policies - {r.policy for r in close})
    max_s = _MAX_POLICY_RATIO * best_s
    return close + [c for policy in other_policies for c in ranking.screen_policy(policy, max_s)]


def _with_smaller_buckets(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    ranked = candidate.plan
    return replace(
        candidate,
        plan=ranked.with_layout(
            buckets=tuple(buckets_with_shares(ranked.layout, evaluator.context))
        ),
        one_bucket_plan=ranked,
        max_microbatches=candidate.microbatches,
    )


def _with_chosen_buckets(evaluator: Evaluator, candidate: Candidate) -> list[Candidate]:
    """The candidate's plan with chosen buckets, of each granularity that the effort allows."""
    max_microbatches, is_quick = (
        evaluator.config.max_microbatches,
        evaluator.config.effort == "quick",
    )
    granularities = _GRANULARITIES[-1:] if is_quick else _GRANULARITIES
    max_counts = {
        max(1, min(max_microbatches, round(x * candidate.max_microbatches))) for x in granularities
    }
    largest_bucket, candidates = candidate.largest_buckets()[0], []
    for max_count in sorted(max_counts, reverse=True):
        candidates += _choose_buckets(
            evaluator, candidate, largest_bucket, max_count, "quick", with_milp=False
        )
    return candidates


def _with_integer_program(evaluator: Evaluator, compared: Sequence[Candidate]) -> list[Candidate]:
    """The plans with what the integer program of shapes makes of the candidates of the fastest,
    which says how their own buckets compare; with effort "full" of a longer search, too."""
    sized_by_plan: dict[int, Candidate] = {}  # of a ranked plan, that buckets were chosen for
    for candidate in compared:
        sized = next(
            (f for f in compared if f.ranked is candidate.ranked and f.bucket_choice), None
        )
        if sized:  # else the plan leaves no room for a choice
            sized_by_plan.setdefault(id(candidate.ranked), sized)
    solved = [
        c
        for sized in list(sized_by_plan.values())[:_N_INTEGER_PROGRAMS]
        for c in _solve_integer_program(evaluator, sized)
    ]
    new = [c for c in solved if all(c.plan.layout != f.plan.layout for f in compared)]
    fastest, *others = compare_new(evaluator, compared, new)
    choices = [c.bucket_choice for c in solved if c.bucket_choice]
    if not choices:
        return [fastest, *others]
    choice = next((c for c in choices if c == fastest.bucket_choice), choices[0])
    solved_layouts = {c.plan.layout for c in new}
    unlike = (
        f
        for f in others
        if (f.plan.layout in solved_layouts) != (fastest.plan.layout in solved_layouts)
    )
    rival = next(unlike, None)
    gain = choice.gain
    if rival:  # by the trials that both ran
        n = min(len(fastest.trial_seconds), len(rival.trial_seconds))
        gain = 1 - fastest.mean_trial_s(n) / rival.mean_trial_s(n)
    predicted = replace(
        fastest.plan.predicted,
        shapes_by=choice.made_by if fastest.bucket_choice == choice else "search",
        shapes_gain=gain,
        shapes_gap=choice.gap,
    )
    return [replace(fastest, plan=replace(fastest.plan, predicted=predicted)), *others]


def _solve_integer_program(evaluator: Evaluator, candidate: Candidate) -> list[Candidate]:
    """What the program makes of a candidate, as large as memory holds with its options, and where
    it is another answer with any: larger buckets may be worth these."""
    n, effort = candidate.max_microbatches, evaluator.config.effort
    start = candidate.bucket_choice if effort == "quick" else None
    by_layout: dict[Layout, Candidate] = {}
    for largest in candidate.largest_buckets():
        for a in _choose_buckets(evaluator, candidate, largest, n, effort, start=start):
            by_layout.setdefault(a.plan.layout, a)
    return [
        extended
        for a in by_layout.values()
        for extended in (a, *_with_divided_readers(evaluator, a))
    ]


def _with_divided_readers(evaluator: Evaluator, candidate: Candidate) -> list[Candidate]:
    """The plan whose modules that only read others go through in several groups, where the policy
    divides modules, none of this plan is and memory holds it. The ranking leaves it out: what it
    brings is less than what equal groups are off."""
    layout = candidate.plan.layout
    if candidate.plan.policy != DIP or layout.divided:
        return []
    readers = [m for m in layout.modules if layout.sources(m) and not layout.targets(m)]
    divided = with_sub_microbatches(layout, evaluator.context, readers)
    return _with_layout(evaluator, candidate, divided) if divided != layout else []


def _with_layout(evaluator: Evaluator, candidate: Candidate, layout: Layout) -> list[Candidate]:
    """The same with another layout, where memory holds it."""
    plan = replace(candidate.plan, layout=layout).with_scheduling(lookahead=0)
    return [replace(candidate, plan=plan, trial_seconds=())] if evaluator.fits(plan) else []


def _with_shorter_rows(evaluator: Evaluator, candidate: Candidate) -> list[Candidate]:
    """The plan with packed rows as short as the longest piece allows, no more of them than before;
    nothing where they are, where these hold not every sample, or where batches need many more
    groups: whether a batch fits into one or two of them, too few are judged to tell. Programs of
    about the same size may differ in speed by more than a fit of a few timings tells; their own
    times do."""
    context, plan = evaluator.context, candidate.plan
    packed_modules = (
        set(plan.layout.modules) - set(context.profile.piece_tokens) - set(plan.layout.divided)
    )
    min_tokens = {m: context.row_tokens(m) for m in packed_modules}
    shortened = (
        Bucket.from_shapes(
            {m: Shape(s.rows, min(s.tokens, min_tokens.get(m, s.tokens))) for m, s in b.shapes}
        )
        for b in plan.layout.buckets
    )
    buckets = tuple(dict.fromkeys(shortened))  # those that differed in tokens only are one now
    shorter = plan.with_layout(buckets=buckets)
    if buckets == plan.layout.buckets or oversize_samples(evaluator.loads, shorter):
        return []
    n_groups, n_shorter_groups = (_count_groups(evaluator, p) for p in (plan, shorter))
    return (
        _with_layout(evaluator, candidate, shorter.layout)
        if n_shorter_groups <= _MAX_GROUP_RATIO * n_groups
        else []
    )


def _count_groups(evaluator: Evaluator, plan: Plan) -> float:
    """Groups of the largest bucket that hold the first batches of the ranking."""
    one_bucket_plan = plan.with_layout(buckets=plan.layout.buckets[:1])
    batches = evaluator.batches[: evaluator.context.spec.n_batches]
    return sum(evaluator.count_groups(one_bucket_plan.layout, i) for i in range(len(batches)))


def _choose_buckets(
    evaluator: Evaluator,
    candidate: Candidate,
    largest: Bucket | None,
    max_microbatches: int,
    effort: str,
    **options: Any,
) -> list[Candidate]:
    """The candidate's plan with the buckets that suit it best, none larger than `largest` or than
    its one bucket where prices are not believed, cutting an average batch into at most `finest`
    microbatches; nothing if they do not fit. `options` are those of `choose_buckets`."""
    context, plan = evaluator.context, candidate.ranked
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
        evaluator.prices,
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
        plan = problem.with_buckets(choice.buckets)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.with_cheapest_options(plan)
    sized = replace(
        candidate,
        plan=plan,
        max_microbatches=max_microbatches,
        bucket_choice=choice,
        trial_seconds=(),
    )
    return [sized] if evaluator.fits(plan) else []


def with_second_remat(plan: Plan, evaluator: Evaluator) -> list[Plan]:
    """Plans in which every segment that can may keep as much as one policy does, so that schedules
    may use what memory is left group by group (`schedule.memory_plan`), as far as memory holds
    them; none where no segment computes anything again."""
    if not evaluator.context.spec.memory_bytes or plan.scheduling.grouping != "balanced":
        return []
    backward = set(segments_with_backward(plan.layout, evaluator.context.trainable(plan.layout)))
    plans = []
    for second_remat in get_args(Remat):
        segments = tuple(
            replace(s, remat_less=second_remat)
            if _can_save_more(s, second_remat, backward, evaluator)
            else s
            for s in plan.layout.segments
        )
        second = plan.with_layout(segments=segments)
        if second != plan and evaluator.fits(second):
            plans.append(_with_free_bytes(second, backward, evaluator))
    return plans


def _can_save_more(
    s: SegmentPlan, second_remat: Remat, backward: set[str], evaluator: Evaluator
) -> bool:
    """Whether a segment has tasks of both directions, and a policy keeps more than its own."""
    context = evaluator.context
    is_known = second_remat in context.costs.fits.priced_policies(s.module)
    keeps_more = is_known and second_remat in REMAT[: REMAT.index(s.remat)]
    return keeps_more and s.name in backward and context.costs.has_forward(s)


def _with_free_bytes(plan: Plan, backward: set[str], evaluator: Evaluator) -> Plan:
    """The plan with what its groups keep, and what of every device's memory is left."""
    costs = evaluator.context.costs
    bytes_by_shape = []
    for s in plan.layout.segments:
        for shape in plan.layout.shapes(s.module) if s.name in backward else ():
            n_bytes = group_bytes(plan.layout, costs, s, shape)
            second = s if s.remat_less is None else s.with_less_remat
            bytes_by_shape.append(
                ResidualBytes(
                    s.name, shape, n_bytes, group_bytes(plan.layout, costs, second, shape) - n_bytes
                )
            )
    peaks = evaluator.peak_bytes_limit(plan)
    free = {name: evaluator.context.spec.memory_bytes - peak for name, peak in peaks.items()}
    return plan.with_scheduling(residuals=tuple(bytes_by_shape), free_bytes=free)


def with_spare_bucket(plan: Plan, tail: Sequence[Load], evaluator: Evaluator) -> Plan:
    """The plan with a bucket for samples of `tail` that none of its buckets holds, since they are
    larger than those that were profiled.

    As it is where there is none, or where memory, with the options that the plan has, is too small
    for such a bucket: then these samples are not trained on (`data.oversize`).
    """
    oversize = [tail[i] for i in oversize_samples(tail, plan)] if tail else []
    if not oversize:
        return plan
    context = evaluator.context
    spare = spare_bucket(
        oversize, sample_capacity(plan), context.profile.piece_tokens, context.spec.token_multiple
    )
    # Parts have one shape: of a divided module a sample gets as many as may feed one group.
    divided_shapes = {
        m: plan.layout.shapes(m)[0] for m in plan.layout.divided if plan.layout.shapes(m)
    }
    spare = Bucket(tuple((m, divided_shapes.get(m, shape)) for m, shape in spare.shapes))
    with_spare = plan.with_layout(buckets=largest_first((*plan.layout.buckets, spare)))
    return with_spare if evaluator.fits(with_spare) else plan
