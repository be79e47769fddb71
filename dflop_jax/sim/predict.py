"""Predictions from a profile: what buckets cost the scheduler, and a trace for whole batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dflop_jax.pipeline.order import resources, stations, with_backward
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    ModelProfile,
    Plan,
    SampleShape,
    Schedule,
    SegmentPlan,
    Task,
    Trace,
)
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.sim.pipeline import Noise, simulate_schedules


def bucket_costs(
    plan: Plan, seconds: Mapping[Task, float], trainable: Collection[str]
) -> BucketCosts:
    """Per microbatch of each bucket, forward and backward of modules that share devices together
    (`pipeline.order.stations`), on the busiest of their devices.

    `seconds` are of groups, by (segment, bucket index, direction).
    """
    of = resources(plan)
    backward = with_backward(plan, trainable)
    final = plan.segments[-1].name

    def segment_s(s: SegmentPlan, b: int) -> float:
        forward = 0.0 if s.name == final else seconds.get(Task(s.name, b, FORWARD), 0.0)
        back = seconds.get(Task(s.name, b, BACKWARD), 0.0) if s.name in backward else 0.0
        return (forward + back) / plan.group_size

    def station_s(modules: Sequence[str], b: int) -> float:
        busy: dict[int, float] = {}
        for s in (s for m in modules for s in plan.segments_of(m)):
            busy[of[s.submesh]] = busy.get(of[s.submesh], 0.0) + segment_s(s, b)
        return max(busy.values())

    return BucketCosts(
        tuple(
            tuple(station_s(modules, b) for modules in stations(plan))
            for b in range(len(plan.buckets))
        )
    )


def simulate(
    plan: Plan,
    batches: Sequence[Sequence[SampleShape]],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
    collectives: Mapping[Task, float] | None = None,
    sends: Mapping[Task, float] | None = None,
    noise: Noise | None = None,
) -> Trace:
    """Schedule global batches and run them, one after another, on the profile's times.

    Args:
      batches: sample shapes of each global batch.
      trainable: names of segments with trainable parameters; None: all.
      collectives: seconds of the step's end, by (segment, -1, REDUCE or UPDATE); None: no time.
      sends, noise: as for `simulate_step`. Schedules are made without noise, as in a run.

    Returns:
      One trace of all steps, `source` "simulated"; groups keep counting from step to step.

    Raises:
      ValueError: a sample fits no bucket, or the profile lacks a degree that the plan uses.
    """
    schedules = schedule_batches(plan, batches, profile, trainable=trainable)
    return simulate_scheduled(
        plan,
        schedules,
        profile,
        trainable=trainable,
        collectives=collectives,
        sends=sends,
        noise=noise,
    )


def schedule_batches(
    plan: Plan,
    batches: Sequence[Sequence[SampleShape]],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
) -> list[Schedule]:
    """The schedules that `simulate` runs; ValueError as there."""
    seconds = CostModel(profile).task_seconds(plan)
    prices = bucket_costs(plan, seconds, _names(plan, trainable))
    return [schedule_batch(b, plan, prices, step=i) for i, b in enumerate(batches)]


def simulate_scheduled(
    plan: Plan,
    schedules: Sequence[Schedule],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
    collectives: Mapping[Task, float] | None = None,
    sends: Mapping[Task, float] | None = None,
    noise: Noise | None = None,
) -> Trace:
    """`simulate` for batches that are scheduled already."""
    return simulate_schedules(
        plan,
        schedules,
        {**CostModel(profile).task_seconds(plan), **(collectives or {})},
        _names(plan, trainable),
        concurrency=profile.concurrency,
        sends=sends,
        noise=noise,
    )


def _names(plan: Plan, trainable: Collection[str] | None) -> Collection[str]:
    return [s.name for s in plan.segments] if trainable is None else trainable
