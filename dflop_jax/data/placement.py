"""Where a schedule puts the pieces of a batch, from loads alone.

A piece stands where the loads of the batch put it, so that every process, which decodes a part of
the samples only, finds it at the same place; one of a replaced sample may be smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflop_jax.data.sample import Sample
from dflop_jax.records import Group, Load, first_pieces

Samples = Mapping[int, Sample] | Sequence[Sample]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the n pieces of a group stand, each int64 [n].

    `piece` is the `order`-th of `sample`; `row` counts over all ranks of the microbatch; `offset`
    tokens and `segment` - 1 pieces stand before it in its row; `length` is by the sample's load.
    """

    piece: np.ndarray
    sample: np.ndarray
    order: np.ndarray
    microbatch: np.ndarray
    rank: np.ndarray
    row: np.ndarray
    offset: np.ndarray
    segment: np.ndarray
    length: np.ndarray


class Held(NamedTuple):
    """A decoded piece of a group: the `order`-th of `sample`, which stands at `place` in the batch.

    Its `length` tokens are at `tokens` among all of the sample's, and go to `room` of `row`
    (microbatch, row).
    """

    sample: Sample
    place: int
    order: int
    length: int
    tokens: slice
    row: tuple[int, int]
    room: slice
    segment: int
    rank: int


def placement(group: Group, loads: Sequence[Load], *, alone: bool) -> Placement:
    """Return where the pieces of a group stand by the loads of the batch.

    `alone`: the module takes one piece a row.
    """
    flat = [
        (piece, m, rank, rank * group.shape.rows + k, segment)
        for m, microbatch in enumerate(group.rows)
        for rank, rows in enumerate(microbatch)
        for k, row in enumerate(rows)
        for segment, piece in enumerate(row, 1)
    ]
    piece, microbatch, rank, row, segment = np.array(flat, np.int64).reshape(-1, 5).T
    first = np.array(first_pieces(loads, group.module))
    sample = np.searchsorted(first, piece, side="right") - 1
    order = piece - first[sample]
    lengths = [loads[s].lengths(group.module)[k] for s, k in zip(sample.tolist(), order.tolist())]
    length = np.array(lengths, np.int64)
    before = np.cumsum(length) - length
    begins = np.maximum.accumulate(np.where(segment == 1, np.arange(len(piece)), 0))
    offset = before - before[begins]
    full = int((offset + length).max(initial=0))
    assert full <= group.shape.tokens, f"{full} tokens in rows of {group.shape.name}"
    assert not alone or segment.max(initial=1) == 1, f"{group.module!r} takes one piece a row"
    return Placement(piece, sample, order, microbatch, rank, row, offset, segment, length)


def held(placed: Placement, module: str, samples: Samples, ranks: Collection[int]) -> list[Held]:
    """Return the pieces of the given ranks whose samples are here; a piece that a replaced sample
    lacks is left out."""
    names = ("sample", "order", "microbatch", "rank", "row", "offset", "segment", "length")
    columns = [getattr(placed, name).tolist() for name in names]
    pieces = []
    for index, order, microbatch, rank, row, offset, segment, most in zip(*columns):
        if rank not in ranks or (isinstance(samples, Mapping) and index not in samples):
            continue
        sample = samples[index]
        lengths = sample.load.lengths(module)
        if order >= len(lengths):
            continue
        length, start = lengths[order], sum(lengths[:order])
        assert length <= most, f"sample {index} of the batch is larger than its load"
        tokens, room = slice(start, start + length), slice(offset, offset + length)
        pieces.append(
            Held(sample, index, order, length, tokens, (microbatch, row), room, segment, rank)
        )
    return pieces
