"""The shapes of a plan's buckets: sized by sampled samples, or by how they arrive."""

from __future__ import annotations

import numpy as np

from dflop_jax.plan.dip import POLICY, with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.placement import Placement
from dflop_jax.plan.uniform import as_plan
from dflop_jax.records import BACKWARD, FORWARD, Bucket, Layout, Plan, ProgramId
from dflop_jax.schedule import BucketSpec, arrival_buckets, capacity_of, choose_buckets
from dflop_jax.tasks.graph import resources


def arrival_plan(evaluator: Evaluator, placement: Placement, policy: str, cap: int) -> Plan:
    """A baseline's plan, whose buckets are quantiles of what arrives."""
    rules = evaluator.rules
    plan = as_plan(placement, policy, rules.structure(placement).layout.buckets, rules)
    ranks = capacity_of(plan.layout).ranks
    per_rank = max(1, -(-evaluator.global_batch // (ranks[plan.layout.modules[-1]] * cap)))
    spec = _spec(evaluator, plan, None, evaluator.config.max_microbatches, "quick")
    return plan.with_layout(buckets=arrival_buckets(evaluator.loads, spec, per_rank))


def with_buckets(
    evaluator: Evaluator, plan: Plan, most: Bucket | None, finest: int, effort: str
) -> Plan:
    """The plan with the buckets that suit it best, none larger than `most` or than its one bucket
    where prices are not believed, cutting an average batch into at most `finest` microbatches.

    Raises:
      ValueError: the largest sample needs a larger one.
    """
    whole = plan.with_layout(fan_in=1)
    choice = choose_buckets(evaluator.loads, _spec(evaluator, whole, most, finest, effort))
    whole = whole.with_layout(buckets=tuple(choice.buckets))
    return with_sub_microbatches(whole, evaluator.rules) if plan.policy == POLICY else whole


def _spec(
    evaluator: Evaluator, plan: Plan, most: Bucket | None, finest: int, effort: str
) -> BucketSpec:
    rules, capacity, of = evaluator.rules, capacity_of(plan.layout), resources(plan.layout)
    limits = {
        m: max(rules.trusted_tokens(m), max((s.size for s in plan.layout.shapes(m)), default=0))
        for m in plan.layout.modules
    }
    for m, shape in most.shapes if most else ():
        limits[m] = min(limits[m], shape.size)
    return BucketSpec(
        global_batch=evaluator.global_batch,
        ranks=dict(capacity.ranks),
        edges=plan.layout.edges,
        piece_tokens=rules.profile.piece_tokens,
        n_buckets=evaluator.config.buckets,
        group_size=plan.layout.group_size,
        seconds=lambda bucket: _module_seconds(
            evaluator, plan.with_layout(buckets=(bucket,)).layout
        ),
        token_multiple=rules.token_multiple,
        max_tokens={m: int(n) for m, n in limits.items() if n < np.inf},
        max_microbatches=finest,
        effort=effort,
        devices={m: of[plan.layout.segments_of(m)[0].submesh] for m in plan.layout.modules},
    )


def _module_seconds(evaluator: Evaluator, layout: Layout) -> dict[str, float]:
    """Seconds of one group of each module of a plan with one bucket, forward and backward, on the
    busiest of its devices."""
    prices, of = evaluator.prices(layout).programs, resources(layout)
    by_devices: dict[str, dict[int, float]] = {}
    for s in layout.segments:
        if (shape := layout.buckets[0].shape(s.module)) is not None:
            programs = (ProgramId(s.name, shape, d) for d in (FORWARD, BACKWARD))
            took_s, r = by_devices.setdefault(s.module, {}), of[s.submesh]
            took_s[r] = took_s.get(r, 0.0) + sum(prices[p].static_s for p in programs)
    return {m: max(took_s.values()) for m, took_s in by_devices.items()}
