"""Chooses a plan: layout, granularity and options of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task graph (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`best_first`) then get chosen buckets (`refine_buckets`). Where devices are at hand, the programs
of the fastest plans are timed, and the fastest by these times is the plan (`time_plans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.plan.best_first import (
    BestFirstSearch,
    OnProgress,
    first_of_placements,
    search_spaces,
)
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.explain import explain_no_fit
from dflop_jax.plan.module_tables import SearchContext, module_volume
from dflop_jax.plan.refine_buckets import refine_candidates
from dflop_jax.plan.search_spec import SearchSpec, with_limits
from dflop_jax.plan.space import allowed_baselines
from dflop_jax.plan.time_plans import TimePlan, TimingSession, TryStep
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import DataProfile, ModelProfile, Plan
from dflop_jax.schedule.batch import sample_batches

# Batches by which candidates are ranked, over `SearchSpec.n_batches`: of thousands of layouts some
# suit two batches by chance. Twice as many take twice the time to count groups.
_RANKING_BATCHES_RATIO = 2


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, and how the search found it."""

    plan: Plan
    candidates: tuple[Candidate, ...]  # the best placements, by their makespan with one bucket
    n_placements: int  # in the space
    n_candidates: int  # placements with granularities
    n_fit: int  # candidates that memory holds
    n_evaluated: int  # candidates that were simulated
    n_timed: int  # plans whose own programs were timed
    limits: Mapping[str, int]  # of the space, as configured or as the job needs


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    spec: SearchSpec | None = None,
    *,
    time_plan: TimePlan | None = None,
    try_step: TryStep = lambda *_: None,
    on_progress: OnProgress | None = None,
    **changes: Any,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      spec: what is searched for; `changes` are fields of it by name, or all of them.
      time_plan: compiles and times a plan's own programs; the last choice is then made by these.
      try_step: runs a step of a plan that is timed, before it is chosen. Both raise PlanTooLarge
        where the devices do not hold the plan; then the next one is tried.

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
            session = TimingSession(evaluator, time_plan, try_step)
            plan, n_timed = session.choose(plans, context.spec.config.finalists), session.n_timed
        else:
            plan = evaluator.evaluate(plans[0], plans[0].predicted.makespan_s)
    return SearchResult(
        plan,
        tuple(c.with_predictions(evaluator) for c in first_of_placements(ranked)),
        search.n_placements,
        search.n_candidates,
        search.n_fit,
        search.n_evaluated,
        n_timed,
        context.spec.limits,
    )


def build_evaluator(profile: ModelProfile, data: DataProfile, spec: SearchSpec) -> PlanEvaluator:
    """The evaluator of a spec, with the job's limits where the spec has none."""
    spec, loads, n = with_limits(spec, profile, data.loads), data.loads, spec.global_batch
    batches = sample_batches(loads, n, _RANKING_BATCHES_RATIO * spec.n_batches)
    volumes = {
        m: module_volume(m, loads, batches, n, counts_pieces=m in profile.piece_tokens)
        for m in profile.n_layers
    }
    return PlanEvaluator(SearchContext(CostModel(profile), volumes, spec), loads, batches)
