"""Global batches drawn from a data profile: as its samples come, and where the data have drifted.

What is chosen for sampled batches is judged by others: a shape that just holds what was sampled
needs a second group as soon as a batch holds a little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Load

# Samples; of larger batches fewer are scheduled, since they take longer and differ less. Twice as
# many double the planning time of such batches.
LARGE_BATCH = 512
# Standard deviations of a sample by which the mean of a drifted batch moves, about; twice as many
# suit shapes to data that differ more, at the cost of the data at hand.
DRIFT = 0.3
_FARTHEST = 2.0  # standard deviations; samples further off are drawn as often as those


def sample_batches(
    loads: Sequence[Load], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """`n` global batches drawn from the profile's loads, without repeats where it has enough."""
    rng = np.random.default_rng(seed)
    repeats = global_batch > len(loads)
    picks = [rng.choice(len(loads), global_batch, replace=repeats) for _ in range(n)]
    return [[loads[int(i)] for i in pick] for pick in picks]


def drifted_batches(
    loads: Sequence[Load], modules: Sequence[str], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """`n` global batches in which samples with much of some modules and little of others come more
    often than in `loads`, and in every second batch less often."""
    tokens = np.array([[load.tokens(m) for m in modules] for load in loads], float)
    spread = tokens.std(axis=0)
    away = (tokens - tokens.mean(axis=0)) / np.where(spread, spread, 1.0)
    away = away.clip(-_FARTHEST, _FARTHEST)
    rng = np.random.default_rng(seed)
    batches = []
    for i in range(n):
        if i % 2 == 0:
            direction = rng.normal(size=len(modules))
            direction *= DRIFT / np.linalg.norm(direction)
        else:
            direction = -direction
        weights = np.exp(away @ direction)
        picks = rng.choice(len(loads), global_batch, p=weights / weights.sum())
        batches.append([loads[int(j)] for j in picks])
    return batches
