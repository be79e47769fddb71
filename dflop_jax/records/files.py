"""Records as messages and versioned JSON files: {"record": type, "version": n, "value": ...}."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

VERSION = 3  # of records that have not changed since
# Raised whenever a field is renamed or changes its meaning; `load` refuses other versions.
_NEWER = {"Plan": 7, "ModelProfile": 5, "Profile": 5, "PriceList": 8, "Schedule": 6}
_STEP = "<i4"  # of two neighbours' difference: pieces of a batch and their places stay below 2^31
T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Records as JSON. Columns of whole numbers become compressed differences of neighbours, most
    of which are 0 or 1, so that the position of a piece takes about one byte."""
    return msgspec.json.encode(value, enc_hook=_encode_columns)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """The record of type `kind` in JSON; `msgspec.DecodeError` for other data."""
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_columns)


def to_msgpack(value: Any) -> bytes:
    """MessagePack of records, smaller and faster than JSON, for messages between processes."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_columns)


def from_msgpack(data: bytes, kind: Any) -> Any:
    """The record of type `kind` in MessagePack data; `msgspec.DecodeError` for other data."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_columns)


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


def save(record: Any, path: str | Path) -> None:
    """Write a record atomically: if the process is killed meanwhile, the old file stays."""
    name = type(record).__name__
    head = {"record": name, "version": _NEWER.get(name, VERSION), "value": record}
    new_path = Path(path).with_suffix(".tmp")
    new_path.write_bytes(msgspec.json.format(to_json(head), indent=1))
    new_path.replace(path)


def load(kind: type[T], path: str | Path) -> T:
    """Read a record; ValueError names the file and the field if it is not one of `kind`."""
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except OSError as e:
        raise ValueError(f"{path}: {(e.strerror or str(e)).lower()}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e}); write it again, or remove it") from None
    name = raw.get("record") if isinstance(raw, dict) else None
    if name != kind.__name__:
        raise ValueError(
            f"{path}: holds {name or 'no record'}, expected {kind.__name__}; name a file of that"
        )
    if (version := raw.get("version")) != (expected_version := _NEWER.get(name, VERSION)):
        raise ValueError(
            f"{path}: version {version}, this program reads {expected_version}; make it again"
        )
    try:
        return msgspec.convert(raw.get("value"), kind, dec_hook=_decode_columns)
    except msgspec.ValidationError as e:
        raise ValueError(f"{path}: {e}") from None


def load_or_compute(kind: type[T], path: Path, compute: Callable[[], T]) -> T:
    """A record of a cache; if it cannot be read, it is computed and written."""
    with suppress(ValueError):
        return load(kind, path)
    record = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(record, path)
    return record
