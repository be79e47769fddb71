"""The shapes of a plan's buckets: sized by sampled samples, by how they arrive, or for a tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflop_jax.plan.dip import POLICY, with_sub_microbatches
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.uniform import as_plan
from dflop_jax.records import Bucket, Layout, Load, Plan
from dflop_jax.schedule import (
    BucketChoice,
    ShapeProblem,
    arrival_buckets,
    capacity_of,
    choose_buckets,
)
from dflop_jax.schedule.shapes.problem import roomiest_first
from dflop_jax.schedule.shapes.spare import beyond, holding_capacity, spare_bucket


def arrival_plan(evaluator: Evaluator, layout: Layout, policy: str, cap: int) -> Plan:
    """A baseline's plan, whose buckets are quantiles of what arrives."""
    rules = evaluator.rules
    ranks = capacity_of(layout).ranks
    per_rank = max(1, -(-rules.spec.global_batch // (ranks[layout.modules[-1]] * cap)))
    buckets = arrival_buckets(
        evaluator.loads,
        ranks,
        per_rank,
        n_buckets=evaluator.config.buckets,
        piece_tokens=rules.profile.piece_tokens,
        token_multiple=rules.spec.token_multiple,
    )
    return as_plan(layout, policy, buckets, rules)


def with_buckets(
    evaluator: Evaluator,
    plan: Plan,
    largest: Bucket | None,
    finest: int,
    effort: str,
    **options: Any,
) -> tuple[Plan, BucketChoice]:
    """The plan with the buckets that suit it best, none larger than `largest` or than its one
    bucket where prices are not believed, cutting an average batch into at most `finest`
    microbatches; `options` are those of `choose_buckets`.

    Raises:
      ValueError: the largest sample needs a larger one.
    """
    problem = _problem(evaluator, plan, largest, finest)
    choice = choose_buckets(evaluator.loads, problem, effort=effort, **options)
    return problem.with_buckets(choice.buckets), choice


def with_spare(plan: Plan, tail: Sequence[Load], evaluator: Evaluator) -> Plan:
    """The plan with a bucket for samples of `tail` that none of its buckets holds, since they are
    larger than those that were profiled.

    As it is where there is none, or where memory, with the options that the plan has, is too small
    for such a bucket: then these samples are not trained on (`data.oversize`).
    """
    large = [tail[i] for i in beyond(tail, plan)] if tail else []
    if not large:
        return plan
    rules = evaluator.rules
    spare = spare_bucket(
        large, holding_capacity(plan), rules.profile.piece_tokens, rules.spec.token_multiple
    )
    # Parts have one shape: of a divided module a sample gets as many as may feed one group.
    parts = {m: plan.layout.shapes(m)[0] for m in plan.layout.divided if plan.layout.shapes(m)}
    spare = Bucket(tuple((m, parts.get(m, shape)) for m, shape in spare.shapes))
    spared = plan.with_layout(buckets=roomiest_first((*plan.layout.buckets, spare)))
    return spared if evaluator.fits(spared) else plan


def _problem(evaluator: Evaluator, plan: Plan, largest: Bucket | None, finest: int) -> ShapeProblem:
    rules, layout = evaluator.rules, replace(plan.layout, fan_in=1)
    limits = {
        m: max(rules.trusted_tokens(m), max((s.size for s in layout.shapes(m)), default=0))
        for m in layout.modules
    }
    for m, shape in largest.shapes if largest else ():
        limits[m] = min(limits[m], shape.size)

    def as_run(chosen: Layout) -> Plan:
        if plan.policy == POLICY:
            chosen = with_sub_microbatches(chosen, rules, plan.layout.divided_readers)
        return replace(plan, layout=chosen)

    return ShapeProblem(
        layout,
        evaluator.prices,
        rules.spec.global_batch,
        n_buckets=evaluator.config.buckets,
        trainable=rules.trainable(layout),
        piece_tokens=rules.profile.piece_tokens,
        token_multiple=rules.spec.token_multiple,
        max_tokens={m: int(n) for m, n in limits.items() if n < np.inf},
        max_microbatches=finest,
        as_run=as_run,
    )
