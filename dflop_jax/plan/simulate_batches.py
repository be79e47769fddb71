"""Schedules of whole batches by a profile's prices, and their simulated traces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Load,
    ModelProfile,
    Plan,
    Prices,
    Schedule,
    Trace,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.schedule.sampled_batches import sample_batches
from dflop_jax.simulate.steps import Noise, simulate_schedules

# Sampled batches whose schedules are compared; twice as many find a fuller one or none.
_REHEARSED_BATCHES = 4


def simulate(
    plan: Plan,
    batches: Sequence[Sequence[Load]],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
    noise: Noise | None = None,
) -> Trace:
    """Schedule global batches and run them, one after another, on the profile's times.

    Args:
      batches: loads of each global batch.
      trainable: names of segments with trainable parameters; None: all.
      noise: as for `simulate_step`. Schedules are made without noise, as in a run.

    Returns:
      One trace of all steps, `source` "simulated"; groups keep counting from step to step.

    Raises:
      ValueError: a sample fits no bucket, or the profile lacks a degree that the plan uses.
    """
    names = [s.name for s in plan.layout.segments] if trainable is None else trainable
    prices = layout_prices(plan.layout, CostModel(profile))
    schedules = [schedule_batch(b, plan, prices, names, step=i) for i, b in enumerate(batches)]
    return simulate_schedules(plan, schedules, prices, names, noise=noise)


def loads_that_fit(plan: Plan, loads: Sequence[Load]) -> list[Load]:
    """The samples that the plan has room for; ValueError if there is none."""
    large = set(oversize_samples(loads, plan))
    if len(large) == len(loads):
        raise ValueError("the plan's shapes hold no sample of this data; plan for it")
    return [load for i, load in enumerate(loads) if i not in large]


def fullest_schedule(
    plan: Plan,
    loads: Sequence[Load],
    global_batch: int,
    prices: Prices,
    trainable: Collection[str],
) -> Schedule:
    """The schedule of a sampled batch with the most tokens between forward and backward at once;
    batches leave out samples that the plan's shapes do not hold.

    Raises:
      ValueError: the plan's shapes hold no sample.
    """
    batches = sample_batches(loads_that_fit(plan, loads), global_batch, _REHEARSED_BATCHES)
    schedules = (schedule_batch(b, plan, prices, trainable) for b in batches)
    return max(schedules, key=_max_live_tokens)


def _max_live_tokens(schedule: Schedule) -> int:
    """Maximum tokens, over a step, of the shapes of groups between forward and backward."""
    forward, backward = (
        {(t.segment, t.group) for t in schedule.order if t.direction == d}
        for d in (FORWARD, BACKWARD)
    )
    tokens = (
        schedule.groups[t.group].shape.size * (1 if t.direction == FORWARD else -1)
        for t in schedule.order
        if (t.segment, t.group) in forward & backward
    )
    return max(accumulate(tokens), default=0)
