"""LLaVA-OneVision's AnyRes ("anyres_max_9"), equal to its published processor.

A picture alone in its sample is fitted into the best of the grid pinpoints and cut into tiles,
behind one tile of the whole picture; the LLM sees the patches of the grid that are no padding, a
newline after each row, scaled down when they exceed `max_tiles` tiles. Of several pictures each is
one tile, padded to a square. Each frame of a clip is one tile, pooled to a quarter of its patches.

Pixels equal the reference's PIL processor (`LlavaOnevisionImageProcessorPil`, formerly the "slow"
one), given upright pictures; counts are the same float arithmetic, hence equal everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dflop_jax.data.bounds import MAX_SQUARE_PX
from dflop_jax.data.media.tiles import Counts, VisionLayout, tile_form
from dflop_jax.data.media.tiling import frame_tile, padded_tiles
from dflop_jax.data.media.token_sources import (
    TokenSources,
    add_line_ends,
    copied_sources,
    newlines,
    resampled_sources,
    shift_sources,
)

CHUNK_PICTURES = 1 << 16  # pictures rated at once: bounds the memory of a million
DOWNSCALE_ABOVE = 1.1  # the reference leaves smaller excesses alone
GRID = range(1, 7)  # rows and columns of the published grids


class Grids(NamedTuple):
    """How n lone pictures are laid out, int64 [n, 2] of rows and columns: tiles of the grid, LLM
    tokens of the unpadded grid, and of that after downscaling; `fits` bool [n]: whether the picture
    leaves a pixel in some grid, which very thin ones do not."""

    fits: np.ndarray
    tiles: np.ndarray
    unpadded: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class AnyRes(VisionLayout):
    """The processor's settings: `pinpoints` are (height, width) in pixels, multiples of `tile_px`;
    a tile has `patches` x `patches` patches; `mean` is the colour that pads to a square."""

    tile_px: int = 384
    patches: int = 27
    max_tiles: int = 9
    pinpoints: tuple[tuple[int, int], ...] = tuple((384 * r, 384 * c) for r in GRID for c in GRID)
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.tile_px < 1 or self.patches < 1 or self.max_tiles < 1 or not self.pinpoints:
            raise ValueError(f"tile_px, patches, max_tiles or pinpoints missing in {self}")
        odd = [
            p for p in self.pinpoints if min(p) < 1 or p[0] % self.tile_px or p[1] % self.tile_px
        ]
        if odd:
            raise ValueError(f"grid pinpoints {odd} are no multiples of tile_px={self.tile_px}")

    @property
    def tokens_per_tile(self) -> int:  # type: ignore[override]
        return self.patches**2

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        sides = np.where(alone[:, None], np.stack([widths, heights], -1), 1)
        chunks = range(0, max(1, len(sides)), CHUNK_PICTURES)
        grids = [self.grids(*sides[k : k + CHUNK_PICTURES].T) for k in chunks]
        fits, tiles, _, tokens = (np.concatenate(column) for column in zip(*grids, strict=True))
        usable = np.where(alone, fits, np.maximum(widths, heights) <= MAX_SQUARE_PX)
        in_grid = np.where(alone, tokens[:, 0] * (tokens[:, 1] + 1), 1)
        return usable, np.where(alone, 1 + tiles.prod(1), 1), self.tokens_per_tile + in_grid

    def grids(self, widths: np.ndarray, heights: np.ndarray) -> Grids:
        """Layouts of lone pictures of upright widths x heights pixels, int [n]: in the pinpoint
        that keeps most pixels, then wastes least."""
        sides, points = np.stack([heights, widths], -1).astype(np.int64), np.array(self.pinpoints)
        scale = (points / sides[:, None]).min(-1, keepdims=True)
        kept_pixels = (sides[:, None] * scale).astype(np.int64).prod(-1)
        kept_pixels = np.minimum(kept_pixels, sides.prod(-1, keepdims=True))
        max_kept_pixels = kept_pixels.max(1, keepdims=True)
        wasted = np.where(
            kept_pixels == max_kept_pixels, points.prod(-1) - kept_pixels, np.iinfo(np.int64).max
        )
        tiles = points[wasted.argmin(1)] // self.tile_px
        full = tiles * self.patches
        inner = np.round(sides * (full[:, ::-1] / sides[:, ::-1]), 7).astype(np.int64)
        is_wider = sides[:, 1] / sides[:, 0] > full[:, 1] / full[:, 0]
        is_padded = np.stack([is_wider, ~is_wider], -1)
        unpadded = np.where(is_padded, full - (full - inner) // 2 * 2, full)
        ratio = np.sqrt(unpadded.prod(-1) / (self.max_tiles * self.tokens_per_tile))
        ratio = np.where(ratio > DOWNSCALE_ABOVE, ratio, 1.0)
        tokens = (unpadded // ratio[:, None]).astype(np.int64)
        return Grids(max_kept_pixels[:, 0] > 0, tiles, unpadded, tokens)

    def cut_tiles(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        px = self.tile_px
        if not alone:
            return frame_tile(_pad_to_square(image, self.mean), px)[None]
        rows, cols = self._grids_of(image.width, image.height).tiles[0].tolist()
        inner = image.resize(
            _fitted_size(image.width, image.height, cols * px, rows * px), Image.Resampling.BICUBIC
        )
        return np.concatenate([frame_tile(image, px)[None], padded_tiles(inner, rows, cols, px)])

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
        p = self.patches
        side = ceil(p / 2)
        one = resampled_sources(np.arange(p * p).reshape(p, p), side, side)
        return np.concatenate(
            [*(shift_sources(one, k * p * p) for k in range(frames)), newlines(1)]
        )

    def _grids_of(self, width: int, height: int) -> Grids:
        return self.grids(np.array([width]), np.array([height]))


def _fitted_size(width: int, height: int, box_width: int, box_height: int) -> tuple[int, int]:
    """(width, height) of the picture inside its grid; rounded up, unlike `tiling.fit_in_box`."""
    scale_w, scale_h = box_width / width, box_height / height
    if scale_w < scale_h:
        return box_width, min(ceil(height * scale_w), box_height)
    return min(ceil(width * scale_h), box_width), box_height


def _pad_to_square(image: Image.Image, mean: tuple[float, float, float]) -> Image.Image:
    if image.width == image.height:
        return image
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(255 * m) for m in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _layout(
    tile_px: int, tokens_per_tile: int, max_tiles: int, pinpoints: Any = (), mean: Any = AnyRes.mean
) -> AnyRes:
    usual = tuple((tile_px * r, tile_px * c) for r in GRID for c in GRID)
    grids = tuple((int(height), int(width)) for height, width in pinpoints or usual)
    return AnyRes(tile_px, isqrt(tokens_per_tile), max_tiles, grids, tuple(mean))


FORM = tile_form(_layout, "pinpoints", "mean")
