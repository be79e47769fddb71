"""What sampled global batches ask of a module, and the shape that cuts them into so many groups.

A cut says into how many groups a mean global batch goes; all groups of a cut have one shape and the
same content, so what they cost is known before anything is scheduled.
"""

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

# Groups that a mean batch is cut into; every one is priced for every placement.
GROUPS_PER_BATCH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Room of the groups over a mean batch's volume: batches differ, and samples do not pack without
# gaps. Twice the 5% makes groups dearer, and fewer batches need one more than was thought.
HEADROOM = 1.05


@dataclass(frozen=True)
class ModuleVolume:
    """What global batches ask of a module: pieces where a row takes one, else tokens.

    mean, content: of a global batch, content by feature. largest: of one sample; it is `divided` if
    some sample has several pieces. longest: tokens of one piece. batches: of each sampled batch,
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
    """Rows of a rank in a microbatch, of which a mean batch has so many, where a row is a piece; 0
    where no sample has one."""
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
    """(rows, tokens of a row) of a rank where rows are packed: as many rows as make a token
    cheapest, each long enough for the longest piece, all of them for the largest sample."""
    tokens_per_rank = volume.mean_per_batch * HEADROOM / (microbatches * data)
    best_rows: Array = np.zeros(np.shape(tokens_per_rank), int)
    best_tokens: Array = np.zeros(np.shape(tokens_per_rank), int)
    best_seconds: Array = np.inf
    kind_counts = Counter(costs.profile.layer_kinds(module)).items()
    for rows in ROW_COUNTS if volume.max_per_sample else ():
        min_row_tokens = _round_up(_min_row_tokens(volume, rows * data), multiple)
        tokens = np.maximum(_round_up(tokens_per_rank / rows, multiple), min_row_tokens).astype(int)
        predictions = costs.predict(module, model, rows, tokens)
        seconds_per_token = sum(
            n * predictions.layer(kind, "layer_backward") for kind, n in kind_counts
        ) / (rows * tokens)
        # More rows than the share fills would only pad.
        is_useful = (rows == 1) | (tokens_per_rank > (rows - 0.5) * min_row_tokens)
        is_cheaper = is_useful & (seconds_per_token < best_seconds * (1 - ROUNDING))
        best_rows = np.where(is_cheaper, rows, best_rows)
        best_tokens = np.where(is_cheaper, tokens, best_tokens)
        best_seconds = np.where(is_cheaper, seconds_per_token, best_seconds)
    return best_rows, best_tokens


def _min_row_tokens(volume: ModuleVolume, rows: Array) -> Array:
    """Tokens of a row with which so many rows hold every sample: with more than a sample's even
    share and a piece in each, putting pieces where they fit cannot fail."""
    if not volume.has_many_pieces:
        return np.full(np.shape(rows), float(volume.max_piece_tokens))
    return np.minimum(volume.max_per_sample, volume.max_per_sample / rows + volume.max_piece_tokens)


def group_content(volume: ModuleVolume, groups_per_batch: Array, data: Array) -> tuple[Array, ...]:
    """Content, by feature, of a rank's share of one group, of which a mean batch has so many."""
    return tuple(_ceil(amount * HEADROOM / (groups_per_batch * data)) for amount in volume.content)


def min_groups(volume: ModuleVolume, capacity: Array, min_share: float) -> Array:
    """Groups that each sampled batch needs at least, [n_batches, *room.shape]; `room` is what one
    holds, of which the smallest has a share: 1 where all are whole."""
    batch_amounts = volume.by_batch.reshape(-1, *(1 for _ in np.shape(capacity)))
    needed = batch_amounts / np.maximum(capacity, 1)
    return np.maximum(min_share, needed if min_share < 1 else _ceil(needed))


def _round_up(x: Array, multiple: int) -> Array:
    return _ceil(x / multiple) * multiple


def _ceil(x: Array) -> Array:
    return np.ceil(x - ROUNDING)
