"""Chooses a plan: placement, cut and remat of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`ranking`), or the first few, then get buckets of their own, and the fastest is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import Hardware
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator, sample_batches
from dflop_jax.plan.explain import why_nothing_fits
from dflop_jax.plan.load import loads
from dflop_jax.plan.ranking import Candidate, Item, Ranking
from dflop_jax.plan.space import baseline, outlines
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import DataProfile, ModelProfile, Plan, SegmentPlan, SubmeshPlan

_LARGE_BATCH = 512  # samples; of larger batches fewer are simulated, since they differ less
FINALISTS = 3  # placements whose buckets are chosen
FINER = (0.6, 1.0, 1.6)  # microbatches of chosen buckets at most, over those of the one bucket
CLOSE = 1.05  # makespan over the best, up to which that may change their order


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and what it was chosen from, best first.

    candidates: the best placements by their makespan with one bucket. n_placements,
    n_candidates: size of the space without and with cuts; n_fit: candidates that memory holds;
    n_evaluated: how many of them were scheduled and simulated.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    n_placements: int
    n_candidates: int
    n_fit: int
    n_evaluated: int


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    *,
    n_devices: int,
    global_batch: int,
    config: PlanConfig | None = None,
    memory_bytes: float = 0.0,
    hardware: Hardware | None = None,
    remat: str = "auto",
    tied: bool = False,
    token_multiple: int = 32,
    trains: Callable[[SegmentPlan], bool] = lambda _: True,
    allowed: Callable[[SubmeshPlan], bool] = lambda _: True,
    shown: int = FINALISTS,
    refine: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      memory_bytes: memory of a device; 0: not checked.
      hardware: nodes and links of the devices: what crosses them takes time, and tensor parallelism
        stays inside a node. None: links take no time.
      remat: "auto" (layers where memory needs it), or the value of every segment.
      tied: head and embedding share parameters, so the LLM stays in one segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.
      allowed: whether the devices at hand can form a submesh.
      shown: placements that are ranked exactly, for `SearchResult.candidates`.
      refine: whether buckets are chosen for the plan; else it has the one that it was ranked with.

    Raises:
      ValueError: no device, no placement, or nothing fits into `memory_bytes`; the message says by
        how much.
    """
    config = config or PlanConfig()
    if n_devices < 1 or global_batch < 1:
        raise ValueError(
            f"a plan for {n_devices} devices and {global_batch} samples a step: give at least one "
            "of each"
        )
    n_batches = max(1, round(config.sampled_batches * min(1.0, _LARGE_BATCH / global_batch)))
    batches = sample_batches(data.shapes, global_batch, n_batches)
    rules = Rules(
        costs=CostModel(profile),
        loads=loads(tuple(profile.n_layers), data.shapes, batches, global_batch),
        token_multiple=token_multiple,
        max_microbatches=config.max_microbatches,
        trains=trains,
        memory_bytes=memory_bytes,
        remat=remat,
        hardware=hardware,
    )
    evaluator = Evaluator(rules, data.shapes, batches, config, global_batch)
    space = (rules, n_devices, config, tied)
    ranking = Ranking(evaluator, outlines(*space), baseline(*space), allowed)
    best = ranking.ranked(max(shown, FINALISTS) if refine else shown, on_progress)
    if not best:
        raise ValueError(why_nothing_fits(rules, n_devices, config, tied, ranking.least_bytes))
    return SearchResult(
        _refined(evaluator, best) if refine else best[0].plan,
        tuple(item.candidate() for item in best),
        n_placements=ranking.n_placements,
        n_candidates=ranking.n_candidates,
        n_fit=ranking.n_fit,
        n_evaluated=ranking.n_evaluated,
    )


def _makespan_s(plan: Plan) -> float:
    return plan.predicted["makespan_s"]


def _refined(evaluator: Evaluator, best: Sequence[Item]) -> Plan:
    """The plan of the best item, with the buckets that suit it; with effort "full" that of the
    fastest of several items with several granularities of buckets."""
    config, first = evaluator.config, best[0]
    if first.plan.grouping == "arrival":
        return first.plan
    quick = config.effort == "quick"
    items = [b for b in best[:FINALISTS] if b.bound_s <= CLOSE * first.bound_s]
    found: list[tuple[float, Plan, Item, int]] = []
    for item in items[: 1 if quick else None]:
        cut = item.cut * item.plan.group_size
        finest = {max(1, min(config.max_microbatches, round(x * cut))) for x in FINER}
        for most in [max(finest)] if quick else sorted(finest, reverse=True):
            if (plan := _with_buckets(evaluator, item, most, "quick")) is not None:
                found.append((_makespan_s(plan), plan, item, most))
    if found and not quick:  # the fastest, searched through
        _, _, item, most = min(found, key=lambda f: f[0])
        if (plan := _with_buckets(evaluator, item, most, "full")) is not None:
            found.append((_makespan_s(plan), plan, item, most))
    span_s, plan, *_ = min(found, key=lambda f: f[0], default=(np.inf, None))
    if plan is not None and span_s < first.bound_s:
        return plan
    return evaluator.evaluate(first.plan)


def _with_buckets(evaluator: Evaluator, item: Item, finest: int, effort: str) -> Plan | None:
    """The item's plan with chosen buckets; None if they do not fit."""
    try:
        plan = evaluator.with_buckets(item.plan, item.most, finest, effort)
    except ValueError:  # memory holds the largest sample only beside a smaller share
        return None
    plan = evaluator.evaluate(_keeping_more(evaluator, plan))
    return plan if evaluator.fits(plan) else None


def _keeping_more(evaluator: Evaluator, plan: Plan) -> Plan:
    """The plan without the remat that its buckets do not need."""
    for m in plan.modules if evaluator.rules.remat == "auto" else ():
        kept = tuple(replace(s, remat="none") if s.module == m else s for s in plan.segments)
        other = replace(plan, segments=kept)
        plan = other if evaluator.fits(other) else plan
    return plan
