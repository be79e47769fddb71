"""Chooses a plan: placement, cut and options of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`ranking`), or the first few, then get buckets of their own. Where the devices are at hand, the
programs of the fastest are timed; the fastest by those times is the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflop_jax.config import PlanConfig
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.explain import Saving, savings, why_nothing_fits
from dflop_jax.plan.finalists import SIZED_PLACEMENTS, refined
from dflop_jax.plan.judge import fastest
from dflop_jax.plan.limits import LEAST, Limits, with_limits
from dflop_jax.plan.on_devices import TimePlan, TryStep, by_its_own
from dflop_jax.plan.ranking import Ranking, searched
from dflop_jax.plan.second_policy import with_second_policies
from dflop_jax.plan.space import baseline
from dflop_jax.plan.spare import with_spare
from dflop_jax.plan.volume import volume_of
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    DataProfile,
    Hardware,
    ModelProfile,
    Plan,
    Prices,
    Remat,
    SegmentPlan,
    SubmeshPlan,
    Zero,
)
from dflop_jax.schedule.sample import LARGE_BATCH, sample_batches


def _always(_: object) -> bool:
    return True


def _no_step(_plan: Plan, _prices: Prices) -> None:
    """No step is tried."""


@dataclass(frozen=True)
class SearchSpec:
    """What a plan is searched for.

    Attributes:
      memory_bytes: memory of a device; 0: not checked.
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
    remat: Remat | Literal["auto"] = "auto"
    zero: Zero | Literal["auto"] = "auto"
    token_multiple: int = 32
    trains: Callable[[SegmentPlan], bool] = _always
    allowed: Callable[[SubmeshPlan], bool] = _always
    shown: int = SIZED_PLACEMENTS
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
        share = min(1.0, LARGE_BATCH / self.global_batch)
        return max(1, round(self.config.sampled_batches * share))


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and what it was chosen from, best first.

    candidates: the best placements by their makespan with one bucket. n_placements,
    n_candidates: size of the space without and with cuts; n_fit: candidates that memory holds;
    n_evaluated: how many of them were scheduled and simulated. n_timed: plans whose own programs
    were timed. limits: of the space, as given or as the job needs.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    n_placements: int
    n_candidates: int
    n_fit: int
    n_evaluated: int
    n_timed: int = 0
    limits: Limits = LEAST


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    spec: SearchSpec | None = None,
    *,
    time_plan: TimePlan | None = None,
    try_step: TryStep = _no_step,
    on_progress: Callable[[int, int], None] | None = None,
    **changes: Any,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      spec: what is searched for; `changes` are fields of it by name, and make one where it is None.
      time_plan: compiles and times a plan's own programs; the last choice is then made by these.
      try_step: runs a step of a plan that is timed, before it is chosen. Both raise PlanTooLarge
        where the devices do not hold the plan; then the next one is tried.
      on_progress: told how many of how many placements are ranked.

    Raises:
      ValueError: no device, no placement, or nothing fits into `memory_bytes`, or by trial into the
        devices; the message says by how much.
    """
    spec = limited(replace(spec, **changes) if spec else SearchSpec(**changes), profile, data)
    rules, evaluator = _prepared(profile, data, spec)
    tables = list(searched(rules, spec.n_devices, spec.config))
    node = rules.node(spec.n_devices)
    placements = baseline(rules.facts, spec.n_devices, node, spec.config)
    ranking = Ranking(evaluator, tables, placements, spec.allowed)
    n = max(spec.shown, SIZED_PLACEMENTS) if spec.refine else spec.shown
    best = ranking.ranked(n, on_progress)
    if not best:
        raise ValueError(why_nothing_fits(rules, spec.n_devices, spec.config, *ranking.nearest()))
    plan, n_timed = best[0].plan, 0
    if spec.refine:
        n_wanted = max(1, spec.config.finalists if time_plan else 1)

        def finish(plan: Plan) -> Plan:
            return with_second_policies(with_spare(plan, data.tail, evaluator), evaluator)

        finalists = refined(ranking, best, n_wanted, finish)
        if time_plan:
            plans, n = [f.plan for f in finalists], spec.config.finalists
            plan, n_timed = by_its_own(evaluator, plans, n, time_plan, try_step)
        else:
            plan = fastest(evaluator, finalists).plan
    return SearchResult(
        plan,
        tuple(c.with_figures(evaluator) for c in best),
        n_placements=ranking.n_placements,
        n_candidates=ranking.n_candidates,
        n_fit=ranking.n_fit,
        n_evaluated=ranking.n_evaluated,
        n_timed=n_timed,
        limits=Limits(spec.config.max_model, spec.config.max_stage, spec.config.max_microbatches),
    )


def what_memory_bought(
    plan: Plan, profile: ModelProfile, data: DataProfile, spec: SearchSpec
) -> list[Saving]:
    """What each module of a plan that saves memory gets for the time that it costs."""
    return savings(_prepared(profile, data, limited(spec, profile, data))[1], plan)


def limited(spec: SearchSpec, profile: ModelProfile, data: DataProfile) -> SearchSpec:
    """With the job's own limits where none are given."""
    usual = profile.hardware.devices_per_node if profile.hardware else spec.n_devices
    config = with_limits(
        spec.config,
        profile,
        data.loads,
        n_devices=spec.n_devices,
        global_batch=spec.global_batch,
        memory_bytes=spec.memory_bytes,
        node=spec.config.node or usual,
    )
    return replace(spec, config=config)


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
        node_devices=spec.config.node,
        shard_devices=_blocks(spec, profile.hardware),
        microbatches_per_stage=spec.config.microbatches_per_stage,
    )
    return rules, Evaluator(rules, data.loads, batches, spec.config, spec.global_batch)


def _blocks(spec: SearchSpec, hardware: Hardware | None) -> tuple[int, ...]:
    """Sizes of blocks of devices that may share state: as asked for, else all or, where links have
    prices and there are several nodes, those of a node."""
    if spec.config.shard_devices:
        return (spec.config.shard_devices,)
    node = hardware and (spec.config.node or hardware.devices_per_node)
    return (0, node) if node and node < spec.n_devices else (0,)
