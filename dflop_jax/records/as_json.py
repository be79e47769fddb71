"""Records as JSON and MessagePack, including columns of whole numbers."""

from __future__ import annotations

import base64
import zlib
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
_STEP = "<i4"  # of two neighbours' difference: pieces of a batch and their places stay below 2^31


def to_json(value: Any) -> bytes:
    """Return records as JSON. Columns of whole numbers become compressed differences of neighbours,
    most of which are 0 or 1, so that the position of a piece takes about one byte."""
    return msgspec.json.encode(value, enc_hook=_encode_columns)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Return the record of type `kind` in JSON; `msgspec.DecodeError` for other data."""
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_columns)


def to_msgpack(value: Any) -> bytes:
    """MessagePack of records, smaller and faster than JSON, for messages between processes."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_columns)


def from_msgpack(data: bytes, kind: Any) -> Any:
    """The record of type `kind` in MessagePack data; `msgspec.DecodeError` for other data."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_columns)


def from_plain(value: Any, kind: type[T]) -> T:
    """Return the record of type `kind` in JSON that was decoded into dictionaries and lists."""
    return msgspec.convert(value, kind, dec_hook=_decode_columns)


def _encode_columns(columns: Any) -> tuple[int, str]:
    """How many columns, [columns, n], and their text."""
    assert isinstance(columns, np.ndarray), f"{type(columns).__name__} is no part of a record"
    steps = np.diff(columns, prepend=0).astype(_STEP)
    return len(columns), base64.b64encode(zlib.compress(steps.tobytes())).decode()


def _decode_columns(kind: type, encoded: Any) -> np.ndarray:
    assert kind is np.ndarray, f"{kind.__name__} is no part of a record"
    try:
        n_columns, text = encoded
        steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), _STEP).reshape(n_columns, -1)
    except (TypeError, ValueError, zlib.error) as e:
        raise ValueError(f"columns of whole numbers are damaged ({e})") from None
    return np.cumsum(steps, axis=1, dtype=np.int64)
