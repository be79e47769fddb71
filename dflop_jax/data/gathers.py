"""Locates the tokens of a group's decoded pieces, and the features of the feeding groups that those
tokens read.

The loads of the batch determine each position, so every process computes the same positions,
although it decodes only a part of the samples. Pieces of a replacement may be smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflop_jax import records
from dflop_jax.data.content import features_per_row
from dflop_jax.data.sample import Sample
from dflop_jax.records import Group, Layout, Load, Schedule

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import MultimodalModel


Samples = Mapping[int, Sample] | Sequence[Sample]


@dataclass(frozen=True, eq=False)
class PieceNumbers:
    """Numbering of a module's P pieces in a global batch of N samples."""

    first: np.ndarray  # number of each sample's first piece, then P, int64 [N + 1]
    length: np.ndarray  # tokens of every piece by its number, int64 [P]

    @classmethod
    def from_loads(cls, loads: Sequence[Load], module: str) -> PieceNumbers:
        return cls(
            np.array(records.first_piece_numbers(loads, module), np.int64),
            np.array(records.piece_tokens(loads, module), np.int64),
        )

    def sample_of(self, piece: np.ndarray) -> np.ndarray:
        """Return the index in the batch of the sample that each piece belongs to."""
        return np.searchsorted(self.first, piece, side="right") - 1


class DecodedPiece(NamedTuple):
    sample: Sample
    batch_index: int  # index of its sample in the batch
    piece_index: int  # index of the piece in its sample
    tokens: slice  # its tokens among the sample's
    row: tuple[int, int]  # microbatch, row over all ranks
    columns: slice  # its columns in that row
    segment: int
    rank: int  # data rank of its module

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
    """Return the pieces on the given ranks whose samples this process has, without pieces that a
    smaller replacement lacks. `one_per_row`: the module takes one piece per row."""
    if not ranks:
        return []
    packed, module = group.pieces, group.module
    length = numbers.length[packed.piece_id]
    offset = packed.row_offsets(length)
    row_tokens = int((offset + length).max(initial=0))
    assert row_tokens <= group.shape.tokens, f"{row_tokens} tokens in rows of {group.shape.name}"
    assert not one_per_row or packed.segment.max(initial=1) == 1, f"{module!r} takes one per row"
    sample = numbers.sample_of(packed.piece_id)
    local = np.flatnonzero(np.isin(packed.rank, list(ranks)))
    row = packed.rank * group.shape.rows + packed.row
    number = packed.piece_id - numbers.first[sample]
    columns = (sample, number, length, packed.microbatch, row, offset, packed.segment, packed.rank)
    rows = zip(*(column[local].tolist() for column in columns))
    starts: dict[int, list[int]] = {}  # by sample: first token of each piece, and the end
    decoded = []
    for index, piece_index, max_length, microbatch, row_of_all, first_column, *segment_rank in rows:
        if isinstance(samples, Mapping) and index not in samples:
            continue
        if index not in starts:
            starts[index] = [*accumulate(samples[index].load.lengths(module), initial=0)]
        if piece_index + 1 >= len(starts[index]):
            continue
        tokens = slice(*starts[index][piece_index : piece_index + 2])
        n_tokens = tokens.stop - tokens.start
        assert n_tokens <= max_length, f"sample {index} of the batch is larger than its load"
        piece_columns = slice(first_column, first_column + n_tokens)
        position = (microbatch, row_of_all), piece_columns, *segment_rank
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
    """Return `PackedGroup.gathers` and `PackedGroup.read_counts` for a group's pieces."""
    target = schedule.groups[group]
    n_ranks = layout.data_ranks(target.module)
    rows = (target.microbatches, n_ranks * target.shape.rows)
    gathers: dict[int, tuple[np.ndarray, ...]] = {}
    read_counts: dict[int, np.ndarray] = {}
    for source in layout.sources(target.module):
        pair = source, target.module
        edges = [e for e in layout.edges if (e.source, e.target) == pair]
        (k,) = {e.sources for e in edges}
        shape, feeders = (*rows, target.shape.tokens, k), schedule.feeders(group, source)
        per_row = {
            f: features_per_row(model.modules[source], edges[0], schedule.groups[f].shape)
            for f in feeders
        }
        for feeder in feeders:
            index = np.full(shape, -1, np.int32)
            gathers[feeder] = (index, np.zeros(shape, np.float32)) if k > 1 else (index,)
        if reading_pieces := [piece for piece in pieces if pair in piece.sample.gathers]:
            features = _locate_features(
                source,
                per_row,
                schedule,
                numbers[source],
                reading_pieces,
                one_per_row=source in model.piece_tokens,
            )
            _write_gathers(gathers, feeders, reading_pieces, pair, features)
        for feeder in feeders:
            ranks = layout.data_ranks(source), n_ranks
            per_microbatch = ranks[0] * schedule.groups[feeder].shape.rows * per_row[feeder]
            every_feature = np.arange(target.microbatches * per_microbatch)
            holder = every_feature % per_microbatch // (per_microbatch // ranks[0])
            microbatch, row, *_ = read = np.nonzero(gathers[feeder][0] >= 0)
            read_feature = microbatch * per_microbatch + gathers[feeder][0][read]
            reader = row // target.shape.rows
            read_counts[feeder] = records.rank_traffic(
                every_feature, holder, np.ones_like(every_feature), read_feature, reader, ranks
            )
    return gathers, read_counts


