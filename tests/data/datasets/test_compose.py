"""Whole samples: their arrays against their costs, and a plain second assembly token by token."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_jax.data import ByteTokenizer, MediaSpec
from dflop_jax.data.datasets.compose import compose, fit_text
from dflop_jax.data.datasets.costs import Preprocessing, SampleCosts
from dflop_jax.data.datasets.mixture import Mixture, Part
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.decode import Pictures, Sound
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.token_sources import plain
from dflop_jax.data.text.pieces import OMNI_TAG, Piece, chat_pieces
from dflop_jax.records import SampleShape
from tests.data.media_cases import made_dataset

VISION = AnyRes(tile_px=28, patches=2, pinpoints=((28, 56), (56, 28), (56, 56)))
SPEC = MelSpec(n_mels=4, window_s=1, max_windows=3)
MEDIA = MediaSpec(28, 4, "anyres", 4, SPEC)
OPTIONS = {"placeholder": 77}


def pictures(n, first):
    """A medium of n tiles, its tokens the patches in order."""
    return Pictures(np.full((n, 28, 28, 3), first, np.uint8), plain(np.arange(4 * n)))


def sound(windows, tokens, frames):
    return Sound(np.full((windows, 4, 100), windows, np.float32), tokens, frames)


def test_media_stand_in_their_own_order():
    """The text places medium 2 first; tiles and windows keep the order of the media."""
    media = (pictures(2, 5), sound(1, 10, 40), pictures(1, 9), sound(2, 30, 120))
    pieces = (Piece((1, 2)), Piece(medium=2), Piece(medium=3), Piece((3,), True), Piece(medium=0),
              Piece(medium=1), Piece((4, 5, 6), True))  # fmt: skip
    got = compose(pieces, media, MEDIA, **OPTIONS)
    text = [1, 2, *[77] * 34, 3, *[77] * 18, 4, 5, 6]
    assert got.tokens.tolist() == text
    assert got.supervised.tolist() == [t in (3, 4, 5, 6) for t in text]
    assert got.tiles[:, 0, 0, 0].tolist() == [5, 5, 9]
    assert got.mel[:, 0, 0].tolist() == [1, 2, 2]
    assert got.mel_frames.tolist() == [40, 100, 20]
    used = got.visual.weight[:, 0] == 1
    assert np.flatnonzero(used).tolist() == [*range(2, 6), *range(37, 45)]
    assert got.visual.index[used, 0].tolist() == [*range(8, 12), *range(8)]
    window = 25  # tokens of 100 frames
    assert got.audio[got.audio >= 0].tolist() == [*range(window, window + 30), *range(10)]
    assert np.flatnonzero(got.audio >= 0).tolist() == [*range(6, 36), *range(45, 55)]


@pytest.mark.parametrize("kept", [0, 1, 2, 4, 6])
def test_text_is_cut_from_the_end_and_media_stay(kept):
    media = (pictures(1, 5),)
    pieces = (Piece((1, 2)), Piece(medium=0), Piece((3, 4, 5, 6), True))
    got = compose(pieces, media, MEDIA, text_tokens=kept, **OPTIONS)
    whole = [1, 2, 3, 4, 5, 6][:kept]
    assert got.tokens.tolist() == [*whole[:2], *[77] * 4, *whole[2:]]


def test_nothing_at_all():
    got = compose((), (), MEDIA, **OPTIONS)
    assert (len(got.tokens), len(got.tiles), len(got.mel), len(got.visual)) == (0, 0, 0, 0)
    for pieces, media in [((Piece(medium=0),), ()), ((), (sound(1, 2, 9),)),
                          ((Piece(medium=0), Piece(medium=0)), (sound(1, 2, 9),))]:  # fmt: skip
        with pytest.raises(ValueError, match=r"each of \d media once"):
            compose(pieces, media, MEDIA, **OPTIONS)


def test_every_kind_of_sample_is_as_large_as_its_cost(tmp_path):
    tokenizer = ByteTokenizer()
    found = MixtureSource(
        Mixture((Part(str(made_dataset(tmp_path))),)),
        Preprocessing(VISION, SPEC, 4),
        lambda turns: chat_pieces(turns, tokenizer, OMNI_TAG),
        "bytes",
        index_file=tmp_path / "index.npz",
    )
    for i in range(len(found)):
        cost = found.cost(i)
        got = compose(found.pieces(i), found.media(i), MEDIA, **OPTIONS)
        assert len(got.tokens) == len(got.supervised) == cost.llm_tokens
        assert (len(got.tiles), len(got.mel)) == (cost.tiles, cost.windows)
        text = cost.text_tokens
        assert got.shape == SampleShape(
            cost.tiles, text, cost.llm_tokens, cost.frames, cost.windows
        )
        assert got.mel_frames.sum() == cost.audio_frames
        seen = got.visual.weight.any(1) | got.visual.newline
        assert seen.sum() == cost.visual_tokens
        heard = got.audio >= 0 if len(got.audio) else np.zeros_like(seen)
        assert heard.sum() == cost.audio_tokens
        assert not (seen & heard).any()
        assert not got.supervised[seen | heard].any()
        assert got.visual.index.max(initial=-1) < 4 * len(got.tiles) or not len(got.tiles)


@pytest.mark.parametrize("truncate", [False, True])
def test_what_fits(truncate):
    rng = np.random.default_rng(0)
    text, visual, audio, prompt = rng.integers(0, 120, (4, 300))
    prompt = np.minimum(prompt, text)
    zeros = np.zeros(300, np.int64)
    costs = SampleCosts(zeros, zeros, zeros, zeros, text, visual, audio, zeros)
    kept, fits = fit_text(costs, prompt, 200, truncate=truncate)
    assert 0 < fits.sum() < 300
    for t, v, a, p, k, f in zip(text, visual, audio, prompt, kept, fits, strict=True):
        if f:
            assert k + v + a <= 200
            assert k == t or (truncate and k + v + a == 200)
            assert k >= min(t, p + 32)
        else:
            assert v + a + (min(t, p + 32) if truncate else t) > 200
