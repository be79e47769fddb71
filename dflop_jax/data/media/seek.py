"""Frames of a long clip by seeking, where that surely gives the frames that decoding all would.

The packets are listed first, undecoded: their times say which frame is on show at a moment, and
which are key frames. Where anything is in doubt, the clip is decoded from its start (see `video`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

# Nothing after a key frame of these, of h264 after some of them, looks behind it.
CLOSED_GOP_CODECS = ("h264", "mjpeg", "mpeg4", "vp8", "vp9")
VP8_SHOWN_BIT = 16  # a bit of a packet's first byte: not only others refer to its frame
H264_IDR_TYPE = 5  # a NAL unit's type: nothing after it refers to what was before

# Numbers of frames, by the seconds at which all begin, in order; None if the clip ends before.
Choose = Callable[[Sequence[float]], Sequence[int] | None]


class SeekPlan(NamedTuple):
    """How to come by the frames on show at some moments, by their times (pts)."""

    pts_by_moment: list[int]
    runs: list[tuple[int, list[int]]]  # decoded without a seek: the key frame, those wanted
    keys: set[int]


def seek_plan(container: InputContainer, stream: VideoStream, choose: Choose) -> SeekPlan | None:
    """Return how to see the chosen frames of the clip; None: decode it from its start."""
    if stream.codec_context.name not in CLOSED_GOP_CODECS or stream.time_base is None:
        return None
    order: dict[int, int] = {}  # pts -> place in the order of decoding
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue  # the end
        is_odd = packet.is_corrupt or is_hidden(packet, stream)
        if packet.pts is None or packet.pts in order or is_odd:
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
    if (chosen := choose(seconds)) is None:
        return None
    pts_by_moment = [times[k] for k in chosen]
    runs: list[tuple[int, list[int]]] = []
    for pts in dict.fromkeys(pts_by_moment):
        key = keys[bisect_right(keys, pts) - 1]
        if runs and order[key] <= order[runs[-1][1][-1]] + 1:
            runs[-1][1].append(pts)
        else:
            runs.append((key, [pts]))
    decoded = sum(1 + max(order[t] for t in wanted) - order[key] for key, wanted in runs)
    if decoded > order[pts_by_moment[-1]]:  # as many as from the start
        return None
    return SeekPlan(pts_by_moment, runs, {*keys})


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
    for key, wanted in plan.runs:
        container.seek(key, stream=stream)
        pending = [*wanted]
        for k, frame in enumerate(container.decode(stream)):
            is_key = frame.key_frame and frame.pts in plan.keys and frame.pts <= key
            if k == 0 and not is_key:
                raise LookupError(f"a seek to {key} led to {frame.pts}")
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
