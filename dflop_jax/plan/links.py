"""Seconds of what crosses devices in a step: activations between segments, gradients at its end.

Devices are numbered node by node; a submesh's model axis is the innermost. Without a hardware table
(what is measured here knows no links) nothing takes time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import upstream
from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s, send_s
from dflop_jax.profile.fit import Array, CostModel, Mesh
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REDUCE,
    UPDATE,
    ModelProfile,
    Plan,
    SegmentPlan,
    SubmeshPlan,
    Task,
)

_UPDATE_PASSES = 7  # float32 arrays that AdamW reads and writes: 4 and 3


def reduce_s(s: SegmentPlan, mesh: Mesh, profile: ModelProfile, hardware: Hardware | None) -> Array:
    """Adding up a segment's gradients over its data ranks; each keeps its part of the sum."""
    return _over_ranks(s, mesh, profile, hardware, reduce_scatter_s)


def update_s(s: SegmentPlan, mesh: Mesh, profile: ModelProfile, hardware: Hardware | None) -> Array:
    """AdamW on each rank's part of a segment, and the new parameters to all ranks."""
    gathered = _over_ranks(s, mesh, profile, hardware, all_gather_s)
    if hardware is None:
        return gathered
    part = _bytes(s, mesh, profile) / np.asarray(mesh[1])
    return gathered + _UPDATE_PASSES * part / hardware.memory_bandwidth


def step_end_seconds(
    plan: Plan, profile: ModelProfile, hardware: Hardware | None
) -> dict[Task, float]:
    """(segment, -1, REDUCE or UPDATE) -> seconds, as the simulator takes them."""
    found: dict[Task, float] = {}
    for s in plan.segments:
        mesh = plan.submesh(s.submesh).shape
        found[Task(s.name, -1, REDUCE)] = float(reduce_s(s, mesh, profile, hardware))
        found[Task(s.name, -1, UPDATE)] = float(update_s(s, mesh, profile, hardware))
    return found


def send_seconds(plan: Plan, costs: CostModel, hardware: Hardware | None) -> dict[Task, float]:
    """Activations of every (segment, bucket) that another submesh reads, and the gradients that
    come back, which are as many bytes, as the simulator takes them.

    Each device that reads gets its data rank's activations over its own link.
    """
    found: dict[Task, float] = {}
    if hardware is None:
        return found
    for s in plan.segments:
        here = plan.submesh(s.submesh)
        for below in upstream(plan, s):
            there = plan.submesh(below.submesh)
            if there == here:
                continue
            across = _nodes(here, hardware) != _nodes(there, hardware)
            for b, bucket in enumerate(plan.buckets):
                if not bucket.items(below.module):
                    continue
                shape = bucket.shape_of(s.module, costs.profile.item_tokens)
                hidden = costs.predict(s.module, here.model, shape.items, shape.tokens, "hidden")
                took_s = send_s(float(hidden) * plan.group_size, hardware, across=across)
                for direction in (FORWARD, BACKWARD):
                    key = Task(below.name, b, direction)
                    found[key] = max(found.get(key, 0.0), took_s)
    return found


def _nodes(mesh: SubmeshPlan, hardware: Hardware) -> tuple[int, int]:
    """First and last node of a submesh; sends inside a node stay off the network."""
    size = hardware.devices_per_node
    return mesh.first // size, (mesh.devices.stop - 1) // size


def _bytes(s: SegmentPlan, mesh: Mesh, profile: ModelProfile) -> float:
    stage, _, model = mesh
    held = profile.layer_param_bytes[s.module] * s.n_layers / stage
    held += profile.ends_param_bytes[s.module] * (s.first + s.last) / 2
    return held / model


def _over_ranks(
    s: SegmentPlan,
    mesh: Mesh,
    profile: ModelProfile,
    hardware: Hardware | None,
    collective: Callable[..., float],
) -> Array:
    _, data, model = mesh
    if hardware is None:
        return np.zeros(np.shape(data))
    size = _bytes(s, mesh, profile)
    each = [collective(size, int(d), hardware, stride=model) for d in np.ravel(data)]
    return np.reshape(each, np.shape(data))
