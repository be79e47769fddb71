"""Pictures as Gemma 3 takes them: each is resized to one square, its aspect ratio not kept.

Pixels equal those of the published processor without "pan and scan" (`Gemma3ImageProcessorPil`),
which published folders leave off. A frame of a clip is a picture, and sees the others where no
text stands between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dflop_jax.data.media.tiles import tile_form
from dflop_jax.data.media.token_sources import TokenSources, plain


@dataclass(frozen=True)
class Square:
    """See `tiles.VisionLayout`."""

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 1
    joined = True  # see `medium.Medium`

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        one = np.ones(len(widths), np.int64)
        return one > 0, one, self.count_clips(one)

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        return frames * self.tokens_per_tile

    def least_size(self, width: int, height: int) -> None:
        return None  # pixels equal the reference's, which decodes whole pictures

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        size_px = (self.tile_px, self.tile_px)
        return np.asarray(image.resize(size_px, Image.Resampling.BILINEAR), np.uint8)[None]

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        return self.place_clip(1)

    def place_clip(self, frames: int) -> TokenSources:
        return plain(np.arange(frames * self.tokens_per_tile))


def _layout(tile_px: int, tokens_per_tile: int, max_tiles: int) -> Square:
    return Square(tile_px, tokens_per_tile)


FORM = tile_form(_layout)
