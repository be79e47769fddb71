"""The exchange against loops over positions, on one device and between shardings; its requests and
slots, followed from every place to the feature that it reads."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.records import home_ranks
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.exchange import Exchange, scatter_gradient
from dflop_jax.runtime.exchange_index import ExchangeIndex


@partial(jax.jit, static_argnums=0)
def scatter(like, *arrays):
    one = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
    return jax.vmap(partial(scatter_gradient, one))(*arrays)


# A width that most meshes below share evenly, and that of 6 devices does not.
M, ITEMS, TOKENS, WIDTH = 2, 4, 3, 8


def arrays(rows, length, *, items=ITEMS, hits=0.6, seed=0, sources=1):
    """Features, the sources of each place (index and, of several, weights), a cotangent. With one
    source an index has no repeats in a microbatch (a token goes to one row)."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(M, items, TOKENS, WIDTH)).astype(np.float32)
    index = np.full((M, rows * length), -1, np.int32)
    for m in range(M):
        n = min(items * TOKENS, int(hits * rows * length))
        spots = rng.choice(rows * length, n, replace=False)
        index[m, spots] = rng.choice(items * TOKENS, n, replace=False)
    dvisual = rng.normal(size=(M, rows, length, WIDTH)).astype(np.float32)
    if sources == 1:
        return features, (index.reshape(M, rows, length, 1),), dvisual
    shape = (M, rows, length, sources)
    index = np.where(rng.random(shape) < hits, rng.integers(0, items * TOKENS, shape), -1)
    return features, (index.astype(np.int32), rng.random(shape).astype(np.float32)), dvisual


