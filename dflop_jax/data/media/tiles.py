"""Pictures and clips as square tiles. A layout cuts the tiles and gives the sources of text tokens.

`SimpleTiles` makes an overview tile and a grid, with one text token per feature; other layouts are
`Square`, `DynamicTiling` and `AnyRes`. A frame of a clip is one tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data.media import medium
from dflop_jax.data.media.kind import IMAGE, VIDEO, Columns, Header, Kinds
from dflop_jax.data.media.medium import DecodedMedium, Grid, MediaCounts
from dflop_jax.data.media.pictures import BICUBIC, Size, frame_tile, padded_tiles
from dflop_jax.data.media.token_sources import TokenSources, copied_sources, insert_text_slots
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer

NEXT_FRAME_TEXT = "\nFrame{}: "  # InternVL's text between a clip's frames

Counts = tuple[np.ndarray, np.ndarray, np.ndarray]  # see `VisionLayout.count`


class VisionLayout(ABC):
    """Layout of pictures and clips in tiles. Implementations are frozen dataclasses that inherit
    the defaults. `alone`: the picture is the only one in its sample."""

    tile_px: int
    tokens_per_tile: int  # features that the encoder outputs for a tile
    max_tiles: int
    is_joined: ClassVar[bool] = False  # see `medium.Medium`

    @abstractmethod
    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        """Return (usable bool, tiles, LLM tokens), each [n], of n upright pictures."""

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        """Return the LLM tokens of clips of int [n] frames, one tile each."""
        return frames * self.tokens_per_tile

    def min_size(self, width: int, height: int) -> Size | None:
        """Return the minimum (width, height) at which a picture may be decoded; None: its full
        size, as published processors do."""
        return None

    @abstractmethod
    def cut_tiles(self, image: Image.Image, alone: bool, size: Size) -> np.ndarray:
        """Return the tiles uint8 [n, tile_px, tile_px, 3] of an upright RGB picture, whose
        original (width, height) is `size`."""

    def token_sources(self, width: int, height: int, alone: bool) -> TokenSources:
        """Return the sources of a picture's LLM tokens in its tiles."""
        return self.clip_token_sources(self.n_tiles(width, height, alone))

    def clip_token_sources(self, frames: int) -> TokenSources:
        """Return the sources of a clip's LLM tokens in its tiles."""
        return copied_sources(np.arange(frames * self.tokens_per_tile))

    def n_tiles(self, width: int, height: int, alone: bool) -> int:
        _, (n,), _ = self.count(*np.array([[width], [height], [alone]]))
        return int(n)


@dataclass(frozen=True)
class SimpleTiles(VisionLayout):
    """The layout of LLaVA-NeXT: a base tile of the whole picture, resized, and a grid of up to
    `max_tiles` if the picture is larger than a tile."""

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 9

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        sizes = zip(widths.tolist(), heights.tolist())
        grids = [choose_grid(w, h, self.tile_px, self.max_tiles) for w, h in sizes]
        tiles = np.array([1 + rows * cols for rows, cols in grids], np.int64)
        return tiles > 0, tiles, self.count_clips(tiles)

    def min_size(self, width: int, height: int) -> Size:
        px = self.tile_px
        rows, cols = choose_grid(width, height, px, self.max_tiles)
        shown_w, shown_h = fit_in_box(width, height, max(1, cols) * px, max(1, rows) * px)
        return 2 * max(shown_w, px), 2 * max(shown_h, px)  # twice the resolution of the tiles

    def cut_tiles(self, image: Image.Image, alone: bool, size: Size) -> np.ndarray:
        px, resize = self.tile_px, partial(image.resize, resample=BICUBIC, reducing_gap=2.0)
        rows, cols = choose_grid(*size, px, self.max_tiles)
        base = np.asarray(resize((px, px)))[None]
        if not rows * cols:
            return base
        inner = resize(fit_in_box(*size, cols * px, rows * px))
        return np.concatenate([base, padded_tiles(inner, rows, cols, px)])


