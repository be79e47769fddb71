"""Whole samples: their arrays against their counts, and a plain second assembly token by token."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.compose import compose
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.token_sources import copied_sources
from dflop_jax.data.text.tokenize import TokenRun
from dflop_jax.records import Load
from tests.data import views
from tests.data.views import heard, mel, mel_frames, prepared, seen, supervised, tiles, tokens

VISION = AnyRes(tile_px=28, patches=2, pinpoints=((28, 56), (56, 28), (56, 56)))
SPEC = MelSpec(n_mels=4, window_s=1, max_windows=3)
MEDIA = prepared(VISION, SPEC, 4)
WINDOW = 25  # tokens of 100 frames
OPTIONS = {"placeholder": 77}


def pictures(n, first):
    """A medium of n tiles, its tokens the patches in order."""
    return views.pictures(
        np.full((n, 28, 28, 3), first, np.uint8), copied_sources(np.arange(4 * n)), 4
    )


def sound(windows, tokens, frames):
    valid = np.minimum(frames - 100 * np.arange(windows), 100)
    return views.sound(np.full((windows, 4, 100), windows, np.float32), valid, tokens, WINDOW)


def test_media_stand_in_their_own_order():
    """The text places medium 2 first; tiles and windows keep the order of the media."""
    media = dict(enumerate((pictures(2, 5), sound(1, 10, 40), pictures(1, 9), sound(2, 30, 120))))
    pieces = (TokenRun((1, 2)), TokenRun(medium=2), TokenRun(medium=3), TokenRun((3,), True),
              TokenRun(medium=0), TokenRun(medium=1), TokenRun((4, 5, 6), True))  # fmt: skip
    got = compose(pieces, media, MEDIA, **OPTIONS)
    text = [1, 2, *[77] * 34, 3, *[77] * 18, 4, 5, 6]
    assert tokens(got).tolist() == text
    assert supervised(got).tolist() == [t in (3, 4, 5, 6) for t in text]
    assert tiles(got)[:, 0, 0, 0].tolist() == [5, 5, 9]
    assert mel(got)[:, 0, 0].tolist() == [1, 2, 2]
    assert mel_frames(got).tolist() == [40, 100, 20]
    used = got.gathers["vision", "llm"].weight[:, 0] == 1
    assert np.flatnonzero(used).tolist() == [*range(2, 6), *range(37, 45)]
    assert seen(got)[used].tolist() == [[k, -1, -1, -1] for k in (*range(8, 12), *range(8))]
    assert heard(got)[heard(got) >= 0].tolist() == [*range(WINDOW, WINDOW + 30), *range(10)]
    assert np.flatnonzero(heard(got) >= 0).tolist() == [*range(6, 36), *range(45, 55)]
    llm = got.fields["llm"]
    assert llm["is_visual"].tolist() == (used | (heard(got) >= 0)).tolist()
    assert llm["targets"][:-1].tolist() == text[1:]


def test_nothing_at_all():
    got = compose((), {}, MEDIA, **OPTIONS)
    assert (len(tokens(got)), len(tiles(got)), len(mel(got)), got.load) == (0, 0, 0, Load({}))
    for pieces, media in [((TokenRun(medium=0),), {}), ((), {0: sound(1, 2, 9)}),
                          ((TokenRun(medium=0),) * 2, {0: sound(1, 2, 9)})]:  # fmt: skip
        with pytest.raises(ValueError, match=r"each of \d media once"):
            compose(pieces, media, MEDIA, **OPTIONS)
