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
from typing import Any

import numpy as np
from PIL import Image

from dflop_jax.data.bounds import MAX_SQUARE
from dflop_jax.data.media.tiles import tile_form
from dflop_jax.data.media.tiling import frame_tile
from dflop_jax.data.media.token_sources import (
    TokenSources,
    join,
    newlines,
    plain,
    resampled,
    with_line_ends,
)

CHUNK = 1 << 16  # pictures rated at once: bounds the memory of a million
DOWNSCALE_ABOVE = 1.1  # the reference leaves smaller excesses alone
GRID = range(1, 7)  # rows and columns of the published grids


@dataclass(frozen=True)
class AnyRes:
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
    def tokens_per_tile(self) -> int:
        return self.patches**2

    @property
    def pooled_tokens(self) -> int:
        """LLM tokens of a video frame."""
        return ceil(self.patches / 2) ** 2

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        square = np.maximum(widths, heights) <= MAX_SQUARE
        usable = np.where(alone, fits_a_grid(widths, heights, self), square)
        sides = (np.where(usable, widths, 1), np.where(usable, heights, 1))
        return usable, *picture_counts(*sides, alone, self)

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        return frames * self.pooled_tokens + 1

    def least_size(self, width: int, height: int) -> None:
        return None  # pixels equal the reference's, which decodes whole pictures

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        return picture_tiles(image, self, alone=alone)

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        return picture_sources(width, height, self, alone=alone)

    def place_clip(self, frames: int) -> TokenSources:
        return clip_sources(frames, self)


@dataclass(frozen=True, eq=False)
class Grids:
    """How `n` lone pictures are laid out, each int64 [n]: tiles of the grid, then LLM tokens of
    the unpadded grid, and of that grid after downscaling."""

    rows: np.ndarray
    cols: np.ndarray
    unpadded_rows: np.ndarray
    unpadded_cols: np.ndarray
    token_rows: np.ndarray
    token_cols: np.ndarray


