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
    first_piece_numbers,
    piece_tokens,
    rank_traffic,
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
    def from_loads(cls, loads: Sequence[Load], module: str) -> PieceNumbers:
        return cls(
            np.array(first_piece_numbers(loads, module), np.int64),
            np.array(piece_tokens(loads, module), np.int64),
        )

    def sample_of(self, piece: np.ndarray) -> np.ndarray:
        """Return the index in the batch of the sample that each piece belongs to."""
        return np.searchsorted(self.first, piece, side="right") - 1


class DecodedPiece(NamedTuple):
    """The `order`-th piece of `sample`, which stands at `place` in the batch.

    Its `tokens`, a slice of the sample's tokens, go to the columns `room` of `row` (microbatch, row
    over all ranks).
    """

    sample: Sample
    batch_index: int
    piece_index: int
    tokens: slice
    row: tuple[int, int]
    columns: slice
    segment: int
    rank: int

    @property
    def length(self) -> int:
        return self.tokens.stop - self.tokens.start


def decoded_pieces(
    group: Group,
    numbers: PieceNumbers,
    samples: Samples,
    ranks: Collection[int],
    *,
    one_per_row: bool,
) -> list[DecodedPiece]:
    """Return the pieces on the given ranks whose samples are in this process; pieces that a smaller
    replacement lacks are left out.

    Args:
      one_per_row: the module takes one piece a row.
    """
    if not ranks:
        return []
    packed, module = group.pieces, group.module
    length = numbers.length[packed.piece_id]
    offset = packed.row_offsets(length)
    row_tokens = int((offset + length).max(initial=0))
    assert row_tokens <= group.shape.tokens, f"{row_tokens} tokens in rows of {group.shape.name}"
    assert not one_per_row or packed.segment.max(initial=1) == 1, (
        f"{module!r} takes one piece a row"
    )
    sample = numbers.sample_of(packed.piece_id)
    local = np.flatnonzero(np.isin(packed.rank, list(ranks)))
    row = packed.rank * group.shape.rows + packed.row
    number = packed.piece_id - numbers.first[sample]
    columns = (sample, number, length, packed.microbatch, row, offset,
               packed.segment, packed.rank)  # fmt: skip
    starts: dict[int, list[int]] = {}  # by sample, where each of its pieces begins, and all end
    decoded = []
    for index, piece_index, max_length, microbatch, row_of_all, first_column, segment, rank in zip(
        *(column[local].tolist() for column in columns)
    ):
        if isinstance(samples, Mapping) and index not in samples:
            continue
        if index not in starts:
            lengths = samples[index].load.lengths(module)
            starts[index] = list(accumulate(lengths, initial=0))
        if piece_index + 1 >= len(starts[index]):
            continue
        tokens = slice(*starts[index][piece_index : piece_index + 2])
        n_tokens = tokens.stop - tokens.start
        assert n_tokens <= max_length, f"sample {index} of the batch is larger than its load"
        position = (
            (microbatch, row_of_all),
            slice(first_column, first_column + n_tokens),
            segment,
            rank,
        )
        decoded.append(DecodedPiece(samples[index], index, piece_index, tokens, *position))
    return decoded


def build_gathers(
    layout: Layout,
    schedule: Schedule,
    group: int,
    pieces: Sequence[DecodedPiece],
    numbers: Mapping[str, PieceNumbers],
    model: MultimodalModel,
) -> tuple[dict[int, tuple[np.ndarray, ...]], dict[int, np.ndarray]]:
    """Return `PackedGroup.gathers` and `PackedGroup.read_counts` of a group with these pieces."""
    target = schedule.groups[group]
    rows = (target.microbatches, layout.data_ranks(target.module) * target.shape.rows)
    gathers: dict[int, tuple[np.ndarray, ...]] = {}
    read_counts: dict[int, np.ndarray] = {}
    for source in layout.sources(target.module):
        pair = source, target.module
        edges = [e for e in layout.edges if (e.source, e.target) == pair]
        (k,) = {e.sources for e in edges}
        shape, feeders = (*rows, target.shape.tokens, k), schedule.fed_by(group, source)
        for feeder in feeders:
            index = np.full(shape, -1, np.int32)
            gathers[feeder] = (index, np.zeros(shape, np.float32)) if k > 1 else (index,)
        offsets = _FeatureOffsets(source, feeders, schedule, numbers[source], model, edges[0])
        reading_pieces = [piece for piece in pieces if pair in piece.sample.gathers]
        if reading_pieces:
            _write_gathers(gathers, feeders, reading_pieces, pair, offsets)
        for feeder in feeders:
            feeder_bucket = schedule.groups[feeder].shape
            per_rank = feeder_bucket.rows * features_per_row(
                model.modules[source], edges[0], feeder_bucket
            )
            ranks = layout.data_ranks(source), layout.data_ranks(target.module)
            read_counts[feeder] = _count_reads(gathers[feeder][0], *ranks, per_rank)
    return gathers, read_counts


