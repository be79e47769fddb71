"""Draws global batches from a data profile, with its distribution and with drifted ones.

Choices made on sampled batches are evaluated on other batches: a bucket that just holds the sampled
ones needs a second group as soon as a batch holds a little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Load

# Samples of a large batch. Fewer such batches are scheduled, since they take longer and differ
# less; twice as many samples double their planning time.
LARGE_BATCH = 512
# Drift of a batch's mean, about, in standard deviations of a sample. Twice as much suits buckets to
# data that differ more, at the cost of the data at hand.
DRIFT = 0.3
_FARTHEST = 2.0  # standard deviations; samples further off are drawn as often as those


def sample_batches(
    loads: Sequence[Load], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """`n` global batches drawn from the profile's loads, without repetition if it has enough."""
    rng = np.random.default_rng(seed)
    repeats = global_batch > len(loads)
    picks = [rng.choice(len(loads), global_batch, replace=repeats) for _ in range(n)]
    return [[loads[int(i)] for i in pick] for pick in picks]


def drifted_batches(
    loads: Sequence[Load], modules: Sequence[str], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """`n` global batches with a drifted distribution: samples with much of some modules and little
    of others are more frequent than in `loads`, and less frequent in every second batch."""
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
