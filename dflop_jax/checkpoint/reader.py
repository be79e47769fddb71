"""Reads any slice of a committed checkpoint's arrays, whoever wrote the pieces it lies in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dflop_jax.checkpoint.files import StreamReader, new_context
from dflop_jax.checkpoint.format import (
    MARKER,
    ArraySpec,
    CorruptCheckpoint,
    Index,
    Manifest,
    StoredPiece,
    process_folder,
    storage_errors,
)
from dflop_jax.checkpoint.layout import chunks_of, intersect, split_box

RUN_BYTES = 8 << 20  # about the most that is read at once: gaps wider than this are not read
READ_AHEAD_BYTES = 64 << 20  # stored bytes that one read has in memory beside its answer


class Reader:
    """A committed checkpoint: `step`, `meta`, `specs` by name, and `read`. Threads may share it."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.step, self.meta, self.specs = manifest.step, manifest.meta, manifest.specs
        self._folder = folder
        self._pieces: dict[str, list[tuple[StreamReader, StoredPiece]]] = {
            n: [] for n in self.specs
        }
        context = new_context()
        for part in manifest.parts:
            where = process_folder(folder, part.process)
            stream = StreamReader(where, part.layout, part.files, context)
            for piece in part.pieces:
                self._pieces[piece.name].append((stream, piece))

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """The box of `shape` elements at `start` of an array, from the chunks that overlap it.

        Raises:
          ValueError: no such array, or the box leaves it.
          CorruptCheckpoint: naming a file that is missing, truncated or damaged.
          StorageError: a file may not be read.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise ValueError(f"{self._folder}: has no array {name}")
        if not len(start) == len(shape) == len(spec.shape) or any(
            s < 0 or n < 0 or s + n > limit for s, n, limit in zip(start, shape, spec.shape)
        ):
            raise ValueError(
                f"{self._folder}: array {name} of shape {spec.shape} has no box {tuple(shape)} at"
                f" {tuple(start)}"
            )
        out = np.empty(tuple(shape), spec.numpy_dtype)
        try:
            with storage_errors(f"read array {name}", self._folder):
                self._fill(out, spec, tuple(start))
        except CorruptCheckpoint:
            if (self._folder / MARKER).exists():
                raise
            raise CorruptCheckpoint(f"{self._folder}: removed while it was read") from None
        return out

    def _fill(self, out: np.ndarray, spec: ArraySpec, start: Index) -> None:
        running: deque[tuple[int, Callable[[], None]]] = deque()
        in_memory = 0
        for n_bytes, finish in self._reads(out, spec, start):
            running.append((n_bytes, finish))
            in_memory += n_bytes
            while in_memory > READ_AHEAD_BYTES:
                n_bytes, finish = running.popleft()
                finish()
                in_memory -= n_bytes
        for _, finish in running:
            finish()

    def _reads(
        self, out: np.ndarray, spec: ArraySpec, start: Index
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        """Starts one read for each chunk that overlaps; (stored bytes, put them into `out`)."""
        itemsize = spec.numpy_dtype.itemsize
        for stream, piece in self._pieces[spec.name]:
            if intersect(start, out.shape, piece.start, piece.shape) is None:
                continue
            offset = piece.offset_bytes
            for at, chunk in chunks_of(spec, piece.start, piece.shape):
                shared = intersect(start, out.shape, at, chunk)
                strides = [prod(chunk[d + 1 :]) * itemsize for d in range(len(chunk))]
                for low, shape in split_box(*shared, strides, RUN_BYTES) if shared else ():
                    first = sum((lo - a) * s for lo, a, s in zip(low, at, strides))
                    n_bytes = sum((n - 1) * s for n, s in zip(shape, strides)) + itemsize
                    box: Any = tuple(
                        slice(lo - s, lo - s + n) for lo, s, n in zip(low, start, shape)
                    )
                    data = stream.start(offset + first, n_bytes)
                    yield n_bytes, partial(_place, data, strides, out[(..., *box)])
                offset += prod(chunk) * itemsize


def _place(data: Callable[[], np.ndarray], strides: list[int], out: np.ndarray) -> None:
    """Take the elements of a chunk's box from the run of stored bytes that spans it."""
    out[...] = as_strided(data().view(out.dtype), out.shape, strides)
