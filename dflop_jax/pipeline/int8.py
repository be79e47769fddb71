"""Matrices as int8 codes beside a float32 scale for every output, of weights that are read a piece
at a time.

A scale is the largest size among all inputs of an output, over 127; a code is the nearest whole
number of scales. Everything is numpy's, so that the same weights give the same codes anywhere, by
which they are known again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dflop_jax.contract import Module, unquantized_of

LARGEST = np.float32(127)  # of an int8 whose negative is one too
Index = tuple[tuple[int, int], ...]  # (start, stop) by dim
Read = Callable[[Index], np.ndarray]


def scales(shape: tuple[int, ...], n_in: int, boxes: Iterable[Index], read: Read) -> np.ndarray:
    """Float32 scales [*out] of a matrix [*in, *out] of a shape.

    Args:
      n_in: how many of its dims are the input's.
      boxes: parts of it that together are all, none larger than the host may hold.
      read: gives the values of one.
    """
    largest = np.zeros(shape[n_in:], np.float32)
    for box in boxes:
        outputs = tuple(slice(*bounds) for bounds in box[n_in:])
        here = np.abs(read(box).astype(np.float32)).max(axis=tuple(range(n_in)))
        largest[outputs] = np.maximum(largest[outputs], here)
    return largest / LARGEST


def scales_of(matrix: np.ndarray, n_in: int) -> np.ndarray:
    """`scales` of a matrix that is at hand whole."""
    whole = tuple((0, n) for n in matrix.shape)
    return scales(matrix.shape, n_in, [whole], lambda _: matrix)


def codes(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Int8 codes of a part of a matrix, by the scales of its outputs."""
    # An output that is zero throughout has a scale of 0.
    divisor = np.where(scale > 0, scale, np.float32(1))
    return np.rint(values.astype(np.float32) / divisor).astype(np.int8)


def is_quantized(module: Module) -> bool:
    """Whether a module holds some parameters as codes."""
    return unquantized_of(module) != module


def scale_of(name: str) -> str:
    """The name of the scales beside a parameter that is held as codes."""
    return f"{name}_scale"


def is_codes(struct: Any) -> bool:
    """Whether an array, or what describes one, holds codes."""
    return struct.dtype == np.int8
