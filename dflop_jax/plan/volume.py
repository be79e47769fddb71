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
CUTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Room of the groups over a mean batch's volume: batches differ, and samples do not pack without
# gaps. Twice the 5% makes groups dearer, and fewer batches need one more than was thought.
ROOM = 1.05


@dataclass(frozen=True)
class Volume:
    """What global batches ask of a module: pieces where a row takes one, else tokens.

    mean, content: of a global batch, content by feature. largest: of one sample; it is `divided` if
    some sample has several pieces. longest: tokens of one piece. batches: of each sampled batch,
    [n_batches].
    """

    mean: float
    content: tuple[float, ...]
    largest: int
    divided: bool
    longest: int
    batches: np.ndarray


def volume_of(
    module: str,
    loads: Sequence[Load],
    batches: Sequence[Sequence[Load]],
    global_batch: int,
    *,
    counts_pieces: bool,
) -> Volume:
    """The volume of a module; `counts_pieces` where each of its rows takes one piece."""

    def amount(load: Load) -> int:
        return len(load.lengths(module)) if counts_pieces else load.tokens(module)

    by_sample, scale = [amount(load) for load in loads], global_batch / len(loads)
    content = piece_content(loads, module).sum(axis=1) * scale
    return Volume(
        mean=sum(by_sample) * scale,
        content=tuple(content.tolist()),
        largest=max(by_sample),
        divided=any(len(load.lengths(module)) > 1 for load in loads),
        longest=max((n for load in loads for n in load.lengths(module)), default=0),
        batches=np.array([float(sum(map(amount, batch))) for batch in batches]),
    )


def piece_rows(volume: Volume, microbatches: Array, data: Array) -> Array:
    """Rows of a rank in a microbatch, of which a mean batch has so many, where a row is a piece; 0
    where no sample has one."""
    if not volume.largest:
        return np.zeros(np.broadcast_shapes(np.shape(microbatches), np.shape(data)), int)
    share = volume.mean * ROOM / (microbatches * data)
    return np.maximum(_ceil(share), _ceil(volume.largest / data)).astype(int)


def packed_rows(
    volume: Volume,
    microbatches: Array,
    data: Array,
    costs: CostModel,
    module: str,
    model: int,
    multiple: int,
) -> tuple[Array, Array]:
    """(rows, tokens of a row) of a rank where rows are packed: as many rows as make a token
    cheapest, each long enough for the longest piece, all of them for the largest sample."""
    share = volume.mean * ROOM / (microbatches * data)
    best_rows: Array = np.zeros(np.shape(share), int)
    best_tokens: Array = np.zeros(np.shape(share), int)
    best_price: Array = np.inf
    kinds = Counter(costs.profile.layer_kinds(module)).items()
    for rows in ROW_COUNTS if volume.largest else ():
        shortest = _up(_shortest(volume, rows * data), multiple)
        tokens = np.maximum(_up(share / rows, multiple), shortest).astype(int)
        figures = costs.at(module, model, rows, tokens)
        price = sum(n * figures.of(kind, "layer_backward") for kind, n in kinds) / (rows * tokens)
        # More rows than the share fills would only pad.
        useful = (rows == 1) | (share > (rows - 0.5) * shortest)
        better = useful & (price < best_price * (1 - ROUNDING))
        best_rows = np.where(better, rows, best_rows)
        best_tokens = np.where(better, tokens, best_tokens)
        best_price = np.where(better, price, best_price)
    return best_rows, best_tokens


def _shortest(volume: Volume, rows: Array) -> Array:
    """Tokens of a row with which so many rows hold every sample: with more than a sample's even
    share and a piece in each, putting pieces where they fit cannot fail."""
    if not volume.divided:
        return np.full(np.shape(rows), float(volume.longest))
    return np.minimum(volume.largest, volume.largest / rows + volume.longest)


def group_content(volume: Volume, cut: Array, data: Array) -> tuple[Array, ...]:
    """Content, by feature, of a rank's share of one group, of which a mean batch has so many."""
    return tuple(_ceil(amount * ROOM / (cut * data)) for amount in volume.content)


def least_groups(volume: Volume, room: Array, smallest: float) -> Array:
    """Groups that each sampled batch needs at least, [n_batches, *room.shape]; `room` is what one
    holds, of which the smallest has a share: 1 where all are whole."""
    sums = volume.batches.reshape(-1, *(1 for _ in np.shape(room)))
    needed = sums / np.maximum(room, 1)
    return np.maximum(smallest, needed if smallest < 1 else _ceil(needed))


def _up(x: Array, multiple: int) -> Array:
    return _ceil(x / multiple) * multiple


def _ceil(x: Array) -> Array:
    return np.ceil(x - ROUNDING)
