"""Parameters, gradients and optimizer state of a segment on a device: their bytes, and the seconds
of their collectives over data ranks (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

import numpy as np

from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s
from dflop_jax.records import MeshShape, ModelProfile, ParamDims, SegmentPlan, layer_key

Array = Any  # a float array, or one number
Dims = tuple[ParamDims, ...]
# What is in memory for each element of a parameter: an attribute of `ParamDims`.
Element = Literal["working_bytes", "trained_bytes", "trained_working_bytes", "element_state_bytes"]
# Float32 arrays of a segment's size that any optimizer reads (parameters, gradients) and writes
# (parameters), beside its state.
_UPDATE_PASSES = 3
# What the programs of a step's end take beside their arguments, as compiled for H100, in shards of
# gradients: copies of a reduction, and of pieces that are made into whole parameters. On one device
# alone both are made in place.
_REDUCED_COPIES, _GATHERED_COPIES = 0.85, 2.2


@dataclass(frozen=True)
class SegmentBytes:
    """state: parameters, gradients and optimizer state that the device has. residuals: of one group
    in flight, its inputs and what forward hands to backward. temporaries: of the largest
    program."""

    state: Array
    residuals: Array
    temporaries: Array


@dataclass(frozen=True)
class ShardedState:
    """State of a segment on one device of a mesh, whose data degree may be an array."""

    segment: SegmentPlan
    mesh: MeshShape
    profile: ModelProfile

    @cached_property
    def ranks(self) -> Array:
        """Data ranks that share a parameter."""
        return self.segment.shard_ranks(self.mesh.data, self.mesh.model)

    def n_bytes(self, element: Element, ranks: Array = 1, *, exact: bool = False) -> Array:
        """Bytes on a device of an element quantity that `ranks` data ranks split. `exact`:
        parameters that tensor parallelism does not split are whole on each tensor rank; otherwise
        all count as split."""
        layers = sum(
            n * self._rank_bytes(dims, element, ranks, exact) for dims, n in self._layer_dims
        )
        return layers / self.mesh.stage + self.ends_bytes(element, ranks, exact=exact)

    def ends_bytes(self, element: Element, ranks: Array = 1, *, exact: bool = False) -> Array:
        """`n_bytes` of the ends. Each end counts as half of both; if they are tied and in two
        segments, both segments have the shared parameters, so each counts as both."""
        first, last, module = self.segment.first, self.segment.last, self.segment.module
        share = float(first or last) if module in self.profile.tied else (first + last) / 2
        return share * self._rank_bytes(self.profile.ends_dims[module], element, ranks, exact)

    def layer_bytes(self, element: Element) -> float:
        """Bytes of the largest layer."""
        return max(float(self._rank_bytes(d, element, 1, False)) for d, _ in self._layer_dims)

    def state_bytes(self, *, trained: bool) -> Array:
        """Bytes of parameters, gradients, optimizer state, and masters if not all are float32."""
        zero = self.segment.zero
        n_bytes = self.n_bytes("working_bytes", self.ranks if zero == 3 else 1, exact=True)
        if trained:
            n_bytes = n_bytes + self.n_bytes("trained_bytes", self.ranks if zero >= 2 else 1)
            if self.profile.has_bfloat16_params(self.segment.module):
                n_bytes = n_bytes + self.n_bytes("trained_bytes", self.ranks)
            n_bytes = n_bytes + self.n_bytes("element_state_bytes", self.ranks, exact=True)
        return n_bytes + np.zeros(np.shape(self.mesh.data))

    def gathered_bytes(self, *, trained: bool, ends_in_loss: bool) -> Array:
        """Peak bytes of what a backward program gathers that is split between programs (ZeRO 2, 3).

        These are a layer's parameters and float32 gradients, and the ends' gradients. In a task
        that ends in a loss the ends' gradients are among the loss's temporaries; the parameters
        that the loss reads are whole instead, half of untied ends.
        """
        zero, tied, whole = self.segment.zero, self.segment.module in self.profile.tied, 0.0
        if zero == 3:
            read = self.ends_bytes("working_bytes") / (1 if tied else 2)
            whole += self.layer_bytes("working_bytes") + ends_in_loss * read
        if zero >= 2 and trained:
            whole += self.layer_bytes("trained_bytes")
            whole += (not ends_in_loss) * self.ends_bytes("trained_bytes")
        return np.where(np.asarray(self.mesh.data) > 1, whole, 0.0)

    def step_end_bytes(self) -> Array:
        """Temporary bytes of a trained segment while it is reduced or updated: the rank's own
        reduced gradients, copies of them, and all new parameters where ranks gather them."""
        data = np.asarray(self.mesh.data)
        one_device = data * self.mesh.stage * self.mesh.model == 1
        shard = self.n_bytes("trained_bytes", self.ranks)
        gathers = (data > 1) & (self.segment.zero < 3)
        gathered = np.where(gathers, self.n_bytes("trained_working_bytes"), 0.0)
        reduced = np.where(one_device, 0.0, _REDUCED_COPIES * shard)
        updated = np.where(gathered, gathered + _GATHERED_COPIES * shard, 0.0)
        return shard + np.maximum(reduced, updated)

    @cached_property
    def gather_s(self) -> tuple[Array, Array]:
        """Seconds in which a program gathers (a layer's, once a call the ends') parameters."""
        return self._layer_and_ends_s(all_gather_s, "working_bytes", self.segment.zero == 3)

    @cached_property
    def scatter_s(self) -> tuple[Array, Array]:
        """Seconds in which a program scatters (a layer's, once a tick the ends') gradients."""
        return self._layer_and_ends_s(reduce_scatter_s, "trained_bytes", self.segment.zero >= 2)

    def reduce_s(self) -> Array:
        """Seconds to reduce gradients over data ranks at the step's end, if the programs do not;
        each rank keeps its part of the sum. Between blocks of ranks the sums of the blocks are
        reduced."""
        size = self.n_bytes("trained_bytes")
        seconds = self._collective_s(reduce_scatter_s, size * (self.segment.zero == 1))
        hardware, devices = self.profile.hardware, self.segment.shard_devices
        if hardware is None or not devices:
            return seconds
        blocks = np.asarray(self.mesh.data) // self.ranks
        stride = max(1, devices // self.mesh.model) * self.mesh.stride("data")
        return seconds + sum(
            collective_s(size / self.ranks, blocks, hardware, stride=stride)
            for collective_s in (reduce_scatter_s, all_gather_s)
        )

    def update_s(self) -> Array:
        """Seconds of the optimizer's memory traffic, and of gathering the new parameters."""
        hardware = self.profile.hardware
        working = self.n_bytes("trained_working_bytes") * (self.segment.zero != 3)
        gathered = self._collective_s(all_gather_s, working)
        if hardware is None:
            return gathered
        memory_bytes = _UPDATE_PASSES * self.n_bytes("trained_bytes") / self.ranks
        state_bytes = self.n_bytes("element_state_bytes", self.ranks, exact=True)
        memory_bytes = memory_bytes + 2 * state_bytes
        return gathered + memory_bytes / hardware.memory_bandwidth

    def _layer_and_ends_s(
        self, collective: Callable[..., Array], element: Element, is_split: bool
    ) -> tuple[Array, Array]:
        both = (self.layer_bytes(element), self.ends_bytes(element)) if is_split else (0.0, 0.0)
        layer_s, ends_s = (self._collective_s(collective, n_bytes) for n_bytes in both)
        return layer_s, ends_s

    def _collective_s(self, collective: Callable[..., Array], n_bytes: float) -> Array:
        """Seconds of a collective over the data ranks that share a parameter, by degree."""
        hardware = self.profile.hardware
        if hardware is None or not n_bytes:
            return np.zeros(np.shape(self.mesh.data))
        return collective(n_bytes, self.ranks, hardware, stride=self.mesh.stride("data"))

    @cached_property
    def _layer_dims(self) -> list[tuple[Dims, int]]:
        """(parameters of a layer, number of layers) of each kind of layers."""
        kinds, dims = self.profile.kinds_in(self.segment), self.profile.layer_dims
        return [(dims[layer_key(self.segment.module, kind)], n) for kind, n in kinds.items()]

    def _rank_bytes(self, dims: Dims, element: Element, ranks: Array, exact: bool) -> Array:
        degrees = tuple(np.ravel(ranks).tolist())
        by_degree = _padded_bytes(dims, degrees, self.mesh.model, element, exact)
        return np.reshape(by_degree, np.shape(ranks))


@lru_cache(maxsize=4096)  # asked again for every option of a module
def _padded_bytes(
    dims: Dims, degrees: tuple[int, ...], tp: int, element: Element, exact: bool
) -> np.ndarray:
    """Bytes of the elements on one device, by the number of data ranks that split them. The ranks
    cut what a tensor rank has of each parameter into equal pieces (`runtime.zero_sharding`), the
    last of which may be padded with zeros."""
    ranks, total = np.array(degrees), np.zeros(len(degrees))
    for p in dims:
        n_elements = prod(p.sizes) // (tp if p.split >= 0 or not exact else 1)
        total = total + getattr(p, element) * -(-n_elements // ranks)
    return total
