"""Keys that a record may give one picture or clip, as qwen-vl-utils takes them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Any

from dflop_jax.data.media.kind import Header

SIZES = ("min_pixels", "max_pixels", "resized_width", "resized_height")
FRAMES = ("nframes", "fps", "min_frames", "max_frames")
SPAN = ("video_start", "video_end")  # seconds of a clip
MICRO = 1_000_000  # an index holds fps in millionths
MAX_INT32 = 2**31 - 1


def with_keys(header: Header, keys: Mapping[str, Any]) -> dict[str, int]:
    """Return a header with the `keys` of its medium: a clip from video_start to video_end is
    one of fewer frames, other keys become columns of their names.

    Raises:
      ValueError: values that cannot be, alone or together.
    """
    for name, value in keys.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and 0 <= value <= MAX_INT32 and (value > 0 or name in SPAN)
        if not is_right or (name not in ("fps", *SPAN) and value != int(value)):
            raise ValueError(f"its {name} is {value!r:.50}, which is no number that it can be")
    for low, high in (SIZES[:2], FRAMES[2:]):
        if keys.get(low, 0) > keys.get(high, MAX_INT32):
            raise ValueError(f"its {low} {keys[low]} is above its {high} {keys[high]}")
    if "fps" in keys and "nframes" in keys:
        raise ValueError("it has fps and nframes; leave one out")
    if len(keys.keys() & {*SIZES[2:]}) == 1:
        raise ValueError("it has one of resized_width and resized_height; give both")
    columns = {name: int(value) for name, value in keys.items() if name not in SPAN}
    if "fps" in keys:
        columns["fps"] = round(keys["fps"] * MICRO)
    if keys.keys() & {*SPAN}:
        columns |= _span(header, keys.get(SPAN[0], 0), keys.get(SPAN[1], MAX_INT32))
    return {**header, **columns}


def _span(header: Header, start_s: float, end_s: float) -> dict[str, int]:
    """The columns of a clip between two seconds."""
    total, rate = header["total"], header["rate_num"] / header["rate_den"]
    first = ceil(min(start_s, total / rate) * rate)
    last = min(floor(min(end_s, total / rate) * rate), total - 1)
    if first >= last:
        raise ValueError(f"{SPAN[0]} {start_s} leaves no frames of {total / rate:.2f} s")
    n = last - first + 1
    frames = ceil(Fraction(header["frames"] * n, total))
    return {"first": first, "total": n, "frames": frames}
