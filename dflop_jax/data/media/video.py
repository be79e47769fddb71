"""Video clips to frames: uniform samples in time, counted from the header alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from dflop_jax.data.bounds import MAX_CLIP_FRAMES, MAX_PIXELS, one_line
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.media.container import checked_duration, opened
from dflop_jax.data.media.kind import Columns, Kind, below_one
from dflop_jax.data.media.seek import Choose, at_moments, numbered, seek_plan, sought

FRAMES_PER_S = 2.0  # that are taken of a clip
TURNED_FORMATS = ("mov", "matroska")  # containers that have a display matrix
USUAL_RATE = Fraction(25)  # frames a second of a clip that does not say
logger = logging.getLogger("dflop_jax.data")


class Clip(NamedTuple):
    """What a clip's header says: pixels of an upright frame, frames in all, frames a second."""

    width: int
    height: int
    total: int
    rate_num: int
    rate_den: int


def clip_header(path: MediaFile) -> dict[str, int]:
    """Read a clip's header: the fields of `Clip`, and "frames", FRAMES_PER_S over the duration, at
    most what is there.

    Reads stream metadata and, where clips may be turned, the first frame, which says how; a
    container without metadata has its packets counted, not decoded.
    Raises ValueError when the file is no video, or one without frames.
    """
    with opened(path, "video") as container:
        total, duration_s = _extent(container)
        stream = container.streams.video[0]
        rate = _rate(stream)
        sides = stream.codec_context.width, stream.codec_context.height
        may_be_turned = any(name in container.format.name for name in TURNED_FORMATS)
    if may_be_turned:
        with opened(path, "video") as container:  # anew: the packets may have been counted
            sides = sides[::-1] if _lies_down(container) else sides
    clip = Clip(*sides, total, rate.numerator, rate.denominator)
    return {"frames": max(1, min(total, ceil(duration_s * FRAMES_PER_S))), **clip._asdict()}


