"""What fits, and how: every sample against a plain search over the preparations."""

import numpy as np
import pytest

from dflop_jax.data.datasets.fitting import ANSWER_TOKENS, fit, preparations
from dflop_jax.data.media.counts import SampleCounts, most_demanding
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.tiles import SimpleTiles
from tests.data.views import prepared


@pytest.mark.parametrize(
    "tiles, frames, expected",
    [(9, 32, [(9, 32), (5, 16), (3, 8), (2, 4), (1, 2), (1, 1)]), (1, 1, [(1, 1)]),
     (1, 3, [(1, 3), (1, 2), (1, 1)])],
)  # fmt: skip
def test_media_are_halved_down_to_one(tiles, frames, expected):
    between = tuple((k,) for k in range(frames - 1))
    how = prepared(SimpleTiles(8, 3, tiles), MelSpec(), frames, between)
    ways = preparations(how, "truncate")
    seen = [way["vision"] for way in ways]
    assert [(medium.layout.max_tiles, medium.max_frames) for medium in seen] == expected
    assert [medium.between_frames for medium in seen] == [between[: n - 1] for _, n in expected]
    assert all(way["audio"] == how["audio"] for way in ways)
    for oversize in ("drop", "error"):
        assert preparations(how, oversize) == ways[:1]


@pytest.mark.parametrize("oversize", ["truncate", "drop"])
@pytest.mark.parametrize("n", [0, 1, 400])
def test_each_sample_takes_the_first_way_that_will_do(n, oversize):
    rng = np.random.default_rng(n)
    limits = Limits(max_tokens=100, oversize=oversize)
    text = rng.integers(1, 150, n)
    prompt = np.minimum(text, rng.integers(0, 100, n))
    frames = rng.integers(0, 12, n)
    ways = preparations(prepared(SimpleTiles(8, 3)), oversize)

    def counts(how):
        tiles = np.minimum(frames, how["vision"].max_frames // 4)[:, None]
        return SampleCounts(("vision",), text, np.stack([tiles, 10 * tiles, 0 * tiles, 0 * tiles]))

    fitted = fit(counts, prompt, ways, limits)
    for i in range(n):
        needed = min(text[i], prompt[i] + ANSWER_TOKENS) if oversize == "truncate" else text[i]
        visual = [10 * min(frames[i], how["vision"].max_frames // 4) for how in ways]
        good = [way for way, v in enumerate(visual) if v + needed <= 100]
        assert fitted.fits[i] == bool(good)
        if good:
            way = good[0]
            kept = min(text[i], 100 - visual[way])
            assert (fitted.way[i], fitted.text_tokens[i]) == (way, kept)
            assert fitted.counts.media[1, i].tolist() == [visual[way]]
            assert fitted.all_tokens[i] == visual[way] + kept <= 100


def test_the_most_demanding_ask_for_all_that_any_does():
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 30, 200):
        asks = rng.integers(0, 6, (n, 3)) * rng.integers(0, 2, (n, 3))
        chosen = most_demanding(asks, 1000)
        for row in asks:
            assert any((asks[k] >= row).all() for k in chosen)
        for k in chosen:  # none for nothing
            assert not any((asks[j] >= asks[k]).all() for j in chosen if j != k)
        assert most_demanding(asks, 2) == chosen[:2]
