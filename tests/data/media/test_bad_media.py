"""Broken and odd media on the way of published preprocessing: read right, or one clear line."""

from __future__ import annotations

import struct
import zlib

import av
import numpy as np
import pytest

from dflop_jax.data.media.audio import count_samples, read_sound
from dflop_jax.data.media.tiling import picture_size
from dflop_jax.data.media.video import read_frames
from tests.data.media_cases import SHARED, count_frames, read_upright


def huge_png(path, side):
    """A header that promises side x side pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", b""), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


@pytest.mark.parametrize("side", [9_000, 20_000])
def test_too_many_pixels(tmp_path, side):
    path = huge_png(tmp_path / "a.png", side)
    for read in (picture_size, read_upright):
        with pytest.raises(ValueError, match=r"a\.png: .*(megapixels|exceeds)") as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["mkv", "avi", "mp4"])
def test_a_clip_without_frames(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()
    with pytest.raises(ValueError, match=rf"a\.{suffix}: not a readable video"):
        count_frames(path, 8)
    with pytest.raises(ValueError, match=rf"a\.{suffix}: "):
        read_frames(path, 1, np.asarray)


def read_all(path):
    """The media of any file, as its ending tells."""
    if path.suffix in (".jpg", ".png"):
        picture_size(path)
        return read_upright(path)
    if path.suffix == ".mp4":
        return read_frames(path, count_frames(path, 8), np.asarray)
    return read_sound(path, count_samples(path, 16000), 16000)


@pytest.mark.parametrize(
    "name",
    ["truncated.jpg", "header_only.jpg", "zero_byte.png", "truncated.png", "corrupt_idat.png",
     "text_named.jpg", "half_index_first.mp4", "half_index_last.mp4", "wav_header_no_data.wav",
     "wav_zero_samples.wav", "truncated.flac"],
)  # fmt: skip
def test_shared_bad_media_are_one_line(shared_data, name):
    with pytest.raises(ValueError, match=name) as caught:
        read_all(SHARED / "bad" / name)
    assert "\n" not in str(caught.value)


def test_a_shared_picture_of_another_ending(shared_data):
    assert read_all(SHARED / "bad" / "png_named_jpg.jpg").size == (200, 345)
