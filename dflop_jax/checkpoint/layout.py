"""Geometry of a checkpoint: which chunks a piece has, where its bytes go, what boxes share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dflop_jax.checkpoint.format import (
    ArraySpec,
    Index,
    Part,
    Piece,
    StoredPiece,
    digest_specs,
    require,
)


def lay_out(
    specs: Mapping[str, ArraySpec], pieces: Iterable[Piece]
) -> tuple[list[StoredPiece], list[Piece], int]:
    """Where each piece goes in the stream, the pieces in that order, and the stream's bytes.

    The order is that of (name, start), whatever the order given, so the bytes are the same.
    Pieces without elements have no place.

    Raises:
      ValueError: a piece of an unknown array, of another dtype, or not of whole chunks.
    """
    ordered = sorted(
        (p for p in pieces if _checked(specs, p).array.size), key=lambda p: (p.name, p.start)
    )
    stored, offset = [], 0
    for p in ordered:
        stored.append(StoredPiece(p.name, tuple(map(int, p.start)), p.array.shape, offset))
        offset += p.array.nbytes
    return stored, ordered, offset


def _checked(specs: Mapping[str, ArraySpec], piece: Piece) -> Piece:
    require(piece.name in specs, f"a piece of array {piece.name}, which has no spec")
    spec, array = specs[piece.name], piece.array
    require(
        array.dtype == spec.numpy_dtype,
        f"array {spec.name} is {spec.dtype}, a piece of it {array.dtype}",
    )
    require(
        len(piece.start) == array.ndim == len(spec.shape)
        and all(
            s >= 0
            and s + n <= limit
            and (n == 0 or (s % c == 0 and ((s + n) % c == 0 or s + n == limit)))
            for s, n, c, limit in zip(piece.start, array.shape, spec.chunk, spec.shape)
        ),
        f"array {spec.name}: a piece of shape {array.shape} at {piece.start} is not one of whole"
        f" chunks {spec.chunk} of {spec.shape}",
    )
    return piece


def chunks_of(
    spec: ArraySpec, start: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[Index, Index]]:
    """(start, shape) of every chunk in a box of whole chunks, the last dim fastest."""
    ranges = [range(s, s + n, c) for s, n, c in zip(start, shape, spec.chunk)]
    end = [s + n for s, n in zip(start, shape)]
    for at in itertools.product(*ranges):
        yield at, tuple(min(c, e - a) for a, c, e in zip(at, spec.chunk, end))


def piece_bytes(spec: ArraySpec, piece: Piece) -> Iterator[np.ndarray]:
    """The bytes of a piece as it is stored: each chunk in C order, uint8[chunk bytes]."""
    for at, shape in chunks_of(spec, piece.start, piece.array.shape):
        box = tuple(slice(a - s, a - s + n) for a, s, n in zip(at, piece.start, shape))
        yield np.ascontiguousarray(piece.array[box]).reshape(-1).view(np.uint8)


def intersect(
    start: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[Index, Index] | None:
    """(start, shape) of what two boxes share; None when that is empty."""
    low = tuple(max(a, b) for a, b in zip(start, other))
    size = tuple(
        min(a + n, b + m) - lo for a, n, b, m, lo in zip(start, shape, other, other_shape, low)
    )
    return (low, size) if min(size, default=1) > 0 else None


def split_box(
    start: Index, shape: Index, strides: Sequence[int], most: int
) -> Iterator[tuple[Index, Index]]:
    """Cut a box, halving its first dims first, until each part spans at most `most` in memory.

    `strides` are those of C order; a single element is never cut.
    """
    span = sum((n - 1) * s for n, s in zip(shape, strides))
    wide = next((d for d, n in enumerate(shape) if n > 1), None)
    if span < most or wide is None:
        yield start, shape
        return
    half = shape[wide] // 2
    for low, n in ((start[wide], half), (start[wide] + half, shape[wide] - half)):
        there = (*start[:wide], low, *start[wide + 1 :])
        yield from split_box(there, (*shape[:wide], n, *shape[wide + 1 :]), strides, most)


def check_whole(specs: Mapping[str, ArraySpec], parts: Sequence[Part]) -> None:
    """Every process wrote once, by the same specs, and every chunk of every array once.

    Raises:
      ValueError: otherwise, naming array or process.
    """
    written = {name: np.zeros(spec.grid, np.int32) for name, spec in specs.items()}
    processes = [p.process for p in parts]
    require(len(set(processes)) == len(parts), f"two parts of one process among {processes}")
    for part in parts:
        names = {p.name for p in part.pieces}
        require(
            names <= specs.keys() and part.specs_digest == digest_specs(specs, names),
            f"process {part.process} laid its arrays out by other specs",
        )
        for p in part.pieces:
            chunk = specs[p.name].chunk
            box = (slice(s // c, -(-(s + n) // c)) for s, n, c in zip(p.start, p.shape, chunk))
            written[p.name][tuple(box)] += 1
    for name, count in written.items():
        require(
            bool((count == 1).all()),
            f"array {name}: of its {count.size} chunks no process wrote {int((count == 0).sum())},"
            f" and several wrote {int((count > 1).sum())}",
        )
