"""What the groups of a module have of a feature of content at least, each as much as its busiest
rank, for which its others wait.

Shape suffixes: P pieces, S shapes, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Shape
from dflop_jax.schedule.solver.problem import ROUNDING, Ints


def least_content(
    length_P: Ints, content_P: Ints, shapes: Sequence[Shape], ranks: int, microbatches: int = 1
) -> float:
    """A bound on the sum over groups of the content of each one's busiest rank, whatever groups of
    these shapes hold the pieces.

    Take the groups by their largest piece, largest first. The first k hold so many pieces of a
    length at most; if more have content c or above, group k + 1 has at least c (`_largest`). And
    what the first k hold together, no more of content than fits into the room of k of the largest
    groups, is all that the others do not hold: these have at least the mean of the rest over the
    ranks. So for every k the sum of both is a bound; k = 0 is the mean of all.

    Args:
      shapes: each can hold some piece; every piece fits one of them.
      microbatches: of a group.
    """
    assert len(length_P), "there is a piece"
    widest = max(shape.size for shape in shapes) * ranks * microbatches
    largest_G = _largest(length_P, content_P, shapes, ranks * microbatches)
    dense_first = np.argsort(-content_P / np.maximum(length_P, 1), kind="stable")
    tokens = np.concatenate([[0], np.cumsum(length_P[dense_first])])
    content = np.concatenate([[0], np.cumsum(content_P[dense_first])]).astype(float)
    room_G = widest * np.arange(len(largest_G) + 1)
    others_G = (content[-1] - np.interp(room_G, tokens, content)) / ranks
    others_G = np.ceil(others_G * (1 - ROUNDING))  # contents are whole numbers
    first_G = np.concatenate([[0], np.cumsum(largest_G)])
    return float((first_G + others_G).max())


def _largest(length_P: Ints, content_P: Ints, shapes: Sequence[Shape], bins: int) -> Ints:
    """[G]: content of the largest piece of each group at least, the group of most first; of groups
    that are sure to be there. `bins` times its rows is what a group has of a shape."""
    order = np.argsort(-content_P, kind="stable")
    shortest_P = np.maximum(np.minimum.accumulate(length_P[order]), 1)  # of the pieces so far
    # Pieces no shorter than that in one group at most.
    held_P = np.max([bins * s.rows * (s.tokens // shortest_P) for s in shapes], axis=0)
    # The piece at place p is beyond what p // held groups hold of those up to it.
    groups_P = np.maximum.accumulate(np.arange(len(order)) // np.maximum(held_P, 1))
    first = np.searchsorted(groups_P, np.arange(groups_P[-1] + 1))
    return np.asarray(content_P[order[first]])
