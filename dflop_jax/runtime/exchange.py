"""What an edge carries: outputs of the source module move to the rows that read them, and back.

Where the pieces of a sample lie on the ranks of the two modules is independent. Every data rank of
the target has a home among the source's data ranks (`routes`), which asks the others for what the
target's rows read: one all-to-all between the source's ranks carries these features and nothing
else, and home puts them where they are read. Gradients go back by the inverse. Output rows are the
target's, with zeros where a place reads nothing.

The two sides may have any data parallelism, V and D ranks: with g = gcd(V, D) the source's side
holds the rows as c = D / g blocks, of which home has one each. So every device receives its own
rows by plain buffer copies, which stay asynchronous; resharding between meshes of different size
would go through the host and stop the dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil, gcd, log, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, chip_of
from dflop_jax.records import home_rank
from dflop_jax.runtime.communicator import Route, assembled, find_route, move, pieces_of
from dflop_jax.runtime.routes import Arrays, Routes

# Room of a round over an even share of a rank's features, where the plan says none; twice as much
# sends twice the padding, and fewer groups need a second round.
_ROOM_OVER_SHARE = 1.5
# Rows that are added in one pass over all: passes are the logarithm to this base of the longest
# run, and each reads as many rows.
_ROWS_A_PASS = 8


@dataclass(frozen=True)
class Exchange:
    """Between a source's `features` and the `placed` input of its target, at fixed shapes.

    `sources`: how many of the features a place is made of, with weights if several. `room`: share
    of a data rank's features that can go to one other rank in one round; None: an even share, and
    half as many more.
    """

    features: jax.ShapeDtypeStruct
    placed: jax.ShapeDtypeStruct
    sources: int = 1
    room: float | None = None

    @property
    def _source(self) -> Mesh:
        return self.features.sharding.mesh

    @cached_property
    def routes(self) -> Routes:
        m, rows, tokens, _ = self.features.shape
        stages, low = self._source.shape["stage"], self._source.shape["data"]
        per_microbatch = rows // low * tokens
        per_rank = m // stages * per_microbatch
        share = _ROOM_OVER_SHARE / low if self.room is None else self.room
        capacity = max(1, min(ceil(share * per_rank - 1e-6), per_rank))
        high = self.placed.sharding.mesh.shape["data"]
        return Routes(low, high, stages, m, per_microbatch, capacity)

    def _at_home(self, struct: jax.ShapeDtypeStruct | Array) -> jax.ShapeDtypeStruct:
        """What each rank of the source has of an array [n, target's ranks, ...]."""
        r = self.routes
        n, rows, *rest = struct.shape
        sharding = NamedSharding(self._source, P(None, "data"))
        shape = n, rows // r.high * r.low, *rest
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)

    @cached_property
    def block_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The rows on the source's submesh: blocks [M, V * rows of a target's rank, length,
        width]."""
        return (self._at_home(self.placed),) * self.routes.blocks

    @cached_property
    def gradient_structs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """What `lower` with `backward` gives."""
        ranks = self._source.shape["stage"], self._source.shape["data"]
        sharding = NamedSharding(self._source, P("stage", "data"))
        return self.features, jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=sharding)

    @cached_property
    def source_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """One round's arrays on the target's submesh, each data rank its own rows."""
        r, sharding = self.routes, self.placed.sharding
        shape = (*self.placed.shape[:3], self.sources)
        structs = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)]
        if self.sources > 1:
            structs.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
        if r.received:
            asked = r.stages, r.high, r.low * r.capacity
            structs.insert(0, jax.ShapeDtypeStruct(asked, jnp.int32, sharding=sharding))
        return tuple(structs)

    def stand_in_places(self) -> Arrays:
        """The packer's arrays where every place reads and one round brings it all."""
        shape = (*self.placed.shape[:3], self.sources)
        index = self.routes.stand_in(shape)
        if self.sources == 1:
            return (index,)
        return index, np.full(shape, 1 / self.sources, np.float32)

    # ---- the programs: on each device, what it has of the arrays ----

    def lower(self, *, backward: bool) -> jax.stages.Lowered:
        """(features, blocks of sources) -> blocks, or with `backward` (blocks, blocks of sources)
        -> (dfeatures, a small output to wait for, since the first is donated onwards); all on the
        source's submesh, for the sources of one round."""
        first: Any = self.features
        out = self.block_structs
        if backward:
            first, out = self.block_structs, self.gradient_structs
        split = P("stage", "data")
        program = jax.shard_map(
            self._scatter if backward else self._gather,
            mesh=self._source,
            in_specs=split,
            out_specs=split,
            check_vma=False,  # what is alike on all devices of a tensor-parallel group stays so
        )
        shardings = tuple(struct.sharding for struct in out)
        sources = tuple((self._at_home(s),) * self.routes.blocks for s in self.source_structs)
        return jax.jit(program, out_shardings=shardings).lower(first, sources)

    def _gather(self, features: Array, sources: tuple[tuple[Array, ...], ...]) -> tuple[Array, ...]:
        table = features.reshape(-1, features.shape[-1])
        asked, *places = self._opened(sources)
        if asked is not None:
            wanted = _swapped(asked)
            rows = gather_features(table, wanted.reshape(-1, 1))
            table = jnp.concatenate([self._moved(rows, wanted, asked), table])
        placed = gather_features(table, *places)
        m, _, *rest = self.block_structs[0].shape
        blocks = jnp.split(placed, self.routes.blocks)
        return tuple(b.reshape(m // self.routes.stages, -1, *rest) for b in blocks)

    def _scatter(
        self, blocks: tuple[Array, ...], sources: tuple[tuple[Array, ...], ...]
    ) -> tuple[Array, Array]:
        r, width, dtype = self.routes, self.features.shape[-1], self.features.dtype
        asked, slots, *weights = self._opened(sources)
        if asked is not None:  # of the ranks that got the same rows one gives the gradient
            slots = jnp.where(self._is_home(), slots, -1)
        rows = jnp.concatenate([b.reshape(-1, *b.shape[2:]) for b in blocks])
        like = jax.ShapeDtypeStruct((r.table_rows, width), dtype)
        dtable = scatter_gradient(like, rows, slots, *weights)
        total = dtable[r.received :]
        if asked is not None:
            wanted = _swapped(asked)
            came = self._moved(dtable[: r.received], asked, wanted)
            like = jax.ShapeDtypeStruct((r.own_features, width), dtype)
            index = wanted.reshape(-1, 1)
            more = scatter_gradient(like, came, index, max_readers=r.high)
            total = (total.astype(jnp.float32) + more.astype(jnp.float32)).astype(dtype)
        m, n, tokens, _ = self.features.shape
        done = jnp.zeros((1, 1), jnp.float32)
        return total.reshape(m // r.stages, n // r.low, tokens, width), done

    def _opened(self, sources: tuple[tuple[Array, ...], ...]) -> tuple[Any, ...]:
        """What this device asks of each rank [V, blocks, capacity] or None, and its slots and
        weights [rows of all blocks, tokens, sources]."""
        r, asked, places = self.routes, None, sources
        if r.received:
            lists = [a.reshape(r.low, r.capacity) for a in sources[0]]
            asked = jnp.where(self._is_home(), jnp.stack(lists, axis=1), -1)
            places = sources[1:]
        joined = [jnp.concatenate([a.reshape(-1, *a.shape[2:]) for a in kind]) for kind in places]
        return asked, *joined

    def _is_home(self) -> Array:
        """Whether this device's rank takes in what ranks of the target read; others, which may
        stand for the same ranks, ask for nothing."""
        alike = self.routes.low // gcd(self.routes.low, self.routes.high)
        return lax.axis_index("data") % alike == 0

    def _moved(self, rows: Array, sent: Array, received: Array) -> Array:
        """Rows [V * blocks * capacity, width], those for rank 0 first, with the other ranks: those
        that came from rank 0 first. `sent` and `received`, [V, blocks, capacity], say where there
        is a row: they are at the start of each list. GPUs send as many rows as are asked for,
        others as many as there is room."""
        if not chip_of(self._source.devices.flat[0]).startswith("sm_"):
            return lax.all_to_all(rows, "data", 0, 0, tiled=True)
        r = self.routes
        begins = jnp.arange(r.low * r.blocks, dtype=jnp.int32) * r.capacity
        mine = lax.axis_index("data") * r.blocks + jnp.arange(r.blocks, dtype=jnp.int32)
        there = jnp.tile(mine.astype(jnp.int32) * r.capacity, r.low)
        n_sent, n_received = (
            (a >= 0).sum(axis=2, dtype=jnp.int32).reshape(-1) for a in (sent, received)
        )
        return lax.ragged_all_to_all(
            rows, jnp.zeros_like(rows), begins, n_sent, there, n_received, axis_name="data"
        )

    # ---- moving the blocks ----

    # Which piece goes where never changes, and steps ask for it with every group: kept.

    @cached_property
    def _deliveries(self) -> list[Route]:
        """How each block goes from the source's side to the target's."""
        r, holders = self.routes, _by_rank(self._source)
        ranks = _data_ranks(self.placed.sharding.mesh)
        homes = [(d, t, home_rank(t, r.low, r.high)) for d, t in ranks]
        return [
            find_route(holders, {d: home for d, t, home in homes if t % r.blocks == j})
            for j in range(r.blocks)
        ]

    @cached_property
    def _collections(self) -> list[Route]:
        """How each block goes from the target's side to the source's."""
        r, ranks = self.routes, _data_ranks(self._source)
        holders = _by_rank(self.placed.sharding.mesh)
        alike = r.low // gcd(r.low, r.high)  # ranks of the source that stand for the same ranks
        return [
            find_route(holders, {d: v // alike * r.blocks + j for d, v in ranks})
            for j in range(r.blocks)
        ]

    def deliver(self, blocks: Sequence[Array]) -> Array:
        """Blocks on the source's side -> `placed` on the target's side; does not wait."""
        shape = self.placed.sharding.shard_shape(self.placed.shape)
        piece = jax.ShapeDtypeStruct(shape, self.placed.dtype)
        parts: list[Array] = []
        for block, route in zip(blocks, self._deliveries, strict=True):
            parts += move(pieces_of(block), route, piece)
        return assembled(self.placed, parts)

    def collect(self, array: Array) -> tuple[Array, ...]:
        """The gradient of `placed`, or an array of the packer's, which only the target's side
        knows, -> blocks on the source's side; does not wait."""
        struct, held = self._at_home(array), pieces_of(array)
        piece = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
        return tuple(assembled(struct, move(held, route, piece)) for route in self._collections)


def _data_ranks(mesh: Mesh) -> list[tuple[jax.Device, int]]:
    """(device, data rank) of a mesh."""
    ranks = np.indices(mesh.devices.shape)[mesh.axis_names.index("data")]
    return list(zip(mesh.devices.flat, ranks.ravel().tolist(), strict=True))


def _by_rank(mesh: Mesh) -> dict[int, list[jax.Device]]:
    """Devices of each data rank."""
    by_rank: dict[int, list[jax.Device]] = {}
    for device, rank in _data_ranks(mesh):
        by_rank.setdefault(rank, []).append(device)
    return by_rank


def _swapped(lists: Array) -> Array:
    """What each rank has for the others [V, ...], as each gets it."""
    return lax.all_to_all(lists, "data", 0, 0, tiled=True)


# ---- rows of features at the places that read them, on one device ----


def gather_features(features: Array, index: Array, weight: Array | None = None) -> Array:
    """features [..., width], index [..., sources] -> [..., width].

    `index` counts over the flattened rows of `features`; -1 gives zeros. A place with several
    sources is their sum, each times its `weight` (float32, of the index's shape).
    """
    flat = features.reshape(-1, features.shape[-1])
    parts: list[Array] = []
    for k in range(index.shape[-1]):
        place = index[..., k]
        rows = jnp.take(flat, place, axis=0, mode="clip")
        if weight is not None:
            rows = rows * weight[..., k, None].astype(rows.dtype)
        parts.append(jnp.where((place >= 0)[..., None], rows, jnp.zeros_like(rows)))
    return reduce(jnp.add, parts)


def scatter_gradient(
    like: jax.ShapeDtypeStruct,
    dplaced: Array,
    index: Array,
    weight: Array | None = None,
    *,
    max_readers: int | None = None,
) -> Array:
    """Transpose of `gather_features` for features of shape `like`, summed in float32.

    The same to the bit in every run: a scatter would add in the order in which a GPU's threads
    come. What a place reads with weight 0 gets nothing from it. `max_readers`: places that may
    read a feature, None: all.
    """
    *rows, width = like.shape
    n, sources = prod(rows), index.shape[-1]
    dplaced, index = dplaced.reshape(-1, width), index.reshape(-1)
    reads = index >= 0
    if weight is not None:
        weight = weight.reshape(-1)
        reads &= weight != 0
    read = jnp.where(reads, index, n)
    order = jnp.argsort(read)
    places = order if sources == 1 else order // sources
    terms = jnp.take(dplaced, places, axis=0, mode="clip").astype(jnp.float32)
    if weight is not None:
        terms = terms * weight[order][:, None]
    read, features = jnp.take(read, order, mode="clip"), jnp.arange(n)
    # Who reads nothing stands at the end, for features that do not exist.
    first = jnp.searchsorted(read, features)
    is_read = jnp.take(read, first, mode="clip") == features
    sums = _run_sums(read, terms, max_readers or read.shape[0]).astype(like.dtype)
    sums = jnp.take(sums, first, axis=0, mode="clip")
    return jnp.where(is_read[:, None], sums, jnp.zeros_like(sums)).reshape(like.shape)


def _run_sums(keys: Array, rows: Array, longest: int) -> Array:
    """Rows [n, width] where the first of each run of equal keys, sorted [n], is the run's sum; a
    run has up to `longest`."""
    n, nothing = keys.shape[0], jnp.zeros_like(rows)
    keys_behind = jnp.concatenate([keys, jnp.full_like(keys, -1)])

    # In terms of lax, which is traced several times as fast as numpy's terms.
    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """Turn sums over up to `step` rows of a run into sums over _ROWS_A_PASS times as many."""
        total, rows_behind = rows, lax.concatenate([rows, nothing], 0)
        for ahead in range(1, _ROWS_A_PASS):
            start = lax.min(lax.mul(step, ahead), n)
            key = lax.dynamic_slice(keys_behind, (start,), keys.shape, allow_negative_indices=False)
            more = lax.dynamic_slice(
                rows_behind, (start, 0), rows.shape, allow_negative_indices=False
            )
            same = lax.broadcast_in_dim(lax.eq(key, keys), rows.shape, (0,))
            total = lax.add(total, lax.select(same, more, nothing))
        return total, None

    n_steps = ceil(round(log(max(longest, 2), _ROWS_A_PASS), 9))
    steps = np.power(_ROWS_A_PASS, np.arange(n_steps), dtype=np.int32)
    return lax.scan(widen, rows, jnp.asarray(steps))[0]
