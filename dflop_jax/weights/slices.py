"""Which slice of a file a slice of a parameter needs, and how to cut a large one in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from dflop_jax.weights.contract import Reshaping

Range = tuple[int, int]
Reader = Callable[[tuple[slice, ...]], np.ndarray]


def read_slice(layout: Reshaping, index: tuple[Range, ...], read: Reader) -> np.ndarray:
    """The part `index` of a parameter, reading of the file as little as one slice can give.

    Args:
      layout: how the file's array becomes the parameter.
      index: (start, stop) for each dim of the parameter.
      read: gives a slice of the file's array.
    """
    joined = len(layout.shape) != len(layout.order)
    wanted = list(map(_whole, layout.split))
    if not joined:
        for dim, place in enumerate(layout.order):
            wanted[place] = index[dim]
    slices, sizes, cuts, first_dim = [], [], [], 0
    for dims in layout.splits:
        ranges = wanted[first_dim : first_dim + len(dims)]
        first_dim += len(dims)
        if not dims:
            slices.append(slice(0, 1))
            continue
        (start, stop), rest = ranges[0], math.prod(dims[1:])
        slices.append(slice(start * rest, stop * rest))
        sizes += [stop - start, *dims[1:]]
        cuts += [slice(None), *(slice(*r) for r in ranges[1:])]
    array = read(tuple(slices)).reshape(sizes)[tuple(cuts)].transpose(layout.order)
    if joined:
        array = array.reshape(layout.shape)[tuple(slice(*r) for r in index)]
    return array


def _whole(size: int) -> Range:
    return (0, size)


def pieces(
    layout: Reshaping, index: tuple[Range, ...], layers: Range, limit_bytes: int, itemsize: int
) -> Iterator[tuple[Range, tuple[Range, ...]]]:
    """(layers, index) of pieces of at most about `limit_bytes` that together give the whole.

    Several layers go together while they are small; a large one is cut along the dim that is the
    outermost of the file.
    """
    each = math.prod(stop - start for start, stop in index) * itemsize
    step = max(1, limit_bytes // max(each, 1))
    if each <= limit_bytes or len(layout.shape) != len(layout.order):
        for start in range(*layers, step):
            yield (start, min(start + step, layers[1])), index
        return
    dim = layout.order.index(0)
    start, stop = index[dim]
    rows = max(1, limit_bytes * (stop - start) // each)
    for layer in range(*layers):
        for row in range(start, stop, rows):
            part = (row, min(row + rows, stop))
            yield (layer, layer + 1), (*index[:dim], part, *index[dim + 1 :])
