"""One more bucket for the tail of the dataset: samples larger than those that were profiled."""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.records import Bucket, Load, Plan
from dflop_jax.schedule.shapes.evaluate import roomiest_first
from dflop_jax.schedule.shapes.spare import beyond, holding_capacity, spare_bucket


def with_spare(plan: Plan, tail: Sequence[Load], evaluator: Evaluator) -> Plan:
    """The plan with a bucket for those of `tail` that none of its buckets holds.

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
