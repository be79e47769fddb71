"""The last choice among plans by the profile: candidates of several policies get buckets of their
own, and what comes of them is judged by batches that no shape was sized for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import readers_of, with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.finalist import Finalist, fastest_of
from dflop_jax.plan.ladder import with_ladder
from dflop_jax.plan.ranking import CLOSE, MOST_CLOSE, Ranking, placements
from dflop_jax.plan.second_policy import with_second_policies
from dflop_jax.plan.sizing import with_buckets
from dflop_jax.records import Bucket, Layout, Plan, Shape
from dflop_jax.schedule import BucketChoice
from dflop_jax.schedule.shapes.spare import beyond

# Microbatches that chosen buckets cut a mean batch into at most, over those of the one bucket; each
# is a choice of buckets more, and with effort "quick" the finest alone is tried.
_GRANULARITIES = (0.6, 1.0, 1.6)
# Makespans over the best one's, up to which a plan is looked at closely, since that may change
# their order: of plans at a glance, and of the first one of another policy, whose glance misses
# other things, at a glance and by one bucket. Larger ones cost planning time and miss less.
_CLOSE_TO_BEST, _OTHER_AT_A_GLANCE, _OTHER_BY_ONE_BUCKET = 1.05, 1.15, 1.2
# Candidates whose buckets are chosen, besides the first of other policies, by effort; each takes a
# second or so.
_SIZED = {"quick": 2, "full": 3}
# Candidates that the integer program of shapes is asked for, a second or two each.
_ASKED = 2
# Groups of plans with shorter rows, over those with longer ones, up to which the plan is judged;
# with twice as many, plans win by chance whose groups just hold the batches that judge.
_MOST_MORE_GROUPS = 1.2

Spared = Callable[[Plan], Plan]


def _others(ranking: Ranking, near: Sequence[Finalist], best_s: float) -> list[Finalist]:
    """About the best of every policy that `near` holds none of, as far as it is not far behind:
    with one bucket policies compare otherwise than with chosen ones."""
    others = sorted(ranking.policies - {f.plan.policy for f in near})
    nearly_best = (ranking.about_best(p, _OTHER_BY_ONE_BUCKET * best_s) for p in others)
    return [_with_ladder(ranking.evaluator, r) for r in nearly_best if r]


def refined(
    ranking: Ranking, ranked: Sequence[Candidate], n: int, spared: Spared
) -> list[Finalist]:
    """Plans of candidates with suitable buckets, the fastest first, and about `n` where there are
    as many, some of them less suitable: of the fastest at a glance of those that are ranked and of
    the first of other policies, with effort "full" with several granularities of buckets; the
    integer program of shapes is then asked for the fastest. What `spared` adds to an evaluated plan
    is judged with it, as are second recompute policies."""
    evaluator, first = ranking.evaluator, ranked[0]
    if first.plan.scheduling.grouping == "arrival":
        alone = placements(ranked)[:n]
        return [Finalist(spared(r.plan), r, seconds=r.makespan_s) for r in alone]
    near = _by_a_glance(evaluator, ranked, n)
    others = _others(ranking, near, first.bound_s)
    firsts = {f.plan.policy: f for f in reversed([*near, *others])}
    leading = _placements(near)[: _SIZED[evaluator.config.effort]]
    close = [*leading, *(f for f in firsts.values() if f not in leading)]
    least_s = min(f.glance_s for f in close)
    tried = [f for f in near[:n] if n > 1 and f not in close]
    for one in close:
        assert one.of is not None, "it was made of one"
        alike = _with_shorter_rows(one.plan, evaluator)
        if n > 1 and one.of.plan != one.plan:
            alike.append(one.of.plan)
        tried += [one, *(replace(one, plan=p, glance_s=math.inf) for p in alike)]
        if one in leading or one.glance_s <= _CLOSE_TO_BEST * least_s:
            tried += _sized(evaluator, one)
    tried += [more for one in tried for more in _with_divided_readers(evaluator, one)]
    judged = _judged(evaluator, tried, n, spared)
    judged = _with_program(evaluator, judged, tried, spared)
    fastest_first: list[Finalist] = []
    while judged:
        fastest_first.append(fastest_of(judged))
        judged = [j for j in judged if j.plan.layout != fastest_first[-1].plan.layout]
    return fastest_first


def _by_a_glance(evaluator: Evaluator, ranked: Sequence[Candidate], n: int) -> list[Finalist]:
    """What is close to the first by one bucket, `n` at least, the fastest at a glance first: many
    just hold the batches that they are ranked by, and not others, for whose rest smaller buckets
    are beside."""
    close = CLOSE * ranked[0].bound_s
    near = [r for i, r in enumerate(ranked) if i < n or r.bound_s <= close][:MOST_CLOSE]
    return sorted((_with_ladder(evaluator, r) for r in near), key=lambda f: f.glance_s)


def _placements(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The first of each placement."""
    made_of = {id(f.of): f for f in finalists}
    return [made_of[id(candidate)] for candidate in placements(f.of for f in finalists if f.of)]


