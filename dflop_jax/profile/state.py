"""What a segment's parameters come to on a device: their bytes, those of gradients and optimizer
state, and the seconds in which data ranks bring each other their parts (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s
from dflop_jax.records import MeshShape, ModelProfile, ParamDims, SegmentPlan, layer_key

Array = Any  # a float array, or one number
Dims = tuple[ParamDims, ...]
# Float32 arrays of a segment's size that any optimizer reads (parameters, gradients) and writes
# (parameters); it reads and writes its state beside them.
_UPDATE_PASSES = 3
# What the programs of a step's end take beside their arguments, as compiled for H100, in shards of
# gradients: copies of a reduction, and of pieces that are made into whole parameters. On one device
# alone both are made in place.
_REDUCED_COPIES, _GATHERED_COPIES = 0.85, 2.2


@dataclass(frozen=True)
class StateBytes:
    """Of a segment on one device, by data degree: what it holds all the time, takes at the step's
    end, and has whole in a backward; see `SegmentState`."""

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


@dataclass(frozen=True)
class SegmentState:
    """The parameters of a segment on one device of a mesh, whose data degree may be an array: bytes
    of them and of what belongs to them, and seconds of their collectives."""

    segment: SegmentPlan
    mesh: MeshShape
    profile: ModelProfile

    @cached_property
    def ranks(self) -> Array:
        """Data ranks that share a parameter."""
        return self.segment.shard_ranks(self.mesh.data, self.mesh.model)

    @cached_property
    def ends_bytes(self) -> float:
        """Parameters of the ends, in float32."""
        return self.profile.ends_param_bytes[self._module] * self._ends_held / self.mesh.model

    @cached_property
    def parameter_bytes(self) -> float:
        """All parameters, in float32."""
        layers = sum(n_bytes * n / self.mesh.stage for _, n, n_bytes in self._layers)
        return layers + self.ends_bytes

    @cached_property
    def trained_layer_bytes(self) -> float:
        """What trains of the parameters of the largest layer, in float32."""
        dims = self.profile.layer_dims
        return max(n * _trained_share(dims, key, self.mesh.model) for key, _, n in self._layers)

    @cached_property
    def trained_ends_bytes(self) -> float:
        """`ends_bytes` of what trains."""
        dims = self.profile.ends_dims
        return self.ends_bytes * _trained_share(dims, self._module, self.mesh.model)

    @cached_property
    def trained_bytes(self) -> float:
        """`parameter_bytes` of what trains: of gradients."""
        dims, mesh = self.profile.layer_dims, self.mesh
        layers = sum(
            n_bytes * n / mesh.stage * _trained_share(dims, key, mesh.model)
            for key, n, n_bytes in self._layers
        )
        return layers + self.trained_ends_bytes

    @cached_property
    def working_layer_bytes(self) -> float:
        """Parameters of the largest layer, as programs have them whole."""
        dims = self.profile.layer_dims
        return max(n * self._working_share(dims, key) for key, _, n in self._layers)

    @cached_property
    def working_ends_bytes(self) -> float:
        """`ends_bytes`, as programs have them whole."""
        return self.ends_bytes * self._working_share(self.profile.ends_dims, self._module)

    def shard_bytes(self, *, trained: bool = False) -> Array:
        """What one data rank has of the parameters where they split them, float32; `trained`: of
        those that train."""

        def share(dims: Mapping[str, Dims], key: str) -> Array:
            return shard_share(dims.get(key, ()), self.ranks, self.mesh.model, trained=trained)

        layers = sum(
            n_bytes * n / self.mesh.stage * share(self.profile.layer_dims, key)
            for key, n, n_bytes in self._layers
        )
        return layers + self.ends_bytes * share(self.profile.ends_dims, self._module)

    @cached_property
    def optimizer_bytes(self) -> Array:
        """What the optimizer keeps of the parameters, beside masters."""
        known = self._by_parameter(self.ranks, _state_bytes)
        return self.shard_bytes() * 2 if known is None else known

    @cached_property
    def working_bytes(self) -> Array:
        """The parameters as programs are given them."""
        is_split = self.segment.zero == 3
        known = self._by_parameter(self.ranks if is_split else 1, _read_bytes)
        if known is not None:
            return known + np.zeros(np.shape(self.mesh.data))
        n_bytes = self.shard_bytes() if is_split else self.parameter_bytes
        return n_bytes * self.profile.working_share(self._module)

    def held_bytes(self, *, trained: bool) -> Array:
        """Parameters, gradients and what the optimizer keeps; masters too where the parameters are
        not float32. `trained`: whether the segment has trainable parameters."""
        if not trained:
            return self.working_bytes + np.zeros(np.shape(self.mesh.data))
        own = self.shard_bytes(trained=True)
        gradients = own if self.segment.zero >= 2 else self.trained_bytes
        masters = own * (self.profile.working_share(self._module) < 1.0)
        return self.working_bytes + gradients + masters + self.optimizer_bytes

    def whole_bytes(self, *, trained: bool, ends_in_loss: bool) -> Array:
        """What a backward has whole that is split between programs (ZeRO 2 and 3).

        At its fullest that is a layer's parameters and float32 gradients, and beside them the ends'
        gradients, which come after it. In a task that ends in a loss these are among what the loss
        takes; there the parameters that the loss reads are whole instead, half of untied ends.
        """
        ends, zero = self.working_ends_bytes, self.segment.zero
        read = ends if self._module in self.profile.tied else ends / 2
        whole = 0.0
        if zero == 3:
            whole += self.working_layer_bytes + ends_in_loss * read
        if zero >= 2 and trained:
            whole += self.trained_layer_bytes + (not ends_in_loss) * self.trained_ends_bytes
        return np.where(np.asarray(self.mesh.data) > 1, whole, 0.0)

    def end_bytes(self) -> Array:
        """What a trained segment takes beside its state while it is reduced or updated: the rank's
        own reduced gradients with what is made of them, and all new parameters where ranks gather
        them."""
        data = np.asarray(self.mesh.data)
        alone = data * self.mesh.stage * self.mesh.model == 1
        shard = self.shard_bytes(trained=True)
        whole = self.trained_bytes * self.profile.working_share(self._module)
        gathered = np.where((data > 1) & (self.segment.zero < 3), whole, 0.0)
        reduced = np.where(alone, 0.0, _REDUCED_COPIES * shard)
        updated = np.where(gathered, gathered + _GATHERED_COPIES * shard, 0.0)
        return shard + np.maximum(reduced, updated)

    def moved(self) -> ShardSeconds:
        """Seconds of what programs gather from other data ranks and scatter to them."""
        if self.profile.hardware is None or self.segment.zero == 1:
            return ShardSeconds()
        gathers = self.segment.zero == 3
        return ShardSeconds(
            layer_gather_s=self._shared_s(all_gather_s, self.working_layer_bytes * gathers),
            layer_scatter_s=self._shared_s(reduce_scatter_s, self.trained_layer_bytes),
            ends_gather_s=self._shared_s(all_gather_s, self.working_ends_bytes * gathers),
            ends_scatter_s=self._shared_s(reduce_scatter_s, self.trained_ends_bytes),
        )

    def reduce_s(self) -> Array:
        """Seconds to add up gradients over data ranks at the step's end, where the programs do not;
        each keeps its part of the sum. What blocks of ranks have is added up over these, whoever
        added it up within them."""
        seconds = self._shared_s(reduce_scatter_s, self.trained_bytes * (self.segment.zero == 1))
        hardware, devices = self.profile.hardware, self.segment.shard_devices
        if hardware is None or not devices:
            return seconds
        blocks, size = np.asarray(self.mesh.data) // self.ranks, self.trained_bytes / self.ranks
        stride = max(1, devices // self.mesh.model) * self.mesh.stride("data")
        return seconds + sum(
            of(size, blocks, hardware, stride=stride) for of in (reduce_scatter_s, all_gather_s)
        )

    def update_s(self) -> Array:
        """Seconds that the optimizer takes of memory on each rank's part, and of the new
        parameters' way to all ranks where these hold all of them."""
        size, hardware = self.trained_bytes, self.profile.hardware
        working = self.profile.working_share(self._module) * (self.segment.zero != 3)
        gathered = self._shared_s(all_gather_s, size * working)
        if hardware is None:
            return gathered
        moved_bytes = _UPDATE_PASSES * size / self.ranks + 2 * self.optimizer_bytes
        return gathered + moved_bytes / hardware.memory_bandwidth

    def _shared_s(self, collective: Callable[..., Array], n_bytes: float) -> Array:
        """Seconds of a collective over the data ranks that share a parameter, by degree."""
        hardware = self.profile.hardware
        if hardware is None or not n_bytes:
            return np.zeros(np.shape(self.mesh.data))
        return collective(n_bytes, self.ranks, hardware, stride=self.mesh.stride("data"))

    @property
    def _module(self) -> str:
        return self.segment.module

    @property
    def _ends_held(self) -> float:
        """How much of a module's ends the segment holds. Each end counts as half of both; where the
        ends are tied and apart, both segments hold what they share, so each counts as both."""
        first, last = self.segment.first, self.segment.last
        return float(first or last) if self._module in self.profile.tied else (first + last) / 2

    @cached_property
    def _layers(self) -> list[tuple[str, int, float]]:
        """(key, layers, bytes of a layer's parameters, in float32) of the kinds of layers."""
        kinds = self.profile.kinds_in(self.segment)
        keys = {layer_key(self._module, kind): n for kind, n in kinds.items()}
        layer_bytes = self.profile.layer_param_bytes
        return [(key, n, layer_bytes[key] / self.mesh.model) for key, n in keys.items()]

    def _working_share(self, of_all: Mapping[str, Dims], key: str) -> float:
        """What the parameters of a key take of their float32 size as programs read them."""
        if not (dims := of_all.get(key)):
            return self.profile.working_share(self._module)
        return sum(prod(p.sizes) * p.working_bytes for p in dims) / max(float32_bytes(dims), 1)

    def _by_parameter(
        self, ranks: Array, of: Callable[[ParamDims, np.ndarray], np.ndarray]
    ) -> Array | None:
        """The sum over parameters of what `of(parameter, elements on one device)` gives where data
        ranks share each; None where parameters are not known one by one."""
        ranks = np.asarray(ranks)
        known = [(self.profile.layer_dims.get(key, ()), n) for key, n, _ in self._layers]
        ends_dims = self.profile.ends_dims.get(self._module, ())
        if not all((*(dims for dims, _ in known), ends_dims)):
            return None

        def total(dims: Dims) -> np.ndarray:
            by_rank = _total(dims, tuple(ranks.ravel().tolist()), self.mesh.model, of)
            return np.reshape(by_rank, ranks.shape)

        layers = sum(total(dims) * n / self.mesh.stage for dims, n in known)
        return layers + total(ends_dims) * self._ends_held


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