def _write_gathers(
    gathers: Mapping[int, tuple[np.ndarray, ...]],
    feeders: Sequence[int],
    pieces: Sequence[DecodedPiece],
    pair: tuple[str, str],
    offsets: _FeatureOffsets,
) -> None:
    """Write, for the tokens of some pieces of a group, which features of a source module they
    read."""
    sample_gathers = [p.sample.gathers[pair] for p in pieces]
    index = [j.index[p.tokens] for j, p in zip(sample_gathers, pieces, strict=True)]
    n_tokens = np.array([len(rows) for rows in index])
    owner, flat, starts = offsets.locate(pieces)
    feature = np.concatenate(index)
    feature = np.where(feature >= 0, feature + np.repeat(starts, n_tokens)[:, None], -1)
    # Each piece's tokens stand side by side in the flattened rows.
    _, rows, length, _ = gathers[feeders[0]][0].shape
    first_token = [(p.row[0] * rows + p.row[1]) * length + p.columns.start for p in pieces]
    token = np.repeat(first_token - np.cumsum(n_tokens) + n_tokens, n_tokens) + np.arange(
        len(feature)
    )
    for feeder in feeders:
        is_from_feeder = owner[feature] == feeder
        target_index, *target_weights = (a.reshape(-1, feature.shape[1]) for a in gathers[feeder])
        target_index[token] = np.where(is_from_feeder, flat[feature], -1)
        for target_weight in target_weights:
            weights = [
                j.weight[p.tokens] for j, p in zip(sample_gathers, pieces) if j.weight is not None
            ]
            assert len(weights) == len(sample_gathers), f"places of {pair} have no weights"
            target_weight[token] = np.where(is_from_feeder, np.concatenate(weights), 0)


def _count_reads(
    index: np.ndarray, n_source_ranks: int, n_target_ranks: int, per_rank: int
) -> np.ndarray:
    """Return how many features each target rank reads from each source rank, int64 [source ranks,
    target ranks]; a feature counts once for a rank that reads it."""
    microbatches, rows, *_ = index.shape
    features = np.arange(microbatches * n_source_ranks * per_rank)
    holder = features // per_rank % n_source_ranks
    microbatch, row, *_ = read = np.nonzero(index >= 0)
    read_feature = microbatch * n_source_ranks * per_rank + index[read]
    reader, ranks = row // (rows // n_target_ranks), (n_source_ranks, n_target_ranks)
    return rank_traffic(features, holder, np.ones_like(features), read_feature, reader, ranks)


class _FeatureOffsets:
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
        self._source, self._one_per_row = source, source in model.piece_tokens
        self._first, length = numbers.first, numbers.length
        self._feeder, self._microbatch, self._base, self._per_row, self._tokens = np.full(
            (5, len(length)), -1
        )
        for feeder in feeders:
            group = schedule.groups[feeder]
            packed = group.pieces
            n = features_per_row(model.modules[source], edge, group.shape)
            first_tokens = packed.row_offsets(length[packed.piece_id])
            first_feature = (
                0 if self._one_per_row else count_features(first_tokens, n, group.shape.tokens)
            )
            row = packed.rank * group.shape.rows + packed.row
            self._feeder[packed.piece_id] = feeder
            self._microbatch[packed.piece_id] = packed.microbatch
            self._base[packed.piece_id] = row * n + first_feature
            self._per_row[packed.piece_id], self._tokens[packed.piece_id] = n, group.shape.tokens

    def locate(self, pieces: Sequence[DecodedPiece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the features of the samples of some pieces are stored.

        Returns three int64 arrays: the feeding group of each feature and its position in its
        microbatch there, both [features + 1] over all samples in order with -1 at the end; and the
        first feature of each piece's sample, [pieces].
        """
        lengths = [p.sample.load.lengths(self._source) for p in pieces]
        n = np.array([len(of_sample) for of_sample in lengths])
        sample_index, microbatch = (
            np.array(c) for c in zip(*((p.batch_index, p.row[0]) for p in pieces))
        )
        ends = np.cumsum(n)
        piece = np.repeat(self._first[sample_index] - ends + n, n) + np.arange(ends[-1])
        is_elsewhere = self._microbatch[piece] != np.repeat(microbatch, n)
        assert not is_elsewhere.any(), (
            f"pieces of {self._source!r} of sample {np.repeat(sample_index, n)[is_elsewhere][0]} "
            "of the batch do not feed its microbatch"
        )
        counts = self._per_row[piece]
        if not self._one_per_row:
            piece_lengths = np.concatenate(lengths).astype(np.int64)
            counts = count_features(piece_lengths, counts, self._tokens[piece])
        stops = np.cumsum(counts)
        total = int(counts.sum())
        flat = np.repeat(self._base[piece] - stops + counts, counts) + np.arange(total)
        first_feature = np.append(0, stops)[ends - n]
        owner = np.repeat(self._feeder[piece], counts)
        return np.append(owner, -1), np.append(flat, -1), first_feature


def count_features(
    length: np.ndarray, per_row: int | np.ndarray, tokens: int | np.ndarray
) -> np.ndarray:
    """Return the features that so many tokens of a row give, rounded up: every piece ends with a
    whole feature, only the end of a row may have too few tokens for one."""
    return -(-length * per_row // tokens)
