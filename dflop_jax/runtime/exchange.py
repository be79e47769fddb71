"""Moves features of a source module along an edge to the inputs that read them, and gradients back.

The pieces of a sample may be on different data ranks in the two modules. Every data rank of the
target has a home rank among the source's data ranks (`exchange_index`), which requests from the
other ranks the features that the target's rows read. One all-to-all between the source's ranks
carries only these features; the home rank puts them at the positions that read them. Gradients take
the inverse path. Output rows are the target's, with zeros at positions that read nothing.

The two sides may have any data parallelism, V and D ranks: with g = gcd(V, D), the source's side
holds the rows as c = D / g blocks, and every block has one target rank's rows on each home rank. So
every device receives its own rows by plain buffer copies, which are asynchronous; resharding
between meshes of different size would go through the host and block the dispatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil, log, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, chip_of
from dflop_jax.runtime import communicator
from dflop_jax.runtime.communicator import Route, find_route
from dflop_jax.runtime.exchange_index import ExchangeIndex, IndexArrays

# Rows that one pass over all rows adds. The passes are the logarithm of the longest run to this
# base, and each pass reads this many rows.
_ROWS_PER_PASS = 8


@dataclass(frozen=True)
class Exchange:
    """The exchange between a source's `features` and its target's `inputs`, at fixed shapes.

    `sources`: number of features that an input position sums, with weights if above 1.
    `capacity_fraction`: share of a data rank's features that one round can send to one other rank;
    None: an even share.
    """

    features: jax.ShapeDtypeStruct
    inputs: jax.ShapeDtypeStruct
    sources: int = 1
    capacity_fraction: float | None = None

    @cached_property
    def _source(self) -> Mesh:
        return self.features.sharding.mesh

    @cached_property
    def index(self) -> ExchangeIndex:
        m, rows, tokens, _ = self.features.shape
        stages, low = self._source.shape["stage"], self._source.shape["data"]
        per_microbatch = rows // low * tokens
        per_rank = m // stages * per_microbatch
        share = 1 / low if self.capacity_fraction is None else self.capacity_fraction
        capacity = max(1, min(ceil(share * per_rank - 1e-6), per_rank))
        high = self.inputs.sharding.mesh.shape["data"]
        return ExchangeIndex(low, high, stages, m, per_microbatch, capacity)

    def _source_struct(self, struct: jax.ShapeDtypeStruct | Array) -> jax.ShapeDtypeStruct:
        """Return the struct, on the source's submesh, of an array [n, target's ranks, ...]."""
        r = self.index
        n, rows, *rest = struct.shape
        sharding = NamedSharding(self._source, P(None, "data"))
        shape = n, rows // r.target_ranks * r.source_ranks, *rest
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)

    @cached_property
    def block_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Rows on the source's submesh, [M, V * rows of one target rank, length, width]."""
        return (self._source_struct(self.inputs),) * self.index.blocks

    @cached_property
    def gradient_structs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Structs of the outputs of `lower(backward=True)`."""
        ranks = self._source.shape["stage"], self._source.shape["data"]
        sharding = NamedSharding(self._source, P("stage", "data"))
        return self.features, jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=sharding)

    @cached_property
    def source_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """One round's `IndexArrays` on the target's submesh, with each data rank's own rows."""
        r, sharding = self.index, self.inputs.sharding
        shape = (*self.inputs.shape[:3], self.sources)
        arrays: list[tuple[tuple[int, ...], Any]] = [(shape, jnp.int32)]
        if r.received_rows:
            arrays.insert(0, ((r.stages, r.target_ranks, r.source_ranks * r.capacity), jnp.int32))
        if self.sources > 1:
            arrays.append((shape, jnp.float32))
        return tuple(jax.ShapeDtypeStruct(*array, sharding=sharding) for array in arrays)

    def synthetic_indices(self) -> IndexArrays:
        """Return `source_indices` in which every position reads a feature, all within one round."""
        shape = (*self.inputs.shape[:3], self.sources)
        index = self.index.synthetic_index(shape)
        if self.sources == 1:
            return (index,)
        return index, np.full(shape, 1 / self.sources, np.float32)

    # ---- the programs, per device ----

    def lower(self, *, backward: bool) -> jax.stages.Lowered:
        """Lower (features, blocks of sources) -> blocks, or, with `backward`, (blocks, blocks of
        sources) -> (dfeatures, small output to wait for, since dfeatures is donated later). All are
        on the source's submesh, for the sources of one round."""
        first_struct: Any = self.features
        out_structs = self.block_structs
        if backward:
            first_struct, out_structs = self.block_structs, self.gradient_structs
        split = P("stage", "data")
        program = jax.shard_map(
            self._scatter if backward else self._gather,
            mesh=self._source,
            in_specs=split,
            out_specs=split,
            check_vma=False,  # equal values on a tensor-parallel group stay equal
        )
        shardings = tuple(struct.sharding for struct in out_structs)
        sources = tuple((self._source_struct(s),) * self.index.blocks for s in self.source_structs)
        return jax.jit(program, out_shardings=shardings).lower(first_struct, sources)

    def _gather(self, features: Array, sources: tuple[tuple[Array, ...], ...]) -> tuple[Array, ...]:
        table = features.reshape(-1, features.shape[-1])
        requests, *indices = self._local_requests(sources)
        if requests is not None:
            requested = lax.all_to_all(requests, "data", 0, 0, tiled=True)
            rows = gather_features(table, requested.reshape(-1, 1))
            table = jnp.concatenate([self._exchange_rows(rows, requested, requests), table])
        inputs = gather_features(table, *indices)
        m, _, *rest = self.block_structs[0].shape
        blocks = jnp.split(inputs, self.index.blocks)
        return tuple(b.reshape(m // self.index.stages, -1, *rest) for b in blocks)

    def _scatter(
        self, blocks: tuple[Array, ...], sources: tuple[tuple[Array, ...], ...]
    ) -> tuple[Array, Array]:
        r, width, dtype = self.index, self.features.shape[-1], self.features.dtype
        requests, slots, *weights = self._local_requests(sources)
        if requests is not None:  # one of the ranks with equal rows sends the gradient
            slots = jnp.where(self._is_home_rank(), slots, -1)
        rows = jnp.concatenate([b.reshape(-1, *b.shape[2:]) for b in blocks])
        struct = jax.ShapeDtypeStruct((r.table_rows, width), dtype)
        dtable = scatter_gradient(struct, rows, slots, *weights)
        total = dtable[r.received_rows :]
        if requests is not None:
            requested = lax.all_to_all(requests, "data", 0, 0, tiled=True)
            received = self._exchange_rows(dtable[: r.received_rows], requests, requested)
            struct = jax.ShapeDtypeStruct((r.own_features, width), dtype)
            index = requested.reshape(-1, 1)
            more = scatter_gradient(struct, received, index, max_readers=r.target_ranks)
            total = (total.astype(jnp.float32) + more.astype(jnp.float32)).astype(dtype)
        m, n, tokens, _ = self.features.shape
        done = jnp.zeros((1, 1), jnp.float32)
        return total.reshape(m // r.stages, n // r.source_ranks, tokens, width), done

    def _local_requests(self, sources: tuple[tuple[Array, ...], ...]) -> tuple[Any, ...]:
        """Return this device's requests [V, blocks, capacity] or None, slots and weights."""
        r, requests, indices = self.index, None, sources
        if r.received_rows:
            lists = [a.reshape(r.source_ranks, r.capacity) for a in sources[0]]
            requests = jnp.where(self._is_home_rank(), jnp.stack(lists, axis=1), -1)
            indices = sources[1:]
        joined = [jnp.concatenate([a.reshape(-1, *a.shape[2:]) for a in kind]) for kind in indices]
        return requests, *joined

    def _is_home_rank(self) -> Array:
        """Return whether this device's rank is a home rank; other ranks request nothing."""
        return lax.axis_index("data") % self.index.home_spacing == 0

    def _exchange_rows(self, rows: Array, sent: Array, received: Array) -> Array:
        """Exchange rows [V * blocks * capacity, width] with the other ranks, rows for rank 0 first.
        `sent` and `received`, [V, blocks, capacity], are true for real rows, which come first in
        each list. GPUs send only these, other devices the whole capacity."""
        if not chip_of(self._source.devices.flat[0]).startswith("sm_"):
            return lax.all_to_all(rows, "data", 0, 0, tiled=True)
        r = self.index
        send_offsets = jnp.arange(r.source_ranks * r.blocks, dtype=jnp.int32) * r.capacity
        rank_slots = lax.axis_index("data") * r.blocks + jnp.arange(r.blocks, dtype=jnp.int32)
        offsets = jnp.tile(rank_slots.astype(jnp.int32) * r.capacity, r.source_ranks)
        n_sent, n_received = (
            (a >= 0).sum(axis=2, dtype=jnp.int32).reshape(-1) for a in (sent, received)
        )
        return lax.ragged_all_to_all(
            rows, jnp.zeros_like(rows), send_offsets, n_sent, offsets, n_received, axis_name="data"
        )

    # ---- moving the blocks ----

    @cached_property
    def _deliveries(self) -> list[Route]:
        """Routes of the blocks to the target's side; cached, since every group uses them."""
        r, holders = self.index, _devices_by_rank(self._source)
        ranks = _data_ranks(self.inputs.sharding.mesh)
        return [
            find_route(holders, {d: r.home_ranks[t] for d, t in ranks if t % r.blocks == j})
            for j in range(r.blocks)
        ]

    @cached_property
    def _collections(self) -> list[Route]:
        """Routes of the blocks back to the source's side."""
        r, ranks = self.index, _data_ranks(self._source)
        holders = _devices_by_rank(self.inputs.sharding.mesh)
        return [
            find_route(holders, {d: v // r.home_spacing * r.blocks + j for d, v in ranks})
            for j in range(r.blocks)
        ]

    def deliver(self, blocks: Sequence[Array]) -> Array:
        """Send blocks from the source's devices to the target's devices; return them as one array
        with the shape and sharding of `inputs`. The call does not wait for the transfer."""
        shape = self.inputs.sharding.shard_shape(self.inputs.shape)
        shard_struct = jax.ShapeDtypeStruct(shape, self.inputs.dtype)
        shards: list[Array] = []
        for block, route in zip(blocks, self._deliveries, strict=True):
            held = communicator.local_shards(block)
            shards += communicator.move_shards(held, route, shard_struct)
        return communicator.assemble_array(self.inputs, shards)

    def collect(self, array: Array) -> tuple[Array, ...]:
        """Send a gradient or index array of the target's side to the source's side, as blocks."""
        struct, shards = self._source_struct(array), communicator.local_shards(array)
        shard_struct = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
        moved = (communicator.move_shards(shards, r, shard_struct) for r in self._collections)
        return tuple(communicator.assemble_array(struct, arrived) for arrived in moved)


def _data_ranks(mesh: Mesh) -> list[tuple[jax.Device, int]]:
    """Return the (device, data rank) pairs of a mesh."""
    ranks = np.indices(mesh.devices.shape)[mesh.axis_names.index("data")]
    return list(zip(mesh.devices.flat, ranks.ravel().tolist(), strict=True))


def _devices_by_rank(mesh: Mesh) -> dict[int, list[jax.Device]]:
    by_rank: defaultdict[int, list[jax.Device]] = defaultdict(list)
    for device, rank in _data_ranks(mesh):
        by_rank[rank].append(device)
    return by_rank


# ---- gather and scatter of features on one device ----


def gather_features(features: Array, index: Array, weight: Array | None = None) -> Array:
    """Map features [..., width] and index [..., sources] to inputs [..., width].

    `index` counts the flattened rows of `features`; -1 gives zeros. A position with several sources
    gets their sum, each times its `weight` (float32, of the index's shape).
    """
    flat = features.reshape(-1, features.shape[-1])
    terms: list[Array] = []
    for k in range(index.shape[-1]):
        index_k = index[..., k]
        rows = jnp.take(flat, index_k, axis=0, mode="clip")
        if weight is not None:
            rows = rows * weight[..., k, None].astype(rows.dtype)
        terms.append(jnp.where((index_k >= 0)[..., None], rows, jnp.zeros_like(rows)))
    return reduce(jnp.add, terms)


def scatter_gradient(
    struct: jax.ShapeDtypeStruct,
    dinputs: Array,
    index: Array,
    weight: Array | None = None,
    *,
    max_readers: int | None = None,
) -> Array:
    """Return the transpose of `gather_features` for features of shape `struct`, summed in float32.

    Every run gives the same bits; a scatter would add in the order in which a GPU's threads arrive.
    A source of weight 0 gets no gradient. `max_readers`: upper bound of the positions that read one
    feature; None: all positions.
    """
    *rows, width = struct.shape
    n, sources = prod(rows), index.shape[-1]
    dinputs, index = dinputs.reshape(-1, width), index.reshape(-1)
    reads = index >= 0
    if weight is not None:
        weight = weight.reshape(-1)
        reads &= weight != 0
    read = jnp.where(reads, index, n)
    order = jnp.argsort(read)
    positions = order if sources == 1 else order // sources
    terms = jnp.take(dinputs, positions, axis=0, mode="clip").astype(jnp.float32)
    if weight is not None:
        terms = terms * weight[order][:, None]
    read, features = jnp.take(read, order, mode="clip"), jnp.arange(n)
    # Positions that read nothing are sorted to the end, as if they read a feature after the last.
    first = jnp.searchsorted(read, features)
    is_read = jnp.take(read, first, mode="clip") == features
    sums = _run_sums(read, terms, max_readers or read.shape[0]).astype(struct.dtype)
    sums = jnp.take(sums, first, axis=0, mode="clip")
    return jnp.where(is_read[:, None], sums, jnp.zeros_like(sums)).reshape(struct.shape)


def _run_sums(keys: Array, rows: Array, longest: int) -> Array:
    """Return rows [n, width] with the sum of each run of equal `keys` in the run's first row.
    `keys` [n] are sorted and a run has up to `longest` rows."""
    n, zero_rows = keys.shape[0], jnp.zeros_like(rows)
    keys_behind = jnp.concatenate([keys, jnp.full_like(keys, -1)])

    # Written with lax, which traces several times as fast as jnp.
    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """Turn sums over up to `step` rows of a run into sums over _ROWS_PER_PASS times as many."""
        total, rows_behind = rows, lax.concatenate([rows, zero_rows], 0)
        for distance in range(1, _ROWS_PER_PASS):
            start = lax.min(lax.mul(step, distance), n)
            key = lax.dynamic_slice(keys_behind, (start,), keys.shape, allow_negative_indices=False)
            more = lax.dynamic_slice(
                rows_behind, (start, 0), rows.shape, allow_negative_indices=False
            )
            same_key = lax.broadcast_in_dim(lax.eq(key, keys), rows.shape, (0,))
            total = lax.add(total, lax.select(same_key, more, zero_rows))
        return total, None

    n_steps = ceil(round(log(max(longest, 2), _ROWS_PER_PASS), 9))
    steps = np.power(_ROWS_PER_PASS, np.arange(n_steps), dtype=np.int32)
    return lax.scan(widen, rows, jnp.asarray(steps))[0]
