"""Writes a process's file of a checkpoint: parts end to end, a checksum of every block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

import numpy as np

from dflop_jax.checkpoint.format import BLOCK_BYTES, ArrayPiece

# Written before the disk is asked to take it. 4 processes that wrote 500 MB each to a disk of
# 250 MB/s took 0.78 of the time with 64 MiB, as with 16 MiB; each flush is a call of the disk.
FLUSH_BYTES = 64 << 20


def write_blocks(path: Path, parts: Iterable[bytes | ArrayPiece]) -> tuple[int, ...]:
    """Write the parts end to end, pieces in C order, and fsync; the CRC-32 of every block."""
    crc32s: list[int] = []
    crc, used = 0, 0
    with _created(path) as file, _EarlyFlush(file) as early:
        for part in parts:
            left = memoryview(part) if isinstance(part, bytes) else _bytes_of(part.array)
            while left:
                now, left = left[: BLOCK_BYTES - used], left[BLOCK_BYTES - used :]
                file.write(now)
                crc, used = zlib.crc32(now, crc), used + len(now)
                if used == BLOCK_BYTES:
                    crc32s.append(crc)
                    crc, used = 0, 0
                    early.flush()
        if used:
            crc32s.append(crc)
        early.wait()
        flush(file)
    return tuple(crc32s)


class _EarlyFlush:
    """Lets the disk begin with what is written while more is: the last flush is short then.

    Errors of the disk are raised by the next `flush`, or by `wait`: it reports each only once."""

    def __init__(self, file: IO[bytes]):
        self._file, self._flushed_bytes = file, 0
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # before the file is closed

    def flush(self) -> None:
        """Begin to flush, where enough was written and the last flush has ended."""
        enough = self._file.tell() - self._flushed_bytes >= FLUSH_BYTES
        if enough and (self._last is None or self._last.done()):
            self.wait()
            self._file.flush()
            self._flushed_bytes = self._file.tell()
            self._last = self._pool.submit(os.fsync, self._file.fileno())

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _created(path: Path) -> IO[bytes]:
    """A new file; another process that failed may have taken the empty folder away meanwhile."""
    while True:
        try:
            return path.open("wb")
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)


def flush(file: IO[bytes]) -> None:
    """Return once all is on the disk."""
    file.flush()
    os.fsync(file.fileno())
