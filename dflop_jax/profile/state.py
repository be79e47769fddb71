"""What a segment's parameters come to on a device: their bytes, those of gradients and optimizer
state, and what data ranks bring each other (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from dflop_jax.records import MeshShape, ModelProfile, ParamDims, SegmentPlan, layer_key

Array = Any  # a float array, or one number


def ends_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """Bytes of the parameters of a segment's ends on one device, in float32."""
    n_bytes = profile.ends_param_bytes[segment.module] * _ends_here(segment, profile)
    return n_bytes / mesh.model


def _ends_here(segment: SegmentPlan, profile: ModelProfile) -> float:
    """How much of a module's ends a segment holds. Each end counts as half of both; where the ends
    are tied and apart, both segments hold what they share, so each counts as both."""
    if segment.module in profile.tied:
        return float(segment.first or segment.last)
    return (segment.first + segment.last) / 2


def _layers(
    segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile
) -> list[tuple[str, int, float]]:
    """(key, layers, bytes of a layer's parameters on one device, in float32) of the kinds of a
    segment's layers."""
    kinds = profile.kinds_in(segment)
    keys = {layer_key(segment.module, kind): n for kind, n in kinds.items()}
    return [(key, n, profile.layer_param_bytes[key] / mesh.model) for key, n in keys.items()]


def trained_layer_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """Bytes of what trains of the parameters of a segment's largest layer on one device, in
    float32."""
    layers = _layers(segment, mesh, profile)
    return max(n * _trained_share(profile.layer_dims, key, mesh.model) for key, _, n in layers)


def trained_ends_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """`ends_bytes` of what trains."""
    share = _trained_share(profile.ends_dims, segment.module, mesh.model)
    return ends_bytes(segment, mesh, profile) * share


def parameter_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """Bytes of a segment's parameters on one device, in float32."""
    layers = sum(n_bytes * n / mesh.stage for _, n, n_bytes in _layers(segment, mesh, profile))
    return layers + ends_bytes(segment, mesh, profile)


def trained_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """`parameter_bytes` of what trains: of gradients."""
    layers = sum(
        n_bytes * n / mesh.stage * _trained_share(profile.layer_dims, key, mesh.model)
        for key, n, n_bytes in _layers(segment, mesh, profile)
    )
    return layers + trained_ends_bytes(segment, mesh, profile)


def _trained_share(of_all: Mapping[str, tuple[ParamDims, ...]], key: str, model: int) -> float:
    """Share of a tensor rank's elements that trains; all where parameters are not known."""
    return float(shard_share(of_all.get(key, ()), 1, model, trained=True))


@dataclass(frozen=True)
class StateBytes:
    """Of a segment on one device, by data degree. held: see `state_bytes`. at_end: see `end_bytes`.
    whole: see `whole_bytes`."""

    held: Array
    at_end: Array
    whole: Array


@dataclass(frozen=True)
class SegmentBytes:
    """state: parameters, gradients and optimizer state, as far as they are not split over the data
    ranks. kept: of one group in flight, its input and what forward hands to backward. temporaries:
    of the largest program."""

    state: Array
    kept: Array
    temporaries: Array


@dataclass(frozen=True)
class ShardSeconds:
    """Seconds of what programs of a segment bring from and to other data ranks (ZeRO): parameters
    of a layer and of the ends, gathered; their gradients, scattered. A layer's are on their way
    while the one before is computed; the ends' parameters come once a call, their gradients go once
    a tick."""

    layer_gather_s: Array = 0.0
    layer_scatter_s: Array = 0.0
    ends_gather_s: Array = 0.0
    ends_scatter_s: Array = 0.0


def float32_bytes(parameters: Sequence[ParamDims]) -> int:
    """Bytes of parameters in float32."""
    return 4 * sum(prod(p.sizes) for p in parameters)


