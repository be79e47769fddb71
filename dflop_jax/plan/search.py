"""Chooses a plan: placement, cut and options of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`ranking`), or the first few, then get buckets of their own. Where the devices are at hand, the
programs of the fastest are timed; the fastest by those times is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import Hardware
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import TIE, Evaluator
from dflop_jax.plan.explain import Saving, savings, why_nothing_fits
from dflop_jax.plan.ranking import Candidate, Ranked, Ranking, searched
from dflop_jax.plan.second_policy import with_second_policies
from dflop_jax.plan.space import baseline
from dflop_jax.plan.spare import with_spare
from dflop_jax.plan.volume import volume_of
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    Bucket,
    DataProfile,
    ModelProfile,
    Plan,
    Prices,
    Remat,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    Zero,
)
from dflop_jax.schedule.sample import sample_batches

_LARGE_BATCH = 512  # samples; of larger batches fewer are simulated, since they differ less
FINALISTS = 3  # placements whose buckets are chosen
FINER = (0.6, 1.0, 1.6)  # microbatches of chosen buckets at most, over those of the one bucket
CLOSE = 1.05  # makespan over the best, up to which that may change their order
FAR = 1.3  # the same of the best of other policies
SMALL = 0.5  # of a bucket: the one beside it that takes what is too much

TimePlan = Callable[[Plan], Prices]


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True)
class SearchSpec:
    """What a plan is searched for.

    Attributes:
      memory_bytes: memory of a device; 0: not checked.
      hardware: nodes and links of the devices: what crosses them takes time, and tensor parallelism
        stays inside a node. None: links take no time.
      remat, zero: "auto" (the cheapest for each module that memory holds), or the value of every
        segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.
      allowed: whether the devices at hand can form a submesh.
      shown: placements that are ranked exactly, for `SearchResult.candidates`.
      refine: whether buckets are chosen for the plan; else it has the one that it was ranked with.
    """

    n_devices: int
    global_batch: int
    config: PlanConfig = field(default_factory=PlanConfig)
    memory_bytes: float = 0.0
    hardware: Hardware | None = None
    remat: Remat | Literal["auto"] = "auto"
    zero: Zero | Literal["auto"] = "auto"
    token_multiple: int = 32
    trains: Callable[[SegmentPlan], bool] = _always
    allowed: Callable[[SubmeshPlan], bool] = _always
    shown: int = FINALISTS
    refine: bool = True

    def __post_init__(self) -> None:
        if self.n_devices < 1 or self.global_batch < 1:
            raise ValueError(
                f"a plan for {self.n_devices} devices and {self.global_batch} samples a step: "
                "give at least one of each"
            )

    @property
    def n_batches(self) -> int:
        """Global batches that are sampled."""
        share = min(1.0, _LARGE_BATCH / self.global_batch)
        return max(1, round(self.config.sampled_batches * share))


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and what it was chosen from, best first.

    candidates: the best placements by their makespan with one bucket. n_placements,
    n_candidates: size of the space without and with cuts; n_fit: candidates that memory holds;
    n_evaluated: how many of them were scheduled and simulated. n_timed: plans whose own programs
    were timed.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    n_placements: int
    n_candidates: int
    n_fit: int
    n_evaluated: int
    n_timed: int = 0


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    spec: SearchSpec | None = None,
    *,
    time_plan: TimePlan | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **changes: Any,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      spec: what is searched for; `changes` are fields of it by name, and make one where it is None.
      time_plan: compiles and times a plan's own programs; the last choice is then made by these.
      on_progress: told how many of how many placements are ranked.

    Raises:
      ValueError: no device, no placement, or nothing fits into `memory_bytes`; the message says by
        how much.
    """
    spec = replace(spec, **changes) if spec else SearchSpec(**changes)
    rules, evaluator = _prepared(profile, data, spec)
    tables = list(searched(rules, spec.n_devices, spec.config))
    placements = baseline(rules, spec.n_devices, spec.config)
    ranking = Ranking(evaluator, tables, placements, spec.allowed)
    n = max(spec.shown, FINALISTS) if spec.refine else spec.shown
    best = ranking.ranked(n, on_progress)
    if not best:
        raise ValueError(why_nothing_fits(rules, spec.n_devices, spec.config, *ranking.nearest()))
    plans = [best[0].plan]
    timed: list[Plan] = []
    if spec.refine:
        plans = _refined(evaluator, [*best[:FINALISTS], *_others(ranking, best)])
        n_wanted = max(1, spec.config.finalists if time_plan else 1)
        plans = [with_spare(p, data.tail, evaluator) for p in plans[:n_wanted]]
        plans = [with_second_policies(p, evaluator) for p in plans]
        timed = plans[: spec.config.finalists] if time_plan else []
    if time_plan and timed:
        plans = [_by_its_own(evaluator, timed, time_plan)]
    return SearchResult(
        plans[0],
        tuple(r.candidate(evaluator) for r in best),
        n_placements=ranking.n_placements,
        n_candidates=ranking.n_candidates,
        n_fit=ranking.n_fit,
        n_evaluated=ranking.n_evaluated,
        n_timed=len(timed),
    )


def what_memory_bought(
    plan: Plan, profile: ModelProfile, data: DataProfile, spec: SearchSpec
) -> list[Saving]:
    """What each module of a plan that saves memory gets for the time that it costs."""
    return savings(_prepared(profile, data, spec)[1], plan)


