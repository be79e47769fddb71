"""Decodes frames of a long clip by seeking, if the result is certainly that of decoding it all.

The packets are listed first, without decoding: they have the times and key frames. In any doubt the
clip is decoded from its start (see `video`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

# Codecs whose frames never refer to a frame before the last key frame (h264: before the last IDR).
CLOSED_GOP_CODECS = ("h264", "mjpeg", "mpeg4", "vp8", "vp9")
VP8_SHOWN_BIT = 16  # bit of a packet's first byte: its frame is displayed
H264_IDR_TYPE = 5  # type of a NAL unit that no later frame refers across

# Returns the numbers of frames, given the seconds at which all begin; None if the clip is short.
Choose = Callable[[Sequence[float]], Sequence[int] | None]


class SeekPlan(NamedTuple):
    """Plan for decoding the frames that are displayed at some moments."""

    pts_by_moment: list[int]  # presentation time of the frame at each moment
    runs: list[tuple[int, list[int]]]  # (pts of a key frame to seek, pts to decode from there)
    keys: set[int]  # pts of all key frames


def seek_plan(container: InputContainer, stream: VideoStream, choose: Choose) -> SeekPlan | None:
    """Return a plan for the chosen frames of the clip; None: decode it from its start."""
    if stream.codec_context.name not in CLOSED_GOP_CODECS or stream.time_base is None:
        return None
    order: dict[int, int] = {}  # pts -> index in decoding order
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue  # end of the stream
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
    if decoded > order[pts_by_moment[-1]]:  # no fewer than from the start
        return None
    return SeekPlan(pts_by_moment, runs, {*keys})


def is_hidden(packet: Packet, stream: VideoStream) -> bool:
    """Return whether a packet's frame is not displayed: an edit list hides it, or it is only a
    reference for others."""
    is_vp8 = stream.codec_context.name == "vp8"
    return packet.is_discard or (is_vp8 and not memoryview(packet)[0] & VP8_SHOWN_BIT)


def seek_frames(
    container: InputContainer, stream: VideoStream, plan: SeekPlan
) -> Iterator[tuple[VideoFrame, int]]:
    """Yield (frame, number of moments that display it) of a plan. LookupError: frames differ from
    what the packets announced."""
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
    """Return whether no frame after a key frame refers to one before it."""
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
