"""Reads any slice of a committed checkpoint's arrays, whoever wrote the pieces it lies in."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dflop_jax.checkpoint.format import (
    BLOCK_BYTES,
    MARKER,
    CorruptCheckpoint,
    Index,
    Manifest,
    StoredPiece,
    WrittenPart,
    lost_file,
    process_file,
    storage_errors,
)
from dflop_jax.checkpoint.layout import intersect, is_inside, split_box

RUN_BYTES = 8 << 20  # about the most that is read at once: gaps wider than this are not read
CACHED_BLOCKS = 32  # of files, of BLOCK_BYTES each: small arrays share one
OPEN_FILES = 32  # of processes, at once: a process may open 1,024 by default


class CheckpointReader:
    """A committed checkpoint: `step`, `meta`, `specs` by name, and `read`. Threads may share it."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.step, self.meta, self.specs = manifest.step, manifest.meta, manifest.specs
        self._folder = folder
        self._pieces: dict[str, list[tuple[int, StoredPiece]]] = {n: [] for n in self.specs}
        for part in manifest.parts:
            for piece in part.pieces:
                self._pieces[piece.name].append((part.process, piece))
        parts = {p.process: p for p in manifest.parts}
        # What stands before the pieces is for other programs; it is checked once all the same.
        self._unchecked_bytes = {
            p.process: min(piece.offset_bytes for piece in p.pieces)
            for p in manifest.parts
            if p.pieces
        }

        @lru_cache(OPEN_FILES)
        def opened(process: int) -> _OpenFile:
            return _OpenFile(process_file(folder, process), parts[process])

        self._block = lru_cache(CACHED_BLOCKS)(lambda process, n: opened(process).block(n))

    def __str__(self) -> str:
        """Where it is."""
        return str(self._folder)

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """The box of `shape` elements at `start` of an array, from the pieces that overlap it.

        Raises:
          ValueError: no such array, or the box leaves it.
          CorruptCheckpoint: naming a file that is missing, truncated or damaged.
          StorageError: a file may not be read.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise ValueError(f"{self._folder}: has no array {name}")
        if not is_inside(start, shape, spec.shape):
            raise ValueError(
                f"{self._folder}: array {name} of shape {spec.shape} has no box {tuple(shape)} at"
                f" {tuple(start)}"
            )
        out = np.empty(tuple(shape), spec.numpy_dtype)
        try:
            with storage_errors(f"read array {name}", self._folder):
                for process, piece in self._pieces[name]:
                    self._read_shared(process, piece, out, tuple(start))
        except CorruptCheckpoint:
            if (self._folder / MARKER).exists():
                raise
            raise CorruptCheckpoint(f"{self._folder}: removed while it was read") from None
        return out

    def _read_shared(self, process: int, piece: StoredPiece, out: np.ndarray, start: Index) -> None:
        """Read what a piece and the box at `start` share into the box, in runs of stored bytes."""
        shared = intersect(start, out.shape, piece.start, piece.shape)
        if shared is None:
            return
        strides = [prod(piece.shape[d + 1 :]) * out.itemsize for d in range(out.ndim)]
        for low, shape in split_box(*shared, strides, RUN_BYTES):
            first = sum((lo - a) * s for lo, a, s in zip(low, piece.start, strides))
            n_bytes = sum((n - 1) * s for n, s in zip(shape, strides)) + out.itemsize
            run = self._read_bytes(process, piece.offset_bytes + first, n_bytes)
            box: Any = tuple(slice(lo - s, lo - s + n) for lo, s, n in zip(low, start, shape))
            out[(*box, ...)] = as_strided(run.view(out.dtype), shape, strides)

    def _read_bytes(self, process: int, offset: int, n_bytes: int) -> np.ndarray:
        """uint8[n_bytes] of the file that a process wrote."""
        for start in range(0, self._unchecked_bytes[process], BLOCK_BYTES):
            self._block(process, start // BLOCK_BYTES)
        self._unchecked_bytes[process] = 0
        data = np.empty(n_bytes, np.uint8)
        done = 0
        while done < n_bytes:
            block, start = divmod(offset + done, BLOCK_BYTES)
            part = self._block(process, block)[start : start + n_bytes - done]
            data[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        return data


class _OpenFile:
    """A file of pieces, closed when nobody needs it any more; threads may share it.

    Raises:
      CorruptCheckpoint: it is missing, or not of the bytes that were written.
    """

    def __init__(self, path: Path, part: WrittenPart):
        self._path, self._crc32s, self._descriptor = path, part.crc32s, -1
        with lost_file(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
        if size != part.n_bytes:
            raise CorruptCheckpoint(f"{path}: has {size} bytes, {part.n_bytes} were written")

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def block(self, number: int) -> memoryview:
        """A block that its checksum says is sound; CorruptCheckpoint names the file otherwise."""
        offset, parts = number * BLOCK_BYTES, list[bytes]()
        stop = offset + BLOCK_BYTES  # or the end of the file
        with lost_file(self._path):
            while part := os.pread(self._descriptor, stop - offset, offset):
                parts.append(part)
                offset += len(part)
        data = b"".join(parts)
        if zlib.crc32(data) != self._crc32s[number]:
            raise CorruptCheckpoint(f"{self._path}: damaged (its checksum)")
        return memoryview(data)
