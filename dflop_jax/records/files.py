"""Serialization of records to messages and versioned JSON files:
{"record": type, "version": n, "value": ...}."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

VERSION = 3  # of records that are not in `_VERSIONS`
# Increase a version when a field is renamed or changes its meaning; `load` rejects other versions.
_VERSIONS = {
    "Plan": 7,
    "ModelProfile": 7,
    "Profile": 7,
    "PriceList": 8,
    "Schedule": 6,
    "Hardware": 4,
}
_STEP = "<i4"  # dtype of differences of neighbours: piece ids and positions stay below 2^31
T = TypeVar("T")


def digest(facts: Any) -> str:
    """Return the digest of facts that names a file of a cache."""
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def to_json(value: Any) -> bytes:
    """Encode records as JSON. Integer columns become compressed differences of neighbours, which
    are mostly 0 or 1, so that a piece's position takes about one byte."""
    return msgspec.json.encode(value, enc_hook=_encode_columns)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode a record of type `kind` from JSON; `msgspec.DecodeError` for other data."""
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_columns)


def to_msgpack(value: Any) -> bytes:
    """Encode records as MessagePack, smaller and faster than JSON, for inter-process messages."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_columns)


def from_msgpack(data: bytes, kind: Any) -> Any:
    """Decode a record of type `kind` from MessagePack; `msgspec.DecodeError` for other data."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_columns)


def _encode_columns(columns: Any) -> tuple[int, str]:
    """Return (number of columns, compressed text) of an array [columns, n]."""
    assert isinstance(columns, np.ndarray), f"a record cannot contain {type(columns).__name__}"
    steps = np.diff(columns, prepend=0).astype(_STEP)
    return len(columns), base64.b64encode(zlib.compress(steps.tobytes())).decode()


def _decode_columns(kind: type, encoded: Any) -> np.ndarray:
    assert kind is np.ndarray, f"a record cannot contain {kind.__name__}"
    try:
        n_columns, text = encoded
        steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), _STEP).reshape(n_columns, -1)
    except (TypeError, ValueError, zlib.error) as e:
        raise ValueError(f"integer columns are damaged ({e})") from None
    return np.cumsum(steps, axis=1, dtype=np.int64)


def save(record: Any, path: str | Path) -> None:
    """Write a record atomically: if the process is killed during the write, the old file stays."""
    name = type(record).__name__
    head = {"record": name, "version": _VERSIONS.get(name, VERSION), "value": record}
    new_path = Path(path).with_suffix(".tmp")
    new_path.write_bytes(msgspec.json.format(to_json(head), indent=1))
    new_path.replace(path)


def load(kind: type[T], path: str | Path) -> T:
    """Read a record of type `kind`; ValueError names the file and the invalid field."""
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except OSError as e:
        raise ValueError(f"{path}: {(e.strerror or str(e)).lower()}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e}); write it again, or remove it") from None
    name = raw.get("record") if isinstance(raw, dict) else None
    if name != kind.__name__:
        raise ValueError(
            f"{path}: contains {name or 'no record'}, expected {kind.__name__}; give another file"
        )
    if (version := raw.get("version")) != (expected_version := _VERSIONS.get(name, VERSION)):
        raise ValueError(
            f"{path}: version {version}, this program reads {expected_version}; create it again"
        )
    try:
        return msgspec.convert(raw.get("value"), kind, dec_hook=_decode_columns)
    except msgspec.ValidationError as e:
        raise ValueError(f"{path}: {e}") from None


def load_or_compute(kind: type[T], path: Path, compute: Callable[[], T]) -> T:
    """Read a cached record; if it cannot be read, compute and write it."""
    with suppress(ValueError):
        return load(kind, path)
    record = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(record, path)
    return record
