"""Seconds of every task and send in a step of a layout: the one entry to a profile's prices.

Programs are priced by the profile's fits. Transfers between devices are priced by its hardware:
activations between segments, gradients and parameters between data ranks. Devices are numbered node
by node; the model axis of a submesh is the innermost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dflop_jax.profile.collectives import send_s
from dflop_jax.profile.cost_model import CostModel
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
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.simulate.task_graph import segment_links, tied_segments


def layout_prices(layout: Layout, costs: CostModel) -> Prices:
    """Prices of every task and send in a step of a layout.

    Raises:
      ValueError: the profile lacks a module or a tensor-parallel degree that the layout uses.
    """
    profile = costs.profile
    return Prices(
        programs=_program_prices(layout, costs),
        step_end=_step_end_seconds(layout, costs),
        sends=_send_seconds(layout, costs),
        concurrency=profile.concurrency,
        host_s=profile.host_s,
        shares_cores=profile.shares_cores,
    )


def _program_prices(layout: Layout, costs: CostModel) -> dict[ProgramId, Price]:
    """Price of every segment at every shape of its module, forward and backward, under each of its
    recompute policies."""
    programs: dict[ProgramId, Price] = {}
    priced: dict[object, list[tuple[Shape, Direction, Price]]] = {}
    for s in layout.segments:
        mesh = layout.submesh(s.submesh).shape
        for remat_less, segment in enumerate(
            [s, s.with_less_remat] if s.remat_less is not None else [s]
        ):
            key = costs.price_key(segment), mesh
            if key not in priced:
                priced[key] = list(_segment_prices(layout, segment, mesh, costs))
            programs |= {
                ProgramId(s.name, shape, direction, bool(remat_less)): price
                for shape, direction, price in priced[key]
            }
    return programs


def _segment_prices(
    layout: Layout, s: SegmentPlan, mesh: MeshShape, costs: CostModel
) -> Iterator[tuple[Shape, Direction, Price]]:
    shapes, group_size = layout.shapes(s.module), layout.group_size
    rows = np.array([shape.rows for shape in shapes])
    tokens = np.array([shape.tokens for shape in shapes])
    segment, predictions = costs.segment(s, mesh), costs.predict(s.module, mesh.model, rows, tokens)
    for direction in (FORWARD, BACKWARD):
        static_s = segment.task_s(group_size, predictions, direction)
        content_s = segment.content_s(group_size, direction)
        for shape, seconds in zip(shapes, static_s, strict=True):
            yield shape, direction, Price(float(seconds), tuple(content_s.tolist()))


def _step_end_seconds(layout: Layout, costs: CostModel) -> dict[Task, float]:
    """Seconds of every segment's reduction and update. A segment that reads the parameters of a
    tied entry sends their gradient to the owner and receives the new parameters from it."""
    seconds: dict[Task, float] = {}
    profile = costs.profile
    for s in layout.segments:
        state = costs.segment(s, layout.submesh(s.submesh).shape).state
        seconds[Task(s.name, NO_GROUP, REDUCE)] = float(state.reduce_s())
        seconds[Task(s.name, NO_GROUP, UPDATE)] = float(state.update_s())
    for reader, owner in tied_segments(layout).items() if profile.hardware else ():
        target, source = (layout.submesh(layout.segment(n).submesh) for n in (reader, owner))
        ends_bytes = 4.0 * profile.ends_elements(layout.segment(reader).module) / target.model
        for direction in (REDUCE, UPDATE):
            seconds[Task(reader, NO_GROUP, direction)] += _transfer_s(
                source, target, ends_bytes, profile.hardware
            )
    return seconds


def _send_seconds(layout: Layout, costs: CostModel) -> dict[SendId, float]:
    """Seconds of the activations that each segment sends to one on other devices, for every shape
    of the reader, and of their gradients, which are as many bytes.

    Each device of the reader receives its data rank's activations over its own link: its tokens of
    hidden states of the reader's shape, and all of them for every edge between the two modules. If
    several groups feed one group, each is priced as if it filled the whole group.
    """
    seconds: dict[SendId, float] = {}
    hardware = costs.profile.hardware
    for link in segment_links(layout) if hardware else ():
        reader = layout.segment(link.target)
        target, source = (
            layout.submesh(layout.segment(n).submesh) for n in (link.target, link.source)
        )
        for shape in layout.shapes(reader.module):
            predictions = costs.predict(reader.module, target.model, shape.rows, shape.tokens)
            n_bytes = predictions["hidden"]
            n_bytes = n_bytes * (1.0 if link.edge else predictions.rank_share)
            transfer_s = _transfer_s(source, target, float(n_bytes) * layout.group_size, hardware)
            for direction in (FORWARD, BACKWARD) if transfer_s else ():
                key = SendId(link.source, link.target, shape, direction)
                seconds[key] = seconds.get(key, 0.0) + transfer_s
    return seconds


def _transfer_s(
    source: SubmeshPlan, target: SubmeshPlan, n_bytes: float, hardware: Hardware | None
) -> float:
    """Seconds to send `n_bytes` to each device of another submesh; 0 on the same submesh."""
    if hardware is None or (source.first, source.shape) == (target.first, target.shape):
        return 0.0
    nodes = {d // hardware.devices_per_node for d in (*source.devices, *target.devices)}
    return float(send_s(n_bytes, hardware, across=len(nodes) > 1))
