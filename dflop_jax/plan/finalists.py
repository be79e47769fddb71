"""The last choice among plans by the profile: candidates of several policies get buckets of their
own, and what comes of them races by batches that no shape was sized for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import readers_of, with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.race import at_a_glance, close_to_best, joined, race
from dflop_jax.plan.ranking import CLOSE, MOST_CLOSE, Ranking, placements
from dflop_jax.plan.second_policy import with_second_policies
from dflop_jax.plan.sizing import with_buckets
from dflop_jax.plan.uniform import with_ladder
from dflop_jax.records import Bucket, Layout, Plan, Shape
from dflop_jax.schedule import BucketChoice
from dflop_jax.schedule.shapes.spare import beyond

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


def refined(
    ranking: Ranking, ranked: Sequence[Candidate], spared: Callable[[Plan], Plan]
) -> list[Plan]:
    """Plans of candidates with suitable buckets, the fastest first, with about their makespans: of
    the fastest of those that are ranked and of the first of other policies, with effort "full" with
    several granularities of buckets; the integer program of shapes is then asked for the fastest,
    and second recompute policies are tried for plans with what `spared` adds. Where the fastest is
    of a policy that none of the best ranked is of, few of its candidates had a look: all are ranked
    then."""
    evaluator = ranking.evaluator
    if ranked[0].plan.scheduling.grouping == "arrival":
        return [spared(r.plan) for r in placements(ranked)]
    raced = _raced(ranking, ranked, spared)
    fastest = raced[0].plan.policy
    if all(c.policy != fastest for c in _near(evaluator, ranked)):
        alone = ranking.of(fastest)
        raced = joined(evaluator, raced, _raced(alone, alone.ranked(), spared))
    unlike: dict[Layout, Candidate] = {}
    for one in raced:
        unlike.setdefault(one.plan.layout, one)
    return [one.with_about_s() for one in unlike.values()]


def _raced(
    ranking: Ranking, ranked: Sequence[Candidate], spared: Callable[[Plan], Plan]
) -> list[Candidate]:
    """What is made of candidates of balanced batches, the fastest first."""
    evaluator, first = ranking.evaluator, ranked[0]
    near = at_a_glance(evaluator, [_with_ladder(evaluator, c) for c in _near(evaluator, ranked)])
    others = at_a_glance(evaluator, _others(ranking, near, first.bound_s))
    n_sized = _SIZED[evaluator.config.effort]
    leading = near[:n_sized]
    leading += [f for f in placements(near)[:n_sized] if f not in leading]
    firsts = {f.plan.policy: f for f in reversed([*near, *others])}
    close = close_to_best([*near, *others])
    tried = [*near, *others]
    for one in [*leading, *(f for f in firsts.values() if f not in leading)]:
        if one.ranked.layout != one.plan.layout:
            tried.append(replace(one, plan=one.ranked, trials_s=()))
        tried += _with_shorter_rows(evaluator, one)
        if one in leading or one in close:
            tried += _sized(evaluator, one)
    tried += [divided for one in tried for divided in _with_divided_readers(evaluator, one)]
    raced = _with_program(evaluator, race(evaluator, tried))
    raced = [replace(f, plan=spared(f.plan)) for f in raced]
    second = [
        replace(one, plan=plan, trials_s=())
        for one in close_to_best(raced)
        for plan in with_second_policies(one.plan, evaluator)
    ]
    return joined(evaluator, raced, second)


def _near(evaluator: Evaluator, ranked: Sequence[Candidate]) -> list[Candidate]:
    """What is close to the first by one bucket, or one of the first that are timed: many just hold
    the batches that they are ranked by, and not others."""
    n, close = evaluator.config.finalists, CLOSE * ranked[0].bound_s
    return [r for i, r in enumerate(ranked) if i < n or r.bound_s <= close][:MOST_CLOSE]


def _others(ranking: Ranking, near: Sequence[Candidate], best_s: float) -> list[Candidate]:
    """About the best of every policy that `near` holds none of, as far as these are not far behind:
    with one bucket policies compare otherwise than with chosen ones."""
    others, most_s = ranking.policies - {f.plan.policy for f in near}, _OTHER_BY_ONE_BUCKET * best_s
    found = [c for policy in sorted(others) for c in ranking.nearly_best(policy, most_s)]
    return [_with_ladder(ranking.evaluator, c) for c in found]


def _with_ladder(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    ranked = candidate.plan
    return replace(
        candidate,
        plan=replace(ranked, layout=with_ladder(ranked.layout, evaluator.rules)),
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
    gain = won.gain_over(rival) if rival else choice.gain
    return [_told(won, choice, gain), *others]


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


def _told(won: Candidate, asked: BucketChoice, gain: float) -> Candidate:
    """The finalist, whose plan says how it compares with what the program of shapes made."""
    predicted = replace(
        won.plan.predicted,
        shapes_by=asked.made_by if won.choice == asked else "search",
        shapes_gain=gain,
        shapes_gap=asked.gap,
    )
    return replace(won, plan=replace(won.plan, predicted=predicted))


def _with_divided_readers(evaluator: Evaluator, one: Candidate) -> list[Candidate]:
    """The plan whose modules that only read others go through in several groups, where the policy
    divides modules, none of this plan is and memory holds it. The ranking leaves it out: what it
    brings is less than what equal groups are off."""
    layout = one.plan.layout
    if one.plan.policy != DIP or layout.divided:
        return []
    divided = with_sub_microbatches(layout, evaluator.rules, readers_of(layout))
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
    if buckets == plan.layout.buckets or beyond(evaluator.loads, shorter):
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
    """The candidate's plan with chosen buckets; nothing if they do not fit."""
    try:
        plan, choice = with_buckets(evaluator, one.ranked, largest, finest, effort, **options)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.with_cheapest_options(plan)
    sized = replace(one, plan=plan, max_microbatches=finest, choice=choice, trials_s=())
    return [sized] if evaluator.fits(plan) else []
