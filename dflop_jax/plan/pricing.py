"""What everything in a step takes by a profile: the prices that planner and scheduler begin with.

Programs come from the profile's fit. What crosses devices comes from its hardware: activations
between segments, gradients and parameters between data ranks. Devices are numbered node by node; a
submesh's model axis is the innermost.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    MeshShape,
    ModelProfile,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.tasks.graph import links, tied_ends


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
    for reader, owner in tied_ends(layout).items() if profile.hardware else ():
        here, there = (layout.submesh(layout.segment(n).submesh) for n in (reader, owner))
        ends_bytes = profile.ends_param_bytes[layout.segment(reader).module] / here.model
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
    for link in links(layout) if hardware else ():
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
