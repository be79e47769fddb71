"""The plain layout of pictures: an overview tile and a grid, every feature one LLM token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dflop_jax.data.media.tiling import count_tiles, needed_size, picture_tiles
from dflop_jax.data.media.token_sources import TokenSources, plain


@dataclass(frozen=True)
class SimpleTiles:
    """As a `counts.VisionLayout`; `max_tiles` of the grid."""

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 9

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = zip(widths.tolist(), heights.tolist())
        counts = [count_tiles(w, h, self.tile_px, self.max_tiles) for w, h in sizes]
        tiles = np.array(counts, np.int64)
        return np.ones(len(tiles), bool), tiles, self.count_clips(tiles)

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        return frames * self.tokens_per_tile

    def least_size(self, width: int, height: int) -> tuple[int, int]:
        return needed_size(width, height, self.tile_px, self.max_tiles)

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        return picture_tiles(image, self.tile_px, self.max_tiles, size)

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        return self.place_clip(count_tiles(width, height, self.tile_px, self.max_tiles))

    def place_clip(self, frames: int) -> TokenSources:
        return plain(np.arange(frames * self.tokens_per_tile))
