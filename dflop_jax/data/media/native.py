"""Pictures and clips at native resolution, as Qwen3-VL takes them.

A picture, or a pair of frames of a clip, is one piece: its sides rounded to whole blocks of patches
within a range of pixels. Every pair stands in the text behind the time at which it is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, sqrt
from typing import NamedTuple

import numpy as np
from PIL import Image

MAX_RATIO = 200  # of a picture's sides
MIN_FRAMES = 4  # sampled from a clip that has them
MIN_CLIP_PIXELS = 4096  # of all frames of a clip
PICTURE_PIXELS = (65_536, 16_777_216)  # of a picture, as published
CLIP_PIXELS = 25_165_824  # of all frames of a clip at most, as published

Grid = tuple[int, int]  # rows and columns of patches


class Clip(NamedTuple):
    """What a clip's header says: pixels of a frame as stored, frames in all, frames a second."""

    width: int
    height: int
    total: int
    rate_num: int
    rate_den: int


class ClipLayout(NamedTuple):
    """How a clip is seen: numbers of its frames, in pairs; the second of each pair; patches of
    every frame."""

    frames: tuple[int, ...]
    seconds: tuple[float, ...]
    grid: Grid


@dataclass(frozen=True)
class Native:
    """Sizes of patches and ranges of pixels.

    Attributes:
      patch_px: side of a patch.
      merge: `merge` x `merge` patches are a block, which becomes one LLM token.
      frames: of a clip in one patch; a picture is repeated so often.
      min_pixels, max_pixels: of a resized picture; max_clip_pixels: of all frames of a clip.
      max_frames: sampled from a clip, at `frames_per_s`.
    """

    patch_px: int = 16
    merge: int = 2
    frames: int = 2
    min_pixels: int = PICTURE_PIXELS[0]
    max_pixels: int = PICTURE_PIXELS[1]
    max_clip_pixels: int = CLIP_PIXELS
    max_frames: int = 768
    frames_per_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.block_px**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"data.min_pixels={self.min_pixels} is not between {self.block_px**2}, a block, "
                f"and data.max_pixels={self.max_pixels}"
            )
        if self.max_clip_pixels < MIN_CLIP_PIXELS:
            raise ValueError(f"data.max_clip_pixels must be at least {MIN_CLIP_PIXELS}")

    @property
    def block_px(self) -> int:
        return self.patch_px * self.merge

    def tokens(self, grid: Grid) -> int:
        """LLM tokens of a piece."""
        return grid[0] * grid[1] // self.merge**2

    def count(
        self, widths: np.ndarray, heights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(usable bool, pieces, LLM tokens), each [n], of n pictures of upright pixels."""
        usable = np.maximum(widths, heights) <= MAX_RATIO * np.minimum(widths, heights)
        rows, cols = self._blocks(np.where(usable, widths, 1), np.where(usable, heights, 1))
        return usable, np.ones(len(widths), np.int64), rows * cols

    def grid(self, width: int, height: int) -> Grid:
        """Patches of a picture. ValueError: it is too thin."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"{width}x{height} pixels: one side is more than {MAX_RATIO} times the other; "
                "crop it"
            )
        rows, cols = self._blocks(np.array([width]), np.array([height]))
        return int(rows[0]) * self.merge, int(cols[0]) * self.merge

    def _blocks(self, widths: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of blocks of pictures, int64 [n] each."""
        px, low, high = self.block_px, self.min_pixels, self.max_pixels
        sides = np.stack([heights, widths]).astype(np.int64)
        area = sides[0] * sides[1]
        blocks = np.round(sides / px).astype(np.int64)  # half to even
        pixels = blocks[0] * blocks[1] * px * px
        shrink, grow = np.sqrt(area / high), np.sqrt(low / area)
        smaller = np.maximum(1, np.floor(sides / shrink / px)).astype(np.int64)
        larger = np.ceil(sides * grow / px).astype(np.int64)
        rows, cols = np.where(pixels > high, smaller, np.where(pixels < low, larger, blocks))
        return rows, cols

    def clip(self, clip: Clip) -> ClipLayout | None:
        """How a clip is seen; None: it has too few frames or is too thin."""
        return _clip_layout(self, clip)

    def least_size(self, width: int, height: int) -> None:
        return None  # pixels equal the reference's, which decodes whole pictures

    def resized(self, image: Image.Image, grid: Grid) -> np.ndarray:
        """An RGB picture or frame as uint8 [height, width, 3] of a grid's size."""
        size = grid[1] * self.patch_px, grid[0] * self.patch_px
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.uint8)

    def patches(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [n, height, width, 3], n a multiple of `frames`, as patches uint8 [p, colours x
        frames x patch_px x patch_px]: pair by pair, block by block, patch by patch."""
        n, height, width, colours = frames.shape
        px, m = self.patch_px, self.merge
        rows, cols = height // self.block_px, width // self.block_px
        split = frames.reshape(n // self.frames, self.frames, rows, m, px, cols, m, px, colours)
        patches = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return patches.reshape(-1, colours * self.frames * px * px)


@lru_cache(maxsize=65536)
def _clip_layout(native: Native, clip: Clip) -> ClipLayout | None:
    rate = clip.rate_num / clip.rate_den
    wanted = int(clip.total / rate * native.frames_per_s)
    n = min(max(wanted, MIN_FRAMES), native.max_frames, clip.total)
    grid = clip_grid(native, n, clip.width, clip.height)
    if grid is None:
        return None
    frames = np.linspace(0, clip.total - 1, n).round().astype(int).tolist()
    frames += frames[-1:] * (-n % native.frames)
    first, last = frames[:: native.frames], frames[native.frames - 1 :: native.frames]
    seconds = tuple((a / rate + b / rate) / 2 for a, b in zip(first, last, strict=True))
    return ClipLayout(tuple(frames), seconds, grid)


def clip_grid(native: Native, n: int, width: int, height: int) -> Grid | None:
    """Patches of each of n frames; None: too few of them, or too thin."""
    px = native.block_px
    if n < native.frames:
        return None
    if min(width, height) < px:
        scale = max(px / height, px / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_RATIO * min(height, width):
        return None
    sides = (height, width)
    blocks = [round(side / px) for side in sides]
    pixels = round(n / native.frames) * native.frames * blocks[0] * blocks[1] * px * px
    if pixels > native.max_clip_pixels:
        shrink = sqrt(n * height * width / native.max_clip_pixels)
        blocks = [max(1, floor(side / shrink / px)) for side in sides]
    elif pixels < MIN_CLIP_PIXELS:
        grow = sqrt(MIN_CLIP_PIXELS / (n * height * width))
        blocks = [ceil(side * grow / px) for side in sides]
    return blocks[0] * native.merge, blocks[1] * native.merge


def patch_places(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """int32 [patches, 4]: row and column of each patch in its piece, in the order of
    `Native.patches`, and the rows and columns of the piece."""
    parts = [np.zeros((0, 4), np.int32)]
    for rows, cols in grids:
        places = np.moveaxis(np.indices((rows, cols)), 0, -1)
        blocks = places.reshape(rows // merge, merge, cols // merge, merge, 2).swapaxes(1, 2)
        whole = np.broadcast_to((rows, cols), (rows * cols, 2))
        parts.append(np.concatenate([blocks.reshape(-1, 2), whole], 1).astype(np.int32))
    return np.concatenate(parts)


def token_positions(runs: Sequence[int | Grid]) -> np.ndarray:
    """int32 [tokens, 3], (time, row, column) of runs of tokens: so many of text, or a piece's rows
    and columns of blocks. Text counts on; a piece that begins at n goes on at n + its longer side.
    """
    parts, start = [np.zeros((0, 3), np.int32)], 0
    for run in runs:
        if isinstance(run, int):
            parts.append(np.repeat(np.arange(start, start + run, dtype=np.int32)[:, None], 3, 1))
            start += run
        else:
            rows, cols = np.mgrid[: run[0], : run[1]].reshape(2, -1)
            parts.append((start + np.stack([0 * rows, rows, cols], -1)).astype(np.int32))
            start += max(run)
    return np.concatenate(parts)
