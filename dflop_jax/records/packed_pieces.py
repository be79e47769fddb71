"""The rows of a group's pieces, as columns that the scheduler hands to the packer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.records.check import require


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """The rows of n pieces of a module: columns `piece_id`, `microbatch`, `rank`, `row`, int64
    [4, n].

    `piece_id` is the piece's number among the module's pieces of the global batch. The piece is in
    `row` of data `rank` of `microbatch`; pieces of one row are packed in the order of the entries.
    """

    columns: np.ndarray

    def __post_init__(self) -> None:
        require(
            self.columns.ndim == 2 and len(self.columns) == 4,
            f"packed pieces are four columns, got {self.columns.shape}",
        )

    @classmethod
    def from_columns(
        cls, piece_id: np.ndarray, microbatch: np.ndarray, rank: np.ndarray, row: np.ndarray
    ) -> PackedPieces:
        return cls(np.stack((piece_id, microbatch, rank, row)))

    @property
    def piece_id(self) -> np.ndarray:
        return self.columns[0]

    @property
    def microbatch(self) -> np.ndarray:
        return self.columns[1]

    @property
    def rank(self) -> np.ndarray:
        return self.columns[2]

    @property
    def row(self) -> np.ndarray:
        return self.columns[3]

    def __len__(self) -> int:
        return self.columns.shape[1]

    def __eq__(self, compared: object) -> bool:
        return isinstance(compared, PackedPieces) and np.array_equal(self.columns, compared.columns)

    def __hash__(self) -> int:
        return hash(self.columns.tobytes())

    @cached_property
    def _row_by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The order of the entries row by row, and for each the index where its row begins, [n]."""
        order = np.lexsort((self.row, self.rank, self.microbatch))
        row = np.stack((self.microbatch, self.rank, self.row))[:, order]
        is_first = np.append(True, (row[:, 1:] != row[:, :-1]).any(axis=0))[: len(order)]
        return order, np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))

    @cached_property
    def segment(self) -> np.ndarray:
        """Segment ids, int64 [n]: in every row pieces count from 1."""
        return self.row_offsets(np.ones(len(self), np.int64)) + 1

    def row_offsets(self, amount: np.ndarray) -> np.ndarray:
        """Sum of the amounts [n] of the pieces before each piece in its row."""
        order, begins = self._row_by_row
        total = np.cumsum(amount[order]) - amount[order]
        result = np.empty_like(total)
        result[order] = total - total[begins]
        return result

    def select(self, entries: np.ndarray) -> PackedPieces:
        """The entries that a mask or an index array selects."""
        return PackedPieces(self.columns[:, entries])

    def reassigned(self, rank: np.ndarray, row: np.ndarray) -> PackedPieces:
        """The same pieces on these ranks, in these rows."""
        columns = self.columns.copy()
        columns[2:] = rank, row
        return PackedPieces(columns)

    def sorted_by_row(self) -> PackedPieces:
        """The same pieces ordered by microbatch, rank, row and piece id."""
        return self.select(np.lexsort((self.piece_id, self.row, self.rank, self.microbatch)))


EMPTY_PACKED_PIECES = PackedPieces(np.zeros((4, 0), np.int64))