def shard_share(
    parameters: Sequence[ParamDims], data: Array, model: int = 1, *, trained: bool = False
) -> Array:
    """Share of parameters' elements that one of the data ranks has of what they split among them:
    they cut what a tensor rank has of each into equal pieces (`pipeline.cut`), the last of which
    may have zeros at its end. `trained`: what the rank has of those that train."""
    data = np.asarray(data)
    shares = _shares(tuple(parameters), tuple(data.ravel().tolist()), model, trained)
    return np.reshape(shares, data.shape)


@lru_cache(maxsize=4096)  # asked again for every option of a module
def _shares(
    parameters: tuple[ParamDims, ...], data: tuple[int, ...], model: int, trained: bool
) -> np.ndarray:
    ranks = np.array(data)
    parts = [(prod(p.sizes) // (model if p.split >= 0 else 1), p.trains) for p in parameters]
    total = sum(n for n, _ in parts)
    counted = (n for n, trains in parts if trains or not trained)
    held = sum((-(-n // ranks) for n in counted), start=np.zeros(ranks.shape))
    return held / total if total else 1 / ranks


def shard_bytes(
    segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile, *, trained: bool = False
) -> Array:
    """Bytes of what one data rank has of a segment's parameters where they split them, float32;
    `trained`: of those that train."""
    ends = ends_bytes(segment, mesh, profile)
    ranks = segment.shard_ranks(mesh.data, mesh.model)

    def share(dims: Mapping[str, tuple[ParamDims, ...]], of: str) -> Array:
        return shard_share(dims.get(of, ()), ranks, mesh.model, trained=trained)

    layers = sum(
        n_bytes * n / mesh.stage * share(profile.layer_dims, key)
        for key, n, n_bytes in _layers(segment, mesh, profile)
    )
    return layers + ends * share(profile.ends_dims, segment.module)


def optimizer_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Bytes of what the optimizer keeps of a segment's parameters on one device, beside masters."""
    ranks = segment.shard_ranks(mesh.data, mesh.model)
    kept_bytes = _by_parameter(segment, mesh, profile, ranks, _kept_bytes)
    return shard_bytes(segment, mesh, profile) * 2 if kept_bytes is None else kept_bytes


def working_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Bytes of a segment's parameters on one device, as programs are given them."""
    ranks = segment.shard_ranks(mesh.data, mesh.model) if segment.zero == 3 else 1
    known = _by_parameter(segment, mesh, profile, ranks, _read_bytes)
    if known is not None:
        return known + np.zeros(np.shape(mesh.data))
    of = shard_bytes if segment.zero == 3 else parameter_bytes
    return of(segment, mesh, profile) * profile.working_share(segment.module)


def working_layer_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """Bytes of the parameters of a segment's largest layer on one device, as programs have them
    whole."""
    module = segment.module
    layers = _layers(segment, mesh, profile)
    return max(n * _working_share(profile, module, profile.layer_dims, key) for key, _, n in layers)


def working_ends_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> float:
    """`ends_bytes`, as programs have them whole."""
    share = _working_share(profile, segment.module, profile.ends_dims, segment.module)
    return ends_bytes(segment, mesh, profile) * share


def _working_share(
    profile: ModelProfile, module: str, of_all: Mapping[str, tuple[ParamDims, ...]], key: str
) -> float:
    """What the parameters of a key take of their float32 size as programs read them."""
    if not (dims := of_all.get(key)):
        return profile.working_share(module)
    return sum(prod(p.sizes) * p.working_bytes for p in dims) / max(float32_bytes(dims), 1)


def _read_bytes(p: ParamDims, shard: np.ndarray) -> np.ndarray:
    return shard * p.working_bytes


def _kept_bytes(p: ParamDims, shard: np.ndarray) -> np.ndarray:
    return shard * p.element_state_bytes


def _by_parameter(
    segment: SegmentPlan,
    mesh: MeshShape,
    profile: ModelProfile,
    ranks: Array,
    of: Callable[[ParamDims, np.ndarray], np.ndarray],
) -> Array | None:
    """The sum over a segment's parameters of what `of(parameter, elements on one device)` gives
    where data ranks share each; None where parameters are not known one by one."""
    ranks = np.asarray(ranks)
    kinds = [(key, n) for key, n, _ in _layers(segment, mesh, profile)]
    known = [profile.layer_dims.get(key, ()) for key, _ in kinds]
    ends_dims = profile.ends_dims.get(segment.module, ())
    if not all((*known, ends_dims)):
        return None

    def total(dims: tuple[ParamDims, ...]) -> np.ndarray:
        return np.reshape(_total(dims, tuple(ranks.ravel().tolist()), mesh.model, of), ranks.shape)

    layers = sum(total(dims) * n / mesh.stage for dims, (_, n) in zip(known, kinds, strict=True))
    return layers + total(ends_dims) * _ends_here(segment, profile)


@lru_cache(maxsize=4096)  # as `_shares`
def _total(
    parameters: tuple[ParamDims, ...],
    data: tuple[int, ...],
    model: int,
    of: Callable[[ParamDims, np.ndarray], np.ndarray],
) -> np.ndarray:
    ranks, total = np.array(data), np.zeros(len(data))
    for p in parameters:
        part = prod(p.sizes) // (model if p.split >= 0 else 1)
        total = total + of(p, -(-part // ranks))
    return total


def state_bytes(
    segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile, *, trained: bool
) -> Array:
    """Bytes of parameters, gradients and what the optimizer keeps on one device; of masters too
    where the parameters are not float32. `trained`: whether the segment has trainable
    parameters."""
    state = working_bytes(segment, mesh, profile)
    if not trained:
        return state + np.zeros(np.shape(mesh.data))
    own = shard_bytes(segment, mesh, profile, trained=True)
    gradients = own if segment.zero >= 2 else trained_bytes(segment, mesh, profile)
    masters = own * (profile.working_share(segment.module) < 1.0)
    return state + gradients + masters + optimizer_bytes(segment, mesh, profile)


def whole_bytes(
    segment: SegmentPlan,
    mesh: MeshShape,
    profile: ModelProfile,
    *,
    trained: bool,
    ends_in_loss: bool,
) -> Array:
    """Bytes of what a backward has whole that is split between programs (ZeRO 2 and 3).

    At its fullest that is a layer's parameters and float32 gradients, and beside them the ends'
    gradients, which come after it. In a task that ends in a loss these are among what the loss
    takes; there the parameters that the loss reads are whole instead, half of untied ends.
    """
    ends = working_ends_bytes(segment, mesh, profile)
    read = ends if segment.module in profile.tied else ends / 2
    whole = 0.0
    if segment.zero == 3:
        whole += working_layer_bytes(segment, mesh, profile) + ends_in_loss * read
    if segment.zero >= 2 and trained:
        whole += trained_layer_bytes(segment, mesh, profile)
        whole += (not ends_in_loss) * trained_ends_bytes(segment, mesh, profile)
    return np.where(np.asarray(mesh.data) > 1, whole, 0.0)


# What the programs of a step's end take beside their arguments, as compiled for H100, in shards of
# gradients: copies of a reduction, and of pieces that are made into whole parameters. On one device
# alone both are made in place.
_REDUCED_COPIES, _GATHERED_COPIES = 0.85, 2.2


def end_bytes(segment: SegmentPlan, mesh: MeshShape, profile: ModelProfile) -> Array:
    """Bytes beside its state while a trained segment is reduced or updated: the rank's own reduced
    gradients with what is made of them, and all new parameters where ranks gather them."""
    data = np.asarray(mesh.data)
    alone = data * mesh.stage * mesh.model == 1
    shard = shard_bytes(segment, mesh, profile, trained=True)
    whole = trained_bytes(segment, mesh, profile) * profile.working_share(segment.module)
    gathered = np.where((data > 1) & (segment.zero < 3), whole, 0.0)
    reduced = np.where(alone, 0.0, _REDUCED_COPIES * shard)
    updated = np.where(gathered, gathered + _GATHERED_COPIES * shard, 0.0)
    return shard + np.maximum(reduced, updated)
