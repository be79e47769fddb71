"""What everything in a step takes by a profile: the prices that planner and scheduler begin with.

Programs come from the profile's fit. What crosses devices comes from its hardware: activations
between segments, gradients and parameters between data ranks. Devices are numbered node by node; a
submesh's model axis is the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s, send_s
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.state import (
    Array,
    ShardSeconds,
    optimizer_bytes,
    trained_bytes,
    trained_ends_bytes,
    trained_layer_bytes,
    working_ends_bytes,
    working_layer_bytes,
)
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

Collective = Callable[..., float]
# Float32 arrays of a segment's size that any optimizer reads (parameters, gradients) and writes
# (parameters); it reads and writes its state beside them.
_UPDATE_PASSES = 3


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
    moved = moved_by(s, mesh, costs.profile)
    for direction in (FORWARD, BACKWARD):
        static_s = costs.task_s(s, mesh, layout.group_size, figures, direction, moved)
        content_s = costs.group_content_s(s, mesh, layout.group_size, direction)
        for shape, seconds in zip(shapes, static_s, strict=True):
            yield shape, direction, Price(float(seconds), tuple(content_s.tolist()))


def moved_by(s: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> ShardSeconds:
    """Seconds of what a segment's programs gather from other data ranks and scatter to them."""
    if profile.hardware is None or s.zero == 1:
        return ShardSeconds()
    layer, ends = working_layer_bytes(s, mesh, profile), working_ends_bytes(s, mesh, profile)
    trained = trained_layer_bytes(s, mesh, profile), trained_ends_bytes(s, mesh, profile)
    gathers = s.zero == 3

    def seconds(collective: Collective, n_bytes: float) -> Array:
        return _over_block(n_bytes, s, mesh, profile.hardware, collective)

    return ShardSeconds(
        layer_gather_s=seconds(all_gather_s, layer * gathers),
        layer_scatter_s=seconds(reduce_scatter_s, trained[0]),
        ends_gather_s=seconds(all_gather_s, ends * gathers),
        ends_scatter_s=seconds(reduce_scatter_s, trained[1]),
    )


def reduce_s(s: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Seconds to add up a segment's gradients over its data ranks at the step's end, where the
    programs do not; each keeps its part of the sum. What blocks of ranks have is added up over
    these, whoever added it up within them."""
    size = trained_bytes(s, mesh, profile)
    within = _over_block(size * (s.zero == 1), s, mesh, profile.hardware, reduce_scatter_s)
    return within + _over_copies(s, mesh, profile)


def update_s(s: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Seconds that the optimizer takes of memory on each rank's part of a segment, and of the new
    parameters' way to all ranks where these hold all of them."""
    size, hardware = trained_bytes(s, mesh, profile), profile.hardware
    working = profile.working_share(s.module) * (s.zero != 3)
    gathered = _over_block(size * working, s, mesh, hardware, all_gather_s)
    if hardware is None:
        return gathered
    ranks = s.shard_ranks(mesh.data, mesh.model)
    moved = _UPDATE_PASSES * size / ranks + 2 * optimizer_bytes(s, mesh, profile)
    return gathered + moved / hardware.memory_bandwidth


def step_end_seconds(layout: Layout, profile: ModelProfile) -> dict[Task, float]:
    """Seconds of every segment's reduction and update. A segment that reads the parameters of a
    tied entry sends their gradient to their owner, and receives them new."""
    seconds: dict[Task, float] = {}
    for s in layout.segments:
        mesh = layout.submesh(s.submesh).shape
        seconds[Task(s.name, NO_GROUP, REDUCE)] = float(reduce_s(s, mesh, profile))
        seconds[Task(s.name, NO_GROUP, UPDATE)] = float(update_s(s, mesh, profile))
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


def _over_block(
    n_bytes: float,
    s: SegmentPlan,
    mesh: MeshShape,
    hardware: Hardware | None,
    collective: Collective,
) -> Array:
    """Seconds of a collective over the data ranks that share a parameter, by degree."""
    if hardware is None or not n_bytes:
        return np.zeros(np.shape(mesh.data))
    ranks = s.shard_ranks(mesh.data, mesh.model)
    return collective(n_bytes, ranks, hardware, stride=mesh.stride("data"))


def _over_copies(s: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Seconds to add up a rank's part of the gradients over the blocks of ranks that have all of
    them, by degree."""
    hardware = profile.hardware
    if hardware is None or not s.shard_devices:
        return np.zeros(np.shape(mesh.data))
    ranks = s.shard_ranks(mesh.data, mesh.model)
    blocks, size = np.asarray(mesh.data) // ranks, trained_bytes(s, mesh, profile) / ranks
    stride = max(1, s.shard_devices // mesh.model) * mesh.stride("data")
    return sum(of(size, blocks, hardware, stride=stride) for of in (reduce_scatter_s, all_gather_s))