def grids(widths: np.ndarray, heights: np.ndarray, spec: AnyRes) -> Grids:
    """Layouts of lone pictures of upright widths x heights pixels, int [n].

    Raises:
      ValueError: a picture without pixels, or too thin to leave a pixel in any grid.
    """
    widths, heights = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    parts = [_best(widths[k : k + CHUNK], heights[k : k + CHUNK], spec)
             for k in range(0, len(widths), CHUNK)]  # fmt: skip
    best = np.concatenate([np.zeros((0, 2), np.int64), *parts])
    rows, cols = best.T // spec.tile_px
    full_rows, full_cols = rows * spec.patches, cols * spec.patches
    wide = widths / heights > full_cols / full_rows
    kept_rows = np.round(heights * (full_cols / widths), 7).astype(np.int64)
    kept_cols = np.round(widths * (full_rows / heights), 7).astype(np.int64)
    un_rows = np.where(wide, full_rows - (full_rows - kept_rows) // 2 * 2, full_rows)
    un_cols = np.where(wide, full_cols, full_cols - (full_cols - kept_cols) // 2 * 2)
    ratio = np.sqrt(un_rows * un_cols / (spec.max_tiles * spec.patches**2))
    large = ratio > DOWNSCALE_ABOVE
    ratio = np.where(large, ratio, 1.0)
    down_rows, down_cols = ((n // ratio).astype(np.int64) for n in (un_rows, un_cols))
    return Grids(rows, cols, un_rows, un_cols, down_rows, down_cols)


def picture_counts(
    widths: np.ndarray, heights: np.ndarray, alone: np.ndarray, spec: AnyRes
) -> tuple[np.ndarray, np.ndarray]:
    """(tiles, LLM tokens) int64 [n] of pictures; `alone` bool [n]: the only one of its sample."""
    g = grids(np.where(alone, widths, 1), np.where(alone, heights, 1), spec)
    base = spec.patches**2
    tiles = np.where(alone, 1 + g.rows * g.cols, 1)
    return tiles, base + np.where(alone, g.token_rows * (g.token_cols + 1), 1)


def fits_a_grid(widths: np.ndarray, heights: np.ndarray, spec: AnyRes) -> np.ndarray:
    """Whether each picture, alone, leaves a pixel in some grid: bool [n]; very thin ones do not."""
    widths, heights = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    # only these can fail; rating all of a million pictures a second time would be slow
    ratio = np.array(spec.pinpoints).max(0).min() // 2
    thin = np.flatnonzero(np.maximum(widths, heights) > np.minimum(widths, heights) * ratio)
    ok = np.ones(len(widths), bool)
    ok[thin] = _kept(widths[thin, None], heights[thin, None], spec).max(1) > 0
    return ok


def picture_sources(width: int, height: int, spec: AnyRes, *, alone: bool = True) -> TokenSources:
    """Token sources of one picture, over its tiles in the order of `picture_tiles`."""
    base = plain(np.arange(spec.patches**2))
    if not alone:
        return join([base, newlines(1)])
    g = grids(np.array([width]), np.array([height]), spec)
    rows, cols = int(g.rows[0]), int(g.cols[0])
    p = spec.patches
    tile = 1 + np.arange(rows * cols).reshape(rows, 1, cols, 1)
    patch = np.arange(p * p).reshape(1, p, 1, p)
    grid = (tile * p * p + patch).reshape(rows * p, cols * p)
    un_rows, un_cols = int(g.unpadded_rows[0]), int(g.unpadded_cols[0])
    top, left = (rows * p - un_rows) // 2, (cols * p - un_cols) // 2
    grid = grid[top : top + un_rows, left : left + un_cols]
    height, width = int(g.token_rows[0]), int(g.token_cols[0])
    same = (height, width) == grid.shape
    tokens = plain(grid.reshape(-1)) if same else resampled(grid, height, width)
    return join([base, with_line_ends(tokens, height)])


def clip_sources(frames: int, spec: AnyRes) -> TokenSources:
    """Token sources of a clip of one tile per frame."""
    p = spec.patches
    side = ceil(p / 2)
    one = resampled(np.arange(p * p).reshape(p, p), side, side)
    return join([*(one.shifted(k * p * p) for k in range(frames)), newlines(1)])


def picture_tiles(image: Image.Image, spec: AnyRes, *, alone: bool = True) -> np.ndarray:
    """Tiles of an upright RGB picture, uint8 [n, tile_px, tile_px, 3]: the whole, then the grid."""
    px = spec.tile_px
    if not alone:
        return frame_tile(_squared(image, spec.mean), px)[None]
    ((height, width),) = _best(np.array([image.width]), np.array([image.height]), spec).tolist()
    inner_w, inner_h = _fitted(image.width, image.height, width, height)
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_h) // 2, (width - inner_w) // 2
    inner = image.resize((inner_w, inner_h), Image.Resampling.BICUBIC)
    canvas[top : top + inner_h, left : left + inner_w] = np.asarray(inner)
    grid = canvas.reshape(height // px, px, width // px, px, 3).swapaxes(1, 2)
    return np.concatenate([frame_tile(image, px)[None], grid.reshape(-1, px, px, 3)])


def _best(widths: np.ndarray, heights: np.ndarray, spec: AnyRes) -> np.ndarray:
    """(height, width) int64 [n, 2] of the best pinpoints: most pixels kept, then least wasted."""
    if len(widths) and min(widths.min(), heights.min()) < 1:
        raise ValueError("a picture of 0 pixels has nothing to tile")
    w, h = widths[:, None], heights[:, None]
    grid_h, grid_w = np.array(spec.pinpoints).T
    kept_pixels = _kept(w, h, spec)
    most_kept = kept_pixels.max(1, keepdims=True)
    if len(most_kept) and most_kept.min() < 1:
        k = int(most_kept[:, 0].argmin())
        raise ValueError(
            f"a picture of {widths[k]}x{heights[k]} pixels is too thin for any grid; crop it"
        )
    wasted = np.where(
        kept_pixels == most_kept, grid_h * grid_w - kept_pixels, np.iinfo(np.int64).max
    )
    return np.array(spec.pinpoints)[wasted.argmin(1)]


def _kept(w: np.ndarray, h: np.ndarray, spec: AnyRes) -> np.ndarray:
    """Pixels of pictures [n, 1] that each of the p pinpoints keeps, int64 [n, p]."""
    grid_h, grid_w = np.array(spec.pinpoints).T
    scale = np.minimum(grid_w / w, grid_h / h)
    return np.minimum((w * scale).astype(np.int64) * (h * scale).astype(np.int64), w * h)


def _fitted(width: int, height: int, box_width: int, box_height: int) -> tuple[int, int]:
    """(width, height) of the picture inside its grid; rounded up, unlike `tiling.fit`."""
    scale_w, scale_h = box_width / width, box_height / height
    if scale_w < scale_h:
        return box_width, min(ceil(height * scale_w), box_height)
    return min(ceil(width * scale_h), box_width), box_height


def _squared(image: Image.Image, mean: tuple[float, float, float]) -> Image.Image:
    if image.width == image.height:
        return image
    side = max(image.size)
    out = Image.new("RGB", (side, side), tuple(int(255 * m) for m in mean))
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def _layout(
    tile_px: int, tokens_per_tile: int, max_tiles: int, pinpoints: Any = (), mean: Any = AnyRes.mean
) -> AnyRes:
    usual = tuple((tile_px * r, tile_px * c) for r in GRID for c in GRID)
    grids = tuple((int(height), int(width)) for height, width in pinpoints or usual)
    return AnyRes(tile_px, isqrt(tokens_per_tile), max_tiles, grids, tuple(mean))


FORM = tile_form(_layout, "pinpoints", "mean")
