"""Chooses a plan: layout, granularity and options of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task graph (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`best_first`) then get chosen buckets (`refine_buckets`). Where devices are at hand, the programs
of the fastest plans are timed, and the fastest by these times is the plan (`time_plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.plan.best_first import BestFirstSearch, first_of_placements, search_spaces
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.explain import explain_no_fit
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.refine_buckets import refine_candidates
from dflop_jax.plan.search_spec import SearchSpec, with_limits
from dflop_jax.plan.space import allowed_baselines
from dflop_jax.plan.time_plans import TimePlan, TryStep, choose_by_timing
from dflop_jax.plan.volume import module_volume
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import DataProfile, ModelProfile, Plan
from dflop_jax.schedule.sampled_batches import sample_batches

# Batches by which candidates are ranked, over `SearchSpec.n_batches`: of thousands of layouts some
# suit two batches by chance. Twice as many take twice the time to count groups.
_RANKING_BATCHES_RATIO = 2


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, and how the search found it.

    Attributes:
      candidates: the best placements by their makespan with one bucket, best first.
      n_placements, n_candidates: size of the space without and with granularities.
      n_fit, n_evaluated: candidates that memory holds, and those that were simulated.
      n_timed: plans whose own programs were timed.
      limits: of the space, as configured or as the job needs.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    n_placements: int
    n_candidates: int
    n_fit: int
    n_evaluated: int
    n_timed: int
    limits: Mapping[str, int]


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    spec: SearchSpec | None = None,
    *,
    time_plan: TimePlan | None = None,
    try_step: TryStep = lambda *_: None,
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
    spec = replace(spec, **changes) if spec else SearchSpec(**changes)
    evaluator = build_evaluator(profile, data, spec)
    context = evaluator.context
    baselines = allowed_baselines(context.space_limits)
    search = BestFirstSearch(evaluator, list(search_spaces(context)), baselines)
    ranked = search.rank_placements(on_progress)
    if not ranked:
        raise ValueError(explain_no_fit(context, *search.smallest_candidate()))
    plan, n_timed = ranked[0].plan, 0
    if context.spec.refine:
        plans = refine_candidates(search, ranked, data.tail)
        if time_plan:
            n = context.spec.config.finalists
            plan, n_timed = choose_by_timing(evaluator, plans, n, time_plan, try_step)
        else:
            plan = evaluator.evaluate(plans[0], plans[0].predicted.makespan_s)
    return SearchResult(
        plan,
        tuple(c.with_predictions(evaluator) for c in first_of_placements(ranked)),
        n_placements=search.n_placements,
        n_candidates=search.n_candidates,
        n_fit=search.n_fit,
        n_evaluated=search.n_evaluated,
        n_timed=n_timed,
        limits=context.spec.limits,
    )


def build_evaluator(profile: ModelProfile, data: DataProfile, spec: SearchSpec) -> PlanEvaluator:
    """The evaluator of a spec, with the job's limits where the spec has none."""
    spec = with_limits(spec, profile, data.loads)
    batches = sample_batches(data.loads, spec.global_batch, _RANKING_BATCHES_RATIO * spec.n_batches)
    volumes = {
        m: module_volume(
            m, data.loads, batches, spec.global_batch, counts_pieces=m in profile.piece_tokens
        )
        for m in profile.n_layers
    }
    return PlanEvaluator(SearchContext(CostModel(profile), volumes, spec), data.loads, batches)
