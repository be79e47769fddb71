"""Clips written here, sampled by header and decoded: the counts agree, the moments are even."""

import logging
from fractions import Fraction
from functools import partial

import av
import numpy as np
import pytest

from dflop_jax.data.media.anyres import frame_tile
from dflop_jax.data.media.video import read_frames, read_numbered
from tests.data.media_cases import clip_of, count_frames


def read_clip(path, n):
    return read_frames(path, n, partial(frame_tile, tile_px=16))


def write_clip(path, n, rate=10, size=(64, 48), split=False):
    """A clip whose frame k is a flat grey of 255 * k / n; `split`: its left half is black."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for k in range(n):
            pixels = np.full((size[1], size[0], 3), 255 * k // n, np.uint8)
            if split:
                pixels[:] = 255
                pixels[:, : size[0] // 2] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = k
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


@pytest.mark.parametrize("suffix", ["mp4", "avi", "mkv"])
@pytest.mark.parametrize("n, count", [(1, 1), (4, 1), (20, 4), (60, 8)])
def test_frames_follow_the_duration_up_to_the_cap(tmp_path, suffix, n, count):
    path = write_clip(tmp_path / f"a.{suffix}", n)
    assert count_frames(path, 8) == count
    for wanted in {1, count}:
        clip = read_clip(path, wanted)
        assert clip.shape == (wanted, 16, 16, 3)
        moments = (np.arange(wanted) + 0.5) * n / wanted
        shown = np.minimum(np.floor(moments), n - 1) * 255 / n
        # a moment on the border of two frames may show either
        assert np.abs(clip.mean((1, 2, 3)) - shown).max() < 255 / n + 6


def test_a_clip_lying_down_is_stood_up(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 3, split=True)
    data = path.read_bytes()
    matrix = [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000]
    turned = [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000]  # shown a quarter turn clockwise
    plain, quarter = (b"".join(v.to_bytes(4, "big", signed=True) for v in m)
                      for m in (matrix, turned))  # fmt: skip
    at = data.index(plain, data.index(b"tkhd"))
    path.write_bytes(data[:at] + quarter + data[at + 36 :])
    tile = read_clip(path, 1)[0]
    assert tile[:6].mean() < 20  # the black half, left as stored, is on top
    assert tile[-6:].mean() > 235
    assert clip_of(path)[:2] == (48, 64)
    (frame,) = read_numbered(path, [1], np.asarray)
    assert frame.shape == (64, 48, 3)
    assert frame[:24].mean() < 20
    assert frame[-24:].mean() > 235


def test_a_clip_that_breaks_off(tmp_path, shared_data, caplog):
    whole = write_clip(tmp_path / "a.mkv", 60).read_bytes()
    broken = tmp_path / "b.mkv"
    broken.write_bytes(whole[: int(len(whole) * 0.8)])
    with caplog.at_level(logging.WARNING):
        clip = read_clip(broken, 8)
    assert clip.shape[0] == 8
    assert (clip[-1] == clip[-2]).all()
    assert str(broken) in caplog.text
    assert "repeated" in caplog.text
    with pytest.raises(ValueError, match="half_index_first"):
        read_clip(shared_data / "bad/half_index_first.mp4", 7)


@pytest.mark.parametrize("content", [b"", b"no video", b"RIFF"])
def test_no_video_is_a_value_error(tmp_path, content):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.mp4"):
        count_frames(path, 4)
    with pytest.raises(ValueError, match=r"a\.mp4"):
        read_clip(path, 4)
