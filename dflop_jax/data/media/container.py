"""Opens video and audio files, only those that refer to no other files.

FFmpeg also reads playlists and scripts that name other files or addresses. The list of formats
excludes those, no protocol is allowed, and bytes come from a file that is already open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.container import InputContainer

from dflop_jax.data.bounds import MAX_DURATION_S, MAX_PIXELS, errors_as
from dflop_jax.data.datasets.blob import MediaFile, open_media

FORMATS = (
    "aac",
    "aiff",
    "amr",
    "asf",
    "au",
    "avi",
    "caf",
    "flac",
    "flv",
    "matroska",
    "mov",
    "mp3",
    "mpeg",
    "mpegts",
    "ogg",
    "w64",
    "wav",
    "webm",
)
OPTIONS = {
    "format_whitelist": ",".join(FORMATS),
    "protocol_whitelist": "none",
    "max_streams": "100",
    "max_pixels": str(MAX_PIXELS),
}

# A title may be in any encoding. Since version 19 PyAV replaces invalid UTF-8 by default.
IS_STRICT = int(av.__version__.partition(".")[0]) < 19
LENIENT: dict[str, Any] = {"metadata_errors": "replace"} if IS_STRICT else {}


@contextmanager
def open_container(source: MediaFile, noun: str) -> Iterator[InputContainer]:
    """Open a file's container. Any error inside the block is a ValueError that names the file."""
    with (
        errors_as(f"{source}: not a readable {noun}"),
        open_media(source) as file,
        av.open(file, "r", options=OPTIONS, **LENIENT) as container,
    ):
        yield container


def check_duration(duration_s: float) -> None:
    """Raise ValueError for an impossible duration."""
    if not 0 <= duration_s <= MAX_DURATION_S:
        raise ValueError(f"it claims to last {duration_s:.4g} s")
