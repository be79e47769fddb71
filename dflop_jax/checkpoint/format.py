"""What a checkpoint is made of: arrays, pieces, parts, the manifest, and its errors.

A global array is cut into a grid of chunks. Each process holds some pieces, each a box of whole
chunks, and lays them end to end, chunk by chunk, into one stream of bytes (store_files.py).
Where every piece lies is in the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

VERSION = 1
MANIFEST, MARKER = "manifest.json", "COMMITTED"
Index = tuple[int, ...]


class StorageError(OSError):
    """A checkpoint cannot be written, listed or removed; names the folder and the cause."""


class CorruptCheckpoint(ValueError):
    """A checkpoint is missing, damaged or incomplete; names the file. Use an older one."""


@contextmanager
def storage_errors(action: str, folder: Path) -> Iterator[None]:
    """Any OSError inside becomes one StorageError that names the folder and the cause."""
    try:
        yield
    except OSError as e:
        error = StorageError(f"cannot {action} in {folder}: {e.strerror or e}")
        error.errno = e.errno
        raise error from None


def process_folder(checkpoint: Path, process: int) -> Path:
    """Where a process's files are in the folder of a checkpoint."""
    return checkpoint / f"process-{process:05d}"


def require(ok: bool, message: str) -> None:
    """ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True)
class ArraySpec:
    """A global array and its grid of chunks.

    `chunk` is what one device holds, or a part of it: chunk[i] in 1..shape[i], or 0 where the dim
    is 0; chunks at the far edge may be smaller. `dtype` is the name of a fixed-size number type of
    numpy or ml_dtypes.
    """

    name: str
    shape: Index
    dtype: str
    chunk: Index

    def __post_init__(self) -> None:
        require(
            len(self.chunk) == len(self.shape)
            and all(0 <= min(n, 1) <= c <= n for n, c in zip(self.shape, self.chunk)),
            f"array {self.name}: chunk {self.chunk} does not fit shape {self.shape}",
        )
        try:
            known = self.numpy_dtype.name == self.dtype and (
                self.numpy_dtype.kind in "biufc" or hasattr(ml_dtypes, self.dtype)
            )
        except TypeError:
            known = False
        require(known, f"array {self.name}: no number type is named {self.dtype!r}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def grid(self) -> Index:
        """Number of chunks along each dim."""
        return tuple(-(-n // c) if n else 0 for n, c in zip(self.shape, self.chunk))


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of whole chunks of array `name`, first element at `start`, as one process holds it."""

    name: str
    start: Index
    array: np.ndarray


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece lies in the byte stream of the process that wrote it."""

    name: str
    start: Index
    shape: Index
    offset_bytes: int


@dataclass(frozen=True)
class StreamLayout:
    """How a stream is cut: at most `file_bytes` (header included) a file, in checksummed blocks."""

    total_bytes: int
    file_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class StoredFile:
    """One file of a process. It begins with `crc32`, that of its share of the stream."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Part:
    """What one process wrote, to be sent to process 0: msgspec encodes and decodes it as JSON.

    `specs_digest` stands for the specs by which it was laid out.
    """

    process: int
    layout: StreamLayout
    files: tuple[StoredFile, ...]
    pieces: tuple[StoredPiece, ...]
    specs_digest: str


@dataclass(frozen=True)
class Manifest:
    """All that is needed to read a checkpoint."""

    step: int
    specs: dict[str, ArraySpec]
    parts: tuple[Part, ...]
    meta: dict[str, Any]


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON bytes, equal for equal manifests.

    Raises:
      ValueError: meta holds something that JSON has no form for.
    """
    record = {
        "version": VERSION,
        "step": manifest.step,
        "arrays": msgspec.to_builtins(list(manifest.specs.values())),
        "parts": msgspec.to_builtins(manifest.parts),
        "meta": manifest.meta,
    }
    try:
        # Not msgspec: a generator's state has integers of 128 bits, a metric may be NaN.
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as e:
        raise ValueError(f"meta of checkpoint {manifest.step}: {e}") from None


def decode_manifest(data: bytes) -> Manifest:
    """The reverse of `encode_manifest`, of bytes whose checksum was right.

    Raises:
      ValueError: written by another version.
    """
    record = json.loads(data)
    if record["version"] != VERSION:
        raise ValueError(f"format version {record['version']}; this program reads {VERSION}")
    specs = msgspec.convert(record["arrays"], tuple[ArraySpec, ...])
    return Manifest(
        record["step"],
        {s.name: s for s in specs},
        msgspec.convert(record["parts"], tuple[Part, ...]),
        record["meta"],
    )


def by_name(specs: Iterable[ArraySpec]) -> dict[str, ArraySpec]:
    """The specs by name, in the order of the names.

    Raises:
      ValueError: two of one name.
    """
    found: dict[str, ArraySpec] = {}
    for spec in sorted(specs, key=lambda s: s.name):
        require(spec.name not in found, f"array {spec.name}: two specs have this name")
        found[spec.name] = spec
    return found


def digest_specs(specs: Mapping[str, ArraySpec], names: Iterable[str]) -> str:
    """Equal on two processes if and only if they mean the same arrays by these names."""
    chosen = [specs[name] for name in sorted(set(names))]
    return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()
