"""Predictions from a profile: the schedules of whole batches, and their trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflop_jax.plan.pricing import plan_prices
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
from dflop_jax.schedule.sample import sample_batches
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.sim.pipeline import Noise, simulate_schedules

# Sampled batches of whose schedules the fullest is taken; twice as many find a fuller one or none.
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
    prices = plan_prices(plan.layout, profile)
    schedules = schedule_batches(plan, batches, prices, names)
    return simulate_schedules(plan, schedules, prices, names, noise=noise)


def schedule_batches(
    plan: Plan,
    batches: Sequence[Sequence[Load]],
    prices: Prices,
    trainable: Collection[str],
) -> list[Schedule]:
    """Return the schedules of global batches, steps 0 and on, as a run makes them."""
    return [schedule_batch(b, plan, prices, trainable, step=i) for i, b in enumerate(batches)]


def held_loads(plan: Plan, loads: Sequence[Load]) -> list[Load]:
    """Those of the samples that the plan has room for; ValueError: none."""
    large = set(beyond(loads, plan))
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
    """Of schedules of sampled batches, as far as the plan's shapes hold their samples, that which
    holds the most tokens at once from forward to backward.

    Raises:
      ValueError: the plan's shapes hold no sample.
    """
    batches = sample_batches(held_loads(plan, loads), global_batch, _REHEARSED_BATCHES)
    return max(schedule_batches(plan, batches, prices, trainable), key=_most_held_tokens)


def _most_held_tokens(schedule: Schedule) -> int:
    """Tokens of the shapes of groups that wait for their backward, at the moment when these are
    most."""
    returns = {(t.segment, t.group) for t in schedule.order if t.direction == BACKWARD}
    waiting: set[tuple[str, int]] = set()
    held = peak = 0
    for task in schedule.order:
        place = task.segment, task.group
        if task.direction == FORWARD and place in returns:
            waiting.add(place)
            held += schedule.groups[task.group].shape.size
        elif task.direction == BACKWARD and place in waiting:
            held -= schedule.groups[task.group].shape.size
        peak = max(peak, held)
    return peak
