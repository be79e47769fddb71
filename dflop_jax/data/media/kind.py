"""Kinds of media in records, and the contents of their headers.

Record readers, the index and chat templates use kinds. For how a model prepares media of a kind see
`medium`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil, floor
from typing import Any

import numpy as np

from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.media.audio import count_samples, read_sound
from dflop_jax.data.media.pictures import picture_size, read_picture
from dflop_jax.data.media.video import ClipHeader, Frames, clip_header, read_frames, read_numbered

Header = Mapping[str, int]
Columns = Mapping[str, np.ndarray]  # headers of n media, each [n]

# Keys that a record may set for a picture or clip, as in qwen-vl-utils.
SIZES = ("min_pixels", "max_pixels", "resized_width", "resized_height")
FRAMES = ("nframes", "fps", "min_frames", "max_frames")
SPAN = ("video_start", "video_end")  # seconds of a clip
MICRO = 1_000_000  # an index stores fps in millionths
INDEX_HZ = 16000  # sampling rate of the lengths in an index, that of all encoders so far


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of media, with one tag."""

    name: str  # name of the tag, <NAME>, and of the record's field
    noun: str  # word for it in messages
    verb: str  # what a model does with it ("sees")
    columns: Mapping[str, type]  # integer types of header values; kinds may share columns
    header: Callable[[MediaFile], Header]  # reads a file's header; ValueError: not of this kind
    opened: Callable[[MediaFile], Any]  # opens a file; its result is decoded by `Medium.decode`
    described: Callable[[Header], str]  # returns a description of a header
    too_small: str  # message for a medium that no model can take, with a remedy
    keys: tuple[str, ...] = ()  # keys that a record may set; all but `SPAN` are columns
    extensions: tuple[str, ...] = ()  # extensions of its files in a shard
    question: str = "What is this?"  # question that a caption answers
    placeholders: tuple[str, ...] = ()  # its tokens, if the tokenizer's configuration names none
    wrapped: bool = False  # put between the tokens that begin and end a picture, if they exist
    preface: str = ""  # text before a wrapped medium


Kinds = tuple[Kind, ...]
IMAGE = Kind(
    name="image",
    noun="picture",
    verb="sees",
    columns=dict.fromkeys(("width", "height", *SIZES), np.int32),  # upright
    header=lambda source: dict(zip(("width", "height"), picture_size(source))),
    opened=lambda source: partial(read_picture, source),
    described=lambda h: f"a picture of {h['width']}x{h['height']} pixels",
    too_small="too thin a picture; crop it",
    keys=SIZES,
    extensions=("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    question="Describe the image.",
    placeholders=("<image>", "<|image_pad|>", "<IMG_CONTEXT>"),
    wrapped=True,
)
VIDEO = Kind(
    name="video",
    noun="clip",
    verb="sees",
    columns={"frames": np.int32, **dict.fromkeys(ClipHeader._fields, np.int32), "fps": np.int64},
    header=clip_header,
    opened=lambda source: Frames(partial(read_frames, source), partial(read_numbered, source)),
    described=lambda h: f"a clip of {h['total']} frames of {h['width']}x{h['height']} pixels",
    too_small="too thin or too short a clip; crop it or take a longer one",
    keys=(*SIZES, *FRAMES, *SPAN, "total_pixels"),
    extensions=("mp4", "mkv", "webm", "avi", "mov"),
    question="Describe the video.",
    placeholders=("<video>", "<|video_pad|>"),
    wrapped=True,
    preface="Frame1: ",  # InternVL's text before a clip's frames
)
AUDIO = Kind(
    name="audio",
    noun="audio file",
    verb="hears",
    columns={"samples": np.int64},
    header=lambda source: {"samples": count_samples(source, INDEX_HZ)},
    opened=lambda source: partial(read_sound, source),
    described=lambda h: f"audio of {h['samples']:,} samples",
    too_small="too short an audio file; take a longer one",
    extensions=("wav", "flac", "mp3", "ogg", "opus", "m4a"),
    question="What is heard?",
    placeholders=("<|AUDIO|>", "<audio>", "<|audio_pad|>"),
)
BUILT_IN: Kinds = (IMAGE, VIDEO, AUDIO)  # models may add their own


@lru_cache
def tag_of(kinds: Kinds) -> re.Pattern[str]:
    """Return a pattern that matches the tag of any kind; its group is the kind's name."""
    return re.compile(f"<({'|'.join(re.escape(kind.name) for kind in kinds)})>")


def with_keys(header: Header, keys: Mapping[str, Any]) -> dict[str, int]:
    """Return the header with the `keys` of its medium: video_start and video_end select frames of a
    clip, other keys become columns. ValueError: invalid values."""
    max_value = np.iinfo(np.int32).max
    for name, value in keys.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and 0 <= value <= max_value and (value > 0 or name in SPAN)
        if not is_right or (name not in ("fps", *SPAN) and value != int(value)):
            raise ValueError(f"its {name} is {value!r:.50}, which is not a valid number")
    for low, high in (SIZES[:2], FRAMES[2:]):
        if keys.get(low, 0) > keys.get(high, max_value):
            raise ValueError(f"its {low} {keys[low]} is above its {high} {keys[high]}")
    if "fps" in keys and "nframes" in keys:
        raise ValueError("it has fps and nframes; leave one out")
    if len(keys.keys() & {*SIZES[2:]}) == 1:
        raise ValueError("it has one of resized_width and resized_height; give both")
    columns = {name: int(value) for name, value in keys.items() if name not in SPAN}
    if "fps" in keys:
        columns["fps"] = round(keys["fps"] * MICRO)
    if keys.keys() & {*SPAN}:
        total, rate = header["total"], header["rate_num"] / header["rate_den"]
        start_s, end_s = keys.get(SPAN[0], 0), keys.get(SPAN[1], max_value)
        first = ceil(min(start_s, total / rate) * rate)
        last = min(floor(min(end_s, total / rate) * rate), total - 1)
        if first >= last:
            raise ValueError(f"{SPAN[0]} {start_s} leaves no frames of {total / rate:.2f} s")
        n = last - first + 1
        frames = ceil(Fraction(header["frames"] * n, total))
        columns |= {"first": first, "total": n, "frames": frames}
    return {**header, **columns}