class _FeatureLocations(NamedTuple):
    """Locations of the features that some pieces' samples have, int64. The first two fields are
    [features + 1] over all samples in order, with -1 at the end."""

    group: np.ndarray  # feeding group of each feature
    position: np.ndarray  # index of each feature in the group's flattened microbatch
    first: np.ndarray  # index of the first feature of each piece's sample, [pieces]


def _locate_features(
    source: str,
    per_row: Mapping[int, int],
    schedule: Schedule,
    numbers: PieceNumbers,
    pieces: Sequence[DecodedPiece],
    *,
    one_per_row: bool,
) -> _FeatureLocations:
    """Return the locations of the features of a source module that the samples of some pieces read.
    `per_row`: features per row of each feeding group, by its number."""
    # For each of the source's pieces: its group (-1: not a feeding group), its microbatch, the
    # index of its first feature in the microbatch, and the features and tokens per row there.
    feeder, microbatch, base, row_features, row_tokens = np.full((5, len(numbers.length)), -1)
    for group, n in per_row.items():
        packed, shape = schedule.groups[group].pieces, schedule.groups[group].shape
        first_tokens = packed.row_offsets(numbers.length[packed.piece_id])
        first = 0 if one_per_row else count_features(first_tokens, n, shape.tokens)
        feeder[packed.piece_id] = group
        microbatch[packed.piece_id] = packed.microbatch
        base[packed.piece_id] = (packed.rank * shape.rows + packed.row) * n + first
        row_features[packed.piece_id], row_tokens[packed.piece_id] = n, shape.tokens
    lengths = [p.sample.load.lengths(source) for p in pieces]
    n_pieces = np.array([len(of_sample) for of_sample in lengths])
    sample = np.array([p.batch_index for p in pieces])
    ends = np.cumsum(n_pieces)
    piece = np.repeat(numbers.first[sample] - ends + n_pieces, n_pieces) + np.arange(ends[-1])
    is_elsewhere = microbatch[piece] != np.repeat([p.row[0] for p in pieces], n_pieces)
    assert not is_elsewhere.any(), (
        f"pieces of {source!r} of sample {np.repeat(sample, n_pieces)[is_elsewhere][0]} of the "
        "batch do not feed its microbatch"
    )
    counts = row_features[piece]
    if not one_per_row:
        piece_lengths = np.concatenate(lengths).astype(np.int64)
        counts = count_features(piece_lengths, counts, row_tokens[piece])
    stops = np.cumsum(counts)
    position = np.repeat(base[piece] - stops + counts, counts) + np.arange(int(counts.sum()))
    group_of_feature = np.repeat(feeder[piece], counts)
    first_features = np.append(0, stops)[ends - n_pieces]
    return _FeatureLocations(
        np.append(group_of_feature, -1), np.append(position, -1), first_features
    )


def _write_gathers(
    gathers: Mapping[int, tuple[np.ndarray, ...]],
    feeders: Sequence[int],
    pieces: Sequence[DecodedPiece],
    pair: tuple[str, str],
    features: _FeatureLocations,
) -> None:
    """Write the features of a source module that the pieces' tokens read into `gathers`."""
    sample_gathers = [p.sample.gathers[pair] for p in pieces]
    index = [j.index[p.tokens] for j, p in zip(sample_gathers, pieces, strict=True)]
    n_tokens = np.array([len(rows) for rows in index])
    feature = np.concatenate(index)
    feature = np.where(feature >= 0, feature + np.repeat(features.first, n_tokens)[:, None], -1)
    # The tokens of a piece are adjacent in the flattened rows.
    _, rows, length, _ = gathers[feeders[0]][0].shape
    first_token = [(p.row[0] * rows + p.row[1]) * length + p.columns.start for p in pieces]
    token = np.repeat(first_token - np.cumsum(n_tokens) + n_tokens, n_tokens)
    token += np.arange(len(feature))
    for feeder in feeders:
        is_from_feeder = features.group[feature] == feeder
        target_index, *target_weights = (a.reshape(-1, feature.shape[1]) for a in gathers[feeder])
        target_index[token] = np.where(is_from_feeder, features.position[feature], -1)
        for target_weight in target_weights:
            weights = [
                j.weight[p.tokens] for j, p in zip(sample_gathers, pieces) if j.weight is not None
            ]
            assert len(weights) == len(sample_gathers), f"gathers of {pair} have no weights"
            target_weight[token] = np.where(is_from_feeder, np.concatenate(weights), 0)


def count_features(
    length: np.ndarray, per_row: int | np.ndarray, tokens: int | np.ndarray
) -> np.ndarray:
    """Return the number of features of `length` tokens, rounded up: each piece ends with a whole
    feature, and only the end of a row may have too few tokens for one."""
    return -(-length * per_row // tokens)
