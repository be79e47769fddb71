"""Plans of the baselines: samples in order of arrival, one per row, and every module with the same
parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.space import allowed_baselines
from dflop_jax.records import ARRIVAL_ORDER, FSDP, Layout, Plan
from dflop_jax.schedule import arrival_buckets, capacity_of, quick_schedule

# Numbers of microbatches per batch that a baseline tries, below the configured maximum.
_MICROBATCHES = (4, 8, 16, 32, 64)


def samples_per_rank(evaluator: PlanEvaluator, layout: Layout) -> dict[int, int]:
    """Return the samples of a rank in a microbatch that a baseline tries, most first; with each the
    microbatches per batch that it takes."""
    max_count, global_batch = evaluator.config.max_microbatches, evaluator.context.spec.global_batch
    ranks, numbers = layout.data_ranks(layout.modules[-1]), dict[int, int]()
    for n in [*(n for n in _MICROBATCHES if n < max_count), max_count]:
        numbers.setdefault(max(1, -(-global_batch // (ranks * n))), n)
    return numbers


def arrival_plans(evaluator: PlanEvaluator, layout: Layout, per_rank: int) -> list[Plan]:
    """Return the plans of a baseline's layout with each memory option, the same in all modules.
    Buckets are quantiles of microbatches of `per_rank` samples of each rank."""
    context, config = evaluator.context, evaluator.config
    ranks = capacity_of(layout).ranks
    buckets = arrival_buckets(
        evaluator.loads,
        ranks,
        per_rank,
        n_buckets=config.buckets,
        piece_tokens=context.profile.piece_tokens,
        token_multiple=context.spec.token_multiple,
    )
    first, *other_options = (context.options(m) for m in context.n_layers)
    options = [o for o in first if all(o in of_module for of_module in other_options)]
    return [
        context.build_plan(layout, config.policy, buckets, dict.fromkeys(ranks, o)) for o in options
    ]


def fastest_option(evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Plan | None:
    """Return the plan that fits into memory and computes least; None: none fits."""
    return min(
        filter(evaluator.fits, plans), key=lambda p: evaluator.busy_s(p.layout), default=None
    )


@dataclass(frozen=True)
class BaselinePlans:
    """The plans of a run's baselines, by name; one that does not fit into memory is absent."""

    by_name: dict[str, Plan]


def quick_baselines(evaluator: PlanEvaluator) -> BaselinePlans:
    """Return the fastest plans of arrival order, among the layouts of the evaluator's baseline, and
    of uniform data parallelism (FSDP). Layouts are compared with the fewest samples per microbatch,
    and only the fastest also with more."""
    context, layouts = evaluator.context, list[Layout]()
    with suppress(ValueError):  # no placement
        layouts = allowed_baselines(context.space_limits)
    layouts = [x for x in layouts if all(map(context.spec.allowed, x.submeshes))]
    uniform = [x for x in layouts if len(x.submeshes) == 1 and x.submeshes[0].model == 1]

    @cache
    def fastest_plan(layout: Layout, per_rank: int) -> tuple[float, Plan] | None:
        plan = fastest_option(evaluator, arrival_plans(evaluator, layout, per_rank))
        return (_mean_step_s(evaluator, plan), plan) if plan else None

    plans: dict[str, Plan] = {}
    for name, compared in ((ARRIVAL_ORDER, layouts), (FSDP, uniform)):
        numbers = {x: [*samples_per_rank(evaluator, x)] for x in compared}
        timed = [(one[0], x) for x in compared if (one := fastest_plan(x, numbers[x][-1]))]
        if timed:
            _, layout = min(timed, key=lambda t: t[0])
            found = filter(None, (fastest_plan(layout, n) for n in numbers[layout]))
            plans[name] = min(found, key=lambda t: t[0])[1]
    return BaselinePlans(plans)


def _mean_step_s(evaluator: PlanEvaluator, plan: Plan) -> float:
    prices = evaluator.context.price_layout(plan.layout)
    trainable = evaluator.context.trainable(plan.layout)
    batches = evaluator.evaluation_batches
    schedules = (quick_schedule(b, plan, prices, trainable, 0) for b in batches)
    return float(np.mean([s.makespan_s for s in schedules]))
