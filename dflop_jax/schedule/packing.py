"""Pack samples into microbatches: vector bin packing with unequal bins.

The bins are the rows of the batch's anchor module; rows of a microbatch share its capacity in the
other modules. Without an anchor, the bins are the microbatches. The largest fill of a bin (load
over capacity) is minimised like a makespan; if it is at most 1, the samples are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.balance_problem import (
    ITEMS_PER_WORK,
    ROUNDING,
    Budget,
    Floats,
    Ints,
    Problem,
    longest_first,
    order_by_size,
)
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.local_search import State, improve

Microbatch = list[list[int]]  # samples of each row of the anchor
Packing = list[Microbatch]


def pack_samples(
    batch: Batch,
    buckets: Sequence[Bucket],
    budget: Budget,
    rng: np.random.Generator,
    initial: tuple[Ints, Ints] | None = None,
) -> Packing | None:
    """Return the rows of each microbatch, one per item of `buckets`; None if no packing is found.

    Args:
      initial: a label for each sample and each microbatch; a sample starts in a microbatch with
        its label. None: samples are placed longest first into all microbatches.
    """
    widths = [batch.anchor_rows(b) for b in buckets]
    width = max(widths)  # microbatches of fewer rows get rows without room
    room_RB = _bin_capacities(batch, buckets, widths)
    sizes_RN, modules = batch.shared_tokens_NM.T, batch.shared
    if batch.anchor:
        modules = (batch.anchor, *modules)
        sizes_RN = np.vstack((batch.tokens[batch.anchor], sizes_RN))
    problem = Problem(
        sizes_RN=np.ascontiguousarray(sizes_RN, float),
        n_costs=len(modules),
        limits_R=np.full(len(modules), np.inf),
        n_bins=width * len(buckets),
        group=width,
        grouped_R=tuple(m != batch.anchor for m in modules),
        scale_RB=1 / room_RB,
    )
    budget.spend(1 + problem.n_samples / ITEMS_PER_WORK)
    order = order_by_size(problem.sizes_RN / room_RB.mean(axis=1, keepdims=True))
    if initial is None:
        bins = longest_first(problem, order)
    else:
        number_N, number_B = initial[0], np.repeat(initial[1], width)
        bins = np.full(problem.n_samples, -1)
        for number in np.unique(number_N).tolist():
            samples, open_bins = (
                order[number_N[order] == number],
                np.flatnonzero(number_B == number),
            )
            bins = longest_first(problem, samples, bins, open_bins)
    state = State(problem, bins)
    improve(state, 1 + ROUNDING, budget, rng)
    if state.makespan > 1 + ROUNDING:
        return None
    rows = [sorted(samples.tolist()) for samples in state.members]
    packed = []
    for m, n in enumerate(widths):
        own = rows[m * width : (m + 1) * width]
        usable, empty_rows = own[:n], own[n:]
        # A row without capacity may hold samples without tokens; move them to the first row.
        packed.append([[*usable[0], *(i for row in empty_rows for i in row)], *usable[1:]])
    return packed


def _bin_capacities(batch: Batch, buckets: Sequence[Bucket], widths: Sequence[int]) -> Floats:
    """Return the token capacity of each bin in the anchor, if any, and the shared modules, [R, B];
    above 0, so that fills are finite."""
    rows = []
    for bucket, n in zip(buckets, widths, strict=True):
        row, shared_M = batch.empty_tokens(bucket)
        own = [[row * (k < n)] if batch.anchor else [] for k in range(max(widths))]
        rows += [[*anchor, *shared_M] for anchor in own]
    return np.maximum(np.array(rows, float).T, ROUNDING)


def first_fit(batch: Batch, order: Sequence[int], bucket: Bucket) -> Packing:
    """Pack samples by first fit into microbatches of a bucket, which must hold each of them."""
    width = batch.anchor_rows(bucket)
    row_tokens, shared_M = batch.empty_tokens(bucket)
    tokens_N = batch.tokens[batch.anchor].tolist() if batch.anchor else [0] * batch.n_samples
    tokens_NM = batch.shared_tokens_NM.tolist()
    packed: Packing = []
    # Free tokens of microbatches; those after the first `len(packed)` are empty.
    free_GR, longest_G = np.full((1, width), row_tokens), np.full(1, row_tokens)
    free_MG = [np.full(1, n) for n in shared_M.tolist()]
    for i in order:
        tokens = tokens_N[i]
        fits_G = longest_G >= tokens
        for free_G, needed in zip(free_MG, tokens_NM[i]):
            fits_G &= free_G >= needed
        g = int(fits_G.argmax())
        if g == len(packed):
            packed.append([[] for _ in range(width)])
            if len(packed) == len(longest_G):  # append as many empty ones
                free_GR = np.vstack((free_GR, np.full_like(free_GR, row_tokens)))
                longest_G = np.append(longest_G, np.full_like(longest_G, row_tokens))
                free_MG = [np.append(x, np.full_like(x, n)) for x, n in zip(free_MG, shared_M)]
        free_R = free_GR[g]
        row = int((free_R >= tokens).argmax())
        packed[g][row].append(i)
        free_R[row] -= tokens
        if free_R[-1] < row_tokens:  # else the last row is empty
            longest_G[g] = free_R.max()
        for free_G, needed in zip(free_MG, tokens_NM[i]):
            free_G[g] -= needed
    return packed
