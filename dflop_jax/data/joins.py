"""Where the features that stand at a group's tokens lie in the groups that feed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflop_jax.data.decoded import DecodedPiece
from dflop_jax.data.features import features_per_row
from dflop_jax.data.sample import Sample
from dflop_jax.records import Edge, Layout, Load, Schedule, first_pieces, piece_tokens, traffic

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import MultimodalModel


@dataclass(frozen=True, eq=False)
class Joined:
    """`PackedGroup.places` and `PackedGroup.reads` of a group."""

    places: dict[int, tuple[np.ndarray, ...]]
    reads: dict[int, np.ndarray]


def joined(
    layout: Layout,
    schedule: Schedule,
    group: int,
    pieces: Sequence[DecodedPiece],
    loads: Sequence[Load],
    model: MultimodalModel,
) -> Joined:
    """Return where the features stand that a group with these pieces reads."""
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
        features = _Features(source, feeders, schedule, loads, model, edges[0])
        for piece in pieces:
            if pair not in piece.sample.places:
                continue
            joins = piece.sample.places[pair]
            index = joins.index[piece.tokens]
            for feeder, flat in features.of_sample(piece).items():
                moved = np.where(index >= 0, flat[np.maximum(index, 0)], -1)
                places[feeder][0][piece.row][piece.room] = moved
                if k > 1:
                    assert joins.weight is not None, f"places of {pair} have no weights"
                    weight = np.where(moved >= 0, joins.weight[piece.tokens], 0)
                    places[feeder][1][piece.row][piece.room] = weight
        for feeder in feeders:
            low = schedule.groups[feeder].shape
            per_rank = low.rows * features_per_row(model.modules[source], edges[0], low)
            ranks = layout.data_ranks(source), layout.data_ranks(target.module)
            reads[feeder] = _reads(places[feeder][0], *ranks, per_rank)
    return Joined(places, reads)


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
        loads: Sequence[Load],
        model: MultimodalModel,
        edge: Edge,
    ) -> None:
        self._source, self._alone = source, source in model.piece_tokens
        self._first = first_pieces(loads, source)
        length = np.array(piece_tokens(loads, source), np.int64)
        self._feeder, self._microbatch, self._base, self._per_row, self._tokens = np.full(
            (5, self._first[-1]), -1
        )
        for feeder in feeders:
            group = schedule.groups[feeder]
            places = group.pieces
            n = features_per_row(model.modules[source], edge, group.shape)
            before = places.before(length[places.piece])
            inside = 0 if self._alone else before * n // group.shape.tokens
            row = places.rank * group.shape.rows + places.row
            self._feeder[places.piece] = feeder
            self._microbatch[places.piece] = places.microbatch
            self._base[places.piece] = row * n + inside
            self._per_row[places.piece], self._tokens[places.piece] = n, group.shape.tokens

    def of_sample(self, target: DecodedPiece) -> dict[int, np.ndarray]:
        """Return by feeding group where each feature of a piece's sample stands in the microbatch
        of the piece: int64 [features of all its pieces of the source], -1 for those elsewhere."""
        sample: Sample = target.sample
        lengths = np.array(sample.load.lengths(self._source), np.int64)
        first = self._first[target.place]
        mine = slice(first, first + len(lengths))
        assert (self._microbatch[mine] == target.row[0]).all(), (
            f"pieces of {self._source!r} of sample {target.place} of the batch do not feed its "
            "microbatch"
        )
        counts = self._per_row[mine]
        if not self._alone:
            counts = lengths * counts // self._tokens[mine]
        starts = np.cumsum(counts) - counts
        flat = np.arange(int(counts.sum())) + np.repeat(self._base[mine] - starts, counts)
        feeders = self._feeder[mine]
        owner = np.repeat(feeders, counts)
        return {g: np.where(owner == g, flat, -1) for g in dict.fromkeys(feeders.tolist())}