def read_numbered(
    path: MediaFile, numbers: Sequence[int], convert: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """`convert` of the upright RGB frames of these ascending numbers, stacked; a number may come
    several times. A clip that breaks off is treated as by `read_frames`."""
    sought_ones = _sought_tiles(path, numbered(numbers), lambda f: convert(_upright(f)))
    if sought_ones is not None:
        return np.stack(sought_ones)
    frames: list[np.ndarray] = []
    reason = "it has fewer frames than it states"
    with opened(path, "video") as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        try:
            for number, frame in enumerate(container.decode(stream)):
                if times := sum(n == number for n in numbers[len(frames) :]):
                    frames += [convert(_upright(frame))] * times
                if len(frames) == len(numbers):
                    break
        except av.FFmpegError as e:
            reason = one_line(e)
    return _filled(path, frames, len(numbers), reason)


def read_frames(
    path: MediaFile, n_frames: int, convert: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """`convert` of `n_frames` upright RGB frames spread evenly over the clip, stacked.

    Where the clip breaks off, the last good frame is repeated, with a warning. ValueError when
    more than half of the frames are missing that way.
    """
    with opened(path, "video") as container:
        duration_s = _extent(container)[1]
        stream = container.streams.video[0]
        choose = at_moments(_moments(stream, n_frames, duration_s), float(2 / _rate(stream)))
    tiles = _sought_tiles(path, choose, lambda frame: convert(_upright(frame)))
    if tiles is not None:
        return np.stack(tiles)
    tiles, reason = [], "it ends before its stated duration"
    with opened(path, "video") as container:  # anew: the packets may have been counted
        try:
            for frame, times in _shown(container, n_frames, duration_s):
                tiles += [convert(_upright(frame))] * times
        except av.FFmpegError as e:
            reason = one_line(e)
    return _filled(path, tiles, n_frames, reason)


def _filled(path: MediaFile, tiles: list[np.ndarray], n: int, reason: str) -> np.ndarray:
    """n frames, the last one repeated for those that are missing; ValueError: most are."""
    missing = n - len(tiles)
    if 2 * missing > n or not tiles:
        raise ValueError(f"{path}: only {len(tiles)} of {n} frames decode ({reason})")
    if missing:
        logger.warning("%s: repeated the last frame %d times (%s)", path, missing, reason)
    return np.stack(tiles + tiles[-1:] * missing)


def _extent(container: InputContainer) -> tuple[int, float]:
    """(number of frames, duration in seconds); counts packets where the header is silent."""
    if not container.streams.video:
        raise ValueError("it holds no video stream")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None:
        raise ValueError("its codec is unknown")
    if not 1 <= context.width * context.height <= MAX_PIXELS:
        raise ValueError(
            f"frames of {context.width}x{context.height} pixels are none, or too large"
        )
    duration_s = 0.0
    if stream.duration and stream.time_base:
        duration_s = float(stream.duration * stream.time_base)
    elif container.duration:
        duration_s = container.duration / av.time_base
    total = stream.frames or floor(duration_s * _rate(stream))
    if total <= 0:
        total = sum(1 for packet in container.demux(stream) if packet.size)
    if total <= 0:
        raise ValueError("it holds no frames")
    duration_s = duration_s if duration_s > 0 else float(total / _rate(stream))
    return min(total, MAX_CLIP_FRAMES), checked_duration(duration_s)


def _rate(stream: VideoStream) -> Fraction:
    """Frames a second, by the header where that is to be believed."""
    rate = stream.average_rate or stream.guessed_rate or USUAL_RATE
    return rate if 0.001 <= rate <= 100_000 else USUAL_RATE


def _sought_tiles(
    path: MediaFile, choose: Choose, convert: Callable[[VideoFrame], np.ndarray]
) -> list[np.ndarray] | None:
    """`convert` of the chosen frames by seeking; None where it gains nothing, or not surely the
    same."""
    tiles: list[np.ndarray] = []
    with opened(path, "video") as container:
        stream = container.streams.video[0]
        plan = seek_plan(container, stream, choose)
        if plan is None:
            return None
        try:
            for frame, times in sought(container, stream, plan):
                tiles += [convert(frame)] * times
        except (av.FFmpegError, LookupError):
            return None
    return tiles


def _moments(stream: VideoStream, n: int, duration_s: float) -> list[float]:
    """Seconds at which the clip is looked at: the middles of n equal parts."""
    start_s = _start_s(stream)
    return [start_s + (k + 0.5) * duration_s / n for k in range(n)]


def _shown(
    container: InputContainer, n: int, duration_s: float
) -> Iterator[tuple[VideoFrame, int]]:
    """Yield the frames on show at n evenly spaced moments, each with how many of the moments show
    it; those of fewer moments if the clip ends before. An error while decoding is raised after the
    last good frame."""
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    frame_s, moments = float(1 / _rate(stream)), _moments(stream, n, duration_s)
    done, shown, shown_s = 0, None, _start_s(stream)
    error: av.FFmpegError | None = None
    frames = container.decode(stream)
    while done < n:
        try:
            frame = next(frames, None)
        except av.FFmpegError as e:
            frame, error = None, e
        if frame is None:
            # the last frame stays on show for about its own duration
            next_s = np.nextafter(shown_s + 2 * frame_s, np.inf)
        else:
            next_s = frame.time if frame.time is not None else shown_s + frame_s
        times = sum(moment < next_s for moment in moments[done:])
        if shown is not None and times:
            yield shown, times
            done += times
        if frame is None:
            break
        shown, shown_s = frame, next_s
    if error is not None:
        raise error


def _start_s(stream: VideoStream) -> float:
    if stream.start_time is None or stream.time_base is None:
        return 0.0
    return float(stream.start_time * stream.time_base)


def _turns(frame: VideoFrame) -> int:
    """Quarter turns to the left that stand a frame upright: phones store clips lying down."""
    return round(frame.rotation / 90) % 4


def _lies_down(container: InputContainer) -> bool:
    """Whether upright frames have the stored width as their height."""
    try:
        frame = next(container.decode(video=0), None)
    except av.FFmpegError:
        return False  # reading its frames says why
    return frame is not None and _turns(frame) % 2 == 1


def _upright(frame: VideoFrame) -> Image.Image:
    image, turns = frame.to_image(), _turns(frame)
    return image.rotate(90 * turns, expand=True) if turns else image


class Frames(NamedTuple):
    """A clip of a file: `read_frames` and `read_numbered` of it."""

    spread: Callable[..., np.ndarray]
    numbered: Callable[..., np.ndarray]


def _wrong(columns: Columns) -> list[str]:
    frames = columns["frames"]
    wrong = ["frames"] if ((frames < 1) | (frames > MAX_CLIP_FRAMES)).any() else []
    return wrong + [f"{name} of a clip" for name in below_one(columns, *Clip._fields)]


VIDEO = Kind(
    name="video",
    word="clip",
    taken="sees",
    # frames: what it offers at FRAMES_PER_S; the others as in `Clip`
    columns={"frames": np.int32, **dict.fromkeys(Clip._fields, np.int32)},
    header=clip_header,
    opened=lambda source: Frames(partial(read_frames, source), partial(read_numbered, source)),
    described=lambda h: f"a clip of {h['total']} frames of {h['width']}x{h['height']} pixels",
    wrong=_wrong,
    too_small="too thin or too short a clip; crop it or take a longer one",
    extensions=("mp4", "mkv", "webm", "avi", "mov"),
    question="Describe the video.",
    placeholders=("<video>", "<|video_pad|>"),
    wrapped=True,
    preface="Frame1: ",  # InternVL's text before a clip's frames
)