def loops(features, sources, dvisual):
    """(gathered, scattered) position by position."""
    index, weight = sources if len(sources) == 2 else (*sources, np.ones(sources[0].shape))
    visual, dfeatures = np.zeros_like(dvisual), np.zeros_like(features)
    for m, r, t, k in np.ndindex(index.shape):
        if (i := index[m, r, t, k]) >= 0:
            w = np.float32(weight[m, r, t, k])
            visual[m, r, t] += w * features[m, i // TOKENS, i % TOKENS]
            dfeatures[m, i // TOKENS, i % TOKENS] += w * dvisual[m, r, t]
    return visual, dfeatures


def test_what_reads_nothing_is_dropped_and_sums_are_exact():
    """Padding does not meet the first feature, nor does a source of weight 0; bfloat16 gradients
    of one feature are added in float32."""
    like = jax.ShapeDtypeStruct((1, 2, 2, WIDTH), jnp.bfloat16)
    dvisual = np.full((1, 1, 600, WIDTH), 1, jnp.bfloat16)
    index = np.full((1, 1, 600, 1), -1, np.int32)
    index[0, 0, :300] = 3
    got = scatter(like, dvisual, index).astype(jnp.float32)[0].reshape(4, WIDTH)
    np.testing.assert_array_equal(got[:, 0], [0, 0, 0, 300])
    # Not a number times 0 would be none.
    dvisual[0, 0, 300:] = np.nan
    got = scatter(like, dvisual, np.abs(index), 1.0 * (index >= 0)).astype(jnp.float32)
    np.testing.assert_array_equal(got[0].reshape(4, WIDTH)[:, 0], [0, 0, 0, 300])


def collectives(text):
    """(kind, bytes that each device hands to it) of the collectives of a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute"
    sizes = {"f32": 4, "bf16": 2, "s32": 4}
    found = []
    for result, kind in re.findall(rf"= (\(?\S.*?) ({kinds})(?:-start)?\(", text):
        arrays = re.findall(r"(f32|bf16|s32)\[([\d,]*)\]", result)
        n = sum(sizes[t] * int(np.prod([int(x) for x in d.split(",") if x])) for t, d in arrays)
        found.append((kind, n))
    return sorted(found)


@pytest.mark.parametrize("low, high", [((1, 4, 1), (1, 4, 1)), ((1, 4, 1), (1, 2, 2))])
def test_one_all_to_all_carries_what_is_asked_for(low, high):
    """And one the requests: 4 bytes for a row. Nothing is gathered on all devices, or scattered in
    an order of its own."""
    exchange = exchange_of(low, 0, high, (M, 8, 16, 64), (M, 4, 32, 64), room=0.25)
    per_pair = M * 2 * 16 // 4
    for backward in (False, True):
        program = exchange.lower(backward=backward)
        text = program.compile().as_text()
        assert "stablehlo.scatter" not in program.as_text()
        assert collectives(text) == [("all-to-all", 4 * per_pair * n * 4) for n in (1, 64)]


# (encoder mesh, first LLM device, LLM mesh), meshes as (stage, data, model).
MESHES = [
    ((1, 1, 1), 0, (1, 1, 1)),
    ((1, 1, 1), 1, (1, 4, 1)),
    ((1, 4, 1), 4, (1, 1, 1)),
    ((1, 2, 1), 2, (1, 3, 2)),
    ((1, 4, 1), 4, (1, 2, 2)),
    ((1, 2, 2), 4, (1, 4, 1)),
    ((2, 2, 2), 0, (2, 4, 1)),
    ((2, 1, 2), 0, (1, 8, 1)),
    ((1, 6, 1), 0, (1, 4, 2)),
]


def mesh_of(first, shape):
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
    return Mesh(devices.reshape(shape), ("stage", "data", "model"))


def exchange_of(low, first, high, features, inputs, sources=1, room=None):
    """Of float32 arrays of these shapes on meshes (stage, data, model), the second one from device
    `first` on."""
    source = NamedSharding(mesh_of(0, low), P("stage", "data"))
    target = NamedSharding(mesh_of(first, high), P(None, "data"))
    structs = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
               for shape, sharding in ((features, source), (inputs, target)))  # fmt: skip
    return Exchange(*structs, sources, room)


@pytest.mark.parametrize("low, first, high", MESHES)
@pytest.mark.parametrize("rows_per_rank, sources, room", [(1, 1, None), (2, 4, 0.1)])
def test_any_two_meshes_exchange_exactly(low, first, high, rows_per_rank, sources, room):
    """In one round, or in several where there is little room."""
    items = ITEMS * low[1]
    rows = rows_per_rank * high[1]
    features, held, dvisual = arrays(rows, 5, items=items, sources=sources)
    visual, dfeatures = loops(features, held, dvisual)
    loose = {"rtol": 1e-5, "atol": 1e-6} if sources > 1 else {"rtol": 0, "atol": 0}
    exchange = exchange_of(low, first, high, features.shape, visual.shape, sources, room)
    feature_sharding, visual_sharding = (s.sharding for s in (exchange.features, exchange.inputs))
    structs = exchange.source_structs
    rounds = exchange.index.rounds(held)
    assert room is None or low[1] == 1 or len(rounds) > 1
    gather, scatter = (exchange.lower(backward=b).compile() for b in (False, True))
    source_features = shard_array(features, feature_sharding)
    dplaced = shard_array(dvisual, visual_sharding)
    got, back = [], []
    for arrays_of_round in rounds:
        assert [s.shape for s in structs] == [a.shape for a in arrays_of_round]
        where = tuple(
            exchange.collect(shard_array(a, s.sharding))
            for a, s in zip(arrays_of_round, structs, strict=True)
        )
        blocks = gather(source_features, where)
        assert [b.shape for b in blocks] == [b.shape for b in exchange.block_structs]
        got.append(exchange.deliver(blocks))
        came = exchange.collect(dplaced)
        expected = zip(came, exchange.block_structs, strict=True)
        assert all(b.sharding == s.sharding for b, s in expected)
        gradient, _ = scatter(came, where)
        back.append(gradient)
    assert_adds_up(got, visual, visual_sharding, loose)
    assert_adds_up(back, dfeatures, feature_sharding, loose)


def assert_adds_up(parts, expected, sharding, loose):
    """The parts are the expected array, in every copy of it."""
    for part in parts:
        assert part.sharding.is_equivalent_to(sharding, part.ndim)
    for shards in zip(*(p.addressable_shards for p in parts), strict=True):
        total = sum(np.asarray(s.data) for s in shards)
        np.testing.assert_allclose(total, expected[shards[0].index], **loose)


@pytest.mark.parametrize("readers", [1, 7, 8, 9, 64, 65, 100])
def test_a_feature_that_many_places_read_gets_all_of_their_gradients(readers):
    rng = np.random.default_rng(readers)
    dplaced = rng.integers(-9, 9, (readers, 1)).astype(np.float32)
    like, index = jax.ShapeDtypeStruct((2, 1), np.float32), np.ones((readers, 1), np.int32)
    for longest in (None, readers):
        summed = scatter_gradient(like, dplaced, index, max_readers=longest)
        np.testing.assert_array_equal(summed, [[0], [dplaced.sum()]])


# ---- requests and slots ----


def random_case(seed):
    """(routes, an index of random reads)."""
    rng = np.random.default_rng(seed)
    low, high, stages = (int(n) for n in rng.integers(1, 5, 3))
    microbatches, per_microbatch = stages * int(rng.integers(1, 3)), int(rng.integers(1, 6))
    own = microbatches // stages * per_microbatch
    capacity = int(rng.integers(1, own + 1))
    routes = ExchangeIndex(low, high, stages, microbatches, per_microbatch, capacity)
    shape = (microbatches, high * int(rng.integers(1, 3)), 3, int(rng.integers(1, 3)))
    read = rng.integers(0, low * per_microbatch, shape)
    return routes, np.where(rng.random(shape) < 0.6, read, -1).astype(np.int32)


def followed(r, rounds, index):
    """The index that the rounds stand for; each place is served in one round."""
    got = np.full(index.shape, -1)
    per_rank, per_stage = index.shape[1] // r.target_ranks, r.microbatches // r.stages
    for arrays in rounds:
        for (m, row, token, k), slot in np.ndenumerate(arrays[-1]):
            if slot < 0:
                continue
            rank, home = row // per_rank, r.home_ranks[row // per_rank]
            source, place = home, slot - r.received_rows
            if place < 0:
                source, rest = divmod(slot, r.blocks * r.capacity)
                block, position = divmod(rest, r.capacity)
                assert block == rank % r.blocks
                assert source != home
                asked = arrays[0].reshape(r.stages, r.target_ranks, r.source_ranks, r.capacity)
                place = asked[m // per_stage, rank, source, position]
            turn, inside = divmod(place, r.per_microbatch)
            assert turn == m % per_stage
            assert got[m, row, token, k] == -1
            got[m, row, token, k] = source * r.per_microbatch + inside
    return got


@pytest.mark.parametrize("seed", range(40))
def test_every_place_gets_the_feature_that_it_reads(seed):
    routes, index = random_case(seed)
    synthetic = routes.synthetic_index(index.shape)
    (one_round,) = routes.rounds((synthetic,))  # in which every place reads
    np.testing.assert_array_equal(followed(routes, [one_round], synthetic), synthetic)
    assert synthetic.min() >= 0
    rounds = routes.rounds((index,))
    np.testing.assert_array_equal(followed(routes, rounds, index), index)
    if routes.source_ranks == 1:
        assert [len(arrays) for arrays in rounds] == [1]
        return
    shape = routes.stages, routes.target_ranks, routes.source_ranks, routes.capacity
    asked = np.concatenate([a[0].reshape(shape) for a in rounds], axis=3)
    for wanted in asked.reshape(-1, asked.shape[3]):
        real = wanted[wanted >= 0]
        assert (wanted[: len(real)] == real).all()  # lists begin at their first row
        assert len(set(real)) == len(real)  # and ask for a feature once
    most = int((asked >= 0).sum(axis=3).max())
    assert len(rounds) == max(1, -(-most // routes.capacity))
    more = routes.rounds((index,), most + routes.capacity)  # as another process may need
    assert len(more) == -(-(most + routes.capacity) // routes.capacity)
    np.testing.assert_array_equal(followed(routes, more, index), index)


HOMES = [(1, 3, [0, 0, 0]), (4, 4, [0, 1, 2, 3]), (4, 2, [0, 2]), (2, 4, [0, 0, 1, 1])]


@pytest.mark.parametrize("low, high, homes", [*HOMES, (6, 4, [0, 0, 3, 3])])
def test_homes_lie_on_the_ranks_devices(low, high, homes):
    assert home_ranks(low, high).tolist() == homes