def _with_ladder(evaluator: Evaluator, candidate: Candidate) -> Finalist:
    plan = replace(candidate.plan, layout=with_ladder(candidate.plan.layout, evaluator.rules))
    return Finalist(plan, candidate, candidate.microbatches, glance_s=evaluator.glance_s(plan))


def _sized(evaluator: Evaluator, one: Finalist) -> list[Finalist]:
    """The candidate's plan with chosen buckets, of each granularity that the effort allows."""
    most, quick = evaluator.config.max_microbatches, evaluator.config.effort == "quick"
    granularities = _GRANULARITIES[-1:] if quick else _GRANULARITIES
    finest = {max(1, min(most, round(x * one.finest))) for x in granularities}
    assert one.of is not None, "it was made of one"
    found = []
    for at_most in sorted(finest, reverse=True):
        found += _with_buckets(evaluator, one.of, one.of.largest, at_most, "quick", with_milp=False)
    return found


def _with_program(
    evaluator: Evaluator, judged: Sequence[Finalist], tried: Sequence[Finalist], spared: Spared
) -> list[Finalist]:
    """The plans with what the integer program of shapes makes of the candidates of the fastest,
    which says how their own buckets compare; with effort "full" of a longer search, too."""
    fastest = fastest_of(judged)
    first: dict[int, Finalist] = {}  # of a candidate, that buckets were chosen for
    for one in sorted(judged, key=lambda j: (j is not fastest, j.seconds)):
        known = next((t for t in tried if t.of is one.of and t.choice), None)
        if known:  # else the candidate leaves no room for a choice
            first.setdefault(id(one.of), known)
    asked = [a for known in list(first.values())[:_ASKED] for a in _by_program(evaluator, known)]
    new = [a for a in asked if all(a.plan.layout != f.plan.layout for f in (*tried, fastest))]
    compared = [fastest, *_judged(evaluator, new, 1, spared, known=[fastest])]
    won = fastest_of(compared)
    rest = [f for f in [*compared, *judged] if f is not won]
    choices = [a.choice for a in asked if a.choice]
    if not choices:
        return [won, *rest]
    choice = next((c for c in choices if c == won.choice), choices[0])
    gain = 1 - won.seconds / max(c.seconds for c in compared) if new else choice.gain
    return [_told(won, choice, gain), *rest]


def _by_program(evaluator: Evaluator, known: Finalist) -> list[Finalist]:
    """What the program makes of a candidate, as large as memory holds with its options, and where
    it is another answer with any: larger buckets may be worth these."""
    candidate, effort = known.of, evaluator.config.effort
    assert candidate is not None, "it was made of one"
    assert known.choice is not None, "its buckets were chosen"
    start = known.choice if effort == "quick" else None
    found: dict[Layout, Finalist] = {}
    for largest in dict.fromkeys([candidate.largest, candidate.roomiest]):
        for a in _with_buckets(evaluator, candidate, largest, known.finest, effort, start=start):
            found.setdefault(a.plan.layout, a)
    return [more for a in found.values() for more in (a, *_with_divided_readers(evaluator, a))]


