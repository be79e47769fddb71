"""What a segment's parameters come to on a device: their bytes, those of gradients and optimizer
state, and what data ranks bring each other (ZeRO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop_jax.records import ModelProfile, SegmentPlan

Array = Any  # a float array, or one number
Mesh = tuple[int, Array, int]  # (stage, data, model)


def ends_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile) -> float:
    """Bytes of the parameters of a segment's ends on one device, in float32. Each end counts as
    half of both; where the ends are tied and apart, both segments hold what they share, so each
    counts as both."""
    ends = (segment.first + segment.last) / 2
    if segment.module in profile.tied:
        ends = float(segment.first or segment.last)
    return profile.ends_param_bytes[segment.module] * ends / mesh[2]


def layer_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile) -> float:
    """Bytes of the parameters of one of a segment's layers on one device, in float32."""
    return profile.layer_param_bytes[segment.module] / mesh[2]


def parameter_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile) -> float:
    """Bytes of a segment's parameters on one device, in float32."""
    layers = layer_bytes(segment, mesh, profile) * segment.n_layers / mesh[0]
    return layers + ends_bytes(segment, mesh, profile)


@dataclass(frozen=True)
class SegmentBytes:
    """state: parameters, gradients and AdamW's moments, as far as they are not split over the data
    ranks. kept: of one group in flight, its input and what forward hands to backward. temporaries:
    of the largest program."""

    state: Array
    kept: Array
    temporaries: Array


@dataclass(frozen=True)
class Moved:
    """Seconds of what programs of a segment bring from and to other data ranks (ZeRO): parameters
    of a layer and of the ends, gathered; their gradients, scattered. A layer's are on their way
    while the one before is computed; the ends' parameters come once a call, their gradients go once
    a tick."""

    layer_gather_s: Array = 0.0
    layer_scatter_s: Array = 0.0
    ends_gather_s: Array = 0.0
    ends_scatter_s: Array = 0.0


def state_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile, *, trained: bool) -> Array:
    """Bytes of parameters, gradients and AdamW's moments on one device; of masters too where the
    parameters are not float32. `trained`: whether the segment has trainable parameters."""
    size, data = parameter_bytes(segment, mesh, profile), np.asarray(mesh[1])
    working = profile.working_share(segment.module)
    state = size * working / (data if segment.zero == 3 else 1)
    if not trained:
        return state
    gradients = size / (data if segment.zero >= 2 else 1)
    return state + gradients + size * (2 + (working < 1.0)) / data


def whole_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile, *, trained: bool) -> Array:
    """Bytes of what a program has whole that is split between programs: parameters of two layers
    (the next one's come early) and of the ends; and what is on its way: a layer's parameters, and
    float32 gradients of a layer or of the ends, which come in one piece and are taken apart."""
    layer, ends = (of(segment, mesh, profile) for of in (layer_bytes, ends_bytes))
    whole = 0.0
    if segment.zero == 3:
        whole += profile.working_share(segment.module) * (3 * layer + ends)
    if segment.zero >= 2 and trained:
        whole += 2 * max(layer, ends)
    return np.where(np.asarray(mesh[1]) > 1, whole, 0.0)