def _trained_share(of_all: Mapping[str, Dims], key: str, model: int) -> float:
    """Share of a tensor rank's elements that trains; all where parameters are not known."""
    return float(shard_share(of_all.get(key, ()), 1, model, trained=True))


@lru_cache(maxsize=4096)  # asked again for every option of a module
def _shares(parameters: Dims, data: tuple[int, ...], model: int, trained: bool) -> np.ndarray:
    ranks = np.array(data)
    parts = [(prod(p.sizes) // (model if p.split >= 0 else 1), p.trains) for p in parameters]
    total = sum(n for n, _ in parts)
    counted = (n for n, trains in parts if trains or not trained)
    held = sum((-(-n // ranks) for n in counted), start=np.zeros(ranks.shape))
    return held / total if total else 1 / ranks


def _read_bytes(p: ParamDims, shard: np.ndarray) -> np.ndarray:
    return shard * p.working_bytes


def _state_bytes(p: ParamDims, shard: np.ndarray) -> np.ndarray:
    return shard * p.element_state_bytes


@lru_cache(maxsize=4096)  # as `_shares`
def _total(
    parameters: Dims,
    data: tuple[int, ...],
    model: int,
    of: Callable[[ParamDims, np.ndarray], np.ndarray],
) -> np.ndarray:
    ranks, total = np.array(data), np.zeros(len(data))
    for p in parameters:
        part = prod(p.sizes) // (model if p.split >= 0 else 1)
        total = total + of(p, -(-part // ranks))
    return total
