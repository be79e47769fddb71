"""Search for the layout, granularity, options and buckets with the least expected makespan.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task graph (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best candidates of the space
(`best_first`) then get buckets fitted to the data (`refine_buckets`). If devices are available, the
fastest plan that fits on them is chosen, after its programs were timed (`time_plans`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.plan.best_first import (
    BestFirstSearch,
    OnProgress,
    first_per_placement,
    search_spaces,
)
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.explain import explain_no_fit
from dflop_jax.plan.module_tables import SearchContext, module_volume
from dflop_jax.plan.refine_buckets import PREDICTION_ERROR, refine_candidates
from dflop_jax.plan.search_spec import SearchSpec, with_limits
from dflop_jax.plan.space import allowed_baselines
from dflop_jax.plan.time_plans import TimePlan, TryStep, choose_fitting_plan
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import DataProfile, ModelProfile, Plan
from dflop_jax.schedule.batch import sample_batches


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and statistics of the search."""

    plan: Plan
    # The best plans of other policies, fastest first, that may be faster than `plan`: their
    # predicted step is up to `PREDICTION_ERROR` times as long.
    alternatives: tuple[Plan, ...]
    candidates: tuple[Candidate, ...]  # the best placements, sorted by makespan with one bucket
    n_placements: int  # in the space
    n_candidates: int  # (placement, granularity) pairs
    n_fit: int  # candidates that fit into memory
    n_evaluated: int  # candidates simulated
    limits: Mapping[str, int]  # of the space, from the config or derived from the job


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
    """Return the plan with the least expected makespan that fits into memory.

    Args:
      spec: the search's settings; `changes` replace its fields. Without `spec`, `changes` are the
        fields of a new SearchSpec.
      time_plan: compiles and times a plan's programs; the plan's predictions use these times.
      try_step: runs a step of the plan before it is chosen. Both callbacks raise PlanTooLarge if
        the plan does not fit on the devices; then the next plan is tried.

    Raises:
      ValueError: no device, no placement, or no plan fits into `memory_bytes` or on the devices;
        the message states the missing bytes.
    """
    spec = replace(spec, **changes) if spec else SearchSpec(**changes)
    evaluator = build_evaluator(profile, data, spec)
    context = evaluator.context
    baselines = allowed_baselines(context.space_limits)
    search = BestFirstSearch(evaluator, list(search_spaces(context)), baselines)
    ranked = search.rank_placements(on_progress)
    if not ranked:
        raise ValueError(explain_no_fit(context, *search.smallest_candidate()))
    plan, alternatives = ranked[0].plan, list[Plan]()
    if context.spec.refine:
        plans = refine_candidates(search, ranked, data.tail)
        if time_plan:
            plan, evaluator = choose_fitting_plan(evaluator, plans, time_plan, try_step)
        else:
            plan = evaluator.evaluate(plans[0], plans[0].predicted.makespan_s)
        alternatives = find_alternatives(evaluator, plan, plans)
    return SearchResult(
        plan,
        tuple(alternatives),
        tuple(c.with_predictions(evaluator) for c in first_per_placement(ranked)),
        search.n_placements,
        search.n_candidates,
        search.n_fit,
        search.n_evaluated,
        context.spec.limits,
    )


def find_alternatives(
    evaluator: PlanEvaluator, plan: Plan, ranked_plans: Sequence[Plan]
) -> list[Plan]:
    """Return the best plans of other policies that may be faster than `plan`, fastest first."""
    firsts: dict[str, Plan] = {plan.policy: plan}
    max_s = PREDICTION_ERROR * plan.predicted.chosen_by_s
    for other in ranked_plans if evaluator.context.spec.max_alternatives else ():
        if other.policy not in firsts and evaluator.fits(other):
            firsts[other.policy] = evaluator.evaluate(other, other.predicted.makespan_s)
    others = [p for p in firsts.values() if p is not plan and p.predicted.makespan_s <= max_s]
    others.sort(key=lambda p: p.predicted.makespan_s)
    return others[: evaluator.context.spec.max_alternatives]


def build_evaluator(profile: ModelProfile, data: DataProfile, spec: SearchSpec) -> PlanEvaluator:
    """Return the evaluator of a spec, whose unset limits are derived from the job."""
    spec, loads, n = with_limits(spec, profile, data.loads), data.loads, spec.global_batch
    batches = sample_batches(loads, n, spec.n_batches)
    volumes = {
        m: module_volume(m, loads, batches, n, counts_pieces=m in profile.piece_tokens)
        for m in profile.n_layers
    }
    return PlanEvaluator(SearchContext(CostModel(profile), volumes, spec), loads, batches)
