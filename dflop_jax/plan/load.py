"""What sampled global batches ask of a module, and the bucket that cuts them into so many groups.

A cut says into how many groups a mean global batch goes; all groups of a cut have one bucket, so
its cost is known before anything is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.profile.fit import Array, CostModel
from dflop_jax.records import SampleShape

CUTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Over a mean batch's even share: batches differ, and samples do not pack without gaps.
_ROOM = 1.05
_ROWS = (1, 2, 4, 8)  # of an LLM rank's tokens


@dataclass(frozen=True)
class Load:
    """Items of an encoder, or tokens of the LLM, as `SampleShape.load` counts them.

    mean: of a global batch. largest: of one sample. batches: of each sampled batch, [n_batches].
    """

    mean: float
    largest: int
    batches: np.ndarray


def loads(
    modules: Sequence[str],
    shapes: Sequence[SampleShape],
    batches: Sequence[Sequence[SampleShape]],
    global_batch: int,
) -> dict[str, Load]:
    found = {}
    for m in modules:
        each = np.array([s.load(m) for s in shapes])
        sums = np.array([float(sum(s.load(m) for s in batch)) for batch in batches])
        found[m] = Load(float(each.mean()) * global_batch, int(each.max()), sums)
    return found


def encoder_items(load: Load, microbatches: Array, data: Array) -> Array:
    """Items of a rank in a microbatch, of which a mean batch has so many."""
    if not load.largest:
        return np.zeros(np.broadcast_shapes(np.shape(microbatches), np.shape(data)), int)
    share = load.mean * _ROOM / (microbatches * data)
    return np.maximum(_ceil(share), _ceil(load.largest / data)).astype(int)


def llm_rows(
    load: Load, microbatches: Array, data: Array, costs: CostModel, model: int, multiple: int
) -> tuple[Array, Array]:
    """(rows, tokens of a row) of a rank: as many rows as make a token cheapest, each long enough
    for the longest sample."""
    share = load.mean * _ROOM / (microbatches * data)
    shortest = -(-load.largest // multiple) * multiple
    best_rows: Array = 1
    best_tokens: Array = shortest
    best_price: Array = np.inf
    for rows in _ROWS:
        tokens = np.maximum(_ceil(share / rows / multiple) * multiple, shortest).astype(int)
        price = costs.predict("llm", model, rows, tokens, "layer_backward") / (rows * tokens)
        # More rows than the share fills would only pad.
        useful = (rows == 1) | (share > (rows - 0.5) * shortest)
        better = useful & (price < best_price * (1 - 1e-9))
        best_rows = np.where(better, rows, best_rows)
        best_tokens = np.where(better, tokens, best_tokens)
        best_price = np.where(better, price, best_price)
    return best_rows, best_tokens


def least_groups(load: Load, room: Array) -> Array:
    """Groups that each sampled batch needs at least, [n_batches, *room.shape]; `room` is what one
    holds."""
    sums = load.batches.reshape(-1, *(1 for _ in np.shape(room)))
    return np.maximum(1.0, _ceil(sums / np.maximum(room, 1)))


def _ceil(x: Array) -> Array:
    return np.ceil(x - 1e-9)
