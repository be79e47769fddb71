"""Predictions from a profile: the schedules of whole batches, and their trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflop_jax.hardware import Hardware
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.records import Load, ModelProfile, Plan, Prices, Schedule, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.sim.pipeline import Noise, simulate_schedules


def simulate(
    plan: Plan,
    batches: Sequence[Sequence[Load]],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
    hardware: Hardware | None = None,
    noise: Noise | None = None,
) -> Trace:
    """Schedule global batches and run them, one after another, on the profile's times.

    Args:
      batches: loads of each global batch.
      trainable: names of segments with trainable parameters; None: all.
      hardware: links of the devices; None: what crosses them takes no time.
      noise: as for `simulate_step`. Schedules are made without noise, as in a run.

    Returns:
      One trace of all steps, `source` "simulated"; groups keep counting from step to step.

    Raises:
      ValueError: a sample fits no bucket, or the profile lacks a degree that the plan uses.
    """
    names = [s.name for s in plan.segments] if trainable is None else trainable
    prices = plan_prices(plan, profile, hardware)
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
