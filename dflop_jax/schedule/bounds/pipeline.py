"""What no order of a step's tasks undercuts, from the seconds of its segments: the bound that the
planner has of whole spaces at once, and the scheduler of every batch.

A resource (devices that no task shares with others) works off all its groups one after another.
Before its first task, what that group needs must have run elsewhere; after its last one, what must
follow that group, up to a reduction; all updates wait for all reductions. Each of these lies apart
from the resource's own work, so the three add up, whatever the order.

Seconds are numbers, or arrays of one shape: bounds of many layouts of one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any  # a number, or an array
Rows = Sequence[Array] | np.ndarray


def ends_s(
    sources: Sequence[Sequence[int]],
    forward_s: Sequence[Array],
    back_s: Sequence[Array],
    reduce_s: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """Of every segment, in topological order: (seconds before its first task, seconds from the end
    of its last backward until the last reduction elsewhere that waits for it), at least.

    Args:
      sources: segments that each reads.
      forward_s, back_s: of a group, 0 where a segment runs none.
    """
    before: list[Array] = [0.0] * len(sources)
    after: list[Array] = list(before)
    for i, read in enumerate(sources):
        for u in read:
            before[i] = np.maximum(before[i], before[u] + forward_s[u])
            below = np.where(back_s[u] > 0, back_s[u] + np.maximum(after[u], reduce_s[u]), 0.0)
            after[i] = np.maximum(after[i], below)
    return before, after


def step_s(
    work_R: Rows,
    before_R: Rows,
    after_R: Rows,
    reduce_R: Rows,
    update_R: Rows,
    awaited_R: Rows | None = None,
) -> Array:
    """Seconds of a step at least, from those of every resource.

    Args:
      work_R: of all its groups.
      before_R, after_R: as `ends_s`, the least of its segments'.
      reduce_R, update_R: of the step's end, of all its segments.
      awaited_R: whether reductions wait for all its tasks; None: they do.
    """
    least: Array = 0.0
    tails = tails_s(after_R, reduce_R, update_R, awaited_R)
    for before_s, work_s, tail_s in zip(before_R, work_R, tails, strict=True):
        least = np.maximum(least, before_s + work_s + tail_s)
    return least


def tails_s(
    after_R: Rows, reduce_R: Rows, update_R: Rows, awaited_R: Rows | None = None
) -> list[Array]:
    """Seconds from the end of every resource's last backward to the end of the step, at least;
    arguments as `step_s`."""
    update_s = np.maximum.reduce(np.broadcast_arrays(*update_R))
    tails = []
    for r, after_s in enumerate(after_R):
        tail_s = np.maximum(reduce_R[r], after_s) + update_s
        if awaited_R is not None:
            alone_s = np.maximum(reduce_R[r] + update_R[r], after_s)
            tail_s = np.where(awaited_R[r], tail_s, alone_s)
        tails.append(tail_s)
    return tails
