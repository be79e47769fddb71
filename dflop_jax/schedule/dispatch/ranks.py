"""Which data rank takes which piece of a microbatch, so that the busiest rank has least to do.

OrchMLLM's post-balancing dispatcher (arXiv 2503.23830): every phase is balanced on its own, after
the batch is drawn, from longest first to the lightest rank on.
"""

from __future__ import annotations

import heapq

import numpy as np

from dflop_jax.records import Shape
from dflop_jax.schedule.solver.problem import Ints


def deal(length_P: Ints, content_P: Ints, n_ranks: int, shape: Shape) -> Ints:
    """Rows of pieces, those of rank 0 first, so that the busiest rank has little content: longest
    first to the lightest rank that has room, there into the emptiest row; -1 where none has."""
    free = [[shape.tokens] * shape.rows for _ in range(n_ranks)]
    lightest = [(0.0, rank) for rank in range(n_ranks)]  # a heap of (content, rank)
    rows = np.full(len(length_P), -1)
    contents = content_P.tolist()
    for i in np.argsort(-length_P, kind="stable").tolist():
        length, full = int(length_P[i]), []
        while lightest:
            content, rank = lightest[0]
            room = max(free[rank])
            if room >= length:
                row = free[rank].index(room)
                free[rank][row] -= length
                rows[i] = rank * shape.rows + row
                heapq.heapreplace(lightest, (content + contents[i], rank))
                break
            full.append(heapq.heappop(lightest))
        for entry in full:
            heapq.heappush(lightest, entry)
    return rows
