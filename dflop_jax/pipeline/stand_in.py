"""Values that stand in for a batch's where programs are timed.

A device that multiplies zeros draws little power and clocks higher, and attention skips rows that
hold no piece: so values are random and rows are full.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SCALE = 0.05  # of random parameters and activations
_VALUES = 65521  # random numbers that are repeated; a prime, so that no two rows are alike


def random_values(shape: tuple[int, ...], dtype: Any, below: int) -> np.ndarray:
    """Values of a shape and dtype, integers from 0 to `below`."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    values: Any
    if dtype.kind == "b":
        values = rng.random(_VALUES) < 0.5
    elif dtype.kind in "iu":
        values = rng.integers(0, min(below, np.iinfo(dtype).max + 1), _VALUES)
    else:  # bfloat16 too
        values = rng.standard_normal(_VALUES) * SCALE
    return np.resize(values.astype(dtype), shape)


def packed_field(
    name: str, shape: tuple[int, ...], dtype: Any, pieces: int, below: int
) -> np.ndarray:
    """A field [microbatches, rows, ...] of rows that are full of about so many pieces of equal
    length each; what is not about pieces is random."""
    if name not in ("segment_ids", "positions", "weights"):
        return random_values(shape, dtype, below)
    tokens = shape[2]
    length = -(-tokens // pieces)
    row = {
        "segment_ids": np.arange(tokens) // length + 1,
        "positions": np.arange(tokens) % length,
        "weights": np.ones(tokens),
    }[name]
    row = row.reshape(tokens, *[1] * (len(shape) - 3)).astype(dtype)
    return np.broadcast_to(row, shape)
