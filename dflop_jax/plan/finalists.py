"""The last choice among plans by the profile: candidates of several policies get buckets of their
own, and what comes of them races by batches that no shape was sized for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from dflop_jax.plan.best_first import CLOSE, MOST_CLOSE, Ranking, placements
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.memory import kept_bytes
from dflop_jax.plan.time_plans import at_a_glance, close_to_best, joined, race
from dflop_jax.plan.uniform import ladder_of
from dflop_jax.records import REMAT, Bucket, Kept, Layout, Load, Plan, Remat, SegmentPlan, Shape
from dflop_jax.schedule import BucketProblem, choose_buckets
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples, sample_capacity, spare_bucket
from dflop_jax.schedule.buckets.problem import largest_first
from dflop_jax.simulate.task_graph import segments_with_backward

# Microbatches that chosen buckets cut a mean batch into at most, over those of the one bucket; each
# is a choice of buckets more, and with effort "quick" the finest alone is tried.
_GRANULARITIES = (0.6, 1.0, 1.6)
# Makespan by one bucket over the best one's, up to which another policy gets a look; a larger one
# costs planning time and misses less.
_OTHER_BY_ONE_BUCKET = 1.2
# Candidates, and placements of them, whose buckets are chosen, besides the first of other policies,
# by effort; each takes a second or so.
_SIZED = {"quick": 2, "full": 3}
# Candidates that the integer program of shapes is asked for, a second or two each.
_ASKED = 2
# Groups of plans with shorter rows, over those with longer ones, up to which the plan is judged;
# with twice as many, plans win by chance whose groups just hold the batches that judge.
_MOST_MORE_GROUPS = 1.2


def refined(ranking: Ranking, ranked: Sequence[Candidate], tail: Sequence[Load]) -> list[Plan]:
    """Plans of candidates with suitable buckets, the fastest first, with about their makespans: of
    the fastest of those that are ranked and of the first of other policies, with effort "full" with
    several granularities of buckets; the integer program of shapes is then asked for the fastest,
    and second recompute policies are tried for plans with room for the samples of `tail`."""
    evaluator = ranking.evaluator
    if ranked[0].plan.scheduling.grouping == "arrival":
        return [with_spare(r.plan, tail, evaluator) for r in placements(ranked)]
    near = [_with_ladder(evaluator, c) for c in _near(ranking, ranked)]
    tried = at_a_glance(evaluator, near)
    n_sized = _SIZED[evaluator.config.effort]
    firsts = {one.policy: one for one in reversed(close_to_best(tried))}
    leading = [*tried[:n_sized], *placements(tried)[:n_sized], *firsts.values()]
    for one in {id(one): one for one in leading}.values():
        if one.ranked.layout != one.plan.layout:
            tried.append(replace(one, plan=one.ranked, trials_s=()))
        tried += _with_shorter_rows(evaluator, one)
        tried += _sized(evaluator, one)
    tried += [divided for one in tried for divided in _with_divided_readers(evaluator, one)]
    raced = _with_program(evaluator, race(evaluator, tried))
    raced = [replace(f, plan=with_spare(f.plan, tail, evaluator)) for f in raced]
    second = [
        replace(one, plan=plan, trials_s=())
        for one in close_to_best(raced)
        for plan in with_second_policies(one.plan, evaluator)
    ]
    unlike: dict[Layout, Plan] = {}
    for one in joined(evaluator, raced, second):
        about = replace(one.plan.predicted, makespan_s=float(np.mean(one.trials_s)))
        unlike.setdefault(one.plan.layout, replace(one.plan, predicted=about))
    return list(unlike.values())


def _near(ranking: Ranking, ranked: Sequence[Candidate]) -> list[Candidate]:
    """What is close to the first by one bucket, or one of the first that are timed: many just hold
    the batches that they are ranked by, and not others. And about the best of every other policy,
    as far as these are not far behind: with one bucket policies compare otherwise than with chosen
    ones."""
    n, best_s = ranking.evaluator.config.finalists, ranked[0].bound_s
    close = [r for i, r in enumerate(ranked) if i < n or r.bound_s <= CLOSE * best_s][:MOST_CLOSE]
    others = sorted(ranking.policies - {r.policy for r in close})
    most_s = _OTHER_BY_ONE_BUCKET * best_s
    return close + [c for policy in others for c in ranking.nearly_best(policy, most_s)]


def _with_ladder(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    ranked = candidate.plan
    return replace(
        candidate,
        plan=ranked.with_layout(buckets=tuple(ladder_of(ranked.layout, evaluator.rules))),
        ranked_plan=ranked,
        max_microbatches=candidate.microbatches,
    )


def _sized(evaluator: Evaluator, one: Candidate) -> list[Candidate]:
    """The candidate's plan with chosen buckets, of each granularity that the effort allows."""
    most, quick = evaluator.config.max_microbatches, evaluator.config.effort == "quick"
    granularities = _GRANULARITIES[-1:] if quick else _GRANULARITIES
    finest = {max(1, min(most, round(x * one.max_microbatches))) for x in granularities}
    largest, found = one.largest_buckets()[0], []
    for at_most in sorted(finest, reverse=True):
        found += _with_buckets(evaluator, one, largest, at_most, "quick", with_milp=False)
    return found


