"""Packing against a token-by-token account, with tiles that name themselves by their pixels."""

import numpy as np
import pytest

from dflop_jax.data import MediaSpec, Sample, pack_group
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.token_sources import TokenSources, plain
from dflop_jax.data.packing import Ranks, own_samples
from dflop_jax.records import Bucket, Microbatch, Schedule

SPEC = MediaSpec(4, 3, sound=MelSpec(n_mels=2, window_s=0.16))  # 16 frames, 4 tokens a window
WINDOW = 4
PX = SPEC.tile_px


def make_sample(rng, i, n_tiles, n_text, n_windows=0):
    """Tiles and windows of sample i carry (i, their number); visual tokens stand in one run inside
    the text, those of sound at its end, the last window's but one."""
    visual = n_tiles * SPEC.tokens_per_tile
    heard = max(0, n_windows * WINDOW - 1)
    index, audio = np.full((2, visual + n_text + heard), -1)
    at = int(rng.integers(n_text + 1))
    index[at : at + visual] = np.arange(visual)
    audio[visual + n_text :] = np.arange(heard)
    mel = np.zeros((n_windows, 2, 16), np.float32)
    mel[:, 0], mel[:, 1] = i, np.arange(n_windows)[:, None]
    tiles = np.zeros((n_tiles, PX, PX, 3), np.uint8)
    tiles[..., 0] = i
    tiles[..., 1] = np.arange(n_tiles)[:, None, None]
    supervised = (rng.random(len(index)) < 0.4) & (index < 0) & (audio < 0)
    tokens = rng.integers(1, 200, len(index)).astype(np.int32)
    return Sample(
        tokens,
        supervised,
        tiles,
        plain(index),
        mel=mel,
        mel_frames=np.full(n_windows, 16, np.int32),
        audio=audio.astype(np.int32),
    )


def random_group(rng, n_microbatches, ranks, rows, max_samples):
    """Samples dealt at random to the rows of microbatches, some of them empty."""
    n = n_microbatches * max_samples
    samples = [
        make_sample(rng, i, int(rng.integers(4)), int(rng.integers(1, 9)), int(rng.integers(3)))
        for i in range(n)
    ]
    places = [[[[] for _ in range(rows)] for _ in range(ranks)] for _ in range(n_microbatches)]
    for i in range(n):
        if rng.random() < 0.8:
            m, r, k = (int(rng.integers(s)) for s in (n_microbatches, ranks, rows))
            places[m][r][k].append(i)
    group = tuple(
        Microbatch(0, tuple(tuple(tuple(row) for row in rank) for rank in m)) for m in places
    )
    return group, samples


