"""Volume of sampled global batches by module, and shapes that divide it into so many groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.state import Array
from dflop_jax.records import Load, piece_content
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.buckets.sizes import ROW_COUNTS

# Groups into which a mean batch may go; every one is priced for every layout.
GROUPS_PER_BATCH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Capacity of the groups over a mean batch's volume: batches differ, and samples do not pack without
# gaps. Twice the 5% makes groups slower, and fewer batches need one more than estimated.
HEADROOM = 1.05


@dataclass(frozen=True)
class ModuleVolume:
    """Volume of a module: pieces where a row takes one piece, else tokens.

    mean_per_batch, content: of a global batch, content by feature. by_batch: of each sampled batch,
    [n_batches].
    """

    mean_per_batch: float
    content: tuple[float, ...]
    max_per_sample: int
    has_many_pieces: bool
    max_piece_tokens: int
    by_batch: np.ndarray


def module_volume(
    module: str,
    loads: Sequence[Load],
    batches: Sequence[Sequence[Load]],
    global_batch: int,
    *,
    counts_pieces: bool,
) -> ModuleVolume:
    """The volume of a module; `counts_pieces` where each of its rows takes one piece."""

    def amount(load: Load) -> int:
        return len(load.lengths(module)) if counts_pieces else load.tokens(module)

    amounts, samples_per_load = [amount(load) for load in loads], global_batch / len(loads)
    content = piece_content(loads, module).sum(axis=1) * samples_per_load
    return ModuleVolume(
        mean_per_batch=sum(amounts) * samples_per_load,
        content=tuple(content.tolist()),
        max_per_sample=max(amounts),
        has_many_pieces=any(len(load.lengths(module)) > 1 for load in loads),
        max_piece_tokens=max((n for load in loads for n in load.lengths(module)), default=0),
        by_batch=np.array([float(sum(map(amount, batch))) for batch in batches]),
    )


def piece_rows(volume: ModuleVolume, microbatches: Array, data: Array) -> Array:
    """Rows of a rank where a row is a piece and a mean batch has so many microbatches; 0 where no
    sample has a piece."""
    if not volume.max_per_sample:
        return np.zeros(np.broadcast_shapes(np.shape(microbatches), np.shape(data)), int)
    pieces_per_rank = volume.mean_per_batch * HEADROOM / (microbatches * data)
    return np.maximum(_ceil(pieces_per_rank), _ceil(volume.max_per_sample / data)).astype(int)


def packed_rows(
    volume: ModuleVolume,
    microbatches: Array,
    data: Array,
    costs: CostModel,
    module: str,
    model: int,
    multiple: int,
) -> tuple[Array, Array]:
    """(rows, tokens of a row) of a rank where rows are packed: the number of rows that is cheapest
    per token, each with room for the longest piece, all of them for the largest sample."""
    tokens_per_rank = volume.mean_per_batch * HEADROOM / (microbatches * data)
    best_rows: Array = np.zeros(np.shape(tokens_per_rank), int)
    best_tokens: Array = np.zeros(np.shape(tokens_per_rank), int)
    best_s: Array = np.inf  # per token
    kinds = Counter(costs.profile.layer_kinds(module)).items()
    for rows in ROW_COUNTS if volume.max_per_sample else ():
        shortest = _round_up(_min_row_tokens(volume, rows * data), multiple)
        tokens = np.maximum(_round_up(tokens_per_rank / rows, multiple), shortest).astype(int)
        predictions = costs.predict(module, model, rows, tokens)
        layers_s = sum(n * predictions.layer(kind, "layer_backward") for kind, n in kinds)
        token_s = layers_s / (rows * tokens)
        # More rows than the share fills would only pad.
        is_filled = (rows == 1) | (tokens_per_rank > (rows - 0.5) * shortest)
        is_cheaper = is_filled & (token_s < best_s * (1 - ROUNDING))
        best_rows = np.where(is_cheaper, rows, best_rows)
        best_tokens = np.where(is_cheaper, tokens, best_tokens)
        best_s = np.where(is_cheaper, token_s, best_s)
    return best_rows, best_tokens


def _min_row_tokens(volume: ModuleVolume, rows: Array) -> Array:
    """Tokens of a row with which so many rows hold every sample: first fit cannot fail where each
    has room for an even share of the sample and one piece more."""
    if not volume.has_many_pieces:
        return np.full(np.shape(rows), float(volume.max_piece_tokens))
    return np.minimum(volume.max_per_sample, volume.max_per_sample / rows + volume.max_piece_tokens)


def group_content(volume: ModuleVolume, groups_per_batch: Array, data: Array) -> tuple[Array, ...]:
    """Content, by feature, of a rank's share of one group, where a mean batch takes so many."""
    return tuple(_ceil(amount * HEADROOM / (groups_per_batch * data)) for amount in volume.content)


def min_groups(volume: ModuleVolume, capacity: Array, min_share: float) -> Array:
    """Minimum number of groups of each sampled batch, [n_batches, *capacity.shape].

    Args:
      capacity: of a group.
      min_share: of the smallest bucket, which the last group may have; 1: all have the largest.
    """
    batch_amounts = volume.by_batch.reshape(-1, *(1 for _ in np.shape(capacity)))
    needed = batch_amounts / np.maximum(capacity, 1)
    return np.maximum(min_share, needed if min_share < 1 else _ceil(needed))


def _round_up(x: Array, multiple: int) -> Array:
    return _ceil(x / multiple) * multiple


def _ceil(x: Array) -> Array:
    return np.ceil(x - ROUNDING)
