"""The samples of an answer dealt anew by content, in the same groups.

Packing looks for few and cheap groups and leaves the content of the ranks as it comes; where the
groups have room to spare, the plain longest-first rule finds a better start for evening it out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.schedule.groups import BucketRun, PackingSpace
from dflop_jax.schedule.packing import Packed
from dflop_jax.schedule.solver.budget import Budget


def dealt_answer(
    room: PackingSpace, answer: Sequence[BucketRun], budget: Budget
) -> list[BucketRun] | None:
    """The same groups with the samples dealt out, longest first, each to a row of the rank that has
    least content in the step so far; None where the anchor's content costs nothing, nothing is
    packed, or samples find no room in this order."""
    batch, anchor = room.batch, room.batch.anchor
    if anchor is None or anchor not in room.priced or not answer:
        return None
    ranks, tokens_N = room.capacity.ranks[anchor], batch.tokens[anchor]
    shared = [m for m in batch.modules if m != anchor]
    asks_NM = np.stack([batch.tokens[m] for m in shared], axis=1) if shared else None
    microbatches = [(t, rows) for t in answer for rows in t.microbatches]
    width_G = [len(rows) for _, rows in microbatches]
    micro_R = np.repeat(np.arange(len(microbatches)), width_G)
    rank_R = np.concatenate([np.arange(n) * ranks // n for n in width_G])
    buckets = [room.buckets[t.bucket] for t, _ in microbatches]
    row_G = [batch.row_room(b.shape(anchor), anchor) for b in buckets]
    free_R = np.repeat(row_G, width_G)
    free_GM = np.array([[batch.room(b, m, room.capacity) for m in shared] for b in buckets])
    budget.spend(batch.n * (1 + len(free_R) / 500) / 20)
    content_D, content_N = np.zeros(ranks), np.zeros(batch.n)
    content_N[batch.count[anchor] > 0] = batch.content[anchor]
    rows: Packed = [[[] for _ in range(n)] for n in width_G]
    first_R = np.repeat(np.cumsum(width_G) - width_G, width_G)
    for i in np.argsort(-tokens_N, kind="stable").tolist():
        fits_R = free_R >= tokens_N[i]
        if asks_NM is not None:
            fits_R &= (free_GM >= asks_NM[i]).all(axis=1)[micro_R]
        if not fits_R.any():
            return None
        row = int(np.where(fits_R, content_D[rank_R], np.inf).argmin())
        micro = int(micro_R[row])
        rows[micro][row - int(first_R[row])].append(i)
        free_R[row] -= tokens_N[i]
        if asks_NM is not None:
            free_GM[micro] -= asks_NM[i]
        content_D[rank_R[row]] += content_N[i]
    size, dealt = room.capacity.group_size, []
    for k, t in enumerate(answer):
        together = room.together(t.bucket, rows[k * size : (k + 1) * size], budget)
        if together is None:
            return None
        dealt.append(together)
    return dealt
