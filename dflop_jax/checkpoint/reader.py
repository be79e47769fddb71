"""Reads any slice of a committed checkpoint's arrays, whoever wrote the pieces it lies in."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from dflop_jax.checkpoint.format import (
    BLOCK_BYTES,
    MARKER,
    CorruptCheckpoint,
    Manifest,
    StoredBox,
    WrittenFile,
    process_file_path,
    translate_lost_file,
    translate_storage_errors,
)

OPEN_FILES = 32  # of processes, at once: a process may open 1,024 by default


class CheckpointReader:
    """A committed checkpoint: `step`, `meta`, `specs` by name, and `read`. Threads may share it."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.step, self.run_state = manifest.step, manifest.run_state
        self.specs = {spec.name: spec for spec in manifest.arrays}
        self._folder = folder
        self._boxes: dict[str, list[tuple[int, StoredBox]]] = {n: [] for n in self.specs}
        for written_file in manifest.files:
            for box in written_file.boxes:
                self._boxes[box.name].append((written_file.process, box))
        files = {p.process: p for p in manifest.files}

        @lru_cache(OPEN_FILES)
        def opened(process: int) -> _OpenFile:
            return _OpenFile(process_file_path(folder, process), files[process])

        self._opened = opened

    def __str__(self) -> str:
        """Where it is."""
        return str(self._folder)

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """The box of `shape` elements at `start` of an array, from the pieces that overlap it.

        Raises:
          CorruptCheckpoint: naming a file that is missing, truncated or damaged.
          StorageError: a file may not be read.
        """
        result = np.empty(tuple(shape), self.specs[name].numpy_dtype)
        try:
            with translate_storage_errors(f"read array {name}", self._folder):
                for process, box in self._boxes[name]:
                    low = np.maximum(start, box.start)
                    high = np.minimum(np.add(start, shape), np.add(box.start, box.shape))
                    if (low < high).all():
                        stored = self._opened(process).read_box(box, low, high, result.dtype)
                        result[_slices(start, low, high)] = stored
        except CorruptCheckpoint:
            if (self._folder / MARKER).exists():
                raise
            raise CorruptCheckpoint(f"{self._folder}: removed while it was read") from None
        return result


def _slices(first: Sequence[int], low: np.ndarray, high: np.ndarray) -> tuple[slice, ...]:
    """Where a box of an array lies in one that begins at `first`."""
    return tuple(slice(int(a - f), int(b - f)) for f, a, b in zip(first, low, high, strict=True))


class _OpenFile:
    """A file of pieces, closed when nobody needs it any more; threads may share it.

    Raises:
      CorruptCheckpoint: it is missing, or not of the bytes that were written.
    """

    def __init__(self, path: Path, written_file: WrittenFile):
        self._path, self._crc32s = path, written_file.crc32s
        with translate_lost_file(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            size = os.fstat(self._descriptor).st_size
            if size != written_file.n_bytes:
                raise CorruptCheckpoint(
                    f"{path}: has {size} bytes, {written_file.n_bytes} were written"
                )
            mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._verified_blocks: set[int] = set()  # blocks
        # What stands before the pieces is for other programs; it is checked once all the same.
        self._check(0, min(p.offset_bytes for p in written_file.boxes))

    def read_box(
        self, box: StoredBox, low: np.ndarray, high: np.ndarray, dtype: np.dtype
    ) -> np.ndarray:
        """What a piece holds of its array from `low` up to `high`, checked; CorruptCheckpoint
        names the file otherwise."""
        stored = np.ndarray(box.shape, dtype, self._bytes, box.offset_bytes)
        index: Any = (*_slices(box.start, low, high), ...)  # an array where it has no dims, too
        values = stored[index]
        first, stop = byte_bounds(values)
        file_start = byte_bounds(self._bytes)[0]
        self._check(first - file_start, stop - file_start)
        return values

    def _check(self, first: int, stop: int) -> None:
        """Compare the blocks of these bytes with their checksums, where they were not before. They
        are read by a call that fails where the disk does: the mapped memory would end the
        process."""
        for number in range(first // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if number in self._verified_blocks:
                continue
            offset, crc = number * BLOCK_BYTES, 0
            end = offset + BLOCK_BYTES  # or that of the file
            with translate_lost_file(self._path):
                while data := os.pread(self._descriptor, end - offset, offset):
                    crc, offset = zlib.crc32(data, crc), offset + len(data)
            if crc != self._crc32s[number]:
                raise CorruptCheckpoint(f"{self._path}: damaged (its checksum)")
            self._verified_blocks.add(number)
