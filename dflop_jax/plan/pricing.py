"""What everything in a step takes by a profile: the prices that planner and scheduler begin with,
and predictions by them: the schedules of whole batches, and their trace.

Programs come from the profile's fit. What crosses devices comes from its hardware: activations
between segments, gradients and parameters between data ranks. Devices are numbered node by node; a
submesh's model axis is the innermost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import numpy as np

from dflop_jax.profile.collectives import send_s
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.state import SegmentState
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Direction,
    Hardware,
    Layout,
    Load,
    MeshShape,
    ModelProfile,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
    Trace,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.schedule.sampled_batches import sample_batches
from dflop_jax.simulate.steps import Noise, simulate_schedules
from dflop_jax.simulate.task_graph import segment_links, tied_segments

# Sampled batches of whose schedules the fullest is taken; twice as many find a fuller one or none.
_REHEARSED_BATCHES = 4


def plan_prices(layout: Layout, profile: ModelProfile) -> Prices:
    """Prices of everything in a step of the plan.

    Raises:
      ValueError: the profile lacks a module or degree that the plan uses.
    """
    return prices_of(layout, CostModel(profile))


def prices_of(layout: Layout, costs: CostModel) -> Prices:
    """`plan_prices` from a cost model that is at hand, whose fits are then made once."""
    return Prices(
        programs=program_prices(layout, costs),
        step_end=step_end_seconds(layout, costs.profile),
        sends=send_seconds(layout, costs),
        concurrency=costs.profile.concurrency,
        host_s=costs.profile.host_s,
        shares_cores=costs.profile.shares_cores,
    )


def program_prices(layout: Layout, costs: CostModel) -> dict[ProgramId, Price]:
    """Price of every segment at every shape of its module, forward and backward, under each of its
    recompute policies."""
    programs: dict[ProgramId, Price] = {}
    known: dict[object, list[tuple[Shape, Direction, Price]]] = {}
    for s in layout.segments:
        mesh = layout.submesh(s.submesh).shape
        for less, policy in enumerate([s, s.keeping] if s.remat_less is not None else [s]):
            key = costs.kind(policy), mesh
            if key not in known:
                known[key] = list(_segment_prices(layout, policy, mesh, costs))
            programs |= {
                ProgramId(s.name, shape, d, bool(less)): price for shape, d, price in known[key]
            }
    return programs


def _segment_prices(
    layout: Layout, s: SegmentPlan, mesh: MeshShape, costs: CostModel
) -> Iterator[tuple[Shape, Direction, Price]]:
    shapes = layout.shapes(s.module)
    rows = np.array([shape.rows for shape in shapes])
    tokens = np.array([shape.tokens for shape in shapes])
    figures = costs.at(s.module, mesh.model, rows, tokens)
    moved = SegmentState(s, mesh, costs.profile).moved()
    for direction in (FORWARD, BACKWARD):
        static_s = costs.task_s(s, mesh, layout.group_size, figures, direction, moved)
        content_s = costs.group_content_s(s, mesh, layout.group_size, direction)
        for shape, seconds in zip(shapes, static_s, strict=True):
            yield shape, direction, Price(float(seconds), tuple(content_s.tolist()))


def step_end_seconds(layout: Layout, profile: ModelProfile) -> dict[Task, float]:
    """Seconds of every segment's reduction and update. A segment that reads the parameters of a
    tied entry sends their gradient to their owner, and receives them new."""
    seconds: dict[Task, float] = {}
    for s in layout.segments:
        state = SegmentState(s, layout.submesh(s.submesh).shape, profile)
        seconds[Task(s.name, NO_GROUP, REDUCE)] = float(state.reduce_s())
        seconds[Task(s.name, NO_GROUP, UPDATE)] = float(state.update_s())
    for reader, owner in tied_segments(layout).items() if profile.hardware else ():
        here, there = (layout.submesh(layout.segment(n).submesh) for n in (reader, owner))
        ends_bytes = 4.0 * profile.ends_elements(layout.segment(reader).module) / here.model
        for direction in (REDUCE, UPDATE):
            took_s = _between(here, there, ends_bytes, profile.hardware)
            seconds[Task(reader, NO_GROUP, direction)] += took_s
    return seconds


def send_seconds(layout: Layout, costs: CostModel) -> dict[SendId, float]:
    """Seconds of what each segment sends to one on other devices, for every shape of the reader,
    and of the gradients that come back, which are as many bytes.

    Each device that reads gets its data rank's activations over its own link: its tokens of hidden
    states of the reader's shape, all of them for every edge between the two. Of several groups that
    feed one, each is priced as if it filled all places of it.
    """
    seconds: dict[SendId, float] = {}
    hardware = costs.profile.hardware
    for link in segment_links(layout) if hardware else ():
        reader = layout.segment(link.target)
        here, there = (
            layout.submesh(layout.segment(n).submesh) for n in (link.target, link.source)
        )
        for shape in layout.shapes(reader.module):
            figures = costs.at(reader.module, here.model, shape.rows, shape.tokens)
            n_bytes = figures["hidden"] * (1.0 if link.edge else figures.rank_share)
            took_s = _between(here, there, float(n_bytes) * layout.group_size, hardware)
            for direction in (FORWARD, BACKWARD):
                key = SendId(link.source, link.target, shape, direction)
                if took_s:
                    seconds[key] = seconds.get(key, 0.0) + took_s
    return seconds


def _between(
    here: SubmeshPlan, there: SubmeshPlan, n_bytes: float, hardware: Hardware | None
) -> float:
    """Seconds of as many bytes for each device from one submesh to another; 0 on the same mesh."""
    if hardware is None or (here.first, here.shape) == (there.first, there.shape):
        return 0.0
    nodes = {d // hardware.devices_per_node for d in (*here.devices, *there.devices)}
    return float(send_s(n_bytes, hardware, across=len(nodes) > 1))


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
    schedules = [schedule_batch(b, plan, prices, names, step=i) for i, b in enumerate(batches)]
    return simulate_schedules(plan, schedules, prices, names, noise=noise)


def held_loads(plan: Plan, loads: Sequence[Load]) -> list[Load]:
    """Those of the samples that the plan has room for; ValueError: none."""
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
    """Of schedules of sampled batches, as far as the plan's shapes hold their samples, that which
    holds the most tokens at once from forward to backward.

    Raises:
      ValueError: the plan's shapes hold no sample.
    """
    batches = sample_batches(held_loads(plan, loads), global_batch, _REHEARSED_BATCHES)
    schedules = (schedule_batch(b, plan, prices, trainable) for b in batches)
    return max(schedules, key=_most_held_tokens)


def _most_held_tokens(schedule: Schedule) -> int:
    """Tokens of the shapes of groups that wait for their backward, at the moment when these are
    most."""
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
