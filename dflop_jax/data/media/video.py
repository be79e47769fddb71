"""Video clips to frames: uniform samples in time, counted from the header alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import ceil, floor
from pathlib import Path

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from dflop_jax.data.datasets.blob import Blob, open_media

FRAMES_PER_S = 2.0
logger = logging.getLogger("dflop_jax.data")


def count_frames(path: Path | Blob, max_frames: int) -> int:
    """Frames to sample: FRAMES_PER_S over the duration, at most `max_frames` and what is there.

    Reads stream metadata; a container without them has its packets counted, not decoded.
    Raises ValueError when the file is no video, or one without frames.
    """
    try:
        with open_media(path) as file, av.open(file, "r") as container:
            total, duration_s = _extent(container)
    except (av.FFmpegError, OSError, ValueError) as e:
        raise ValueError(f"{path}: not a readable video ({_reason(e)})") from e
    return max(1, min(max_frames, total, ceil(duration_s * FRAMES_PER_S)))


def read_frames(
    path: Path | Blob, n_frames: int, convert: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """`convert` of `n_frames` upright RGB frames spread evenly over the clip, stacked.

    Where the clip breaks off, the last good frame is repeated, with a warning. ValueError when
    more than half of the frames are missing that way.
    """
    try:
        with open_media(path) as file, av.open(file, "r") as container:
            duration_s = _extent(container)[1]
        with (
            open_media(path) as file,
            av.open(file, "r") as container,
        ):  # anew: the packets may have been counted
            frames, reason = _sample_frames(container, n_frames, duration_s)
    except (av.FFmpegError, OSError, ValueError) as e:
        raise ValueError(f"{path}: not a readable video ({_reason(e)})") from e
    missing = n_frames - len(frames)
    if 2 * missing > n_frames or not frames:
        raise ValueError(f"{path}: only {len(frames)} of {n_frames} frames decode ({reason})")
    if missing:
        logger.warning("%s: repeated the last frame %d times (%s)", path, missing, reason)
    tiles: list[np.ndarray] = []
    for i, frame in enumerate(frames):
        same = i > 0 and frame is frames[i - 1]
        tiles.append(tiles[-1] if same else convert(_upright(frame)))
    return np.stack(tiles + tiles[-1:] * missing)


def _extent(container: av.container.InputContainer) -> tuple[int, float]:
    """(number of frames, duration in seconds); counts packets where the header is silent."""
    if not container.streams.video:
        raise ValueError("it holds no video stream")
    stream = container.streams.video[0]
    rate = float(stream.average_rate or stream.guessed_rate or 25)
    duration_s = 0.0
    if stream.duration and stream.time_base:
        duration_s = float(stream.duration * stream.time_base)
    elif container.duration:
        duration_s = container.duration / av.time_base
    total = stream.frames or floor(duration_s * rate)
    if total <= 0:
        total = sum(1 for packet in container.demux(stream) if packet.size)
    if total <= 0:
        raise ValueError("it holds no frames")
    return total, duration_s if duration_s > 0 else total / rate


def _sample_frames(
    container: av.container.InputContainer, n: int, duration_s: float
) -> tuple[list[VideoFrame], str]:
    """The frames on show at n evenly spaced moments, fewer (and why) if the clip ends before."""
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    start_s = _start_s(stream)
    moments = [start_s + (k + 0.5) * duration_s / n for k in range(n)]
    frame_s = 1.0 / float(stream.average_rate or stream.guessed_rate or 25)
    chosen: list[VideoFrame] = []
    shown: VideoFrame | None = None
    shown_s, reason = start_s, "it ends before its stated duration"
    try:
        for frame in container.decode(stream):
            time_s = frame.time if frame.time is not None else shown_s + frame_s
            while shown is not None and len(chosen) < n and time_s > moments[len(chosen)]:
                chosen.append(shown)
            if len(chosen) == n:
                break
            shown, shown_s = frame, time_s
    except av.FFmpegError as e:
        reason = _reason(e)
    # the last frame stays on show for about its own duration
    while shown is not None and len(chosen) < n and moments[len(chosen)] <= shown_s + 2 * frame_s:
        chosen.append(shown)
    return chosen, reason


def _start_s(stream: VideoStream) -> float:
    if stream.start_time is None or stream.time_base is None:
        return 0.0
    return float(stream.start_time * stream.time_base)


def _upright(frame: VideoFrame) -> Image.Image:
    image = frame.to_image()
    if frame.rotation:  # phones store upright clips lying down
        image = image.rotate(frame.rotation, expand=True)
    return image


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
