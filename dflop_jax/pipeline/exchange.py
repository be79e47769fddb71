"""From encoder outputs to LLM rows and back: features move to where their samples were packed.

Sample placement on encoder ranks and on LLM ranks is independent, so the exchange is one gather by
an index from the packer; its gradient is the matching scatter-add. Output rows are the LLM's, with
zeros where a position holds no visual token.

The two sides may have any data parallelism, V and D ranks. With g = gcd(V, D) the encoder's side
holds the rows as c = D / g blocks, each split g ways: piece i of block j belongs to LLM rank
i * c + j. So every device receives its own rows by plain buffer copies, which stay asynchronous;
resharding between meshes of different size would go through the host and stop the dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array


def gather_features(features: Array, index: Array) -> Array:
    """features [M, items, tokens, width], index [M, rows, length] -> [M, rows, length, width].

    `index` counts over the flattened (items, tokens) of its microbatch; -1 gives zeros.
    """
    flat = features.reshape(features.shape[0], -1, features.shape[-1])
    rows = jax.vmap(lambda f, i: jnp.take(f, jnp.maximum(i, 0), axis=0))(flat, index)
    return jnp.where((index >= 0)[..., None], rows, jnp.zeros_like(rows))


def scatter_gradient(like: jax.ShapeDtypeStruct, dvisual: Array, index: Array) -> Array:
    """Transpose of `gather_features` for features of shape `like`."""
    zeros = jnp.zeros(like.shape, like.dtype)
    return jax.linear_transpose(lambda f: gather_features(f, index), zeros)(dvisual)[0]


@dataclass(frozen=True)
class Exchange:
    """One exchange between an encoder's features and the LLM's `visual` input, at fixed shapes."""

    features: jax.ShapeDtypeStruct
    visual: jax.ShapeDtypeStruct

    @property
    def _source(self) -> Mesh:
        return self.features.sharding.mesh

    @property
    def _ranks(self) -> tuple[int, int]:
        """(g, c): pieces of a block, and blocks."""
        low, high = self._source.shape["data"], self.visual.sharding.mesh.shape["data"]
        g = gcd(low, high)
        return g, high // g

    @cached_property
    def block_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The rows on the encoder's submesh: blocks [M, rows / c, length, width]."""
        g, c = self._ranks
        stage, data, model = self._source.devices.shape
        split = self._source.devices.reshape(stage, g, data // g, model)
        sharding = NamedSharding(Mesh(split, ("stage", "piece", "copy", "model")), P(None, "piece"))
        m, rows, *rest = self.visual.shape
        one = jax.ShapeDtypeStruct((m, rows // c, *rest), self.visual.dtype, sharding=sharding)
        return (one,) * c

    @cached_property
    def index_struct(self) -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(self._source, P())
        return jax.ShapeDtypeStruct(self.visual.shape[:3], jnp.int32, sharding=everywhere)

    def _blocks(self, visual: Array) -> tuple[Array, ...]:
        g, c = self._ranks
        m, rows, *rest = visual.shape
        parts = visual.reshape(m, g, c, rows // (g * c), *rest)
        return tuple(parts[:, :, j].reshape(m, rows // c, *rest) for j in range(c))

    def _joined(self, blocks: Sequence[Array]) -> Array:
        g, c = self._ranks
        m, rows, *rest = blocks[0].shape
        parts = [b.reshape(m, g, rows // g, *rest) for b in blocks]
        return jnp.stack(parts, axis=2).reshape(m, rows * c, *rest)

    def lower(self, *, backward: bool) -> jax.stages.Lowered:
        """(features, index) -> blocks, or with `backward` (blocks, index) -> dfeatures."""
        if backward:
            like = jax.ShapeDtypeStruct(self.features.shape, self.features.dtype)
            scatter = jax.jit(
                lambda blocks, index: scatter_gradient(like, self._joined(blocks), index),
                out_shardings=self.features.sharding,
            )
            return scatter.lower(self.block_structs, self.index_struct)
        gather = jax.jit(
            lambda features, index: self._blocks(gather_features(features, index)),
            out_shardings=tuple(b.sharding for b in self.block_structs),
        )
        return gather.lower(self.features, self.index_struct)

    # ---- moving the blocks ----

    # Which buffer goes where never changes, and steps ask for it with every group: kept.

    @cached_property
    def _deliveries(self) -> tuple[list[tuple[int, jax.Device]], list[jax.Device]]:
        """((block, device that holds it), device that gets it) for the LLM's side."""
        g, c = self._ranks
        per_piece = self._source.shape["data"] // g
        holders: dict[int, list[jax.Device]] = {}
        for device, rank in _data_ranks(self._source):
            holders.setdefault(rank // per_piece, []).append(device)
        sources, targets = [], []
        for device, rank in _data_ranks(self.visual.sharding.mesh):
            piece = holders[rank // c]
            # Among the devices that hold a piece, another one for each rank.
            sources.append((rank % c, piece[rank % len(piece)]))
            targets.append(device)
        return sources, targets

    @cached_property
    def _collections(self) -> tuple[list[list[jax.Device]], list[jax.Device]]:
        """(per block the devices that hold its pieces, the devices that get them)."""
        g, c = self._ranks
        per_piece = self._source.shape["data"] // g
        first = {rank: d for d, rank in reversed(_data_ranks(self.visual.sharding.mesh))}
        targets = _data_ranks(self._source)
        sources = [[first[rank // per_piece * c + j] for _, rank in targets] for j in range(c)]
        return sources, [device for device, _ in targets]

    def deliver(self, blocks: Sequence[Array]) -> Array:
        """Blocks on the encoder's side -> `visual` on the LLM's side; does not wait."""
        held = [_buffers(b) for b in blocks]
        sources, targets = self._deliveries
        parts = jax.device_put([held[j][device] for j, device in sources], targets)
        return jax.make_array_from_single_device_arrays(
            self.visual.shape, self.visual.sharding, parts
        )

    def collect(self, dvisual: Array) -> tuple[Array, ...]:
        """Gradient of `visual` on the LLM's side -> blocks on the encoder's; does not wait."""
        held = _buffers(dvisual)
        sources, targets = self._collections
        return tuple(
            jax.make_array_from_single_device_arrays(
                struct.shape,
                struct.sharding,
                jax.device_put([held[device] for device in devices], targets),
            )
            for struct, devices in zip(self.block_structs, sources, strict=True)
        )


def _data_ranks(mesh: Mesh) -> list[tuple[jax.Device, int]]:
    """(device, data rank) of a (stage, data, model) mesh."""
    ranks = np.broadcast_to(np.arange(mesh.devices.shape[1])[None, :, None], mesh.devices.shape)
    return list(zip(mesh.devices.flat, (int(r) for r in ranks.flat), strict=True))


def _buffers(array: Array) -> dict[jax.Device, Array]:
    return {s.device: s.data for s in array.addressable_shards}
