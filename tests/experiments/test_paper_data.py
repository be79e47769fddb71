"""The shipped quantile tables, and samples drawn from them."""

from pathlib import Path

import numpy as np
import pytest

from experiments.paper import data, tables
from experiments.paper.data import Assumptions, Draws

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT.parent / "shared" / "data" / "shapes"


def test_tables_hold_rising_quantiles_of_every_kind():
    found = data.tables()
    assert {t["kind"] for t in found} == set(tables.KINDS)
    for t in found:
        named = [k for k in ("prompt_chars", "answer_chars", "video_s", "audio_s") if k in t]
        named += ["images", "pixels"] if "image" in t["kind"] else []
        for k in named:
            assert len(t[k]) == tables.LEVELS + 1, (t["source"], k)
            assert t[k] == sorted(t[k]), (t["source"], k)
        assert t["rows"] > 0
        assert t["licence"]
        assert ("video_s" in t, "audio_s" in t) == (t["kind"] == "video", t["kind"] == "audio")


@pytest.mark.skipif(not SHAPES.is_dir(), reason="the shape files are not here")
def test_shipped_tables_are_what_the_script_makes():
    assert tables.text_of(tables.make(SHAPES)) == tables.TABLES.read_text(encoding="utf-8")


def test_a_table_of_rows_by_hand(tmp_path):
    rows = [
        {
            "images": [[w, 10]],
            "video_s": None,
            "audio_s": None,
            "prompt_chars": 0,
            "answer_chars": n,
        }
        for w, n in ((10, 1), (20, 2), (30, 3))
    ]
    t = tables.table_of("gsm8k", "single image", rows)
    assert t["rows"] == 3
    assert (t["pixels"][0], t["pixels"][50], t["pixels"][100]) == (100, 200, 300)
    assert [band[0] for band in t["aspect_by_pixels"]] == [1, 2, 3]
    assert (t["answer_chars"][50], t["images"][100]) == (2, 1)
    assert "video_s" not in t


@pytest.mark.parametrize("limit", [-1.0, 0.0, 1.5, 4.0, 30.0, 99.0, 1e9])
def test_share_below_is_what_counting_gives(limit):
    q = sorted([0.0, 1, 1, 1, 2, 8, 30, 30, 60, 99, 100.5])
    many = data.at(q, np.linspace(0, 1, 200_001))
    assert data.share_below(q, limit) == pytest.approx(np.mean(many <= limit), abs=1e-4)


@pytest.mark.parametrize(
    ("mixture", "kind", "field", "limit"),
    [("vision", "video", "video_s", 30.0), ("audio", "audio", "audio_s", np.inf)],
)
def test_durations_follow_the_tables_of_their_sources(mixture, kind, field, limit):
    """Share of samples below x, against the sources' own shares, weighted by their rows."""
    drawn = data.draw(mixture, 40_000, seed=3)
    own = getattr(drawn, field)[drawn.kind == kind]
    sources = [t for t in data.tables() if t["kind"] == kind]

    def pooled(x):  # rows of all sources below x, by counting levels
        levels = [data.at(t[field], np.linspace(0, 1, 20_001)) for t in sources]
        return sum(t["rows"] * np.mean(v <= x) for t, v in zip(sources, levels, strict=True))

    assert own.max() <= limit + 1e-9
    for x in np.quantile(own, [0.1, 0.3, 0.5, 0.8]):
        assert np.mean(own <= x) == pytest.approx(pooled(x) / pooled(min(limit, 1e9)), abs=0.02)


def test_draws_repeat_by_seed_and_differ_otherwise():
    one, two = (data.loads("vision", "anyres", 50, seed=1) for _ in range(2))
    assert one == two
    assert one != data.loads("vision", "anyres", 50, seed=2)
    assert len(data.loads("audio", "anyres", 1, seed=0)) == 1


def sample(images=(), video_s=0.0, audio_s=0.0, prompt=0, answer=8):
    return Draws(
        kind=np.array(["x"]),
        images=np.array([len(images)]),
        sizes=np.array(images, np.int64).reshape(-1, 2),
        video_s=np.array([video_s]),
        audio_s=np.array([audio_s]),
        prompt_chars=np.array([float(prompt)]),
        answer_chars=np.array([float(answer)]),
    )


def cost(drawn, layout="anyres", **assumed):
    found = data._loads(drawn, layout, Assumptions(**assumed))
    return [(len(x.lengths("vision")), x.tokens("llm"), len(x.lengths("audio"))) for x in found]


def test_what_samples_cost_by_hand():
    text = 32 + 15 + 2  # chat, an instruction of 60 characters, an answer of 8
    assert cost(sample()) == [(0, text, 0)]
    assert cost(sample(prompt=41)) == [(0, 32 + 11 + 2, 0)]
    # of several pictures each is one tile of 27 x 27 patches, and a line end
    assert cost(sample([(640, 480)] * 3)) == [(3, text + 3 * 730, 0)]
    # a frame a second, rounded up, 196 tokens each and one line end
    assert cost(sample(video_s=10.2)) == [(11, text + 11 * 196 + 1, 0)]
    assert cost(sample(video_s=500.0))[0][0] == 32
    assert cost(sample(audio_s=30.0)) == [(0, text + 750, 1)]
    assert cost(sample(audio_s=0.01)) == []  # too short to be heard


def test_internvl_shares_its_tiles_among_the_pictures_of_a_sample():
    (alone,) = cost(sample([(1200, 900)]), "dynamic")
    assert alone[0] == 13  # 4 x 3 tiles and a thumbnail
    (pair,) = cost(sample([(1200, 900)] * 2), "dynamic")
    assert pair[0] <= 2 * (6 + 1)
    assert pair[1] == 32 + 15 + 2 + 256 * pair[0]


def test_long_samples_lose_text_and_those_of_too_many_pictures_are_not_used():
    ((_, tokens, _),) = cost(sample(answer=10**6))
    assert tokens == 8192
    assert cost(sample([(64, 64)] * 12)) == []
    assert len(cost(sample([(64, 64)] * 12), max_tokens=9200)) == 1
