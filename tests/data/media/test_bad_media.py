"""Broken and odd media on the way of published preprocessing: read right, or one clear line."""

from __future__ import annotations

import struct
import zlib

import av
import numpy as np
import pytest

from dflop_jax.data.media.tiling import picture_size
from dflop_jax.data.media.video import read_frames
from tests.data.media_cases import count_frames, read_upright


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
