"""Sources of the LLM's visual tokens: each is a weighted sum of at most four patches.

Unpadding, downscaling and pooling of patch features become one gather and weighted sum on the
device for any picture size, with the numbers of `torch`'s bilinear `interpolate`.
"""

from __future__ import annotations

import numpy as np

# Fields of a visual token: index, tile * patches_per_tile + patch; weight, with sum 1, or 0 for a
# newline; newline, whether the token is the model's newline embedding.
SOURCES = np.dtype([("index", np.int32, 4), ("weight", np.float32, 4), ("newline", np.bool_)])
TokenSources = np.ndarray  # of SOURCES, [t]


def is_from_patches(tokens: TokenSources) -> np.ndarray:
    """Return a mask of tokens that come from patches, bool [t]."""
    return np.any(tokens["weight"] > 0, axis=1)


def shift_sources(tokens: TokenSources, patches: int) -> TokenSources:
    """Return the tokens with all patch indices raised by `patches`."""
    sources = tokens.copy()
    sources["index"] += np.int32(patches) * is_from_patches(tokens)[:, None]
    return sources


def copied_sources(index: np.ndarray) -> TokenSources:
    """Return tokens that copy one patch each; index int [t], -1 for a token without a patch."""
    sources = np.zeros(len(index), SOURCES)
    sources["index"][:, 0], sources["weight"][:, 0] = np.maximum(index, 0), index >= 0
    return sources


def newlines(n: int) -> TokenSources:
    sources = np.zeros(n, SOURCES)
    sources["newline"] = True
    return sources


def resampled_sources(grid: np.ndarray, height: int, width: int) -> TokenSources:
    """Return height x width tokens, by row: a grid of patch indices int [h, w] resized as by
    `interpolate(mode="bilinear")`, without antialiasing and with half-pixel centres."""
    y0, y1, fy = _interpolation_taps(grid.shape[0], height)
    x0, x1, fx = _interpolation_taps(grid.shape[1], width)
    sources = np.zeros((height, width), SOURCES)
    corners = [grid[np.ix_(y, x)] for y in (y0, y1) for x in (x0, x1)]
    weights = [np.outer(wy, wx) for wy in (1 - fy, fy) for wx in (1 - fx, fx)]
    sources["index"], sources["weight"] = np.stack(corners, -1), np.stack(weights, -1)
    return sources.reshape(-1)


def insert_text_slots(tokens: TokenSources, positions: list[int]) -> TokenSources:
    """Return the tokens with a token without source, for text, before each of the positions."""
    return np.insert(tokens, positions, np.zeros(1, SOURCES))


def add_line_ends(tokens: TokenSources, rows: int) -> TokenSources:
    """Return the tokens with a newline after each of `rows` equal rows, which may be empty."""
    lines = tokens.reshape(rows, len(tokens) // max(rows, 1))
    return np.concatenate([lines, newlines(rows)[:, None]], 1).reshape(-1)


def _interpolation_taps(n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (lower, upper, weight of upper) of each output, in float32 like the reference."""
    half, scale = np.float32(0.5), np.float32(n_in) / np.float32(max(n_out, 1))
    centre = np.maximum(scale * (np.arange(n_out, dtype=np.float32) + half) - half, 0)
    lower = np.minimum(centre.astype(np.int64), n_in - 1)
    return lower, np.minimum(lower + 1, n_in - 1), (centre - lower).astype(np.float32)
