"""Records as versioned JSON files: {"record": type, "version": n, "value": ...}."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

VERSION = 3
T = TypeVar("T")


def save(record: Any, path: str | Path) -> None:
    """Write a record: all of it, or, if the process is killed meanwhile, what was there before."""
    head = {"record": type(record).__name__, "version": VERSION, "value": record}
    fresh = Path(path).with_suffix(".tmp")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=1))
    fresh.replace(path)


def load(kind: type[T], path: str | Path) -> T:
    """Read a record; ValueError names the file and the field when it is not one of `kind`."""
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except OSError as e:
        raise ValueError(f"{path}: {(e.strerror or str(e)).lower()}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    found = raw.get("record") if isinstance(raw, dict) else None
    if found != kind.__name__:
        raise ValueError(f"{path}: holds {found or 'no record'}, expected {kind.__name__}")
    if raw.get("version") != VERSION:
        raise ValueError(f"{path}: version {raw.get('version')}, this program reads {VERSION}")
    try:
        return msgspec.convert(raw.get("value"), kind)
    except msgspec.ValidationError as e:
        raise ValueError(f"{path}: {e}") from None
