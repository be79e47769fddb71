"""Buckets of the baseline: quantiles of what arrives, nothing chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.batch import rows_needed
from dflop_jax.schedule.shapes.evaluate import roomiest_first
from dflop_jax.schedule.shapes.sizes import round_up

# Microbatches drawn to see what arrival order needs; twice as many move a baseline's quantiles by
# less than a step of its shapes, usually.
_ARRIVAL_DRAWS = 512


def arrival_buckets(
    loads: Sequence[Load],
    ranks: Mapping[str, int],
    per_rank: int,
    *,
    n_buckets: int = 4,
    piece_tokens: Mapping[str, int] | None = None,
    token_multiple: int = 128,
    seed: int = 0,
) -> tuple[Bucket, ...]:
    """Buckets of the baseline: `per_rank` rows of one sample each in the last module, padded to the
    longest, and as many rows of the others as hold these samples' pieces.

    Capacities are quantiles of what microbatches drawn in arrival order need on a rank; the last
    holds `per_rank` of the largest sample.
    """
    piece_tokens = piece_tokens or {}
    last = list(ranks)[-1]
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(loads), size=(_ARRIVAL_DRAWS, ranks[last], per_rank))
    needs: dict[str, tuple[np.ndarray, int]] = {}
    row_tokens: dict[str, int] = {}
    for m in ranks:
        lengths = [load.lengths(m) for load in loads]
        if not any(lengths):
            continue
        if m == last:
            unit = piece_tokens.get(m, token_multiple)
            sizes_N = np.array([sum(n) for n in lengths])
            drawn = sizes_N[picks].max(axis=(1, 2))
            needs[m] = np.array([round_up(v, unit) for v in drawn]), round_up(sizes_N.max(), unit)
            continue
        longest = max((max(n, default=0) for n in lengths), default=0)
        row_tokens[m] = piece_tokens.get(m) or round_up(longest, token_multiple)
        shape = Shape(1, row_tokens[m])
        rows_N = np.array([rows_needed(n, shape) for n in lengths], int)
        needs[m] = rows_N[picks].sum(axis=2).max(axis=1), int(rows_N.max()) * per_rank

    def bucket(amounts: Mapping[str, int]) -> Bucket:
        return Bucket.of(
            {
                m: (Shape(per_rank, n) if m == last else Shape(n, row_tokens[m])) if n else None
                for m, n in amounts.items()
            }
        )

    quantiles = np.arange(1, n_buckets) / n_buckets
    chosen = {
        bucket({m: int(np.quantile(drawn, q, method="higher")) for m, (drawn, _) in needs.items()})
        for q in quantiles
    }
    chosen.add(bucket({m: needed for m, (_, needed) in needs.items()}))
    return roomiest_first(list(chosen))