def _prepared(
    profile: ModelProfile, data: DataProfile, spec: SearchSpec
) -> tuple[Rules, Evaluator]:
    batches = sample_batches(data.loads, spec.global_batch, spec.n_batches)
    volumes = {
        m: volume_of(
            m, data.loads, batches, spec.global_batch, counts_pieces=m in profile.piece_tokens
        )
        for m in profile.n_layers
    }
    rules = Rules(
        costs=CostModel(profile),
        volumes=volumes,
        token_multiple=spec.token_multiple,
        max_microbatches=spec.config.max_microbatches,
        trains=spec.trains,
        memory_bytes=spec.memory_bytes,
        remat=spec.remat,
        zero=spec.zero,
        hardware=spec.hardware,
        node_devices=spec.config.node,
    )
    return rules, Evaluator(rules, data.loads, batches, spec.config, spec.global_batch)


@dataclass(frozen=True)
class _Judged:
    """A plan, and the seconds that plans are compared by; `ranked`, and the microbatches that its
    buckets cut a mean batch into at most, where they were chosen."""

    plan: Plan
    seconds: float
    ranked: Ranked | None = None
    finest: int = 0


def _by_its_own(evaluator: Evaluator, plans: Sequence[Plan], time_plan: TimePlan) -> Plan:
    """The fastest plan by the times of its own programs, with the figures that these give."""
    judged = []
    for plan in plans:
        prices, by_profile_s = time_plan(plan), plan.predicted.makespan_s
        free = plan if plan.kept else replace(plan, lookahead=0)
        timed = evaluator.evaluate(free, by_profile_s, prices)
        if len(plans) == 1:  # the profile chose
            timed = replace(timed, predicted=replace(timed.predicted, chosen_by_s=by_profile_s))
        judged.append(_Judged(timed, evaluator.judged_s(timed, prices)))
    return _fastest(judged).plan


def _fastest(judged: Sequence[_Judged]) -> _Judged:
    """The plan of least seconds; of equals that of fewer buckets, then the first."""
    least_s = min(j.seconds for j in judged)
    equal = [j for j in judged if j.seconds <= least_s * (1 + TIE)]
    return min(equal, key=lambda j: len(j.plan.buckets))


def _others(ranking: Ranking, best: Sequence[Ranked]) -> list[Ranked]:
    """About the best of every policy that `best` holds none of, as far as it is not far behind:
    with one bucket policies compare otherwise than with chosen ones."""
    found = [ranking.about_best(p) for p in ranking.policies - {r.policy for r in best[:FINALISTS]}]
    limit_s = FAR * best[0].bound_s
    return sorted((r for r in found if r and r.bound_s <= limit_s), key=lambda r: r.policy)


def _refined(evaluator: Evaluator, best: Sequence[Ranked]) -> list[Plan]:
    """Plans of candidates with suitable buckets, the fastest first: of the first, of the first of
    other policies, and with effort "full" of all that are close to it, with several granularities
    of buckets; the best are then searched through."""
    first = best[0]
    if first.plan.grouping == "arrival":
        return [r.plan for r in best]
    quick = evaluator.config.effort == "quick"
    by_policy = {r.policy: r for r in reversed(best)}
    close = [
        r for r in best
        if r is by_policy[r.policy] or (not quick and r.bound_s <= CLOSE * first.bound_s)
    ]  # fmt: skip
    tried: list[_Judged] = []
    for ranked in close:
        cut = ranked.cut * ranked.plan.group_size
        most = evaluator.config.max_microbatches
        finest = sorted({max(1, min(most, round(x * cut))) for x in FINER}, reverse=True)
        for n in finest[:1] if quick else finest:
            tried += _with_buckets(evaluator, ranked, n, "quick")
        for plan in _with_one(ranked.plan, evaluator.rules) if ranked in by_policy.values() else ():
            plan = evaluator.evaluate(plan, ranked.bound_s)
            tried.append(_Judged(plan, evaluator.judged_s(plan), ranked, cut))
    if not quick:  # the fastest, searched through
        winner = _fastest(tried)
        assert winner.ranked is not None
        tried += _with_buckets(evaluator, winner.ranked, winner.finest, "full")
    in_order: list[Plan] = []
    while tried:
        fastest = _fastest(tried).plan
        in_order.append(fastest)
        tried = [t for t in tried if _programs(t.plan) != _programs(fastest)]
    return in_order


def _with_one(plan: Plan, rules: Rules) -> list[Plan]:
    """The plan with its one bucket, and with a small one beside it for what does not fit: a second
    group of the same size would double the step."""
    (bucket,) = plan.buckets
    shapes: dict[str, Shape | None] = {}
    for m, shape in bucket.shapes:
        rows, tokens = max(1, round(SMALL * shape.rows)), shape.tokens
        if shape.rows == 1 and m not in rules.profile.piece_tokens:
            tokens = _up(SMALL * tokens, rules.token_multiple)
        shapes[m] = shape if m in plan.divided else Shape(rows, tokens)
    small = Bucket.of(shapes)
    return [plan] if small == bucket else [plan, replace(plan, buckets=(bucket, small))]


def _up(tokens: float, multiple: int) -> int:
    return -(-int(tokens) // multiple) * multiple


def _programs(plan: Plan) -> tuple[object, ...]:
    """What a plan's compiled programs depend on."""
    return plan.submeshes, plan.segments, plan.buckets, plan.group_size


def _with_buckets(evaluator: Evaluator, ranked: Ranked, finest: int, effort: str) -> list[_Judged]:
    """The candidate's plan with chosen buckets; nothing if they do not fit."""
    try:
        plan = evaluator.with_buckets(ranked.plan, ranked.most, finest, effort)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.evaluate(evaluator.with_cheapest_options(plan), ranked.bound_s)
    if not evaluator.fits(plan):
        return []
    return [_Judged(plan, evaluator.judged_s(plan), ranked, finest)]
