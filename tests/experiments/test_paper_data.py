"""The shipped quantile tables, and samples drawn from them."""

from pathlib import Path

import numpy as np

from experiments.paper import data, tables
from experiments.paper.data import DrawnSamples

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT.parent / "shared" / "data" / "shapes"


def test_tables_hold_rising_quantiles_of_every_kind():
    found = data.load_tables()
    assert {t["kind"] for t in found} == set(tables.KINDS)
    for t in found:
        columns = [k for k in ("prompt_chars", "answer_chars", "video_s", "audio_s") if k in t]
        columns += ["images", "pixels"] if "image" in t["kind"] else []
        for k in columns:
            assert len(t[k]) == tables.QUANTILES + 1, (t["source"], k)
            assert t[k] == sorted(t[k]), (t["source"], k)
        assert t["rows"] > 0
        assert t["licence"]
        assert ("video_s" in t, "audio_s" in t) == (t["kind"] == "video", t["kind"] == "audio")


def test_a_table_of_rows_by_hand(tmp_path):
    row = {"video_s": None, "audio_s": None, "prompt_chars": 0}
    rows = [row | {"images": [[10 * n, 10]], "answer_chars": n} for n in (1, 2, 3)]
    t = tables.build_table("gsm8k", "single image", rows)
    assert t["rows"] == 3
    assert (t["pixels"][0], t["pixels"][50], t["pixels"][100]) == (100, 200, 300)
    assert [band[0] for band in t["aspect_by_pixels"]] == [1, 2, 3]
    assert (t["answer_chars"][50], t["images"][100]) == (2, 1)
    assert "video_s" not in t


def sample(images=(), video_s=0.0, audio_s=0.0, prompt=0, answer=8):
    return DrawnSamples(
        kind=np.array(["x"]),
        images=np.array([len(images)]),
        sizes=np.array(images, np.int64).reshape(-1, 2),
        video_s=np.array([video_s]),
        audio_s=np.array([audio_s]),
        prompt_chars=np.array([float(prompt)]),
        answer_chars=np.array([float(answer)]),
    )


def cost(drawn, layout="anyres"):
    found = data.to_loads(drawn, layout)
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
