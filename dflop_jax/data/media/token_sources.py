"""Where each visual token of the LLM comes from: at most four patches of the tiles, with weights.

Unpadding, downscaling and pooling of patch features are then one gather and weighted sum on the
device, whatever the picture's size, and the same numbers as `torch`'s bilinear `interpolate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenSources:
    """Sources of `t` visual tokens.

    index: int32 [t, 4], tile * patches_per_tile + patch.
    weight: float32 [t, 4], rows sum to 1, or to 0 for a newline.
    newline: bool [t], whether the token is the model's newline embedding instead.
    """

    index: np.ndarray
    weight: np.ndarray
    newline: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    @property
    def used(self) -> np.ndarray:
        """bool [t]: tokens that come from patches."""
        return np.any(self.weight > 0, axis=1)

    def shifted(self, patches: int) -> TokenSources:
        """The same tokens of tiles that stand `patches` patches further on."""
        return TokenSources(
            self.index + np.int32(patches) * self.used[:, None], self.weight, self.newline
        )


def plain(index: np.ndarray) -> TokenSources:
    """One patch for each token; index int [t], -1 for a token that comes from none."""
    four = np.zeros((len(index), 4), np.int32)
    weight = np.zeros((len(index), 4), np.float32)
    four[:, 0], weight[:, 0] = np.maximum(index, 0), index >= 0
    return TokenSources(four, weight, np.zeros(len(index), bool))


def newlines(n: int) -> TokenSources:
    """`n` newline tokens."""
    return TokenSources(np.zeros((n, 4), np.int32), np.zeros((n, 4), np.float32), np.ones(n, bool))


def placed(n: int, parts: Sequence[tuple[int, TokenSources]]) -> TokenSources:
    """`n` tokens, of which each part's stand from its place on; all others have no source."""
    tokens = plain(np.full(n, -1))
    for start, part in parts:
        stop = start + len(part)
        for whole, some in zip(_arrays(tokens), _arrays(part), strict=True):
            whole[start:stop] = some
    return tokens


def join(parts: Sequence[TokenSources]) -> TokenSources:
    """The tokens of all parts, one after the other."""
    parts = [newlines(0), *parts]
    return TokenSources(
        np.concatenate([p.index for p in parts]),
        np.concatenate([p.weight for p in parts]),
        np.concatenate([p.newline for p in parts]),
    )


def resampled(grid: np.ndarray, height: int, width: int) -> TokenSources:
    """A grid of patch indices int [h, w] resized bilinearly to height x width tokens, by row.

    Without antialiasing and with half-pixel centres, as `interpolate(mode="bilinear")` does.
    """
    y0, y1, fy = _taps(grid.shape[0], height)
    x0, x1, fx = _taps(grid.shape[1], width)
    rows = (y0[:, None], y0[:, None], y1[:, None], y1[:, None])
    cols = (x0, x1, x0, x1)
    index = np.stack([grid[r, c] for r, c in zip(rows, cols, strict=True)], -1)
    wy = np.stack([1 - fy, 1 - fy, fy, fy], -1)[:, None, :]
    wx = np.stack([1 - fx, fx, 1 - fx, fx], -1)[None, :, :]
    n = height * width
    return TokenSources(
        index.reshape(n, 4).astype(np.int32),
        (wy * wx).reshape(n, 4).astype(np.float32),
        np.zeros(n, bool),
    )


def with_text(tokens: TokenSources, places: np.ndarray) -> TokenSources:
    """The tokens with room for text: one token that has no source before each place of `places`."""
    return TokenSources(*(np.insert(a, places, 0, axis=0) for a in _arrays(tokens)))


def with_line_ends(tokens: TokenSources, rows: int) -> TokenSources:
    """A newline after each of the equal rows, which may be empty."""
    width = len(tokens) // max(rows, 1)
    index, weight, newline = (
        np.concatenate([a.reshape(rows, width, *a.shape[1:]), b[:, None]], 1)
        for a, b in zip(_arrays(tokens), _arrays(newlines(rows)), strict=True)
    )
    return TokenSources(index.reshape(-1, 4), weight.reshape(-1, 4), newline.reshape(-1))


def _arrays(tokens: TokenSources) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tokens.index, tokens.weight, tokens.newline


def _taps(n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lower, upper, weight of the upper) of each output; float32 as the reference computes it."""
    scale = np.float32(n_in) / np.float32(max(n_out, 1))
    centre = np.maximum(
        scale * (np.arange(n_out, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0
    )
    lower = np.minimum(centre.astype(np.int64), n_in - 1)
    return lower, np.minimum(lower + 1, n_in - 1), (centre - lower).astype(np.float32)
