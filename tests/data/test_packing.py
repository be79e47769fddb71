"""Packing against a token-by-token account, with tiles that name themselves by their pixels."""

import numpy as np
import pytest

from dflop_jax.data import Sample, VisionSpec, pack_group
from dflop_jax.data.packing import Ranks, own_samples
from dflop_jax.records import Bucket, Microbatch, Schedule

SPEC = VisionSpec(4, 3)
PX = SPEC.tile_px


def make_sample(rng, i, n_tiles, n_text):
    """Tiles of sample i carry (i, tile); visual tokens stand in one run inside the text."""
    visual = n_tiles * SPEC.tokens_per_tile
    index = np.full(visual + n_text, -1)
    at = int(rng.integers(n_text + 1))
    index[at : at + visual] = np.arange(visual)
    tiles = np.zeros((n_tiles, PX, PX, 3), np.uint8)
    tiles[..., 0] = i
    tiles[..., 1] = np.arange(n_tiles)[:, None, None]
    supervised = (rng.random(len(index)) < 0.4) & (index < 0)
    tokens = rng.integers(1, 200, len(index)).astype(np.int32)
    return Sample(tiles, tokens, index.astype(np.int32), supervised)


def random_group(rng, n_microbatches, ranks, rows, max_samples):
    """Samples dealt at random to the rows of microbatches, some of them empty."""
    n = n_microbatches * max_samples
    samples = [make_sample(rng, i, int(rng.integers(4)), int(rng.integers(1, 9)))
               for i in range(n)]  # fmt: skip
    places = [[[[] for _ in range(rows)] for _ in range(ranks)] for _ in range(n_microbatches)]
    for i in range(n):
        if rng.random() < 0.8:
            m, r, k = (int(rng.integers(s)) for s in (n_microbatches, ranks, rows))
            places[m][r][k].append(i)
    group = tuple(
        Microbatch(0, tuple(tuple(tuple(row) for row in rank) for rank in m)) for m in places
    )
    return group, samples


