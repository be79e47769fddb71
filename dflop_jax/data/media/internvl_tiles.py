"""InternVL-2.5's dynamic tiling, equal to its published processor.

A picture is resized, its aspect ratio not kept, to the grid of 1..max_tiles tiles whose ratio is
nearest, and cut; with more than one tile a thumbnail of the whole follows. A frame is one tile.
Pixels equal the reference's PIL processor (`GotOcr2ImageProcessorPil`), given upright pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dflop_jax.data.media.tiles import tile_form
from dflop_jax.data.media.tiling import frame_tile
from dflop_jax.data.media.token_sources import TokenSources, plain


@dataclass(frozen=True)
class DynamicTiling:
    """The processor's settings; `max_tiles` does not count the thumbnail. A tile is seen by the
    LLM as `tokens_per_tile` tokens, between the text tokens <img> and </img> of the picture."""

    tile_px: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    tokens_per_tile: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles or min(self.tile_px, self.tokens_per_tile) < 1:
            raise ValueError(f"{self}: sizes must be at least 1, min_tiles at most max_tiles")

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tiles = tile_counts(widths, heights, self)
        return np.ones(len(tiles), bool), tiles, tiles * self.tokens_per_tile

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        return frames * self.tokens_per_tile

    def least_size(self, width: int, height: int) -> None:
        return None  # pixels equal the reference's, which decodes whole pictures

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        return cut_tiles(image, self)

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        (n,) = tile_counts(np.array([width]), np.array([height]), self)
        return self.place_clip(int(n))

    def place_clip(self, frames: int) -> TokenSources:
        return plain(np.arange(frames * self.tokens_per_tile))


def tile_grids(
    widths: np.ndarray, heights: np.ndarray, spec: DynamicTiling
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) int64 [n] of the grids of upright widths x heights pixels, int [n].

    Nearest in aspect ratio; of equally near ones the larger, while the picture has more than half
    of its pixels. ValueError for a picture without pixels.
    """
    widths, heights = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    if len(widths) and min(widths.min(), heights.min()) < 1:
        raise ValueError("a picture of 0 pixels has nothing to tile")
    ratio, area = widths / heights, widths * heights
    rows, cols = np.ones_like(widths), np.ones_like(widths)
    nearest = np.full(len(widths), np.inf)
    for n_cols, n_rows in _arrangements(spec):
        distance = np.abs(ratio - n_cols / n_rows)
        filled = area > 0.5 * spec.tile_px**2 * n_cols * n_rows
        better = (distance < nearest) | ((distance == nearest) & filled)
        rows, cols = np.where(better, n_rows, rows), np.where(better, n_cols, cols)
        nearest = np.minimum(nearest, distance)
    return rows, cols


def tile_counts(widths: np.ndarray, heights: np.ndarray, spec: DynamicTiling) -> np.ndarray:
    """Tiles int64 [n], the thumbnail included."""
    rows, cols = tile_grids(widths, heights, spec)
    return rows * cols + (rows * cols > 1)


def cut_tiles(image: Image.Image, spec: DynamicTiling) -> np.ndarray:
    """Tiles of an upright RGB picture, uint8 [n, tile_px, tile_px, 3]: by row, then thumbnail."""
    px = spec.tile_px
    (rows,), (cols,) = (
        g.tolist() for g in tile_grids(np.array([image.width]), np.array([image.height]), spec)
    )
    whole = image.resize((cols * px, rows * px), Image.Resampling.BICUBIC)
    tiles = np.asarray(whole, np.uint8).reshape(rows, px, cols, px, 3).swapaxes(1, 2)
    tiles = tiles.reshape(-1, px, px, 3)
    return tiles if len(tiles) == 1 else np.concatenate([tiles, frame_tile(image, px)[None]])


def _arrangements(spec: DynamicTiling) -> list[tuple[int, int]]:
    """(cols, rows) in the order in which ties are broken."""
    sides = range(1, spec.max_tiles + 1)
    grids = [(c, r) for c in sides for r in sides if spec.min_tiles <= c * r <= spec.max_tiles]
    return sorted(grids, key=lambda g: g[0] * g[1])


def _layout(tile_px: int, tokens_per_tile: int, max_tiles: int) -> DynamicTiling:
    return DynamicTiling(tile_px, max_tiles=max_tiles, tokens_per_tile=tokens_per_tile)


FORM = tile_form(_layout)
