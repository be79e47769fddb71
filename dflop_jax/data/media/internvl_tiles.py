"""InternVL-2.5's dynamic tiling, equal to its published processor.

A picture is resized, its aspect ratio not kept, to the grid of 1..max_tiles tiles whose ratio is
nearest, and cut; with more than one tile a thumbnail of the whole follows. A frame is one tile.
Pixels equal the reference's PIL processor (`GotOcr2ImageProcessorPil`), given upright pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dflop_jax.data.media.tiles import Counts, VisionLayout, tile_form
from dflop_jax.data.media.tiling import frame_tile, padded_tiles


@dataclass(frozen=True)
class DynamicTiling(VisionLayout):
    """The processor's settings; `max_tiles` does not count the thumbnail. A tile is seen by the
    LLM as `tokens_per_tile` tokens, between the text tokens <img> and </img> of the picture."""

    tile_px: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    tokens_per_tile: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles or min(self.tile_px, self.tokens_per_tile) < 1:
            raise ValueError(f"{self}: sizes must be at least 1, min_tiles at most max_tiles")

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        tiles = np.multiply(*self.grids(widths, heights))
        tiles = tiles + (tiles > 1)
        return tiles > 0, tiles, tiles * self.tokens_per_tile

    def cut_tiles(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        px = self.tile_px
        sides = np.array([[image.width], [image.height]])
        rows, cols = (int(n[0]) for n in self.grids(*sides))
        whole = image.resize((cols * px, rows * px), Image.Resampling.BICUBIC)
        tiles = padded_tiles(whole, rows, cols, px)
        return tiles if len(tiles) == 1 else np.concatenate([tiles, frame_tile(image, px)[None]])

    def grids(self, widths: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, cols) int64 [n] of the grids of upright widths x heights pixels, int [n].

        Nearest in aspect ratio; of equally near ones the larger, while the picture has more than
        half of its pixels.
        """
        ratio, area = widths / heights, widths.astype(np.int64) * heights
        rows, cols = np.ones((2, len(widths)), np.int64)
        min_distance = np.full(len(widths), np.inf)
        sides = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in sides for r in sides if self.min_tiles <= c * r <= self.max_tiles]
        for n_cols, n_rows in sorted(grids, key=lambda g: g[0] * g[1]):
            distance = np.abs(ratio - n_cols / n_rows)
            filled = area > 0.5 * self.tile_px**2 * n_cols * n_rows
            is_nearer = (distance < min_distance) | ((distance == min_distance) & filled)
            rows, cols = np.where(is_nearer, n_rows, rows), np.where(is_nearer, n_cols, cols)
            min_distance = np.minimum(min_distance, distance)
        return rows, cols


FORM = tile_form(DynamicTiling)
