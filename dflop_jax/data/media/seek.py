"""Frames of a long clip by seeking, where that surely gives the frames that decoding all would.

The packets are listed first, undecoded: their times say which frame is on show at a moment, and
which can be decoded by themselves. Only codecs are taken whose such frames nothing after them looks
behind. Where anything is in doubt, the clip is decoded from its start instead (see `video`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

CLOSED_GOP_CODECS = ("h264", "mjpeg", "mpeg4", "vp8", "vp9")
VP8_SHOWN_BIT = 16  # a bit of a packet's first byte: not only others refer to its frame
H264_IDR_TYPE = 5  # a NAL unit's type: nothing after it refers to what was before
# Frames that are decoded without seeking over those with it, from which on it is worth its cost.
MIN_SEEK_GAIN = 1.5


@dataclass(frozen=True)
class FrameRun:
    """Frames to decode without a seek between them: times (pts) of the one to begin with and of
    those wanted, ascending."""

    key: int
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class SeekPlan:
    """Which frame, by pts, is on show at every moment, and how to come by them."""

    pts_by_moment: tuple[int, ...]
    runs: tuple[FrameRun, ...]
    keys: frozenset[int]


Choose = Callable[[Sequence[float]], Sequence[int] | None]


def choose_at_moments(moments: Sequence[float], last_s: float) -> Choose:
    """The frames on show at ascending moments (seconds); None if the clip ends before.

    Args:
      last_s: seconds that the last frame stays on show.
    """

    def choose(seconds: Sequence[float]) -> Sequence[int] | None:
        if moments[-1] > seconds[-1] + last_s:
            return None
        return [max(0, bisect_right(seconds, m) - 1) for m in moments]

    return choose


def choose_numbered(numbers: Sequence[int]) -> Choose:
    """The frames of ascending numbers; None if the clip has fewer."""
    return lambda seconds: numbers if numbers[-1] < len(seconds) else None


def seek_plan(container: InputContainer, stream: VideoStream, choose: Choose) -> SeekPlan | None:
    """Return how to see some frames of the clip; None: decode it from its start.

    Args:
      choose: picks them by the seconds at which frames begin, in order.
    """
    if stream.codec_context.name not in CLOSED_GOP_CODECS or stream.time_base is None:
        return None
    order: dict[int, int] = {}  # pts -> place in the order of decoding
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue  # the end
        if packet.pts is None or packet.pts in order or packet.is_corrupt:
            return None
        if is_hidden(packet, stream):
            return None
        if packet.is_keyframe and _is_closed(stream, packet):
            keys.append(packet.pts)
        order[packet.pts] = len(order)
    times = sorted(order)
    keys.sort()
    if not times or not keys or keys[0] != times[0]:
        return None
    tick_num, tick_den = stream.time_base.numerator, stream.time_base.denominator
    seconds = [float(t) * float(tick_num) / float(tick_den) for t in times]  # as PyAV's frame.time
    chosen = choose(seconds)
    if chosen is None:
        return None
    pts_by_moment = tuple(times[k] for k in chosen)
    runs: list[FrameRun] = []
    for pts in dict.fromkeys(pts_by_moment):
        key = keys[bisect_right(keys, pts) - 1]
        if runs and order[key] <= order[runs[-1].wanted[-1]] + 1:
            runs[-1] = FrameRun(runs[-1].key, (*runs[-1].wanted, pts))
        else:
            runs.append(FrameRun(key, (pts,)))
    decoded = sum(1 + max(order[t] for t in r.wanted) - order[r.key] for r in runs)
    if MIN_SEEK_GAIN * decoded > 1 + order[pts_by_moment[-1]]:
        return None
    return SeekPlan(pts_by_moment, tuple(runs), frozenset(keys))


def is_hidden(packet: Packet, stream: VideoStream) -> bool:
    """Whether a decoder shows no frame of a packet that is not empty: an edit list hides it, or it
    is only referred to."""
    is_vp8 = stream.codec_context.name == "vp8"
    return packet.is_discard or (is_vp8 and not memoryview(packet)[0] & VP8_SHOWN_BIT)


def seek_frames(
    container: InputContainer, stream: VideoStream, plan: SeekPlan
) -> Iterator[tuple[VideoFrame, int]]:
    """Yield the frames of a plan, each with how many of the moments show it; LookupError where the
    clip is not as its packets said."""
    for run in plan.runs:
        container.seek(run.key, stream=stream)
        pending = list(run.wanted)
        for k, frame in enumerate(container.decode(stream)):
            is_key = frame.key_frame and frame.pts in plan.keys and frame.pts <= run.key
            if k == 0 and not is_key:
                raise LookupError(f"a seek to {run.key} led to {frame.pts}")
            if frame.pts == pending[0]:
                yield frame, plan.pts_by_moment.count(pending.pop(0))
            elif frame.pts is None or frame.pts > pending[0]:
                raise LookupError(f"no frame at {pending[0]}")
            if not pending:
                break
        if pending:
            raise LookupError(f"no frame at {pending[0]}")


def _is_closed(stream: VideoStream, packet: Packet) -> bool:
    """Whether nothing after a key frame looks behind it."""
    if stream.codec_context.name != "h264":
        return True
    data, head = bytes(packet), stream.codec_context.extradata or b""
    if head[:1] != b"\x01":  # start codes between the units
        units = (unit[:1] for unit in data.split(b"\x00\x00\x01")[1:])
        return any(u and u[0] & 31 == H264_IDR_TYPE for u in units)
    width, offset = (head[4] & 3) + 1, 0
    while offset + width < len(data):
        if data[offset + width] & 31 == H264_IDR_TYPE:
            return True
        offset += width + int.from_bytes(data[offset : offset + width], "big")
    return False
