"""Bytes of a medium in a file, in a member of a tar shard or in memory; and folders of media."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from dflop_jax.data.bounds import MAX_RECORD_BYTES


@dataclass(frozen=True)
class Blob:
    """A tar member: `size_bytes` bytes of `path` from `offset` on; `name` is the member's name."""

    path: Path
    offset: int
    size_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def read(self) -> bytes:
        """Return all bytes. ValueError: too many for a record; OSError: the file ends inside."""
        if not 0 <= self.size_bytes <= MAX_RECORD_BYTES:
            raise ValueError(f"{self.size_bytes:,} bytes, more than {MAX_RECORD_BYTES:,}")
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size_bytes)
        if len(data) < self.size_bytes:
            raise OSError(f"{self}: the file ends inside it")
        return data


@dataclass(frozen=True)
class Embedded:
    """A medium whose bytes are in its record; messages use `name`."""

    data: bytes = field(repr=False)
    name: str

    def __str__(self) -> str:
        return self.name


MediaFile = Path | Blob | Embedded


def open_media(source: MediaFile) -> BinaryIO:
    """Return a medium as a seekable binary file; members of a tar shard are read on demand."""
    if isinstance(source, Path):
        return source.open("rb")
    if isinstance(source, Embedded):
        # A BytesIO alone would have an address as its name in messages.
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, io.BytesIO(source.data))))
    return cast(BinaryIO, io.BufferedReader(_Section(source)))


class _Section(io.RawIOBase):
    """A section of a file, readable as a file."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._position = blob, 0
        self._file = blob.path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (0, self._position, self._blob.size_bytes)[whence]
        if position < 0:
            raise OSError(f"{self._blob}: seek before its start")
        self._position = position
        return position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        n_left = max(0, self._blob.size_bytes - self._position)
        self._file.seek(self._blob.offset + self._position)
        n = self._file.readinto(memoryview(buffer)[:n_left]) or 0
        self._position += n
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


class MissingFile(Exception):
    """No file exists at any of the paths in `args`."""


class MediaRoots:
    """Folders that are searched in order. A file outside all of them is refused, whether its path
    is absolute, contains "..", or follows a link."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._roots = [Path(r) for r in folders]
        self._real_roots = [r.resolve() for r in self._roots]

    def resolve(self, name: str) -> Path:
        """Return the path of a file. ValueError: outside, or missing (from a `MissingFile`)."""
        inside = [
            path
            for path in (root / name for root in self._roots)
            if any(path.resolve().is_relative_to(root) for root in self._real_roots)
        ]
        if not inside:
            roots = ", ".join(map(str, self._roots))
            raise ValueError(f"{name} is outside {roots}; to allow it, add its folder to data.root")
        for candidate in inside:
            if candidate.is_file():
                return candidate
        raise ValueError(f"missing file {inside[0]}") from MissingFile(*map(str, inside))
