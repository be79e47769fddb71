"""The format of a checkpoint: arrays, boxes (slices of arrays), files, manifest, and errors.

Each process holds some boxes of global arrays and writes them one after the other into one file,
after a header that makes it a safetensors file for other programs. The manifest has the file and
offset of every box, and a checksum of every block of every file.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

VERSION = 3  # of the manifest; a program reads checkpoints of its own version only
MANIFEST, MARKER = "manifest.json", "COMMITTED"
BLOCK_BYTES = 1 << 20  # bytes of a file per checksum: the smallest unit that is verified
Index = tuple[int, ...]
# Names of dtypes in safetensors since its version 0.3.
SAFETENSORS = {"bool": "BOOL", "bfloat16": "BF16"}
SAFETENSORS |= {
    f"{kind}int{n}": f"{kind.upper() or 'I'}{n}" for kind in ("", "u") for n in (8, 16, 32, 64)
}
SAFETENSORS |= {f"float{n}": f"F{n}" for n in (16, 32, 64)}


class StorageError(OSError):
    """A checkpoint cannot be written, listed or removed; the message has the folder and cause."""


class CorruptCheckpoint(ValueError):
    """A checkpoint is missing, damaged or incomplete; the message has the file."""


class OtherVersion(ValueError):
    """A checkpoint is intact, but has a format version that this program does not read."""


@contextmanager
def translate_storage_errors(action: str, folder: object) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        error = StorageError(f"cannot {action} in {folder}: {e.strerror or e}")
        error.errno = e.errno
        raise error from None


@contextmanager
def translate_lost_file(path: Path) -> Iterator[None]:
    """Raise CorruptCheckpoint for an OSError that says that `path` is missing or damaged."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CorruptCheckpoint(f"{path}: missing") from None
    except OSError as e:
        if e.errno == errno.EIO:
            raise CorruptCheckpoint(f"{path}: damaged ({e.strerror})") from None
        raise


def process_file_path(checkpoint: Path, process: int) -> Path:
    return checkpoint / f"process-{process:05d}"


@dataclass(frozen=True)
class ArraySpec:
    name: str
    shape: Index
    dtype: str  # name of a fixed-size number type of numpy or ml_dtypes

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


@dataclass(frozen=True, eq=False)
class ArrayBox:
    """A box of an array in a process's memory, with its first element at `start`."""

    name: str
    start: Index
    array: np.ndarray


@dataclass(frozen=True)
class StoredBox:
    """The position of a box, in C order, in the file of the process that wrote it."""

    name: str
    start: Index
    shape: Index
    offset_bytes: int


def safetensors_header(specs: Mapping[str, ArraySpec], boxes: Iterable[StoredBox]) -> bytes:
    """Return the safetensors header of a file whose boxes follow it, the first at offset 0.

    A box that is only a part of its array has a name such as `name[0:4,128:256]`. Dtypes that
    safetensors lacks are stored as bytes (U8), with a last dim for the bytes of an element.
    """
    entries: dict[str, Any] = {}
    for p in boxes:
        spec = specs[p.name]
        spans = ",".join(f"{a}:{a + n}" for a, n in zip(p.start, p.shape, strict=True))
        item_bytes = spec.numpy_dtype.itemsize
        is_known_type = spec.dtype in SAFETENSORS
        entries[p.name if p.shape == spec.shape else f"{p.name}[{spans}]"] = {
            "dtype": SAFETENSORS.get(spec.dtype, "U8"),
            "shape": [*p.shape] if is_known_type else [*p.shape, item_bytes],
            "data_offsets": [p.offset_bytes, p.offset_bytes + prod(p.shape) * item_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that elements are aligned
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class WrittenFile:
    process: int
    n_bytes: int  # 0: there is no file
    crc32s: tuple[int, ...]  # of its blocks; the last block may be shorter
    boxes: tuple[StoredBox, ...]


def check_covered(spec: ArraySpec, boxes: Sequence[StoredBox]) -> None:
    """Raise ValueError unless the boxes cover every element of an array exactly once."""
    # Cut the array at the edges of all boxes, and count the boxes that cover each cell.
    edges_by_dim = []
    for d, n in enumerate(spec.shape):
        inner = (edge for p in boxes for edge in (p.start[d], p.start[d] + p.shape[d]))
        edges_by_dim.append(np.unique([0, n, *inner]))
    count = np.zeros([len(e) - 1 for e in edges_by_dim], np.int32)
    for p in boxes:
        low = (np.searchsorted(e, s) for e, s in zip(edges_by_dim, p.start))
        high = (np.searchsorted(e, s + n) for e, s, n in zip(edges_by_dim, p.start, p.shape))
        count[tuple(map(slice, low, high))] += 1
    if (count != 1).any():
        volume = reduce(np.multiply.outer, map(np.diff, edges_by_dim), np.ones((), np.int64))
        raise ValueError(
            f"array {spec.name}: of its {volume.sum()} elements, {volume[count == 0].sum()} were "
            f"not written, and {volume[count > 1].sum()} were written several times"
        )


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json, which a reader needs to find and verify every array."""

    step: int
    arrays: tuple[ArraySpec, ...]
    files: tuple[WrittenFile, ...]
    run_state: dict[str, Any]
    version: int = VERSION


def encode_manifest(manifest: Manifest) -> bytes:
    """Return JSON bytes, equal for equal manifests; ValueError if the run state is not JSON."""
    try:
        # Not msgspec: a generator's state has integers of 128 bits, a metric may be NaN.
        text = json.dumps(msgspec.to_builtins(manifest), separators=(",", ":"))
    except (TypeError, ValueError) as e:
        raise ValueError(f"run state of checkpoint {manifest.step}: {e}") from None
    return text.encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in JSON bytes; OtherVersion if it has another format version."""
    record = json.loads(data)
    if record["version"] != VERSION:
        raise OtherVersion(f"format version {record['version']}; this program reads {VERSION}")
    return msgspec.convert(record, Manifest)
