"""Bytes of a segment's parameters, gradients and optimizer state on a device, and the seconds of
their collectives over data ranks (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

import numpy as np

from dflop_jax.profile.collectives import all_gather_s, group_overlap, reduce_scatter_s
from dflop_jax.records import MeshShape, ModelProfile, ParamDims, SegmentPlan, layer_key

Array = Any  # a float array, or one number
Dims = tuple[ParamDims, ...]
# Attribute of `ParamDims` with bytes per element of a parameter.
Element = Literal["working_bytes", "trained_bytes", "trained_working_bytes", "element_state_bytes"]
# Float32 arrays of the segment's size that an optimizer reads (parameters, gradients) and writes
# (parameters), besides its state.
_UPDATE_PASSES = 3
# Temporaries of step-end programs compiled for H100, in multiples of the gradient shard: copies for
# the reduction, and for gathering whole parameters. A single device needs neither.
_REDUCED_COPIES, _GATHERED_COPIES = 0.85, 2.2


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of a segment on one device."""

    state: Array  # parameters, gradients and optimizer state
    residuals: Array  # inputs and residuals of one group in flight
    temporaries: Array  # of the largest program


@dataclass(frozen=True)
class ShardedState:
    """A segment's state on one device of a mesh, whose data-parallel degree may be an array."""

    segment: SegmentPlan
    mesh: MeshShape
    profile: ModelProfile

    @cached_property
    def ranks(self) -> Array:
        """Number of data ranks over which a parameter is sharded."""
        return self.segment.shard_ranks(self.mesh.data, self.mesh.model)

    def n_bytes(self, element: Element, ranks: Array = 1, *, exact: bool = False) -> Array:
        """Return the bytes on a device of an element quantity sharded over `ranks` data ranks.
        `exact`: parameters that tensor parallelism does not split count in full; otherwise all
        count as split."""
        layers = sum(
            n * self._rank_bytes(dims, element, ranks, exact) for dims, n in self._layer_dims
        )
        return layers / self.mesh.stage + self.ends_bytes(element, ranks, exact=exact)

    def ends_bytes(self, element: Element, ranks: Array = 1, *, exact: bool = False) -> Array:
        """Return `n_bytes` of the ends. Each end counts as half of both; tied ends in two segments
        count in full in each, since both segments have the shared parameters."""
        first, last, module = self.segment.first, self.segment.last, self.segment.module
        share = float(first or last) if module in self.profile.tied else (first + last) / 2
        return share * self._rank_bytes(self.profile.ends_dims[module], element, ranks, exact)

    def layer_bytes(self, element: Element) -> float:
        """Return the bytes of the largest layer."""
        return max(float(self._rank_bytes(d, element, 1, False)) for d, _ in self._layer_dims)

    def state_bytes(self, *, trained: bool) -> Array:
        """Return bytes of parameters, gradients, optimizer state, and of masters if any."""
        parameters, trained_state = self._state_bytes
        return parameters + trained_state if trained else parameters

    @cached_property
    def _state_bytes(self) -> tuple[Array, Array]:
        """Bytes of (parameters; gradients, optimizer state and masters)."""
        zero = self.segment.zero
        parameters = self.n_bytes("working_bytes", self.ranks if zero == 3 else 1, exact=True)
        trained = self.n_bytes("trained_bytes", self.ranks if zero >= 2 else 1)
        if self.profile.has_bfloat16_params(self.segment.module):
            trained = trained + self.n_bytes("trained_bytes", self.ranks)
        trained = trained + self.n_bytes("element_state_bytes", self.ranks, exact=True)
        return parameters + np.zeros(np.shape(self.mesh.data)), trained

    def gathered_bytes(self, *, trained: bool, ends_in_loss: bool) -> Array:
        """Return the peak bytes of unsharded arrays in a backward program under ZeRO 2 or 3.

        These are a layer's parameters and float32 gradients, and the ends' gradients. A task that
        ends in a loss instead holds the parameters that the loss reads (half of untied ends); its
        ends' gradients are part of the loss's temporaries.
        """
        zero, tied, whole = self.segment.zero, self.segment.module in self.profile.tied, 0.0
        if zero == 3:
            read = self.ends_bytes("working_bytes") / (1 if tied else 2)
            whole += self.layer_bytes("working_bytes") + ends_in_loss * read
        if zero >= 2 and trained:
            whole += self.layer_bytes("trained_bytes")
            whole += (not ends_in_loss) * self.ends_bytes("trained_bytes")
        return np.where(np.asarray(self.mesh.data) > 1, whole, 0.0)

    @cached_property
    def step_end_bytes(self) -> Array:
        """Temporary bytes of a trained segment's reduction and update: the rank's reduced
        gradients, copies of them, and all new parameters if ranks gather them."""
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
        """Seconds to gather parameters in a program: (of one layer, of the ends once per call)."""
        return self._layer_and_ends_s(all_gather_s, "working_bytes", self.segment.zero == 3)

    @cached_property
    def scatter_s(self) -> tuple[Array, Array]:
        """Seconds to scatter gradients in a program: (of one layer, of the ends once per tick)."""
        return self._layer_and_ends_s(reduce_scatter_s, "trained_bytes", self.segment.zero >= 2)

    @cached_property
    def overlap(self) -> Array:
        """Overlap factor of `gather_s` and `scatter_s` with the layers' computation."""
        hardware = self.profile.hardware
        if hardware is None:
            return 1.0
        return group_overlap(self.ranks, hardware, stride=self.mesh.stride("data"))

    @cached_property
    def reduce_s(self) -> Array:
        """Seconds to reduce-scatter gradients over data ranks at the end of the step, if programs
        do not (ZeRO 1), and to all-reduce shards between blocks of ranks (hybrid sharding)."""
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

    @cached_property
    def update_s(self) -> Array:
        """Seconds of the optimizer's memory traffic and of gathering new parameters."""
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
        """Return the seconds of a collective over the ranks that shard a parameter, by degree."""
        hardware = self.profile.hardware
        if hardware is None or not n_bytes:
            return np.zeros(np.shape(self.mesh.data))
        return collective(n_bytes, self.ranks, hardware, stride=self.mesh.stride("data"))

    @cached_property
    def _layer_dims(self) -> list[tuple[Dims, int]]:
        """(a layer's parameters, number of layers) of each kind of layers."""
        kinds, dims = self.profile.kinds_in(self.segment), self.profile.layer_dims
        return [(dims[layer_key(self.segment.module, kind)], n) for kind, n in kinds.items()]

    def _rank_bytes(self, dims: Dims, element: Element, ranks: Array, exact: bool) -> Array:
        degrees = tuple(np.ravel(ranks).tolist())
        by_degree = _padded_bytes(dims, degrees, self.mesh.model, element, exact)
        return np.reshape(by_degree, np.shape(ranks))


@lru_cache(maxsize=4096)  # called again for every option of a module
def _padded_bytes(
    dims: Dims, degrees: tuple[int, ...], tp: int, element: Element, exact: bool
) -> np.ndarray:
    """Return the bytes on one device by number of sharding data ranks. Ranks split a tensor rank's
    part of each parameter into equal pieces (`runtime.zero_sharding`), padded with zeros if
    needed."""
    ranks, total = np.array(degrees), np.zeros(len(degrees))
    for p in dims:
        n_elements = prod(p.sizes) // (tp if p.split >= 0 or not exact else 1)
        total = total + getattr(p, element) * -(-n_elements // ranks)
    return total