def needed(group, samples, ranks, spread, module="vision"):
    """Smallest capacities that hold the group: items of an encoder, tokens."""
    items = 0
    for m in group:
        per_rank = [
            sum(samples[i].shape.load(module) for row in rank for i in row) for rank in m.rows
        ]
        items = max(items, -(-sum(per_rank) // ranks) if spread else max(per_rank))
    tokens = max(
        sum(len(samples[i].tokens) for i in row) for m in group for rank in m.rows for row in rank
    )
    return items, max(1, tokens)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "vision_ranks, llm_ranks, rows, spread",
    [(1, 1, 1, True), (2, 2, 1, False), (3, 2, 2, True), (2, 2, 3, False), (1, 4, 1, True)],
)
def test_every_token_and_tile_is_where_it_belongs(seed, vision_ranks, llm_ranks, rows, spread):
    rng = np.random.default_rng(seed)
    group, samples = random_group(rng, 1 + seed % 3, llm_ranks, rows, 1 + 2 * seed)
    tiles, tokens = needed(group, samples, vision_ranks, spread)
    windows, _ = needed(group, samples, llm_ranks, spread, "audio")
    bucket = Bucket(tiles + seed % 2, tokens + seed % 3, rows, windows)
    packed = pack_group(
        group,
        bucket,
        samples,
        shapes=[s.shape for s in samples],
        data_ranks={"vision": vision_ranks, "audio": llm_ranks, "llm": llm_ranks},
        spec=SPEC,
        spread=spread,
    )
    llm = packed.fields["llm"]
    shape = (len(group), llm_ranks * rows, bucket.tokens)
    assert {name: (a.shape, a.dtype) for name, a in llm.items()} == {
        **dict.fromkeys(("tokens", "segment_ids", "positions", "targets"), (shape, np.int32)),
        "weights": (shape, np.float32),
        **dict.fromkeys(("is_visual", "is_newline"), (shape, np.bool_)),
    }
    assert packed.sources.keys() == packed.fields.keys() - {"llm"}
    none = np.full((*shape, 1), -1)
    (visual,) = packed.sources.get("vision", (none,))
    (heard,) = packed.sources.get("audio", (none,))
    pixels = packed.fields["vision"]["pixels"] if bucket.tiles else None
    assert ("vision" in packed.fields) == (bucket.tiles > 0)
    supervised = used = 0
    tile_owner, window_owner = {}, {}
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
                        v, a = int(visual[where][0]), int(heard[where][0])
                        assert (v >= 0) == x.visual.used[p]
                        assert (a >= 0) == (x.audio[p] >= 0)
                        assert llm["is_visual"][where] == (v >= 0 or a >= 0)
                        if a >= 0:
                            window, token = divmod(int(x.audio[p]), WINDOW)
                            slot = a // WINDOW
                            assert a % WINDOW == token
                            mel = packed.fields["audio"]["mel"][m, slot, :, 0]
                            assert mel.tolist() == [i, window]
                            assert packed.fields["audio"]["mel_frames"][m, slot] == 16
                            window_owner.setdefault((m, slot), (i, window, r))
                            assert window_owner[m, slot] == (i, window, r)
                            assert spread or slot // bucket.windows == r
                        if v >= 0:
                            tile, token = divmod(int(x.visual.index[p, 0]), SPEC.tokens_per_tile)
                            slot = int(v) // SPEC.tokens_per_tile
                            assert v % SPEC.tokens_per_tile == token
                            assert pixels[m, slot, 0, 0].tolist() == [i, tile, 0]
                            tile_owner.setdefault((m, slot), (i, tile, r))
                            assert tile_owner[m, slot] == (i, tile, r)
                        t += 1
                used += t
                assert (llm["segment_ids"][at][t:] == 0).all()
                assert (llm["weights"][at][t:] == 0).all()
                assert (visual[at][t:] == -1).all()
                assert (heard[at][t:] == -1).all()
    assert packed.supervised_tokens == supervised
    assert packed.used == {"vision": len(tile_owner), "audio": len(window_owner), "llm": used}
    per_rank = np.zeros((len(group), vision_ranks), int)
    for (m, slot), (_, _, r) in tile_owner.items():
        per_rank[m, slot // bucket.tiles] += 1
        assert spread or slot // bucket.tiles == r
    if spread:
        assert (per_rank.max(1) - per_rank.min(1)).max() <= 1


def test_an_empty_microbatch_and_no_tiles():
    group = (Microbatch(0, (((),),)), Microbatch(0, ()))
    packed = pack_group(
        group, Bucket(0, 5), {}, shapes=[], data_ranks={"vision": 1, "llm": 1}, spec=SPEC
    )
    assert packed.fields.keys() == {"llm"}
    assert packed.fields["llm"]["tokens"].shape == (2, 1, 5)
    assert packed.supervised_tokens == 0
    assert packed.used == {"vision": 0, "llm": 0}
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
            data_ranks={"vision": 1, "llm": 1},
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
    data_ranks = {"vision": ranks, "llm": ranks}

    def pack(held, part):
        return pack_group(
            group,
            bucket,
            held,
            shapes=shapes,
            data_ranks=data_ranks,
            spec=SPEC,
            spread=spread,
            ranks=part,
        )

    whole = pack(samples, None)
    # Rank 1 of the LLM lies on both processes; vision is the first's alone, or rank 2 the other's.
    first = Ranks(*[{"vision": {0, 1}, "llm": {0, 1}}] * 2)
    second = Ranks({"vision": {2}, "llm": {1, 2}}, {"vision": {2}, "llm": {2}})
    total = np.zeros(3, int)
    for part in (first, second):
        own = own_samples(Schedule(0, (group,)), [bucket], shapes, data_ranks, spread, part)
        packed = pack({i: samples[i] for i in own}, part)
        for name, array in packed.fields["llm"].items():
            for r in part.fills["llm"]:
                rows = slice(2 * r, 2 * r + 2)
                np.testing.assert_array_equal(array[:, rows], whole.fields["llm"][name][:, rows])
                np.testing.assert_array_equal(
                    packed.sources["vision"][0][:, rows], whole.sources["vision"][0][:, rows]
                )
        for r in part.fills["vision"]:
            items = slice(r * tiles, (r + 1) * tiles)
            np.testing.assert_array_equal(
                packed.fields["vision"]["pixels"][:, items],
                whole.fields["vision"]["pixels"][:, items],
            )
        total += (packed.supervised_tokens, packed.used["vision"], packed.used["llm"])
    assert tuple(total) == (whole.supervised_tokens, whole.used["vision"], whole.used["llm"])


def test_a_process_without_ranks_decodes_nothing():
    group, _ = random_group(np.random.default_rng(0), 1, 2, 1, 3)
    shapes = [make_sample(np.random.default_rng(0), i, 1, 3).shape for i in range(3)]
    nobody = Ranks(*[{"vision": (), "llm": ()}] * 2)
    ranks = {"vision": 2, "llm": 2}
    assert own_samples(Schedule(0, (group,)), [Bucket(9, 99)], shapes, ranks, True, nobody) == []


def test_weighted_sources_and_line_ends():
    """Two samples in a row: each source moves with the tile that it counts from."""
    spec = MediaSpec(4, 3, "anyres", sources=4)
    rng = np.random.default_rng(0)
    samples = []
    for i in range(2):
        t = 5
        weight = rng.dirichlet(np.ones(4), t).astype(np.float32)
        weight[1] = 0  # text
        weight[2] = 0
        weight[3, 1:] = 0
        newline = np.arange(t) == 2
        index = rng.integers(0, 6, (t, 4)).astype(np.int32)
        tiles = np.full((2, 4, 4, 3), i, np.uint8)
        tokens = np.arange(t, dtype=np.int32)
        samples.append(
            Sample(tokens, np.zeros(t, bool), tiles, TokenSources(index, weight, newline))
        )
    packed = pack_group(
        (Microbatch(0, (((1, 0),),)),),
        Bucket(5, 12),
        samples,
        shapes=[s.shape for s in samples],
        data_ranks={"vision": 1, "llm": 1},
        spec=spec,
    )
    index, weight = packed.sources["vision"]
    assert index.shape == weight.shape == (1, 1, 12, 4)
    for at, i in ((0, 1), (5, 0)):
        v = samples[i].visual
        used = v.weight > 0
        moved = v.index + (0 if i == 1 else 2) * 3
        np.testing.assert_array_equal(index[0, 0, at : at + 5], np.where(used, moved, -1))
        np.testing.assert_array_equal(weight[0, 0, at : at + 5], v.weight)
    llm = packed.fields["llm"]
    assert np.flatnonzero(llm["is_newline"]).tolist() == [2, 7]
    assert np.flatnonzero(llm["is_visual"]).tolist() == [0, 3, 4, 5, 8, 9]
    assert not weight[0, 0, 10:].any()
