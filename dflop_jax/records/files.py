"""Records as versioned JSON files: {"record": type, "version": n, "value": ...}."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dflop_jax.records import from_plain, to_json

VERSION = 3  # of records that have not changed since
# Raised whenever a field is renamed or changes its meaning; `load` refuses other versions.
_NEWER = {"Plan": 6, "ModelProfile": 5, "Profile": 5, "PriceList": 8, "Schedule": 6}
T = TypeVar("T")


def save(record: Any, path: str | Path) -> None:
    """Write a record atomically: if the process is killed meanwhile, the old file stays."""
    name = type(record).__name__
    head = {"record": name, "version": _version(name), "value": record}
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
    if (version := raw.get("version")) != (expected_version := _version(name)):
        raise ValueError(
            f"{path}: version {version}, this program reads {expected_version}; make it again"
        )
    try:
        return from_plain(raw.get("value"), kind)
    except msgspec.ValidationError as e:
        raise ValueError(f"{path}: {e}") from None


def load_or_compute(kind: type[T], path: Path, compute: Callable[[], T]) -> T:
    """Read a record of a cache; if it is missing, damaged or of another version, compute and write
    it."""
    with suppress(ValueError):
        return load(kind, path)
    record = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(record, path)
    return record


def _version(name: str) -> int:
    return _NEWER.get(name, VERSION)
