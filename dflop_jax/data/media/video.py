"""Reads frames of video clips, sampled uniformly in time; counts them from header or packets."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from PIL import Image
from PIL.Image import Transpose

from dflop_jax.data.bounds import MAX_CLIP_FRAMES, MAX_PIXELS, one_line
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.media.container import check_duration, open_container
from dflop_jax.data.media.seek import Choose, is_hidden, seek_frames, seek_plan

FRAMES_PER_S = 2.0  # frames sampled per second
DEFAULT_RATE = Fraction(25)  # frames per second of a clip without a frame rate
Convert = Callable[[Image.Image], np.ndarray]
CountedFrames = Iterator[tuple[VideoFrame, int]]  # (frame, how often it is used)
ChooseFrames = Callable[[Iterator[VideoFrame]], CountedFrames]
MIRRORED = Transpose.TRANSPOSE, Transpose.FLIP_LEFT_RIGHT, Transpose.FLIP_TOP_BOTTOM
MAX_RATE_DEN = 10_000  # maximum denominator of a computed rate, so that it fits int32
logger = logging.getLogger("dflop_jax.data")


class ClipHeader(NamedTuple):
    """Header of a clip, and keys of its record (see `kind.with_keys`), 0 if not set."""

    width: int  # of an upright frame
    height: int
    total: int  # displayed frames
    rate_num: int  # average frames per second
    rate_den: int
    first: int = 0  # number of the first frame
    min_pixels: int = 0  # of a frame
    max_pixels: int = 0
    resized_width: int = 0
    resized_height: int = 0
    nframes: int = 0
    fps: int = 0
    min_frames: int = 0
    max_frames: int = 0
    total_pixels: int = 0  # of all frames

    @property
    def frame_s(self) -> float:
        return self.rate_den / self.rate_num


class Frames(NamedTuple):
    """Functions `read_frames` and `read_numbered` for the file of a clip."""

    spread: Callable[..., np.ndarray]
    numbered: Callable[..., np.ndarray]


def clip_header(path: MediaFile) -> dict[str, int]:
    """Return the fields of `Clip` and "frames", the number sampled at FRAMES_PER_S, at most all.
    ValueError: the file is not a video, or has no frames."""
    with open_container(path, "video") as container:
        clip, _ = _scan_clip(container)
    frames = min(clip.total, ceil(clip.total * clip.frame_s * FRAMES_PER_S))
    return {"frames": frames, **clip._asdict()}


def read_numbered(path: MediaFile, numbers: Sequence[int], convert: Convert) -> np.ndarray:
    """Return the upright RGB frames of these ascending numbers, each passed to `convert`, stacked.
    Numbers may repeat. A clip that breaks off is treated as by `read_frames`."""

    def choose(seconds: Sequence[float]) -> Sequence[int] | None:
        return numbers if numbers[-1] < len(seconds) else None

    def choose_frames(frames: Iterator[VideoFrame]) -> CountedFrames:
        for number, frame in enumerate(islice(frames, numbers[-1] + 1)):
            if n_times := numbers.count(number):
                yield frame, n_times

    return _read(path, choose, choose_frames, len(numbers), convert)


def read_frames(
    path: MediaFile, n_frames: int, convert: Convert, first: int = 0, total: int | None = None
) -> np.ndarray:
    """Return `n_frames` upright RGB frames, each passed to `convert`, stacked: the frames displayed
    in the middles of equal parts of the clip, or of its `total` frames from `first`. If it breaks
    off, the last good frame replaces the missing ones and a warning is logged.

    Raises:
      ValueError: more than half of the frames are missing."""
    with open_container(path, "video") as container:
        clip, start_s = _scan_clip(container)
    part_s = (total or clip.total) * clip.frame_s / n_frames
    moments = [start_s + first * clip.frame_s + (k + 0.5) * part_s for k in range(n_frames)]

    def choose(seconds: Sequence[float]) -> Sequence[int] | None:
        if moments[-1] > seconds[-1] + 2 * clip.frame_s:
            return None
        return [max(0, bisect_right(seconds, m) - 1) for m in moments]

    choose_frames = partial(_frames_at, moments, start_s, clip.frame_s)
    return _read(path, choose, choose_frames, n_frames, convert)


def _read(
    path: MediaFile, choose: Choose, choose_frames: ChooseFrames, n: int, convert: Convert
) -> np.ndarray:
    """Return n converted frames: those of `choose` by seeking, if that is faster and certainly
    gives the same frames, else those of `choose_frames`."""
    decoded: list[np.ndarray] = []
    with open_container(path, "video") as container, suppress(av.FFmpegError, LookupError):
        stream = container.streams.video[0]
        if plan := seek_plan(container, stream, choose):
            for frame, n_times in seek_frames(container, stream, plan):
                decoded += [convert(_upright(frame))] * n_times
            return np.stack(decoded)
    decoded, reason = [], "it has fewer frames than it states"
    with open_container(path, "video") as container:  # opened again, since its packets were read
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        try:
            for frame, n_times in choose_frames(container.decode(stream)):
                decoded += [convert(_upright(frame))] * n_times
        except av.FFmpegError as e:
            reason = one_line(e)
    missing = n - len(decoded)
    if 2 * missing > n or not decoded:
        raise ValueError(f"{path}: only {len(decoded)} of {n} frames decode ({reason})")
    if missing:
        logger.warning("%s: repeated the last frame %d times (%s)", path, missing, reason)
    return np.stack(decoded + decoded[-1:] * missing)


def _frames_at(
    moments: Sequence[float], start_s: float, frame_s: float, frames: Iterator[VideoFrame]
) -> CountedFrames:
    """Yield (frame, number of moments that display it) for ascending moments until the clip ends.
    A decoding error is raised after the last good frame."""
    n_done, previous, previous_s = 0, None, start_s
    error: av.FFmpegError | None = None
    while n_done < len(moments):
        try:
            frame = next(frames, None)
        except av.FFmpegError as e:
            frame, error = None, e
        if frame is None:
            # the last frame is displayed for about its own duration
            next_s = np.nextafter(previous_s + 2 * frame_s, np.inf)
        else:
            next_s = frame.time if frame.time is not None else previous_s + frame_s
        n_times = sum(moment < next_s for moment in moments[n_done:])
        if previous is not None and n_times:
            yield previous, n_times
            n_done += n_times
        if frame is None:
            break
        previous, previous_s = frame, next_s
    if error is not None:
        raise error


def _scan_clip(container: InputContainer) -> tuple[ClipHeader, float]:
    """Return a clip and the time of its first frame in seconds. The header of an MP4 is used if its
    frame count, duration and rate agree, so that no edit list hides frames. Other headers are only
    estimates, so the packets are counted without decoding."""
    if not container.streams.video:
        raise ValueError("it holds no video stream")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None:
        raise ValueError("its codec is unknown")
    sides = context.width, context.height
    if not 1 <= sides[0] * sides[1] <= MAX_PIXELS:
        raise ValueError(f"frames of {sides[0]}x{sides[1]} pixels are empty or too large")
    rate = _plausible_rate(stream.average_rate or stream.guessed_rate or DEFAULT_RATE)
    tick_s = stream.time_base or Fraction(1, av.time_base)
    total, start, ticks = stream.frames, stream.start_time or 0, stream.duration or 0
    is_listed = total > 0 and start == 0 and "mov" in container.format.name
    is_listed = is_listed and abs(total - ticks * tick_s * rate) <= 1
    first: VideoFrame | None = None
    packets: list[tuple[int | None, int]] = []  # begin and duration in ticks
    with suppress(av.FFmpegError):  # decoding will report the error
        for packet in container.demux(stream):
            if packet.size and not is_hidden(packet, stream):
                begin_ticks = packet.dts if packet.pts is None else packet.pts
                packets.append((begin_ticks, packet.duration or 0))
            if first is None:
                with suppress(av.FFmpegError):
                    first = next(iter(packet.decode()), None)
            elif is_listed:
                break
    if not is_listed:
        if first is not None and first.pts is not None:  # earlier ones cannot be decoded
            packets = [p for p in packets if p[0] is None or p[0] >= first.pts]
        total, (start, ticks) = len(packets), _time_span(packets, int(1 / (DEFAULT_RATE * tick_s)))
    if total <= 0:
        raise ValueError("it holds no frames")
    if ticks and abs(total - ticks * tick_s * rate) > 1:  # the rate varies or is wrong
        rate = _plausible_rate((total / (ticks * tick_s)).limit_denominator(MAX_RATE_DEN))
    check_duration(float(total / rate))
    if first is not None and _orientation(first)[0]:
        sides = sides[::-1]
    clip = ClipHeader(*sides, min(total, MAX_CLIP_FRAMES), rate.numerator, rate.denominator)
    return clip, float(start * tick_s)


def _plausible_rate(rate: Fraction) -> Fraction:
    """Return the frames per second, or the default if no camera has that rate."""
    return rate if 0.001 <= rate <= 100_000 else DEFAULT_RATE


def _time_span(packets: Sequence[tuple[int | None, int]], usual_ticks: int) -> tuple[int, int]:
    """Return (begin of the first packet, duration of all) in ticks. A last packet without a
    duration gets the average of the others, at most `usual_ticks`."""
    timed = [(ticks, duration) for ticks, duration in packets if ticks is not None]
    first, (last, last_ticks) = min(timed, default=(0, 0))[0], max(timed, default=(0, 0))
    last_ticks = max(last_ticks, min((last - first) // max(len(timed) - 1, 1), usual_ticks))
    return first, last + last_ticks - first


def _orientation(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """Return how the display matrix makes a frame upright: whether to transpose it, then whether to
    mirror it left to right, and top to bottom."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX") or np.eye(3, dtype=np.int32)
    across, down, _, x_sign, y_sign = np.frombuffer(matrix, np.int32)[:5].tolist()
    if abs(down) > abs(across):
        return True, x_sign < 0, down < 0
    return False, across < 0, y_sign < 0


def _upright(frame: VideoFrame) -> Image.Image:
    image = frame.to_image()
    for is_needed, transpose in zip(_orientation(frame), MIRRORED, strict=True):
        image = image.transpose(transpose) if is_needed else image
    return image
