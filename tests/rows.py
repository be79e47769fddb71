"""Groups from and to lists of pieces by microbatch, data rank and row, which tests read easily."""

from __future__ import annotations

import numpy as np

from dflop_jax.records import Group, PackedPieces


def group_of_rows(module, shape, rows, feeds=(), content=()) -> Group:
    """A group whose `rows[microbatch][rank][row]` are numbers of pieces."""
    entries = [
        (piece, m, d, r)
        for m, ranks in enumerate(rows)
        for d, rank in enumerate(ranks)
        for r, row in enumerate(rank)
        for piece in row
    ]
    places = PackedPieces(np.array(entries, np.int64).reshape(-1, 4).T)
    return Group(module, shape, feeds, content, places, len(rows))


def rows_of(group: Group, ranks: int) -> list[list[list[list[int]]]]:
    """Pieces of a group by microbatch, data rank and row."""
    rows = [
        [[[] for _ in range(group.shape.rows)] for _ in range(ranks)]
        for _ in range(group.microbatches)
    ]
    for piece, m, d, r in group.pieces.columns.T.tolist():
        rows[m][d][r].append(piece)
    return rows
