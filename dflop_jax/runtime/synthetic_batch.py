"""Synthetic batches, on which programs are timed.

A device that multiplies zeros draws little power and clocks higher, and attention skips empty rows,
so values are random and rows are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflop_jax.contract import Module, content_of
from dflop_jax.records import Group, Shape
from dflop_jax.runtime.programs import GroupArrays, Programs
from dflop_jax.simulate.task_graph import feeding_groups

# Pieces in a row, if their number does not change the timed programs.
PIECES_PER_ROW = 4
VALUE_STD = 0.05  # standard deviation of random parameters and activations: none overflows
_N_RANDOM_VALUES = 65521  # random numbers that are repeated; a prime, so that no two rows are alike


def random_values(shape: tuple[int, ...], dtype: Any, below: int) -> np.ndarray:
    """Values of a shape and dtype, integers from 0 to `below`."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    values: Any
    if dtype.kind == "b":
        values = rng.random(_N_RANDOM_VALUES) < 0.5
    elif dtype.kind in "iu":
        values = rng.integers(0, min(below, np.iinfo(dtype).max + 1), _N_RANDOM_VALUES)
    else:  # bfloat16 too
        values = rng.standard_normal(_N_RANDOM_VALUES) * VALUE_STD
    return np.resize(values.astype(dtype), shape)


def packed_field(
    name: str, shape: tuple[int, ...], dtype: Any, n_pieces: int, below: int
) -> np.ndarray:
    """A field [microbatches, rows, ...] of full rows with about `n_pieces` equal pieces."""
    if name not in ("segment_ids", "positions", "weights"):
        return random_values(shape, dtype, below)
    tokens = shape[2]
    length = -(-tokens // n_pieces)
    row = {
        "segment_ids": np.arange(tokens) // length + 1,
        "positions": np.arange(tokens) % length,
        "weights": np.ones(tokens),
    }[name]
    row = row.reshape(tokens, *[1] * (len(shape) - 3)).astype(dtype)
    return np.broadcast_to(row, shape)


def content_of_rows(module: Module, shape: Shape, n_pieces: int = PIECES_PER_ROW) -> dict[str, int]:
    """Content of the rows of `packed_field`, by feature."""
    length = -(-shape.tokens // n_pieces)
    whole, rest = divmod(shape.tokens, length)
    of_whole, of_rest = content_of(module, length), content_of(module, rest)
    return {name: shape.rows * (whole * n + of_rest[name]) for name, n in of_whole.items()}


def synthetic_groups(
    programs: Programs, bucket: int
) -> tuple[tuple[Group, ...], tuple[GroupArrays, ...]]:
    """One group without samples for every module of a bucket, and arrays of full rows."""
    layout = programs.layout
    shapes = dict(layout.buckets[bucket].shapes)
    index_of = {m: i for i, m in enumerate(shapes)}
    groups = []
    for m, shape in shapes.items():
        feeds = tuple(index_of[t] for t in layout.targets(m) if t in index_of)
        groups.append(Group(m, shape, feeds, microbatches=layout.group_size))
    return tuple(groups), synthetic_arrays(programs, groups)


def synthetic_arrays(programs: Programs, groups: Sequence[Group]) -> tuple[GroupArrays, ...]:
    """Arrays of full rows for these groups, whatever samples the groups hold."""
    feeding, found = feeding_groups(groups), []
    for n, group in enumerate(groups):
        fields: dict[str, np.ndarray] = {}
        source_indices: dict[int, tuple[np.ndarray, ...]] = {}
        for s in programs.layout.segments_of(group.module):
            for field, a in programs.signature(s.name, group.shape).fields.items():
                below = programs.model.vocab_size
                fields[field] = packed_field(field, a.shape, a.dtype, PIECES_PER_ROW, below)
            for link in programs.incoming_links[s.name]:
                for i in feeding.get((n, link.edge.source), ()) if link.edge else ():
                    exchange = programs.exchange(link, groups[i].shape, group.shape)
                    source_indices[i] = exchange.synthetic_indices()
        found.append(GroupArrays(fields, source_indices))
    return tuple(found)
