"""Careless users' records on the way from a file to samples, for every form of model: each is read
right, or named in one line of the log and left out, or named when it is decoded."""

from __future__ import annotations

import json
import logging

import av
import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data import make_source
from dflop_jax.data.media.mel import MelSpec
from tests.data.media.test_bad_media import huge_png
from tests.data.media_cases import made_pictures, noise, talk, write_clip, write_wav
from tests.data.text.test_chat import CHATML, write
from tests.data.views import media_spec, tiles

SOUND = MelSpec(n_mels=4, window_s=1, max_windows=3)
SPECS = {
    "tiles": media_spec(28, 4),
    "tiles and sound": media_spec(28, 4, sound=SOUND),
    "anyres": media_spec(28, 4, "anyres", 4, SOUND),
    "dynamic": media_spec(28, 4, "dynamic", sound=SOUND),
}
every_form = pytest.mark.parametrize("form", SPECS)


def load(path, form, index_dir, **more):
    options = {"max_tokens": 4096, "max_frames": 4, "max_tiles": 4, "max_bad_fraction": 1.0}
    config = DataConfig(path=str(path), **{**options, **more})
    return make_source(config, SPECS[form], index_dir=index_dir, vocab_size=512)


def no_frames(path):
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()


def make_bad(folder):
    """{file of a bad medium: its kind}, all found out by their headers."""
    huge_png(folder / "huge.png", 20_000)
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("no picture")
    no_frames(folder / "none.mp4")
    (folder / "broken.mp4").write_bytes(write_clip(folder / "a.mp4", 9).read_bytes()[:400])
    write_wav(folder / "none.wav", np.zeros((1, 0), int), 16000)
    (folder / "text.wav").write_text("no sound")
    return {
        "huge.png": "image", "empty.png": "image", "text.jpg": "image", "gone.png": "image",
        "none.mp4": "video", "broken.mp4": "video", "none.wav": "audio", "text.wav": "audio",
    }  # fmt: skip


@every_form
def test_odd_pictures_are_samples(form, tmp_path):
    pictures = made_pictures(tmp_path)
    Image.fromarray(np.full((50, 40), 40_000, np.uint16)).save(tmp_path / "deep.png")
    names = [*(p.name for p in pictures), "deep.png"]
    records = [{"image": n, "conversations": talk("<image>", "a")} for n in names]
    (tmp_path / "d.json").write_text(json.dumps(records))
    found = load(tmp_path / "d.json", form, tmp_path, max_bad_fraction=0.0)
    thin = form == "anyres"  # a line of 3 pixels leaves none in LLaVA-OneVision's grids
    assert len(found) >= len(names) - thin
    for i in range(len(found)):
        sample = found.sample(i)
        assert sample.load == found.load(i)
        assert len(tiles(sample)) >= 1


@every_form
def test_bad_media_are_named_and_left_out(form, tmp_path, caplog):
    bad = make_bad(tmp_path)
    Image.fromarray(noise(40, 50)).save(tmp_path / "good.png")
    records = [{"id": "good", "image": "good.png", "conversations": talk("<image>", "a")}]
    records += [{"id": n, kind: n, "conversations": talk(f"<{kind}>", "a")}
                for n, kind in bad.items()]  # fmt: skip
    (tmp_path / "d.json").write_text(json.dumps(records))
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        found = load(tmp_path / "d.json", form, tmp_path)
    assert len(found) == 1
    assert found.sample(0).load == found.load(0)
    lines = [r.getMessage() for r in caplog.records]
    assert all("\n" not in line for line in lines)
    for k, name in enumerate(bad, 1):
        (line,) = (s for s in lines if f"d.json[{k}] id={name}" in s)
        assert line.count(name) >= 2
    with pytest.raises(ValueError, match=r"records are unusable .*d\.json\[1\].*repair them"):
        load(tmp_path / "d.json", form, tmp_path, max_bad_fraction=0.1)


@every_form
def test_pixels_that_break_off_are_named_when_decoded(form, tmp_path):
    whole = tmp_path / "whole.jpg"
    Image.fromarray(noise(300, 300)).save(whole)
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:2000])
    records = [{"image": "cut.jpg", "conversations": talk("<image>", "a")}]
    (tmp_path / "d.json").write_text(json.dumps(records))
    with pytest.raises(ValueError, match=r"d\.json\[0\].*cut\.jpg") as caught:
        load(tmp_path / "d.json", form, tmp_path).sample(0)
    assert "\n" not in str(caught.value)


@every_form
def test_every_shared_bad_record(form, shared_data, tmp_path, caplog):
    file = shared_data / "bad" / "bad_records.json"
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        found = load(file, form, tmp_path, root=(str(shared_data),))
    raw = json.loads(file.read_text())
    kept = [int(found.label(i).split("[")[1].split("]")[0]) for i in range(len(found))]
    broken = {
        "bad_truncated_jpg", "bad_truncated_png", "bad_corrupt_idat_png", "bad_half_index_first",
        *(["bad_truncated_flac"] if form != "tiles" else []),
    }  # fmt: skip
    assert broken <= {raw[k]["id"] for k in kept}
    for i, number in enumerate(kept):
        if raw[number]["id"] not in broken:
            assert found.sample(i).load == found.load(i)
            continue
        with pytest.raises(ValueError, match=r"bad_records\.json\[\d+\].*bad/") as caught:
            found.sample(i)
        assert found.label(i).split(" ")[0] in str(caught.value)
        assert "\n" not in str(caught.value)
    for k, record in enumerate(raw):
        named = f"bad_records.json[{k}]" in caplog.text
        assert k in kept or named or (form == "tiles" and record.get("audio"))


@every_form
def test_shared_broken_lists(form, shared_data, tmp_path):
    for name, why in (("broken.json", r"broken\.json: n"), ("broken_line.jsonl", "line.jsonl:3")):
        with pytest.raises(ValueError, match=why) as caught:
            load(shared_data / "bad" / name, form, tmp_path, root=(str(shared_data),),
                 max_bad_fraction=0.1)  # fmt: skip
        assert "\n" not in str(caught.value)
    found = load(shared_data / "bad/broken_line.jsonl", form, tmp_path, root=(str(shared_data),))
    assert len(found) == (3 if form == "tiles" else 5)


@every_form
def test_tokenizers_that_do_not_fit(form, tmp_path):
    (tmp_path / "d.json").write_text(json.dumps([{"conversations": talk("a", "b")}]))
    whole = write(tmp_path / "whole", CHATML)
    lacks = write(tmp_path / "lacks", CHATML, {"eos_token": "<eos>"})
    small = DataConfig(path=str(tmp_path / "d.json"), tokenizer=str(whole))
    with pytest.raises(ValueError, match=r"whole: the tokenizer has \d+ ids, .* 128 rows"):
        make_source(small, SPECS[form], index_dir=tmp_path, vocab_size=128)
    with pytest.raises(ValueError, match=r"lacks: .*'<eos>', which .*lacks"):
        make_source(
            DataConfig(path=small.path, tokenizer=str(lacks)), SPECS[form], index_dir=tmp_path
        )
    file = DataConfig(path=small.path, tokenizer=str(write(tmp_path / "no", special=["<x>"])
                                                     / "tokenizer.json"))  # fmt: skip
    with pytest.raises(ValueError, match=r"tokenizer\.json: lacks <\|im_start\|>; add it"):
        make_source(file, SPECS[form], index_dir=tmp_path)
