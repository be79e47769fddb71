"""Which bytes of which process's file hold which box of an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import numpy as np

from dflop_jax.checkpoint.format import (
    ArrayPiece,
    ArraySpec,
    Index,
    StoredPiece,
    WrittenPart,
    digest_specs,
    require,
)


def lay_out(
    specs: Mapping[str, ArraySpec], pieces: Iterable[ArrayPiece]
) -> tuple[list[StoredPiece], list[ArrayPiece]]:
    """Where each piece goes in the file, and the pieces in that order.

    The order is that of (name, start), whatever the order given, so the bytes are the same.
    Pieces without elements have no place.

    Raises:
      ValueError: a piece of an unknown array, of another dtype, or outside of its array.
    """
    ordered = sorted(
        (p for p in pieces if _checked(specs, p).array.size), key=lambda p: (p.name, p.start)
    )
    stored, offset = [], 0
    for p in ordered:
        stored.append(StoredPiece(p.name, tuple(map(int, p.start)), p.array.shape, offset))
        offset += p.array.nbytes
    return stored, ordered


def _checked(specs: Mapping[str, ArraySpec], piece: ArrayPiece) -> ArrayPiece:
    require(piece.name in specs, f"a piece of array {piece.name}, which has no spec")
    spec, array = specs[piece.name], piece.array
    require(
        array.dtype == spec.numpy_dtype,
        f"array {spec.name} is {spec.dtype}, a piece of it {array.dtype}",
    )
    require(
        is_inside(piece.start, array.shape, spec.shape),
        f"array {spec.name} of shape {spec.shape} has no piece of shape {array.shape} at "
        f"{piece.start}",
    )
    return piece


def is_inside(start: Sequence[int], shape: Sequence[int], limits: Sequence[int]) -> bool:
    """Whether a box lies in an array of shape `limits`."""
    return len(start) == len(shape) == len(limits) and all(
        s >= 0 and n >= 0 and s + n <= limit for s, n, limit in zip(start, shape, limits)
    )


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
    start: Index, shape: Index, strides: Sequence[int], max_span: int
) -> Iterator[tuple[Index, Index]]:
    """Cut a box, halving its first dims first, until each part spans at most `max_span` in memory.

    `strides` are those of C order; a single element is never cut.
    """
    span = sum((n - 1) * s for n, s in zip(shape, strides))
    wide = next((d for d, n in enumerate(shape) if n > 1), None)
    if span < max_span or wide is None:
        yield start, shape
        return
    half = shape[wide] // 2
    for low, n in ((start[wide], half), (start[wide] + half, shape[wide] - half)):
        there = (*start[:wide], low, *start[wide + 1 :])
        yield from split_box(there, (*shape[:wide], n, *shape[wide + 1 :]), strides, max_span)


def check_whole(specs: Mapping[str, ArraySpec], parts: Sequence[WrittenPart]) -> None:
    """Every process wrote once, by the same specs, and every element of every array once.

    Raises:
      ValueError: otherwise, naming array or process.
    """
    processes = [p.process for p in parts]
    require(len(set(processes)) == len(parts), f"two parts of one process among {processes}")
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in specs}
    for part in parts:
        names = {p.name for p in part.pieces}
        require(
            names <= specs.keys() and part.specs_digest == digest_specs(specs, names),
            f"process {part.process} laid its arrays out by other specs",
        )
        for p in part.pieces:
            pieces[p.name].append(p)
    for name, spec in specs.items():
        _check_covered(spec, pieces[name])


def _check_covered(spec: ArraySpec, pieces: Sequence[StoredPiece]) -> None:
    """Count the pieces that cover each cell of the grid that all their edges make."""
    edges = []
    for d, n in enumerate(spec.shape):
        inner = (edge for p in pieces for edge in (p.start[d], p.start[d] + p.shape[d]))
        edges.append(np.unique([0, n, *inner]))
    count = np.zeros([len(e) - 1 for e in edges], np.int32)
    for p in pieces:
        low = (np.searchsorted(e, s) for e, s in zip(edges, p.start))
        high = (np.searchsorted(e, s + n) for e, s, n in zip(edges, p.start, p.shape))
        count[tuple(map(slice, low, high))] += 1
    if (count != 1).any():
        volume = reduce(np.multiply.outer, map(np.diff, edges), np.ones((), np.int64))
        raise ValueError(
            f"array {spec.name}: of its {volume.sum()} elements no process wrote "
            f"{volume[count == 0].sum()}, and several wrote {volume[count > 1].sum()}"
        )