def _told(won: Finalist, asked: BucketChoice, gain: float) -> Finalist:
    """The finalist, whose plan says how it compares with what the program of shapes made."""
    predicted = replace(
        won.plan.predicted,
        shapes_by=asked.made_by if won.choice == asked else "search",
        shapes_gain=gain,
        shapes_gap=asked.gap,
    )
    return replace(won, plan=replace(won.plan, predicted=predicted))


def _judged(
    evaluator: Evaluator,
    plans: Sequence[Finalist],
    n: int,
    spared: Spared,
    known: Sequence[Finalist] = (),
) -> list[Finalist]:
    """All that are close to the fastest at a glance, looked at closely; the first of a policy even
    where it is less close, since a glance misses other things of each; and `n` of the fastest's, so
    that it is as well searched as alone. `known` are judged already."""
    glanced = [
        f if f.glance_s < math.inf else replace(f, glance_s=evaluator.glance_s(f.plan))
        for f in plans
    ]
    least_s = min((f.glance_s for f in (*glanced, *known)), default=math.inf)
    judged = list(known)
    for one in sorted(glanced, key=lambda f: f.glance_s):
        policy = one.plan.policy
        alike = sum(j.plan.policy == policy for j in judged)
        wanted = n if not judged or policy == judged[0].plan.policy else 0
        near = _CLOSE_TO_BEST if alike else _OTHER_AT_A_GLANCE
        if alike < wanted or one.glance_s <= near * least_s:
            assert one.of is not None
            plan = spared(evaluator.evaluate(one.plan, one.of.bound_s))
            plan, seconds = with_second_policies(plan, evaluator)
            judged.append(replace(one, plan=plan, seconds=seconds))
    return judged[len(known) :]


def _with_divided_readers(evaluator: Evaluator, one: Finalist) -> list[Finalist]:
    """The plan whose modules that only read others go through in several groups, where the policy
    divides modules, none of this plan is and memory holds it. The ranking leaves it out: what it
    brings is less than what equal groups are off."""
    plan = one.plan
    if plan.policy != DIP or plan.layout.divided:
        return []
    layout = with_sub_microbatches(plan.layout, evaluator.rules, readers_of(plan.layout))
    divided = replace(one, plan=replace(plan, layout=layout), glance_s=math.inf)
    known = layout == plan.layout or not evaluator.fits(divided.plan)
    return [] if known else [divided]


def _with_shorter_rows(plan: Plan, evaluator: Evaluator) -> list[Plan]:
    """The plan with packed rows as short as the longest piece allows, no more of them than before;
    nothing where they are, where these hold not every sample, or where batches need many more
    groups: whether a batch fits into one or two of them, too few are judged to tell. Programs of
    about the same size may differ in speed by more than a fit of a few timings tells; their own
    times do."""
    rules = evaluator.rules
    packed = set(plan.layout.modules) - set(rules.profile.piece_tokens) - set(plan.layout.divided)
    shortest = {m: rules.row_tokens(m) for m in packed}
    buckets = tuple(
        Bucket.of({m: Shape(s.rows, min(s.tokens, shortest.get(m, s.tokens))) for m, s in b.shapes})
        for b in plan.layout.buckets
    )
    shorter = plan.with_layout(buckets=buckets)
    if buckets == plan.layout.buckets or beyond(evaluator.loads, shorter):
        return []
    before, after = (_groups(evaluator, p) for p in (plan, shorter))
    return [shorter] if after <= _MOST_MORE_GROUPS * before else []


def _groups(evaluator: Evaluator, plan: Plan) -> float:
    """Groups of the largest bucket that hold the first batches of the ranking."""
    whole = plan.with_layout(buckets=plan.layout.buckets[:1])
    first = evaluator.batches[: evaluator.rules.spec.n_batches]
    return sum(evaluator.n_groups(whole.layout, i) for i in range(len(first)))


def _with_buckets(
    evaluator: Evaluator,
    ranked: Candidate,
    largest: Bucket | None,
    finest: int,
    effort: str,
    **options: Any,
) -> list[Finalist]:
    """The candidate's plan with chosen buckets; nothing if they do not fit."""
    try:
        plan, choice = with_buckets(evaluator, ranked.plan, largest, finest, effort, **options)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.with_cheapest_options(plan)
    return [Finalist(plan, ranked, finest, choice)] if evaluator.fits(plan) else []
