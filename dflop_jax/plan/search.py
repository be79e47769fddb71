"""Chooses a plan: placement, cut and options of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). The best of the whole space
(`ranking`), or the first few, then get buckets of their own. Where the devices are at hand, the
programs of the fastest are timed; the fastest by those times is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.plan.best_first import Ranking, placements, searched
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.explain import why_nothing_fits
from dflop_jax.plan.finalists import refined
from dflop_jax.plan.space import baseline
from dflop_jax.plan.spec import SearchSpec, with_limits
from dflop_jax.plan.time_plans import TimePlan, TryStep, by_its_own
from dflop_jax.plan.volume import volume_of
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import DataProfile, ModelProfile, Plan
from dflop_jax.schedule.sampled_batches import sample_batches

# Batches by which candidates are ranked, over `SearchSpec.n_batches`: of thousands of placements
# some suit two batches by chance. With twice as many, as many again are counted.
_RANKED_TIMES = 2


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
    evaluator = evaluator_of(
        profile, data, replace(spec, **changes) if spec else SearchSpec(**changes)
    )
    rules = evaluator.rules
    config = rules.spec.config
    ranking = Ranking(evaluator, list(searched(rules)), baseline(rules.extent))
    best = ranking.ranked(on_progress)
    if not best:
        raise ValueError(why_nothing_fits(rules, *ranking.nearest()))
    plan, n_timed = best[0].plan, 0
    if rules.spec.refine:
        plans = refined(ranking, best, data.tail)
        if time_plan:
            plan, n_timed = by_its_own(evaluator, plans, config.finalists, time_plan, try_step)
        else:
            plan = evaluator.evaluate(plans[0], plans[0].predicted.makespan_s)
    return SearchResult(
        plan,
        tuple(c.with_figures(evaluator) for c in placements(best)),
        n_placements=ranking.n_placements,
        n_candidates=ranking.n_candidates,
        n_fit=ranking.n_fit,
        n_evaluated=ranking.n_evaluated,
        n_timed=n_timed,
        limits=rules.spec.limits,
    )


def evaluator_of(profile: ModelProfile, data: DataProfile, spec: SearchSpec) -> Evaluator:
    """What judges plans for a spec, with the job's own limits where it gives none."""
    spec = with_limits(spec, profile, data.loads)
    batches = sample_batches(data.loads, spec.global_batch, _RANKED_TIMES * spec.n_batches)
    volumes = {
        m: volume_of(
            m, data.loads, batches, spec.global_batch, counts_pieces=m in profile.piece_tokens
        )
        for m in profile.n_layers
    }
    return Evaluator(Rules(CostModel(profile), volumes, spec), data.loads, batches)
