"""The pieces of a group whose samples are here, which tokens of a sample go where, and where the
features that stand at these tokens lie in the groups that feed it.

A piece stands where the loads of the batch put it, so that every process, which decodes a part of
the samples only, finds it at the same place; one of a replaced sample may be smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflop_jax.data.content import features_per_row
from dflop_jax.data.sample import Sample
from dflop_jax.records import (
    Edge,
    Group,
    Layout,
    Load,
    Schedule,
    first_pieces,
    piece_tokens,
    traffic,
)

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import MultimodalModel


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
    length = numbers.length[places.piece_id]
    offset = places.row_offsets(length)
    full = int((offset + length).max(initial=0))
    assert full <= group.shape.tokens, f"{full} tokens in rows of {group.shape.name}"
    assert not alone or places.segment.max(initial=1) == 1, f"{module!r} takes one piece a row"
    sample = numbers.sample(places.piece_id)
    here = np.flatnonzero(np.isin(places.rank, list(ranks)))
    row = places.rank * group.shape.rows + places.row
    number = places.piece_id - numbers.first[sample]
    columns = (sample, number, length, places.microbatch, row, offset,
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


def joined(
    layout: Layout,
    schedule: Schedule,
    group: int,
    pieces: Sequence[DecodedPiece],
    numbers: Mapping[str, PieceNumbers],
    model: MultimodalModel,
) -> tuple[dict[int, tuple[np.ndarray, ...]], dict[int, np.ndarray]]:
    """Return `PackedGroup.places` and `PackedGroup.reads` of a group with these pieces."""
    target = schedule.groups[group]
    rows = (target.microbatches, layout.data_ranks(target.module) * target.shape.rows)
    places: dict[int, tuple[np.ndarray, ...]] = {}
    reads: dict[int, np.ndarray] = {}
    for source in layout.sources(target.module):
        pair = source, target.module
        edges = [e for e in layout.edges if (e.source, e.target) == pair]
        (k,) = {e.sources for e in edges}
        shape, feeders = (*rows, target.shape.tokens, k), schedule.fed_by(group, source)
        for feeder in feeders:
            index = np.full(shape, -1, np.int32)
            places[feeder] = (index, np.zeros(shape, np.float32)) if k > 1 else (index,)
        features = _Features(source, feeders, schedule, numbers[source], model, edges[0])
        reading = [piece for piece in pieces if pair in piece.sample.places]
        if reading:
            _place(places, feeders, reading, pair, features)
        for feeder in feeders:
            low = schedule.groups[feeder].shape
            per_rank = low.rows * features_per_row(model.modules[source], edges[0], low)
            ranks = layout.data_ranks(source), layout.data_ranks(target.module)
            reads[feeder] = _reads(places[feeder][0], *ranks, per_rank)
    return places, reads


def _place(
    places: Mapping[int, tuple[np.ndarray, ...]],
    feeders: Sequence[int],
    reading: Sequence[DecodedPiece],
    pair: tuple[str, str],
    features: _Features,
) -> None:
    """Write where the features of a pair of modules stand that some pieces of a group read."""
    joins = [piece.sample.places[pair] for piece in reading]
    index = [j.index[piece.tokens] for j, piece in zip(joins, reading, strict=True)]
    tokens = np.array([len(of_piece) for of_piece in index])
    owner, flat, starts = features.of_samples(reading)
    wanted = np.concatenate(index)
    wanted = np.where(wanted >= 0, wanted + np.repeat(starts, tokens)[:, None], -1)
    # Each piece's tokens stand side by side in the flattened rows.
    _, rows, length, _ = places[feeders[0]][0].shape
    begins = [(p.row[0] * rows + p.row[1]) * length + p.room.start for p in reading]
    stand = np.repeat(begins - np.cumsum(tokens) + tokens, tokens) + np.arange(len(wanted))
    for feeder in feeders:
        here = owner[wanted] == feeder
        into, *weights = (a.reshape(-1, wanted.shape[1]) for a in places[feeder])
        into[stand] = np.where(here, flat[wanted], -1)
        for weight in weights:
            given = [j.weight[p.tokens] for j, p in zip(joins, reading) if j.weight is not None]
            assert len(given) == len(joins), f"places of {pair} have no weights"
            weight[stand] = np.where(here, np.concatenate(given), 0)


def _reads(index: np.ndarray, low: int, high: int, per_rank: int) -> np.ndarray:
    """Return how many features each of `high` ranks reads from each of `low`, int64 [low, high];
    each counts once for a rank that reads it."""
    microbatches, rows, *_ = index.shape
    features = np.arange(microbatches * low * per_rank)
    holder = features // per_rank % low
    microbatch, row, *_ = read = np.nonzero(index >= 0)
    wanted = microbatch * low * per_rank + index[read]
    return traffic(features, holder, np.ones_like(features), wanted, row // (rows // high),
                   (low, high))  # fmt: skip


class _Features:
    """Where the features of a source module stand in the groups that feed one group.

    Arrays are by the number of a piece, int64: the group it lies in (-1: in none of these), its
    microbatch, its first feature in that, and the features and tokens of a row there.
    """

    def __init__(
        self,
        source: str,
        feeders: Sequence[int],
        schedule: Schedule,
        numbers: PieceNumbers,
        model: MultimodalModel,
        edge: Edge,
    ) -> None:
        self._source, self._alone = source, source in model.piece_tokens
        self._first, length = numbers.first, numbers.length
        self._feeder, self._microbatch, self._base, self._per_row, self._tokens = np.full(
            (5, len(length)), -1
        )
        for feeder in feeders:
            group = schedule.groups[feeder]
            places = group.pieces
            n = features_per_row(model.modules[source], edge, group.shape)
            before = places.row_offsets(length[places.piece_id])
            inside = 0 if self._alone else features_of(before, n, group.shape.tokens)
            row = places.rank * group.shape.rows + places.row
            self._feeder[places.piece_id] = feeder
            self._microbatch[places.piece_id] = places.microbatch
            self._base[places.piece_id] = row * n + inside
            self._per_row[places.piece_id], self._tokens[places.piece_id] = n, group.shape.tokens

    def of_samples(
        self, targets: Sequence[DecodedPiece]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the features of the samples of some pieces, one sample after the other: the feeding
        group that has each, and where it stands in its microbatch there, int64 [features + 1], -1
        at the end; and where those of each piece's sample begin, int64 [pieces]."""
        lengths = [p.sample.load.lengths(self._source) for p in targets]
        n = np.array([len(of_sample) for of_sample in lengths])
        place, microbatch = (np.array(c) for c in zip(*((p.place, p.row[0]) for p in targets)))
        ends = np.cumsum(n)
        mine = np.repeat(self._first[place] - ends + n, n) + np.arange(ends[-1])
        astray = self._microbatch[mine] != np.repeat(microbatch, n)
        assert not astray.any(), (
            f"pieces of {self._source!r} of sample {np.repeat(place, n)[astray][0]} of the batch "
            "do not feed its microbatch"
        )
        counts = self._per_row[mine]
        if not self._alone:
            every = np.concatenate(lengths).astype(np.int64)
            counts = features_of(every, counts, self._tokens[mine])
        stops = np.cumsum(counts)
        total = int(counts.sum())
        flat = np.repeat(self._base[mine] - stops + counts, counts) + np.arange(total)
        before = np.append(0, stops)[ends - n]
        owner = np.repeat(self._feeder[mine], counts)
        return np.append(owner, -1), np.append(flat, -1), before


def features_of(
    length: np.ndarray, per_row: int | np.ndarray, tokens: int | np.ndarray
) -> np.ndarray:
    """Features that so many tokens of a row give, where pieces end with a whole one: rounded up,
    since a row may end with tokens that are too few for one more."""
    return -(-length * per_row // tokens)
