"""What an edge carries: outputs of the source module move to the rows that read them, and back.

Where the pieces of a sample lie on the ranks of the two modules is independent, so the exchange is
one gather by an index from the packer; its gradient is the matching sum over the places that read a
feature. Output rows are the target's, with zeros where a place reads nothing.

The two sides may have any data parallelism, V and D ranks. With g = gcd(V, D) the source's side
holds the rows as c = D / g blocks, each split g ways: piece i of block j belongs to the target's
rank i * c + j. So every device receives its own rows by plain buffer copies, which stay
asynchronous; resharding between meshes of different size would go through the host and stop the
dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil, gcd, log, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array
from dflop_jax.pipeline.communicator import Route, find_route, move, pieces_of

_AT_ONCE = 8  # rows that are added in one pass over all


def gather_features(features: Array, index: Array, weight: Array | None = None) -> Array:
    """features [M, rows, tokens, width], index [M, places, length, sources] ->
    [M, places, length, width].

    `index` counts over the flattened (rows, tokens) of its microbatch; -1 gives zeros. A place
    with several sources is their sum, each times its `weight` (float32, of the index's shape).
    """
    flat = features.reshape(features.shape[0], -1, features.shape[-1])
    parts: list[Array] = []
    for k in range(index.shape[-1]):
        at = index[..., k]
        rows = jax.vmap(lambda f, i: jnp.take(f, jnp.maximum(i, 0), axis=0))(flat, at)
        if weight is not None:
            rows = rows * weight[..., k, None].astype(rows.dtype)
        parts.append(jnp.where((at >= 0)[..., None], rows, jnp.zeros_like(rows)))
    return reduce(jnp.add, parts)


def scatter_gradient(
    like: jax.ShapeDtypeStruct, dplaced: Array, index: Array, weight: Array | None = None
) -> Array:
    """Transpose of `gather_features` for features of shape `like`, summed in float32.

    The same to the bit in every run: a scatter would add in the order in which a GPU's threads
    come. What a place reads with weight 0 gets nothing from it.
    """
    m, rows, tokens, width = like.shape
    n, sources = rows * tokens, index.shape[-1]

    def of_microbatch(dplaced: Array, index: Array, weight: Array | None) -> Array:
        reads = index >= 0 if weight is None else (index >= 0) & (weight != 0)
        read = jnp.where(reads, index, n)
        order = jnp.argsort(read)
        terms = dplaced[order // sources].astype(jnp.float32)
        if weight is not None:
            terms = terms * weight[order][:, None]
        read = read[order]
        # Who reads nothing stands at the end, for features that do not exist.
        first = jnp.searchsorted(read, jnp.arange(n))
        found = read.at[first].get(mode="clip") == jnp.arange(n)
        sums = _run_sums(read, terms).astype(like.dtype).at[first].get(mode="clip")
        return jnp.where(found[:, None], sums, jnp.zeros_like(sums))

    flat = index.reshape(m, -1), None if weight is None else weight.reshape(m, -1)
    return jax.vmap(of_microbatch)(dplaced.reshape(m, -1, width), *flat).reshape(like.shape)


def _run_sums(keys: Array, rows: Array) -> Array:
    """Rows [n, width] where the first of each run of equal keys, sorted [n], is the run's sum."""
    n = keys.shape[0]
    place = jnp.arange(n)

    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """From sums over up to `step` rows of a run to sums over up to _AT_ONCE times as many."""
        total = rows
        for ahead in range(1, _AT_ONCE):
            other = jnp.minimum(place + ahead * step, n)
            same = keys.at[other].get(mode="fill", fill_value=-1) == keys
            more = rows.at[other].get(mode="clip")
            total = total + jnp.where(same[:, None], more, jnp.zeros_like(more))
        return total, None

    n_steps = ceil(log(max(n, 2), _AT_ONCE))
    return jax.lax.scan(widen, rows, _AT_ONCE ** jnp.arange(n_steps))[0]


@dataclass(frozen=True)
class Exchange:
    """Between a source's `features` and the `placed` input of its target, at fixed shapes.

    `sources`: how many of the features a place is made of, with weights if several.
    """

    features: jax.ShapeDtypeStruct
    placed: jax.ShapeDtypeStruct
    sources: int = 1

    @property
    def _source(self) -> Mesh:
        return self.features.sharding.mesh

    @property
    def _ranks(self) -> tuple[int, int]:
        """(g, c): pieces of a block, and blocks."""
        low, high = self._source.shape["data"], self.placed.sharding.mesh.shape["data"]
        g = gcd(low, high)
        return g, high // g

    @cached_property
    def block_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The rows on the source's submesh: blocks [M, rows / c, length, width]."""
        g, c = self._ranks
        stage, data, model = self._source.devices.shape
        split = self._source.devices.reshape(stage, g, data // g, model)
        sharding = NamedSharding(Mesh(split, ("stage", "piece", "copy", "model")), P(None, "piece"))
        m, rows, *rest = self.placed.shape
        one = jax.ShapeDtypeStruct((m, rows // c, *rest), self.placed.dtype, sharding=sharding)
        return (one,) * c

    def _sources_of(self, rows: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        """(index,) or (index, weight) of rows of features."""
        shape = (*rows.shape[:3], self.sources)
        kinds = (jnp.int32, jnp.float32) if self.sources > 1 else (jnp.int32,)
        return tuple(jax.ShapeDtypeStruct(shape, k, sharding=rows.sharding) for k in kinds)

    @cached_property
    def source_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The packer's index (and weight) on the target's submesh, each data rank its own rows."""
        return self._sources_of(self.placed)

    @cached_property
    def source_block_structs(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """The same as they arrive on the source's submesh: blocks of each."""
        return tuple(zip(*map(self._sources_of, self.block_structs), strict=True))

    def stand_in_sources(self) -> tuple[np.ndarray, ...]:
        """The packer's arrays where every place reads, the features one after the other."""
        n_features = self.features.shape[1] * self.features.shape[2]
        index, *weight = self.source_structs
        read = np.arange(prod(index.shape[1:]), dtype=np.int32) % n_features
        every = np.broadcast_to(read.reshape(index.shape[1:]), index.shape)
        return every, *(np.full(a.shape, 1 / self.sources, a.dtype) for a in weight)

    def _blocks(self, placed: Array) -> tuple[Array, ...]:
        g, c = self._ranks
        m, rows, *rest = placed.shape
        parts = placed.reshape(m, g, c, rows // (g * c), *rest)
        return tuple(parts[:, :, j].reshape(m, rows // c, *rest) for j in range(c))

    def _joined(self, blocks: Sequence[Array]) -> Array:
        g, c = self._ranks
        m, rows, *rest = blocks[0].shape
        parts = [b.reshape(m, g, rows // g, *rest) for b in blocks]
        return jnp.stack(parts, axis=2).reshape(m, rows * c, *rest)

    def lower(self, *, backward: bool) -> jax.stages.Lowered:
        """(features, blocks of sources) -> blocks, or with `backward` (blocks, blocks of sources)
        -> dfeatures; all on the source's submesh."""
        sources = self.source_block_structs
        if backward:
            # Any place may read any feature, so devices share the sums by columns, where these
            # divide: XLA of jax 0.12 aborts at a gather of uneven ones.
            mesh, axes = self.block_structs[0].sharding.mesh, ("piece", "copy", "model")
            is_even = self.features.shape[-1] % prod(mesh.shape[a] for a in axes) == 0
            columns = NamedSharding(mesh, P("stage", None, None, axes if is_even else None))

            def scatter(blocks: tuple[Array, ...], sources: tuple[tuple[Array, ...], ...]) -> Array:
                dplaced = jax.lax.with_sharding_constraint(self._joined(blocks), columns)
                return scatter_gradient(self.features, dplaced, *map(self._joined, sources))

            program = jax.jit(scatter, out_shardings=self.features.sharding)
            return program.lower(self.block_structs, sources)
        gather = jax.jit(
            lambda features, sources: self._blocks(
                gather_features(features, *map(self._joined, sources))
            ),
            out_shardings=tuple(b.sharding for b in self.block_structs),
        )
        return gather.lower(self.features, sources)

    # ---- moving the blocks ----

    # Which piece goes where never changes, and steps ask for it with every group: kept.

    @cached_property
    def _deliveries(self) -> list[Route]:
        """Of each block, from the source's side to the target's."""
        g, c = self._ranks
        holders = _by_rank(self._source, self._source.shape["data"] // g)
        ranks = _data_ranks(self.placed.sharding.mesh)
        return [find_route(holders, {d: r // c for d, r in ranks if r % c == j}) for j in range(c)]

    @cached_property
    def _collections(self) -> list[Route]:
        """Of each block, from the target's side to the source's."""
        g, c = self._ranks
        per_piece = self._source.shape["data"] // g
        holders, ranks = _by_rank(self.placed.sharding.mesh, 1), _data_ranks(self._source)
        return [find_route(holders, {d: r // per_piece * c + j for d, r in ranks})
                for j in range(c)]  # fmt: skip

    def deliver(self, blocks: Sequence[Array]) -> Array:
        """Blocks on the source's side -> `placed` on the target's side; does not wait."""
        m, rows, *rest = self.placed.shape
        ranks = self.placed.sharding.mesh.shape["data"]
        piece = jax.ShapeDtypeStruct((m, rows // ranks, *rest), self.placed.dtype)
        parts: list[Array] = []
        for block, route in zip(blocks, self._deliveries, strict=True):
            parts += move(pieces_of(block), route, piece)
        return jax.make_array_from_single_device_arrays(
            self.placed.shape, self.placed.sharding, parts, dtype=self.placed.dtype
        )

    def collect(self, dplaced: Array) -> tuple[Array, ...]:
        """Gradient of `placed` on the target's side -> blocks on the source's; does not wait."""
        return self._collect(dplaced, self.block_structs)

    def collect_sources(self, sources: Sequence[Array]) -> tuple[tuple[Array, ...], ...]:
        """The packer's arrays, which only the target's side knows, to the source's."""
        return tuple(map(self._collect, sources, self.source_block_structs))

    def _collect(
        self, array: Array, structs: tuple[jax.ShapeDtypeStruct, ...]
    ) -> tuple[Array, ...]:
        held = pieces_of(array)
        piece = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
        return tuple(
            jax.make_array_from_single_device_arrays(
                struct.shape,
                struct.sharding,
                move(held, route, piece),
                dtype=struct.dtype,
            )
            for struct, route in zip(structs, self._collections, strict=True)
        )


def _data_ranks(mesh: Mesh) -> list[tuple[jax.Device, int]]:
    """(device, data rank) of a (stage, data, model) mesh."""
    ranks = np.broadcast_to(np.arange(mesh.devices.shape[1])[None, :, None], mesh.devices.shape)
    return list(zip(mesh.devices.flat, (int(r) for r in ranks.flat), strict=True))


def _by_rank(mesh: Mesh, per_piece: int) -> dict[int, list[jax.Device]]:
    """Devices by the number of the piece that they hold, each of so many data ranks."""
    found: dict[int, list[jax.Device]] = {}
    for device, rank in _data_ranks(mesh):
        found.setdefault(rank // per_piece, []).append(device)
    return found