@lru_cache(maxsize=65536)
def choose_grid(width: int, height: int, tile_px: int, max_tiles: int) -> Grid:
    """Return (rows, cols) of the grid of 2..max_tiles tiles that keeps the most pixels of a fitted
    picture, then wastes the fewest; (0, 0): only the base tile."""
    if max(width, height) <= tile_px:
        return (0, 0)
    best_grid, best_key = (0, 0), (-1, 0)
    for rows in range(1, max_tiles + 1):
        for cols in range(1, max_tiles // rows + 1):
            if rows * cols == 1:  # it would repeat the base tile
                continue
            w, h = fit_in_box(width, height, cols * tile_px, rows * tile_px)
            kept_pixels = min(w * h, width * height)
            key = (kept_pixels, kept_pixels - rows * cols * tile_px**2)
            if key > best_key:
                best_grid, best_key = (rows, cols), key
    return best_grid


def fit_in_box(width: int, height: int, box_width: int, box_height: int) -> Size:
    """Return the largest (width, height) of the same aspect ratio inside the box, at least 1."""
    if width * box_height >= height * box_width:
        return box_width, max(1, height * box_width // width)
    return max(1, width * box_height // height), box_height


@dataclass(frozen=True)
class Square(VisionLayout):
    """The layout of Gemma 3: each picture is resized to one square, as by the published processor
    (`Gemma3ImageProcessorPil`) without "pan and scan", which published folders disable. Frames of a
    clip without text between them attend to each other."""

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 1
    is_joined: ClassVar[bool] = True

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        one = np.ones(len(widths), np.int64)
        return one > 0, one, self.count_clips(one)

    def cut_tiles(self, image: Image.Image, alone: bool, size: Size) -> np.ndarray:
        return frame_tile(image, self.tile_px, Image.Resampling.BILINEAR)[None]


@dataclass(frozen=True)
class DynamicTiling(VisionLayout):
    """The layout of InternVL-2.5: a picture is resized to the grid of up to `max_tiles` tiles with
    the nearest aspect ratio, and cut; if there are several tiles, a thumbnail follows. Pixels equal
    those of the published processor (`GotOcr2ImageProcessorPil`)."""

    tile_px: int = 448
    tokens_per_tile: int = 256
    max_tiles: int = 12

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        tiles = np.multiply(*self.grids(widths, heights))
        tiles = tiles + (tiles > 1)
        return tiles > 0, tiles, self.count_clips(tiles)

    def cut_tiles(self, image: Image.Image, alone: bool, size: Size) -> np.ndarray:
        px = self.tile_px
        rows, cols = (int(n[0]) for n in self.grids(*np.array(size)[:, None]))
        tiles = padded_tiles(image.resize((cols * px, rows * px), BICUBIC), rows, cols, px)
        return tiles if len(tiles) == 1 else np.concatenate([tiles, frame_tile(image, px)[None]])

    def grids(self, widths: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, cols), int64 [n], of the grids with the nearest aspect ratio to pictures of
        these sizes; of equally near grids the largest that the picture fills by half."""
        ratio, area = widths / heights, widths.astype(np.int64) * heights
        rows, cols = np.ones((2, len(widths)), np.int64)
        min_distance = np.full(len(widths), np.inf)
        sides = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in sides for r in sides if c * r <= self.max_tiles]
        for n_cols, n_rows in sorted(grids, key=lambda g: g[0] * g[1]):
            distance = np.abs(ratio - n_cols / n_rows)
            filled = area > 0.5 * self.tile_px**2 * n_cols * n_rows
            is_nearer = (distance < min_distance) | ((distance == min_distance) & filled)
            rows, cols = np.where(is_nearer, n_rows, rows), np.where(is_nearer, n_cols, cols)
            min_distance = np.minimum(min_distance, distance)
        return rows, cols


@dataclass(frozen=True)
class TileMedium(medium.Medium):
    """Preparation of pictures and clips in the tiles of a layout."""

    layout: VisionLayout
    sources: int = 1
    tile_tokens: int = 0  # tokens of a tile inside the encoder; 0: as many as output features
    max_frames: int = DataConfig.max_frames  # of a clip
    # ids of the text after each of max_frames - 1 frames of a clip; () if there is none
    between_frames: tuple[tuple[int, ...], ...] = ()

    kinds: ClassVar[Kinds] = (IMAGE, VIDEO)
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({"pixels": medium.GREY})

    @property
    def piece_tokens(self) -> int:  # type: ignore[override]
        return self.tile_tokens or self.layout.tokens_per_tile

    @property
    def is_joined(self) -> bool:  # type: ignore[override]
        return self.layout.is_joined and not self.between_frames

    @property
    def unit_px(self) -> int:
        """Side of the smallest drawn picture, in pixels."""
        return self.layout.tile_px

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        if kind == IMAGE.name:
            return MediaCounts(*self.layout.count(headers["width"], headers["height"], alone))
        frames = np.minimum(headers["frames"], self.max_frames).astype(np.int64)
        text_before = np.cumsum([0, *map(len, self.between_frames)])  # before each frame
        text_between = text_before[frames - 1] if self.between_frames else 0
        return MediaCounts(frames > 0, frames, self.layout.count_clips(frames), text_between)

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        if kind == IMAGE.name:
            n = self.layout.n_tiles(header["width"], header["height"], alone=False)
        else:
            n = min(header["frames"], self.max_frames)
        return (self.piece_tokens,) * n

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        layout = self.layout
        if kind == IMAGE.name:
            size = header["width"], header["height"]
            tiles = layout.cut_tiles(opened(size, layout.min_size(*size)), alone, size)
            tokens = layout.token_sources(*size, alone)
            ids = np.full(len(tokens), -1)
        else:
            n = min(header["frames"], self.max_frames)
            tile = partial(frame_tile, tile_px=layout.tile_px)
            tiles = opened.spread(n, tile, header["first"], header["total"])
            tokens, text_between = layout.clip_token_sources(n), self.between_frames[: n - 1]
            step = len(tokens) // n
            positions = [k * step for k, ids in enumerate(text_between, 1) for _ in ids]
            text_ids = [i for ids in text_between for i in ids]
            ids = np.insert(np.full(len(tokens), -1), positions, text_ids)
            tokens = insert_text_slots(tokens, positions)
        lengths = (self.piece_tokens,) * len(tiles)
        features = len(tiles) * layout.tokens_per_tile
        return DecodedMedium({"pixels": tiles}, lengths, features, tokens, ids)


def tile_form(make_layout: Callable[..., VisionLayout], *fact_names: str) -> medium.Form:
    """Return the form of a layout. `make_layout` is called with tile_px, tokens_per_tile, max_tiles
    and the facts in `fact_names` that a model has."""

    def build(
        facts: medium.Facts, limits: DataConfig, tokenizer: AnyTokenizer | None
    ) -> TileMedium:
        layout_facts = {name: facts[name] for name in fact_names if name in facts}
        px, tokens, sources, inside = medium.integer_facts(
            facts, *fact_names, tile_px=None, tokens_per_tile=None, sources=1, piece_tokens=0
        )
        n = limits.max_frames
        text_between = between_frames(tokenizer, n) if isinstance(tokenizer, ChatTokenizer) else ()
        layout = make_layout(px, tokens, limits.max_tiles, **layout_facts)
        return TileMedium(layout, sources, inside, n, text_between)

    return medium.Form(TileMedium.kinds, build)


def between_frames(tokenizer: ChatTokenizer, n: int) -> tuple[tuple[int, ...], ...]:
    """Return the n - 1 id sequences between the n frames of a clip; () if there are none."""
    if tokenizer.picture_ends is None:
        return ()
    begin_ids, end_ids = tokenizer.picture_ends
    texts = [tokenizer.encode(NEXT_FRAME_TEXT.format(k)) for k in range(2, n + 1)]
    return tuple((*end_ids, *text_ids, *begin_ids) for text_ids in texts)


FORM, SQUARE, DYNAMIC = map(tile_form, (SimpleTiles, Square, DynamicTiling))
