"""A second recompute policy for segments that compute things again, so that schedules may use what
memory is left group by group (`schedule.memory_plan`)."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.records import REMAT, Kept, Plan, Remat, SegmentPlan
from dflop_jax.sim.memory import kept_bytes
from dflop_jax.tasks.graph import with_backward


def with_second_policies(plan: Plan, evaluator: Evaluator) -> list[Plan]:
    """Plans in which every segment that can may keep as much as one policy does, as far as memory
    holds them; none where no segment computes anything again."""
    if not evaluator.rules.spec.memory_bytes or plan.scheduling.grouping != "balanced":
        return []
    backward = set(with_backward(plan.layout, evaluator.rules.trainable(plan.layout)))
    found = []
    for less in get_args(Remat):
        segments = tuple(
            replace(s, remat_less=less) if _may(s, less, backward, evaluator) else s
            for s in plan.layout.segments
        )
        second = plan.with_layout(segments=segments)
        if second != plan and evaluator.fits(second):
            found.append(_with_room(second, backward, evaluator))
    return found


def _may(s: SegmentPlan, less: Remat, backward: set[str], evaluator: Evaluator) -> bool:
    """Whether a segment has tasks of both directions, and a policy keeps more than its own."""
    rules = evaluator.rules
    known = less in rules.costs.fits.known_policies(s.module)
    keeps_more = known and less in REMAT[: REMAT.index(s.remat)]
    return keeps_more and s.name in backward and rules.costs.hands_over(s)


def _with_room(plan: Plan, backward: set[str], evaluator: Evaluator) -> Plan:
    """The plan with what its groups keep, and what of every device's memory is left."""
    costs = evaluator.rules.costs
    kept_by_shape = []
    for s in plan.layout.segments:
        for shape in plan.layout.shapes(s.module) if s.name in backward else ():
            n_bytes = kept_bytes(plan.layout, costs, s, shape)
            less = s if s.remat_less is None else s.keeping
            kept_by_shape.append(
                Kept(s.name, shape, n_bytes, kept_bytes(plan.layout, costs, less, shape) - n_bytes)
            )
    peaks = evaluator.most_by_submesh(plan)
    free = {name: evaluator.rules.spec.memory_bytes - peak for name, peak in peaks.items()}
    return plan.with_scheduling(kept=tuple(kept_by_shape), free_bytes=free)