def _with_program(evaluator: Evaluator, raced: Sequence[Candidate]) -> list[Candidate]:
    """The plans with what the integer program of shapes makes of the candidates of the fastest,
    which says how their own buckets compare; with effort "full" of a longer search, too."""
    first: dict[int, Candidate] = {}  # of a ranked plan, that buckets were chosen for
    for one in raced:
        known = next((f for f in raced if f.ranked is one.ranked and f.choice), None)
        if known:  # else the plan leaves no room for a choice
            first.setdefault(id(one.ranked), known)
    asked = [a for known in list(first.values())[:_ASKED] for a in _by_program(evaluator, known)]
    new = [a for a in asked if all(a.plan.layout != f.plan.layout for f in raced)]
    won, *others = joined(evaluator, raced, new)
    choices = [a.choice for a in asked if a.choice]
    if not choices:
        return [won, *others]
    choice = next((c for c in choices if c == won.choice), choices[0])
    by_program = {a.plan.layout for a in new}
    unlike = (f for f in others if (f.plan.layout in by_program) != (won.plan.layout in by_program))
    rival = next(unlike, None)
    gain = choice.gain
    if rival:  # by the trials that both ran
        n = min(len(won.trials_s), len(rival.trials_s))
        gain = 1 - won.trial_s(n) / rival.trial_s(n)
    predicted = replace(
        won.plan.predicted,
        shapes_by=choice.made_by if won.choice == choice else "search",
        shapes_gain=gain,
        shapes_gap=choice.gap,
    )
    return [replace(won, plan=replace(won.plan, predicted=predicted)), *others]


def _by_program(evaluator: Evaluator, known: Candidate) -> list[Candidate]:
    """What the program makes of a candidate, as large as memory holds with its options, and where
    it is another answer with any: larger buckets may be worth these."""
    n, effort = known.max_microbatches, evaluator.config.effort
    start = known.choice if effort == "quick" else None
    found: dict[Layout, Candidate] = {}
    for largest in known.largest_buckets():
        for a in _with_buckets(evaluator, known, largest, n, effort, start=start):
            found.setdefault(a.plan.layout, a)
    return [more for a in found.values() for more in (a, *_with_divided_readers(evaluator, a))]


def _with_divided_readers(evaluator: Evaluator, one: Candidate) -> list[Candidate]:
    """The plan whose modules that only read others go through in several groups, where the policy
    divides modules, none of this plan is and memory holds it. The ranking leaves it out: what it
    brings is less than what equal groups are off."""
    layout = one.plan.layout
    if one.plan.policy != DIP or layout.divided:
        return []
    readers = [m for m in layout.modules if layout.sources(m) and not layout.targets(m)]
    divided = with_sub_microbatches(layout, evaluator.rules, readers)
    return _anew(evaluator, one, divided) if divided != layout else []


def _anew(evaluator: Evaluator, one: Candidate, layout: Layout) -> list[Candidate]:
    """The same with another layout, where memory holds it."""
    plan = replace(one.plan, layout=layout).with_scheduling(lookahead=0)
    return [replace(one, plan=plan, trials_s=())] if evaluator.fits(plan) else []


def _with_shorter_rows(evaluator: Evaluator, one: Candidate) -> list[Candidate]:
    """The plan with packed rows as short as the longest piece allows, no more of them than before;
    nothing where they are, where these hold not every sample, or where batches need many more
    groups: whether a batch fits into one or two of them, too few are judged to tell. Programs of
    about the same size may differ in speed by more than a fit of a few timings tells; their own
    times do."""
    rules, plan = evaluator.rules, one.plan
    packed = set(plan.layout.modules) - set(rules.profile.piece_tokens) - set(plan.layout.divided)
    shortest = {m: rules.row_tokens(m) for m in packed}
    shortened = (
        Bucket.of({m: Shape(s.rows, min(s.tokens, shortest.get(m, s.tokens))) for m, s in b.shapes})
        for b in plan.layout.buckets
    )
    buckets = tuple(dict.fromkeys(shortened))  # those that differed in tokens only are one now
    shorter = plan.with_layout(buckets=buckets)
    if buckets == plan.layout.buckets or oversize_samples(evaluator.loads, shorter):
        return []
    before, after = (_groups(evaluator, p) for p in (plan, shorter))
    return _anew(evaluator, one, shorter.layout) if after <= _MOST_MORE_GROUPS * before else []


def _groups(evaluator: Evaluator, plan: Plan) -> float:
    """Groups of the largest bucket that hold the first batches of the ranking."""
    whole = plan.with_layout(buckets=plan.layout.buckets[:1])
    first = evaluator.batches[: evaluator.rules.spec.n_batches]
    return sum(evaluator.n_groups(whole.layout, i) for i in range(len(first)))