def needed(group, samples, vision_ranks, spread):
    """Smallest capacities that hold the group."""
    tiles = 0
    for m in group:
        per_rank = [sum(len(samples[i].tiles) for row in rank for i in row) for rank in m.rows]
        tiles = max(tiles, -(-sum(per_rank) // vision_ranks) if spread else max(per_rank))
    tokens = max(
        sum(len(samples[i].tokens) for i in row) for m in group for rank in m.rows for row in rank
    )
    return tiles, max(1, tokens)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "vision_ranks, llm_ranks, rows, spread",
    [(1, 1, 1, True), (2, 2, 1, False), (3, 2, 2, True), (2, 2, 3, False), (1, 4, 1, True)],
)
def test_every_token_and_tile_is_where_it_belongs(seed, vision_ranks, llm_ranks, rows, spread):
    rng = np.random.default_rng(seed)
    group, samples = random_group(rng, 1 + seed % 3, llm_ranks, rows, 1 + 2 * seed)
    tiles, tokens = needed(group, samples, vision_ranks, spread)
    bucket = Bucket(tiles + seed % 2, tokens + seed % 3, rows)
    packed = pack_group(
        group, bucket, samples, shapes=[s.shape for s in samples], vision_ranks=vision_ranks,
        llm_ranks=llm_ranks, spec=SPEC, spread=spread,
    )  # fmt: skip
    llm = packed.fields["llm"]
    shape = (len(group), llm_ranks * rows, bucket.tokens)
    assert {name: (a.shape, a.dtype) for name, a in llm.items()} == {
        **dict.fromkeys(("tokens", "segment_ids", "positions", "targets"), (shape, np.int32)),
        "weights": (shape, np.float32),
        "is_visual": (shape, np.bool_),
    }
    assert packed.visual_index.dtype == np.int32
    pixels = packed.fields["vision"]["pixels"] if bucket.tiles else None
    assert ("vision" in packed.fields) == (bucket.tiles > 0)
    supervised = used = 0
    tile_owner = {}
    for m, microbatch in enumerate(group):
        for r in range(llm_ranks):
            for k in range(rows):
                at, t = (m, r * rows + k), 0
                for s, i in enumerate(microbatch.rows[r][k], 1):
                    x = samples[i]
                    for p in range(len(x.tokens)):
                        where = (*at, t)
                        assert llm["tokens"][where] == x.tokens[p]
                        assert llm["segment_ids"][where] == s
                        assert llm["positions"][where] == p
                        last = p + 1 == len(x.tokens)
                        assert llm["weights"][where] == (not last and x.supervised[p + 1])
                        if not last:
                            assert llm["targets"][where] == x.tokens[p + 1]
                        supervised += int(not last and x.supervised[p + 1])
                        v = packed.visual_index[where]
                        assert llm["is_visual"][where] == (v >= 0) == (x.visual[p] >= 0)
                        if v >= 0:
                            tile, token = divmod(int(x.visual[p]), SPEC.tokens_per_tile)
                            slot = int(v) // SPEC.tokens_per_tile
                            assert v % SPEC.tokens_per_tile == token
                            assert pixels[m, slot, 0, 0].tolist() == [i, tile, 0]
                            tile_owner.setdefault((m, slot), (i, tile, r))
                            assert tile_owner[m, slot] == (i, tile, r)
                        t += 1
                used += t
                assert (llm["segment_ids"][at][t:] == 0).all()
                assert (llm["weights"][at][t:] == 0).all()
                assert (packed.visual_index[at][t:] == -1).all()
    assert packed.supervised_tokens == supervised
    assert packed.used_tokens == used
    assert packed.used_tiles == len(tile_owner)
    per_rank = np.zeros((len(group), vision_ranks), int)
    for (m, slot), (_, _, r) in tile_owner.items():
        per_rank[m, slot // bucket.tiles] += 1
        assert spread or slot // bucket.tiles == r
    if spread:
        assert (per_rank.max(1) - per_rank.min(1)).max() <= 1


def test_an_empty_microbatch_and_no_tiles():
    group = (Microbatch(0, (((),),)), Microbatch(0, ()))
    packed = pack_group(group, Bucket(0, 5), {}, shapes=[], vision_ranks=1, llm_ranks=1, spec=SPEC)
    assert packed.fields.keys() == {"llm"}
    assert packed.fields["llm"]["tokens"].shape == (2, 1, 5)
    assert packed.supervised_tokens == packed.used_tokens == packed.used_tiles == 0
    assert not packed.fields["llm"]["segment_ids"].any()


@pytest.mark.parametrize("bucket", [Bucket(1, 100), Bucket(9, 10), Bucket(0, 100)])
def test_overflow_is_an_assertion(bucket):
    samples = {7: make_sample(np.random.default_rng(0), 7, 2, 6)}
    with pytest.raises(AssertionError):
        pack_group(
            (Microbatch(0, (((7,),),)),),
            bucket,
            samples,
            shapes={7: samples[7].shape},
            vision_ranks=1,
            llm_ranks=1,
            spec=SPEC,
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [True, False])
def test_the_parts_of_processes_make_the_whole(seed, spread):
    """Each process decodes its own samples only; their arrays and counts add up."""
    rng = np.random.default_rng(seed)
    ranks = 3
    group, samples = random_group(rng, 2, ranks, 2, 6)
    tiles, tokens = needed(group, samples, ranks, spread)
    bucket, shapes = Bucket(tiles, tokens, 2), [s.shape for s in samples]

    def pack(held, part):
        return pack_group(
            group, bucket, held, shapes=shapes, vision_ranks=ranks, llm_ranks=ranks, spec=SPEC,
            spread=spread, ranks=part,
        )  # fmt: skip

    whole = pack(samples, None)
    # Rank 1 of the LLM lies on both processes; vision is the first's alone, or rank 2 the other's.
    first = Ranks({0, 1}, {0, 1}, {0, 1}, {0, 1})
    second = Ranks({2}, {1, 2}, {2}, {2})
    total = np.zeros(3, int)
    for part in (first, second):
        own = own_samples(Schedule(0, (group,)), [bucket], shapes, ranks, spread, part)
        packed = pack({i: samples[i] for i in own}, part)
        for name, array in packed.fields["llm"].items():
            for r in part.llm:
                rows = slice(2 * r, 2 * r + 2)
                np.testing.assert_array_equal(array[:, rows], whole.fields["llm"][name][:, rows])
                np.testing.assert_array_equal(
                    packed.visual_index[:, rows], whole.visual_index[:, rows]
                )
        for r in part.vision:
            items = slice(r * tiles, (r + 1) * tiles)
            np.testing.assert_array_equal(
                packed.fields["vision"]["pixels"][:, items],
                whole.fields["vision"]["pixels"][:, items],
            )
        total += (packed.supervised_tokens, packed.used_tiles, packed.used_tokens)
    assert tuple(total) == (whole.supervised_tokens, whole.used_tiles, whole.used_tokens)


def test_a_process_without_ranks_decodes_nothing():
    group, _ = random_group(np.random.default_rng(0), 1, 2, 1, 3)
    shapes = [make_sample(np.random.default_rng(0), i, 1, 3).shape for i in range(3)]
    nobody = Ranks((), (), (), ())
    assert own_samples(Schedule(0, (group,)), [Bucket(9, 99)], shapes, 2, True, nobody) == []
