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
from dflop_jax.plan.evaluate import TIE, Evaluator, sample_batches
from dflop_jax.plan.explain import Saving, savings, why_nothing_fits
from dflop_jax.plan.ranking import Candidate, Ranked, Ranking, searched
from dflop_jax.plan.space import baseline
from dflop_jax.plan.spare import with_spare
from dflop_jax.plan.volume import volume_of
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    DataProfile,
    ModelProfile,
    Plan,
    Prices,
    Remat,
    SegmentPlan,
    SubmeshPlan,
    Zero,
)

_LARGE_BATCH = 512  # samples; of larger batches fewer are simulated, since they differ less
FINALISTS = 3  # placements whose buckets are chosen
FINER = (0.6, 1.0, 1.6)  # microbatches of chosen buckets at most, over those of the one bucket
CLOSE = 1.05  # makespan over the best, up to which that may change their order

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
    plans = _refined(evaluator, best) if spec.refine else [best[0].plan]
    if spec.refine:
        n_wanted = max(1, spec.config.finalists if time_plan else 1)
        plans = [with_spare(p, data.tail, evaluator) for p in plans[:n_wanted]]
    timed = plans[: spec.config.finalists] if time_plan and spec.refine else []
    if time_plan and timed:
        plans = [_timed(evaluator, p, time_plan(p)) for p in timed]
        if len(plans) == 1:  # the profile chose
            by_profile_s = timed[0].predicted.makespan_s
            predicted = replace(plans[0].predicted, chosen_by_s=by_profile_s)
            plans = [replace(plans[0], predicted=predicted)]
    return SearchResult(
        _fastest(plans),
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


def _timed(evaluator: Evaluator, plan: Plan, prices: Prices) -> Plan:
    """The plan with the figures of its own programs."""
    return evaluator.evaluate(replace(plan, lookahead=0), plan.predicted.makespan_s, prices)


def _fastest(plans: Sequence[Plan]) -> Plan:
    """The plan of least predicted makespan; of equals that of fewer buckets, then the first."""
    least_s = min(p.predicted.makespan_s for p in plans)
    equal = [p for p in plans if p.predicted.makespan_s <= least_s * (1 + TIE)]
    return min(equal, key=lambda p: len(p.buckets))


@dataclass(frozen=True)
class _Tried:
    """A plan with chosen buckets, of a ranked candidate, cut into `finest` microbatches at most."""

    plan: Plan
    ranked: Ranked
    finest: int


def _refined(evaluator: Evaluator, best: Sequence[Ranked]) -> list[Plan]:
    """Plans of the best candidates with suitable buckets, the fastest first; with effort "full"
    several granularities of buckets are tried, and the best are searched through."""
    first = best[0]
    if first.plan.grouping == "arrival":
        return [r.plan for r in best]
    quick = evaluator.config.effort == "quick"
    close = [r for r in best[:FINALISTS] if r.bound_s <= CLOSE * first.bound_s]
    tried: list[_Tried] = []
    for ranked in close[: 1 if quick else None]:
        cut = ranked.cut * ranked.plan.group_size
        most = evaluator.config.max_microbatches
        finest = sorted({max(1, min(most, round(x * cut))) for x in FINER}, reverse=True)
        for n in finest[:1] if quick else finest:
            tried += _with_buckets(evaluator, ranked, n, "quick")
    if tried and not quick:  # the fastest, searched through
        fastest = _fastest([t.plan for t in tried])
        winner = next(t for t in tried if t.plan is fastest)
        tried += _with_buckets(evaluator, winner.ranked, winner.finest, "full")
    plans = [t.plan for t in tried]
    if all(_programs(p) != _programs(first.plan) for p in plans):
        plans.append(evaluator.evaluate(first.plan, first.bound_s))
    in_order = []
    while plans:
        fastest = _fastest(plans)
        in_order.append(fastest)
        plans = [p for p in plans if _programs(p) != _programs(fastest)]
    return in_order


def _programs(plan: Plan) -> tuple[object, ...]:
    """What a plan's compiled programs depend on."""
    return plan.submeshes, plan.segments, plan.buckets, plan.group_size


def _with_buckets(evaluator: Evaluator, ranked: Ranked, finest: int, effort: str) -> list[_Tried]:
    """The candidate's plan with chosen buckets; nothing if they do not fit."""
    try:
        plan = evaluator.with_buckets(ranked.plan, ranked.most, finest, effort)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return []
    plan = evaluator.evaluate(evaluator.with_cheapest_options(plan), ranked.bound_s)
    return [_Tried(plan, ranked, finest)] if evaluator.fits(plan) else []