def _with_buckets(
    evaluator: Evaluator,
    one: Candidate,
    largest: Bucket | None,
    finest: int,
    effort: str,
    **options: Any,
) -> list[Candidate]:
    """The candidate's plan with the buckets that suit it best, none larger than `largest` or than
    its one bucket where prices are not believed, cutting an average batch into at most `finest`
    microbatches; nothing if they do not fit. `options` are those of `choose_buckets`."""
    rules, plan = evaluator.rules, one.ranked
    layout = replace(plan.layout, fan_in=1)
    limits = {
        m: max(rules.trusted_tokens(m), max((s.size for s in layout.shapes(m)), default=0))
        for m in layout.modules
    }
    for m, shape in largest.shapes if largest else ():
        limits[m] = min(limits[m], shape.size)

    def as_run(chosen: Layout) -> Plan:
        if plan.policy == DIP:
            chosen = with_sub_microbatches(chosen, rules, plan.layout.divided_readers)
        return replace(plan, layout=chosen)

    problem = BucketProblem(
        layout,
        evaluator.prices,
        rules.spec.global_batch,
        n_buckets=evaluator.config.buckets,
        trainable=rules.trainable(layout),
        piece_tokens=rules.profile.piece_tokens,
        token_multiple=rules.spec.token_multiple,
        max_tokens={m: int(n) for m, n in limits.items() if n < np.inf},
        max_microbatches=finest,
        make_plan=as_run,
    )
    try:
        choice = choose_buckets(evaluator.loads, problem, effort=effort, **options)
        plan = problem.with_buckets(choice.buckets)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.with_cheapest_options(plan)
    sized = replace(one, plan=plan, max_microbatches=finest, choice=choice, trials_s=())
    return [sized] if evaluator.fits(plan) else []


def with_second_policies(plan: Plan, evaluator: Evaluator) -> list[Plan]:
    """Plans in which every segment that can may keep as much as one policy does, so that schedules
    may use what memory is left group by group (`schedule.memory_plan`), as far as memory holds
    them; none where no segment computes anything again."""
    if not evaluator.rules.spec.memory_bytes or plan.scheduling.grouping != "balanced":
        return []
    backward = set(segments_with_backward(plan.layout, evaluator.rules.trainable(plan.layout)))
    found = []
    for less in get_args(Remat):
        segments = tuple(
            replace(s, remat_less=less) if _may(s, less, backward, evaluator) else s
            for s in plan.layout.segments
        )
        second = plan.with_layout(segments=segments)
        if second != plan and evaluator.fits(second):
            found.append(_with_room(second, backward, evaluator))
    return found


def _may(s: SegmentPlan, less: Remat, backward: set[str], evaluator: Evaluator) -> bool:
    """Whether a segment has tasks of both directions, and a policy keeps more than its own."""
    rules = evaluator.rules
    known = less in rules.costs.fits.priced_policies(s.module)
    keeps_more = known and less in REMAT[: REMAT.index(s.remat)]
    return keeps_more and s.name in backward and rules.costs.hands_over(s)


def _with_room(plan: Plan, backward: set[str], evaluator: Evaluator) -> Plan:
    """The plan with what its groups keep, and what of every device's memory is left."""
    costs = evaluator.rules.costs
    kept_by_shape = []
    for s in plan.layout.segments:
        for shape in plan.layout.shapes(s.module) if s.name in backward else ():
            n_bytes = kept_bytes(plan.layout, costs, s, shape)
            less = s if s.remat_less is None else s.keeping
            kept_by_shape.append(
                Kept(s.name, shape, n_bytes, kept_bytes(plan.layout, costs, less, shape) - n_bytes)
            )
    peaks = evaluator.most_by_submesh(plan)
    free = {name: evaluator.rules.spec.memory_bytes - peak for name, peak in peaks.items()}
    return plan.with_scheduling(kept=tuple(kept_by_shape), free_bytes=free)


def with_spare(plan: Plan, tail: Sequence[Load], evaluator: Evaluator) -> Plan:
    """The plan with a bucket for samples of `tail` that none of its buckets holds, since they are
    larger than those that were profiled.

    As it is where there is none, or where memory, with the options that the plan has, is too small
    for such a bucket: then these samples are not trained on (`data.oversize`).
    """
    large = [tail[i] for i in oversize_samples(tail, plan)] if tail else []
    if not large:
        return plan
    rules = evaluator.rules
    spare = spare_bucket(
        large, sample_capacity(plan), rules.profile.piece_tokens, rules.spec.token_multiple
    )
    # Parts have one shape: of a divided module a sample gets as many as may feed one group.
    parts = {m: plan.layout.shapes(m)[0] for m in plan.layout.divided if plan.layout.shapes(m)}
    spare = Bucket(tuple((m, parts.get(m, shape)) for m, shape in spare.shapes))
    spared = plan.with_layout(buckets=largest_first((*plan.layout.buckets, spare)))
    return spared if evaluator.fits(spared) else plan
