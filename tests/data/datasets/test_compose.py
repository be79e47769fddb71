"""Whole samples: their arrays against their counts, and a plain second assembly token by token."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.mixture import Mixture, MixturePart
from dflop_jax.data.datasets.mixture_source import IndexRules, MixtureSource
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.compose import compose
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.token_sources import plain
from dflop_jax.data.text.pieces import TextPiece, chat_pieces, first_tokens
from dflop_jax.records import Load
from tests.data import views
from tests.data.media_cases import made_dataset
from tests.data.views import (
    from_pictures,
    heard,
    mel,
    mel_frames,
    newlines,
    prepared,
    seen,
    supervised,
    tiles,
    tokens,
)

VISION = AnyRes(tile_px=28, patches=2, pinpoints=((28, 56), (56, 28), (56, 56)))
SPEC = MelSpec(n_mels=4, window_s=1, max_windows=3)
MEDIA = prepared(VISION, SPEC, 4)
WINDOW = 25  # tokens of 100 frames
OPTIONS = {"placeholder": 77}


def pictures(n, first):
    """A medium of n tiles, its tokens the patches in order."""
    return views.pictures(np.full((n, 28, 28, 3), first, np.uint8), plain(np.arange(4 * n)), 4)


def sound(windows, tokens, frames):
    valid = np.minimum(frames - 100 * np.arange(windows), 100)
    return views.sound(np.full((windows, 4, 100), windows, np.float32), valid, tokens, WINDOW)


def test_media_stand_in_their_own_order():
    """The text places medium 2 first; tiles and windows keep the order of the media."""
    media = dict(enumerate((pictures(2, 5), sound(1, 10, 40), pictures(1, 9), sound(2, 30, 120))))
    pieces = (TextPiece((1, 2)), TextPiece(medium=2), TextPiece(medium=3), TextPiece((3,), True),
              TextPiece(medium=0), TextPiece(medium=1), TextPiece((4, 5, 6), True))  # fmt: skip
    got = compose(pieces, media, MEDIA, **OPTIONS)
    text = [1, 2, *[77] * 34, 3, *[77] * 18, 4, 5, 6]
    assert tokens(got).tolist() == text
    assert supervised(got).tolist() == [t in (3, 4, 5, 6) for t in text]
    assert tiles(got)[:, 0, 0, 0].tolist() == [5, 5, 9]
    assert mel(got)[:, 0, 0].tolist() == [1, 2, 2]
    assert mel_frames(got).tolist() == [40, 100, 20]
    used = got.places["vision", "llm"].weight[:, 0] == 1
    assert np.flatnonzero(used).tolist() == [*range(2, 6), *range(37, 45)]
    assert seen(got)[used].tolist() == [[k, -1, -1, -1] for k in (*range(8, 12), *range(8))]
    assert heard(got)[heard(got) >= 0].tolist() == [*range(WINDOW, WINDOW + 30), *range(10)]
    assert np.flatnonzero(heard(got) >= 0).tolist() == [*range(6, 36), *range(45, 55)]
    llm = got.fields["llm"]
    assert llm["is_visual"].tolist() == (used | (heard(got) >= 0)).tolist()
    assert llm["targets"][:-1].tolist() == text[1:]


@pytest.mark.parametrize("kept", range(9))
def test_of_a_cut_sample_media_behind_the_cut_are_gone(kept):
    """Each medium counts as one token there."""
    media = {0: pictures(1, 5), 1: sound(1, 10, 40)}
    pieces = (TextPiece((1, 2)), TextPiece(medium=1), TextPiece((3, 4), True), TextPiece(medium=0),
              TextPiece((5,)))  # fmt: skip
    first = first_tokens(pieces, kept)
    media = {k: medium for k, medium in media.items() if k in {p.medium for p in first}}
    got = compose(first, media, MEDIA, **OPTIONS)
    whole = [[1], [2], [77] * 10, [3], [4], [77] * 4, [5]]
    assert tokens(got).tolist() == [*chain(*whole[:kept])]
    assert (len(mel(got)), len(tiles(got))) == (kept > 2, kept > 5)


def test_nothing_at_all():
    got = compose((), {}, MEDIA, **OPTIONS)
    assert (len(tokens(got)), len(tiles(got)), len(mel(got)), got.load) == (0, 0, 0, Load({}))
    for pieces, media in [((TextPiece(medium=0),), {}), ((), {0: sound(1, 2, 9)}),
                          ((TextPiece(medium=0),) * 2, {0: sound(1, 2, 9)})]:  # fmt: skip
        with pytest.raises(ValueError, match=r"each of \d media once"):
            compose(pieces, media, MEDIA, **OPTIONS)


def test_every_kind_of_sample_is_as_large_as_its_count(tmp_path):
    tokenizer = ByteTokenizer()
    found = MixtureSource(
        Mixture((MixturePart(str(made_dataset(tmp_path))),)),
        MEDIA,
        lambda turns: chat_pieces(turns, tokenizer),
        IndexRules(tmp_path / "index.npz", "bytes"),
    )
    counts = found.counts()
    assert counts.modules == ("vision", "audio")
    for i in range(len(found)):
        record, total = found.record(i), int(counts.all_tokens[i])
        got = compose(found.pieces(record), found.media(i, record), MEDIA, **OPTIONS)
        assert len(tokens(got)) == total
        assert [len(tiles(got)), len(mel(got))] == counts.pieces[i].tolist()
        assert got.load == found.load(i, counts.taken(slice(i, i + 1)))
        from_tiles = from_pictures(got) | newlines(got)
        from_sound = heard(got) >= 0
        assert [from_tiles.sum(), from_sound.sum()] == counts.media[1, i].tolist()
        assert not (from_tiles & from_sound).any()
        assert not supervised(got)[from_tiles | from_sound].any()
        assert seen(got).max(initial=-1) < max(1, 4 * len(tiles(got)))
