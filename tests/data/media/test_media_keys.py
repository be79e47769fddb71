"""Keys that a record gives a medium: as qwen-vl-utils takes them, used or named."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.media.kind import VIDEO, with_keys
from dflop_jax.data.media.native import Native
from dflop_jax.data.media.pictures import frame_tile
from dflop_jax.data.media.video import ClipHeader, read_numbered
from tests.data.media.test_native import dataset
from tests.data.media_cases import noise, picture_header, with_columns, write_clip
from tests.verify.folders import load


def keyed_size(height, width, low, high):
    """Rows and columns of patches, as qwen-vl-utils sizes a picture or a frame."""
    code = load("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return tuple(side // 16 for side in code.smart_resize(height, width, 32, low, high))


def test_keys_of_a_picture_say_its_size():
    rng = np.random.default_rng(0)
    for _ in range(300):
        width, height = np.exp(rng.uniform(3, 8, 2)).astype(int).tolist()
        low, high = sorted(np.exp(rng.uniform(8, 16, 2)).astype(int).tolist())
        keys = {"min_pixels": low, "max_pixels": high}
        resized = {"resized_height": 40 + height, "resized_width": 2 * width, **keys}
        for given, size in [
            (keys, (height, width, low, high)),
            ({"max_pixels": high}, (height, width, 4096, high)),
            ({"min_pixels": low}, (height, width, low, 2**24)),
            (resized, (40 + height, 2 * width, 4096, 2**24)),
        ]:
            header = picture_header(width, height, **given)
            if max(width, height) < 200 * min(width, height):
                assert Native().grid(header) == keyed_size(*size), (width, height, given)


def test_keys_of_a_clip_say_its_frames_and_size():
    rng = np.random.default_rng(0)
    native = Native()
    file = {**ClipHeader(640, 360, 300, 10, 1)._asdict(), "frames": 60}
    for keys, frames in [
        ({}, np.linspace(0, 299, 60)),
        ({"fps": 1}, np.linspace(0, 299, 30)),
        ({"fps": 0.5, "min_frames": 19}, np.linspace(0, 299, 20)),
        ({"fps": 9.5, "max_frames": 13}, np.linspace(0, 299, 12)),
        ({"fps": 0.26}, np.linspace(0, 299, 6)),
        ({"nframes": 8}, np.linspace(0, 299, 8)),
        ({"nframes": 9}, np.linspace(0, 299, 8)),
        ({"video_start": 10.0, "video_end": 20.0}, np.linspace(100, 200, 20)),
        ({"video_start": 29.05}, np.linspace(291, 299, 4)),
        ({"video_end": 100}, np.linspace(0, 299, 60)),
        ({"video_start": 0, "video_end": 0.19, "nframes": 2}, [0, 1]),
    ]:
        header = with_keys(file, keys)
        layout = native.clip(ClipHeader(*(header[name] for name in ClipHeader._fields)))
        assert layout.frames == tuple(np.round(frames).astype(int)), keys
        pairs = np.reshape(layout.frames, (-1, 2)).mean(axis=1)
        np.testing.assert_allclose(layout.seconds, pairs / 10)
    assert with_keys(file, {"video_start": 10, "video_end": 20})["frames"] == 21
    assert native.clip(ClipHeader(640, 360, 7, 10, 1, nframes=8)) is None
    for _ in range(200):
        width, height, n = (int(k) for k in rng.integers([40, 40, 2], [2000, 2000, 80]))
        low, high, total = (int(x) for x in np.exp(rng.uniform([8, 13, 14], [13, 16, 18])))
        clip = ClipHeader(width, height, 2 * n, 10, 1, nframes=2 * (n // 2))
        most = max(min(768 * 1024, 115_200 * 1024 / clip.nframes * 2), int(128 * 1024 * 1.05))
        of_all = max(min(768 * 1024, total / clip.nframes * 2), int(low * 1.05))
        for keys, limits in [
            ({"max_pixels": high}, (128 * 1024, min(high, most))),
            ({"min_pixels": low, "total_pixels": total}, (low, of_all)),
            ({"min_pixels": low, "max_pixels": high, "total_pixels": total},
             (low, min(high, of_all))),
        ]:  # fmt: skip
            assert native.clip(clip._replace(**keys)).grid == keyed_size(height, width, *limits)
        sized = clip._replace(resized_width=100, resized_height=400, max_pixels=high)
        assert native.clip(sized).grid == keyed_size(400, 100, 4096, 2**24)


def test_keys_that_cannot_be():
    header = with_columns(VIDEO, **ClipHeader(64, 48, 50, 10, 1)._asdict())
    for keys, why in [
        ({"fps": 0}, "its fps is 0, which is not a valid number"),
        ({"nframes": 2.5}, "its nframes is 2.5"),
        ({"max_pixels": "9"}, "its max_pixels is .9."),
        ({"min_frames": True}, "its min_frames is True"),
        ({"video_end": -1}, "its video_end is -1"),
        ({"max_pixels": 10, "min_pixels": 20}, "its min_pixels 20 is above its max_pixels 10"),
        ({"min_frames": 9, "max_frames": 8}, "its min_frames 9 is above its max_frames 8"),
        ({"fps": 1, "nframes": 2}, "it has fps and nframes; leave one out"),
        ({"resized_width": 64}, "one of resized_width and resized_height; give both"),
        ({"video_start": 3, "video_end": 2}, "video_start 3 leaves no frames of 5.00 s"),
        ({"video_start": 6}, "video_start 6 leaves no frames of 5.00 s"),
    ]:
        with pytest.raises(ValueError, match=why):
            with_keys(header, keys)


def record(*parts, answer="a"):
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def test_keys_of_parts_reach_the_model_or_are_named(tmp_path, caplog):
    write_clip(tmp_path / "c.mp4", 40)  # 4 frames a second
    Image.fromarray(noise(300, 400)).save(tmp_path / "a.png")

    clip, image = {"type": "video", "video": "c.mp4"}, {"type": "image", "image": "a.png"}
    listed = {"images": [{"path": "a.png", "min_pixels": 2048, "detail": "low"}]}
    records = [
        record(clip | {"video_start": 1.0, "video_end": 2.9, "nframes": 4}),
        record(image | {"max_pixels": 32 * 32 * 12, "detail": "low"}, clip),
        record({"type": "image", "max_pixels": 32 * 32 * 6}) | listed,
        record(image | {"max_pixels": -1}),
    ]
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = dataset(tmp_path, records, max_bad_fraction=0.5)
    assert "dataset.json[3]: its max_pixels is -1" in caplog.text
    assert "not read: detail (2 records)" in caplog.text
    assert "not used" not in caplog.text
    first, second, third = (source.sample(k) for k in range(3))
    native = Native(max_clip_pixels=60_000)
    resized = partial(native.resized, grid=(4, 4))
    shown = read_numbered(tmp_path / "c.mp4", [4, 6, 9, 11], resized)
    np.testing.assert_array_equal(first.fields["vision"]["patches"], native.patches(shown))
    assert second.load.lengths("vision")[0] == 4 * 12
    assert third.load.lengths("vision") == (4 * 4,)  # 2 x 2 blocks, as 2 x 3 are too many
    assert all(made.load == source.load(k) for k, made in enumerate([first, second, third]))

    caplog.clear()
    tiles = MediaSpec({"vision": {"form": "tiles", "tile_px": 32, "tokens_per_tile": 4}})
    config = DataConfig(path=str(tmp_path), max_bad_fraction=0.5)
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        of_tiles = make_source(config, tiles, index_dir=tmp_path, in_processes=False)
    assert (
        f"{tmp_path}: not used: min_pixels of images (1 of them); not used: max_pixels of images "
        "(2 of them); not used: nframes of videos (1 of them)\n"
    ) in caplog.text
    seen = of_tiles.sample(0).fields["vision"]["pixels"]  # of 2 s, 2 a second
    moments = read_numbered(tmp_path / "c.mp4", [5, 7, 9, 11], partial(frame_tile, tile_px=32))
    np.testing.assert_array_equal(seen, moments)


def test_a_tag_in_text_before_a_part_that_names_its_medium(tmp_path):
    Image.fromarray(noise(64, 64)).save(tmp_path / "a.png")
    before, after = (
        {"type": "text", "text": text} for text in ("Write <image>, not ", " or <image>.")
    )
    made = record(before, {"type": "image", "image": "a.png"}, after, answer="An <image>.")
    assert dataset(tmp_path, [made]).load(0).lengths("vision") == (16,)
