"""The pieces of a group whose samples are here: which tokens of a sample go where.

A piece stands where the loads of the batch put it, so that every process, which decodes a part of
the samples only, finds it at the same place; one of a replaced sample may be smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dflop_jax.data.sample import Sample
from dflop_jax.records import Group, Load, first_pieces, piece_tokens

Samples = Mapping[int, Sample] | Sequence[Sample]


@dataclass(frozen=True, eq=False)
class PieceNumbers:
    """A module's P pieces in a global batch of N samples.

    first: number of every sample's first piece, and one past the last, int64 [N + 1].
    length: tokens of every piece by its number, int64 [P].
    """

    first: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, loads: Sequence[Load], module: str) -> PieceNumbers:
        return cls(
            np.array(first_pieces(loads, module), np.int64),
            np.array(piece_tokens(loads, module), np.int64),
        )

    def sample(self, piece: np.ndarray) -> np.ndarray:
        """The place in the batch of the sample that each of some pieces is of."""
        return np.searchsorted(self.first, piece, side="right") - 1


class DecodedPiece(NamedTuple):
    """The `order`-th piece of `sample`, which stands at `place` in the batch.

    Its `tokens` among all of the sample's go to `room` of `row` (microbatch, row of all ranks).
    """

    sample: Sample
    place: int
    order: int
    tokens: slice
    row: tuple[int, int]
    room: slice
    segment: int
    rank: int

    @property
    def length(self) -> int:
        return self.tokens.stop - self.tokens.start


def decoded_pieces(
    group: Group, numbers: PieceNumbers, samples: Samples, ranks: Collection[int], *, alone: bool
) -> list[DecodedPiece]:
    """Return the pieces on the given ranks whose samples are here; a piece that a replaced sample
    lacks is left out. `alone`: the module takes one piece a row."""
    if not ranks:
        return []
    places, module = group.pieces, group.module
    length = numbers.length[places.piece]
    offset = places.before(length)
    full = int((offset + length).max(initial=0))
    assert full <= group.shape.tokens, f"{full} tokens in rows of {group.shape.name}"
    assert not alone or places.segment.max(initial=1) == 1, f"{module!r} takes one piece a row"
    sample = numbers.sample(places.piece)
    here = np.flatnonzero(np.isin(places.rank, list(ranks)))
    row = places.rank * group.shape.rows + places.row
    columns = (sample, places.piece - numbers.first[sample], length, places.microbatch, row, offset,
               places.segment, places.rank)  # fmt: skip
    starts: dict[int, list[int]] = {}  # by sample, where each of its pieces begins, and all end
    pieces = []
    for index, order, limit, microbatch, row_of_all, begin, segment, rank in zip(
        *(column[here].tolist() for column in columns)
    ):
        if isinstance(samples, Mapping) and index not in samples:
            continue
        if index not in starts:
            lengths = samples[index].load.lengths(module)
            starts[index] = list(accumulate(lengths, initial=0))
        if order + 1 >= len(starts[index]):
            continue
        tokens = slice(*starts[index][order : order + 2])
        n = tokens.stop - tokens.start
        assert n <= limit, f"sample {index} of the batch is larger than its load"
        where = (microbatch, row_of_all), slice(begin, begin + n), segment, rank
        pieces.append(DecodedPiece(samples[index], index, order, tokens, *where))
    return pieces
