"""Size limits of untrusted files. Sizes in a header are checked before memory is allocated for
them. An error that a library raises on a broken file becomes a one-line ValueError that names the
file."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

MiB = 1 << 20  # bytes

# pictures and frames
MAX_PIXELS = 80_000_000  # of a picture or a frame; Pillow warns only above it
MAX_SQUARE_PX = 20_000  # pixels of a side of the square that a picture is padded to
# clips and audio
MAX_DURATION_S = 7 * 24 * 3600  # a week
MAX_CLIP_FRAMES = 1000 * MAX_DURATION_S  # 1,000 frames a second
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 768_000
MAX_RESAMPLING = 50_000  # numerator and denominator of the ratio of two rates
MAX_CHANNELS = 64  # of audio
# records
MAX_RECORD_BYTES = 64 * MiB  # of one record's JSON, or a caption
MAX_LIST_BYTES = 8192 * MiB  # of a .json list, which is read as a whole
MAX_PARTS = 1000  # media or turns of one record; a chat template is rendered once for each
MAX_NAME_CHARS = 200  # characters of a file's name or a record's id in messages
MAX_EXAMPLES = 3  # records or warnings that a message quotes
# files beside the records
MAX_YAML_BYTES = 4 * MiB
MAX_MEMBERS = 2_000_000  # files of one data set, or members of one shard
MAX_TAR_HEADER_BYTES = MiB  # bytes of one header of a tar: long names, extended attributes
MAX_FOOTER_BYTES = 64 * MiB  # of the metadata of a table
MAX_ROWS = 200_000_000  # of one table, or samples of a mixture's epoch
MAX_TOKENIZER_BYTES = 256 * MiB  # of a file of a tokenizer
_FILE_OBJECT = re.compile(r" <_io\.[^>]*>")  # a file object in Pillow's messages


@contextmanager
def errors_as(failure: str, remedy: str = "") -> Iterator[None]:
    """Turn any error inside the block into a one-line ValueError, "FAILURE (REASON)REMEDY"."""
    try:
        yield
    except BaseException as e:
        # A panic of a Rust library is not an Exception; SystemExit and the like are not caught.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise ValueError(f"{failure} ({one_line(e)}){remedy}") from e


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, after its type unless that is plain ValueError."""
    text = " ".join(_FILE_OBJECT.sub("", str(error)).split())[:500]
    return text if type(error) is ValueError and text else f"{type(error).__name__}: {text}"


def read_bounded(file: Path, limit: int) -> bytes:
    """Return all bytes of a file. ValueError: it cannot be read or exceeds `limit` bytes."""
    with errors_as(f"{file}: cannot be read"), file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size  # `read(limit)` would allocate the limit
        data = opened.read(size) if size <= limit else b""
    if size > limit:
        raise ValueError(f"{file}: larger than the limit of {limit:,} bytes")
    return data


def strip_byte_order_mark(text: bytes) -> bytes:
    """Return UTF-8 text without its byte order mark. ValueError: it is UTF-16 or UTF-32."""
    if b"\0" in text[:4] or text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("UTF-16 or UTF-32; save it as UTF-8")
    return text.removeprefix(codecs.BOM_UTF8)


def parse_json(data: bytes, kind: Any = Any) -> Any:
    """Return a JSON value. ValueError: not JSON, not of type `kind`, or nested too deeply."""
    data = strip_byte_order_mark(data)
    if not data or data.isspace():
        raise ValueError("empty")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise ValueError(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"not JSON ({e})") from None
