"""Frames by seeking are those of decoding from the start."""

from __future__ import annotations

import av
import numpy as np
import pytest

from dflop_jax.data.media import video
from dflop_jax.data.media.video import read_frames


def write_long(path, codec, frames=240, **options):
    """A clip of 64 x 48 pixels in which every frame differs, a key frame every 24."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=10, options={"g": "24", **options})
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for k in range(frames):
            image = np.full((48, 64, 3), k % 256, np.uint8)
            image[rng.integers(0, 48, 200), rng.integers(0, 64, 200)] = 255
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode())
    return path


def both(path, n, monkeypatch):
    """(frames with seeking, frames without, whether it sought)."""
    taken = []
    plan = video.seek_plan

    def watched(*args):
        taken.append(plan(*args))
        return taken[-1]

    monkeypatch.setattr(video, "seek_plan", watched)
    one = read_frames(path, n, np.asarray)
    monkeypatch.setattr(video, "seek_plan", lambda *args: None)
    two = read_frames(path, n, np.asarray)
    monkeypatch.undo()
    return one, two, taken[0] is not None


@pytest.mark.parametrize(
    "name, codec, options, seeks",
    [("a.mp4", "libx264", {"bf": "3", "x264-params": "open-gop=0"}, True),
     ("b.mp4", "libx264", {"bf": "3", "x264-params": "open-gop=1:scenecut=0"}, False),
     ("a.mkv", "libx264", {"bf": "2"}, True), ("a.ts", "libx264", {}, True),
     ("a.mp4", "mpeg4", {}, True), ("b.mp4", "mpeg4", {"bf": "2"}, True),
     ("a.avi", "mpeg4", {"bf": "2"}, None), ("a.avi", "mjpeg", {}, True),
     ("a.webm", "libvpx", {"deadline": "realtime"}, True)],
)  # fmt: skip
def test_the_same_frames(tmp_path, monkeypatch, name, codec, options, seeks):
    path = write_long(tmp_path / name, codec, **options)
    for n in (3, 5):
        one, two, sought = both(path, n, monkeypatch)
        np.testing.assert_array_equal(one, two)
        assert seeks is None or sought == seeks


def test_a_clip_that_is_not_as_its_packets_say_is_decoded_from_its_start(tmp_path, monkeypatch):
    path = write_long(tmp_path / "a.mp4", "mpeg4")
    whole = read_frames(path, 4, np.asarray)
    sought = video.seek_frames

    def broken(*args):
        yield next(sought(*args))
        raise LookupError("no frame")

    monkeypatch.setattr(video, "seek_frames", broken)
    np.testing.assert_array_equal(read_frames(path, 4, np.asarray), whole)
