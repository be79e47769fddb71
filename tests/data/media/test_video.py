"""Clips written here, sampled by header and decoded: the counts agree, the moments are even, and
frames by seeking are those of decoding from the start."""

import logging
from functools import partial

import av
import numpy as np
import pytest

from dflop_jax.data.media import video
from dflop_jax.data.media.pictures import frame_tile
from dflop_jax.data.media.video import read_frames, read_numbered
from tests.data.media_cases import clip_of, count_frames, write_clip

VARIABLE = [*range(30), *range(30, 330, 10)]  # when 60 frames begin


def read_clip(path, n):
    return read_frames(path, n, partial(frame_tile, tile_px=16))


def write_grey(path, n, **options):
    """A clip whose frame k is a flat grey of 255 * k / n."""
    greys = [np.full((48, 64, 3), 255 * k // n, np.uint8) for k in range(n)]
    return write_clip(path, greys, 10, encoder={"g": "12"}, **options)


@pytest.mark.parametrize("suffix", ["mp4", "avi", "mkv"])
@pytest.mark.parametrize("n, count", [(0, 0), (1, 1), (4, 1), (20, 4), (60, 8)])
def test_frames_follow_the_duration_up_to_the_cap(tmp_path, suffix, n, count):
    path = write_grey(tmp_path / f"a.{suffix}", n)
    if not n:
        with pytest.raises(ValueError, match=rf"a\.{suffix}: not a readable video"):
            count_frames(path, 8)
        return
    assert count_frames(path, 8) == count
    for wanted in {1, count}:
        clip = read_clip(path, wanted)
        assert clip.shape == (wanted, 16, 16, 3)
        moments = (np.arange(wanted) + 0.5) * n / wanted
        shown = np.minimum(np.floor(moments), n - 1) * 255 / n
        # a moment on the border of two frames may show either
        assert np.abs(clip.mean((1, 2, 3)) - shown).max() < 255 / n + 6


def patched(path, name, change):
    """The file with the first box of this name changed in place, from behind its name on."""
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name)
    change(memoryview(data)[at:])
    path.write_bytes(data)
    return path


def numbers_at(box, at, *numbers):
    box[at : at + 4 * len(numbers)] = np.array(numbers, ">i4").tobytes()


def hidden_start(folder):
    """60 frames of 10 a second, the first 25 hidden by an edit list."""
    with av.open(str(write_grey(folder / "a.mp4", 60))) as clip:
        ticks = int(2.5 / clip.streams.video[0].time_base)
    return patched(folder / "a.mp4", b"elst", lambda box: numbers_at(box, 8, 3500, ticks))


def wrong_avi(folder):
    """An AVI of 30 frames that says 50."""
    path = write_grey(folder / "a.avi", 30)
    patched(path, b"avih", lambda box: box.__setitem__(20, 50))
    return patched(path, b"strh", lambda box: box.__setitem__(36, 50))


def reshaped(path, change):
    """The clip with the bytes that `change` makes of packet k, which is left out for None."""
    target = path.with_stem("changed")
    with av.open(str(path)) as clip, av.open(str(target), "w") as out:
        stream = out.add_stream_from_template(clip.streams.video[0])
        for k, packet in enumerate(clip.demux(video=0)):
            data = change(k, bytes(packet)) if packet.size else None
            if data is not None:
                made = av.Packet(data)
                made.pts, made.dts, made.time_base = packet.pts, packet.dts, packet.time_base
                made.stream, made.is_keyframe = stream, packet.is_keyframe
                out.mux(made)
    return target


def referred_to(folder):
    """VP8 of which every tenth frame is not shown, others only refer to it."""
    path = write_grey(folder / "a.webm", 60)
    return reshaped(
        path, lambda k, data: bytes([data[0] & 239]) + data[1:] if k % 10 == 5 else data
    )


def cut_before_a_key_frame(folder):
    return reshaped(write_grey(folder / "a.ts", 60), lambda k, data: data if k > 7 else None)


@pytest.mark.parametrize(
    "make, total, seconds",
    [(hidden_start, 35, 3.5), (wrong_avi, 30, 3.0), (referred_to, 54, 6.0),
     (lambda folder: write_grey(folder / "a.mkv", 60, times=VARIABLE), 60, 32.1),
     (lambda folder: write_grey(folder / "a.webm", 60, times=VARIABLE, live="1"), 60, 32.1),
     (lambda folder: write_grey(folder / "a.mp4", 60, movflags="frag_keyframe"), 60, 6.0),
     (cut_before_a_key_frame, 48, 4.8)],
)  # fmt: skip
def test_frames_are_those_that_a_decoder_shows(tmp_path, make, total, seconds):
    path = make(tmp_path)
    with av.open(str(path)) as clip:
        expected = [np.asarray(frame.to_image()) for frame in clip.decode(video=0)]
    found = clip_of(path)
    assert (found.total, len(expected)) == (total, total)
    assert found.total * found.rate_den / found.rate_num == pytest.approx(seconds, abs=0.1)
    np.testing.assert_array_equal(read_numbered(path, range(total), np.asarray), expected)
    few = [total - 9, total - 1]  # by seeking, where that may be
    np.testing.assert_array_equal(read_numbered(path, few, np.asarray), [expected[k] for k in few])


# matrix: the upper left of a display matrix; corner: where it puts the stored upper left
@pytest.mark.parametrize(
    "matrix, corner",
    [((0, 1, -1, 0), (0, -1)), ((-1, 0, 0, -1), (-1, -1)), ((0, -1, 1, 0), (-1, 0)),
     ((-1, 0, 0, 1), (0, -1)), ((1, 0, 0, -1), (-1, 0)), ((0, 1, 1, 0), (0, 0))],
)  # fmt: skip
def test_a_clip_is_stood_up_and_mirrored(tmp_path, matrix, corner):
    pixels = np.full((48, 64, 3), 235, np.uint8)
    pixels[:24, :32] = 20
    a, b, c, d = (k << 16 for k in matrix)
    path = write_clip(tmp_path / "a.mp4", [pixels] * 3, 10)
    patched(path, b"tkhd", lambda box: numbers_at(box, 40, a, b, 0, c, d))
    sides = (48, 64) if b else (64, 48)
    assert clip_of(path)[:2] == sides
    (frame,) = read_numbered(path, [1], np.asarray)
    assert frame.shape == (*sides[::-1], 3)
    dark = frame.mean(-1) < 100
    assert dark[corner]
    assert dark.mean() == pytest.approx(0.25, abs=0.02)


def test_a_clip_that_breaks_off(tmp_path, shared_data, caplog):
    whole = write_grey(tmp_path / "a.mp4", 60, movflags="faststart").read_bytes()
    broken = tmp_path / "b.mp4"
    broken.write_bytes(whole[: int(len(whole) * 0.8)])
    with caplog.at_level(logging.WARNING):
        clip = read_clip(broken, 8)
    assert clip.shape[0] == 8
    assert (clip[-1] == clip[-2]).all()
    assert f"{broken}: repeated" in caplog.text
    with pytest.raises(ValueError, match="half_index_first"):
        read_clip(shared_data / "bad/half_index_first.mp4", 7)


def write_long(path, codec, frames=240, **options):
    """A clip in which every frame differs, a key frame every 24."""
    rng = np.random.default_rng(0)
    images = [np.full((48, 64, 3), k % 256, np.uint8) for k in range(frames)]
    for image in images:
        image[rng.integers(0, 48, 200), rng.integers(0, 64, 200)] = 255
    return write_clip(path, images, 10, codec, encoder={"g": "24", **options})


@pytest.mark.parametrize(
    "name, codec, options, seeks",
    [("a.mp4", "libx264", {"bf": "3", "x264-params": "open-gop=0"}, True),
     ("b.mp4", "libx264", {"bf": "3", "x264-params": "open-gop=1:scenecut=0"}, False),
     ("a.mkv", "libx264", {"bf": "2"}, True), ("a.ts", "libx264", {}, True),
     ("a.mp4", "mpeg4", {}, True), ("b.mp4", "mpeg4", {"bf": "2"}, True),
     ("a.avi", "mpeg4", {"bf": "2"}, None), ("a.avi", "mjpeg", {}, True),
     ("a.webm", "libvpx", {"deadline": "realtime"}, True)],
)  # fmt: skip
def test_seeking_gives_the_same_frames(tmp_path, monkeypatch, name, codec, options, seeks):
    path, plan, plans = write_long(tmp_path / name, codec, **options), video.seek_plan, []

    def watched(*args):
        plans.append(plan(*args))
        return plans[-1]

    for n in (3, 5):
        with monkeypatch.context() as patch:
            patch.setattr(video, "seek_plan", watched)
            sought = read_frames(path, n, np.asarray)
            patch.setattr(video, "seek_plan", lambda *args: None)
            np.testing.assert_array_equal(sought, read_frames(path, n, np.asarray))
    assert seeks is None or [p is not None for p in plans] == [seeks] * 2


def test_a_clip_that_is_not_as_its_packets_say_is_decoded_from_its_start(tmp_path, monkeypatch):
    path = write_long(tmp_path / "a.mp4", "mpeg4")
    whole = read_frames(path, 4, np.asarray)
    sought = video.seek_frames

    def broken(*args):
        yield next(sought(*args))
        raise LookupError("no frame")

    monkeypatch.setattr(video, "seek_frames", broken)
    np.testing.assert_array_equal(read_frames(path, 4, np.asarray), whole)
