"""LLaVA-OneVision's AnyRes ("anyres_max_9"), equal to its published processor.

A sample's only picture is fitted into the best grid pinpoint and cut into tiles, after one tile of
the whole picture. The LLM sees the patches of the grid without padding, with a newline after each
row, downscaled if they exceed `max_tiles` tiles. If a sample has several pictures, each is padded
to a square of one tile. Each frame of a clip is one tile, pooled to a quarter of its patches.

Pixels equal those of the reference's PIL processor (`LlavaOnevisionImageProcessorPil`) for upright
pictures; counts use the same float arithmetic, so they are equal, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dflop_jax.data.bounds import MAX_SQUARE_PX
from dflop_jax.data.media.pictures import BICUBIC, Size, frame_tile, padded_tiles
from dflop_jax.data.media.tiles import Counts, VisionLayout, tile_form
from dflop_jax.data.media.token_sources import (
    TokenSources,
    add_line_ends,
    copied_sources,
    newlines,
    resampled_sources,
    shift_sources,
)

DOWNSCALE_ABOVE = 1.1  # the reference does not downscale by a smaller ratio
GRID = range(1, 7)  # rows and columns of the published grids


class Grids(NamedTuple):
    """Grids of n pictures that are alone in their samples, int64 [n, 2] of rows and columns."""

    fits: np.ndarray  # bool [n]; False if the picture is too thin for any grid
    tiles: np.ndarray  # tiles of the grid
    unpadded: np.ndarray  # LLM tokens of the unpadded grid
    tokens: np.ndarray  # LLM tokens after downscaling


@dataclass(frozen=True)
class AnyRes(VisionLayout):
    """Settings of the processor: `pinpoints` are (height, width) in pixels, multiples of `tile_px`;
    a tile has `patches` x `patches` patches; `mean` is the colour of padding to a square."""

    tile_px: int = 384
    patches: int = 27
    max_tiles: int = 9
    pinpoints: tuple[tuple[int, int], ...] = tuple((384 * r, 384 * c) for r in GRID for c in GRID)
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        px = self.tile_px
        if not self.pinpoints or any(min(p) < 1 or p[0] % px or p[1] % px for p in self.pinpoints):
            raise ValueError(f"grid pinpoints {self.pinpoints} are no multiples of tile_px={px}")

    @property
    def tokens_per_tile(self) -> int:  # type: ignore[override]
        return self.patches**2

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        grids = self.grids(np.where(alone, widths, 1), np.where(alone, heights, 1))
        usable = np.where(alone, grids.fits, np.maximum(widths, heights) <= MAX_SQUARE_PX)
        in_grid = np.where(alone, grids.tokens[:, 0] * (grids.tokens[:, 1] + 1), 1)
        return usable, np.where(alone, 1 + grids.tiles.prod(1), 1), self.tokens_per_tile + in_grid

    def grids(self, widths: np.ndarray, heights: np.ndarray) -> Grids:
        """Return the grids of pictures alone in their samples, of upright sizes int [n]: the
        pinpoint that keeps the most pixels, then wastes the fewest."""
        sides = np.stack([heights, widths], -1).astype(np.int64)
        grid_px = np.full_like(sides, 0)
        max_kept, min_wasted = np.full((2, len(sides)), -1)
        for point in self.pinpoints:
            scale = (np.array(point) / sides).min(-1, keepdims=True)
            kept_px = np.minimum((sides * scale).astype(np.int64).prod(-1), sides.prod(-1))
            wasted_px = point[0] * point[1] - kept_px
            improves = (kept_px > max_kept) | ((kept_px == max_kept) & (wasted_px < min_wasted))
            grid_px = np.where(improves[:, None], point, grid_px)
            max_kept = np.where(improves, kept_px, max_kept)
            min_wasted = np.where(improves, wasted_px, min_wasted)
        tiles = grid_px // self.tile_px
        full = tiles * self.patches
        inner = np.round(sides * (full[:, ::-1] / sides[:, ::-1]), 7).astype(np.int64)
        is_wider = sides[:, 1] / sides[:, 0] > full[:, 1] / full[:, 0]
        is_padded = np.stack([is_wider, ~is_wider], -1)
        unpadded = np.where(is_padded, full - (full - inner) // 2 * 2, full)
        ratio = np.sqrt(unpadded.prod(-1) / (self.max_tiles * self.tokens_per_tile))
        ratio = np.where(ratio > DOWNSCALE_ABOVE, ratio, 1.0)
        tokens = (unpadded // ratio[:, None]).astype(np.int64)
        return Grids(max_kept > 0, tiles, unpadded, tokens)

    def cut_tiles(self, image: Image.Image, alone: bool, size: Size) -> np.ndarray:
        px, (width, height) = self.tile_px, size
        if not alone:
            colour = tuple(int(255 * m) for m in self.mean)
            square = Image.new("RGB", (max(size),) * 2, colour)
            square.paste(image, ((max(size) - width) // 2, (max(size) - height) // 2))
            return frame_tile(square, px)[None]
        rows, cols = self._grids_of(*size).tiles[0].tolist()
        # Rounded up, unlike `tiles.fit_in_box`.
        scale = min(cols * px / width, rows * px / height)
        inner = min(ceil(width * scale), cols * px), min(ceil(height * scale), rows * px)
        tiles = padded_tiles(image.resize(inner, BICUBIC), rows, cols, px)
        return np.concatenate([frame_tile(image, px)[None], tiles])

    def token_sources(self, width: int, height: int, alone: bool) -> TokenSources:
        base, p = copied_sources(np.arange(self.tokens_per_tile)), self.patches
        if not alone:
            return np.concatenate([base, newlines(1)])
        grids = self._grids_of(width, height)
        (rows, cols), (un_rows, un_cols), size = (a[0].tolist() for a in grids[1:])
        tile = 1 + np.arange(rows * cols).reshape(rows, 1, cols, 1)
        patch = np.arange(p * p).reshape(1, p, 1, p)
        grid = (tile * p * p + patch).reshape(rows * p, cols * p)
        top, left = (rows * p - un_rows) // 2, (cols * p - un_cols) // 2
        grid = grid[top : top + un_rows, left : left + un_cols]
        is_unscaled = size == [*grid.shape]
        tokens = copied_sources(grid.reshape(-1)) if is_unscaled else resampled_sources(grid, *size)
        return np.concatenate([base, add_line_ends(tokens, size[0])])

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        return frames * ceil(self.patches / 2) ** 2 + 1

    def clip_token_sources(self, frames: int) -> TokenSources:
        p, side = self.patches, ceil(self.patches / 2)
        one = resampled_sources(np.arange(p * p).reshape(p, p), side, side)
        all_frames = [shift_sources(one, k * p * p) for k in range(frames)]
        return np.concatenate([*all_frames, newlines(1)])

    def _grids_of(self, width: int, height: int) -> Grids:
        return self.grids(np.array([width]), np.array([height]))


def _layout(
    tile_px: int, tokens_per_tile: int, max_tiles: int, pinpoints: Any = (), mean: Any = AnyRes.mean
) -> AnyRes:
    usual = tuple((tile_px * r, tile_px * c) for r in GRID for c in GRID)
    grids = tuple((int(height), int(width)) for height, width in pinpoints or usual)
    return AnyRes(tile_px, isqrt(tokens_per_tile), max_tiles, grids, tuple(mean))


FORM = tile_form(_layout, "pinpoints", "mean")
