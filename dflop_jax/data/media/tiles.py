"""Pictures and clips as square tiles: a layout cuts them and says which tokens show what.

The plain layout is an overview tile and a grid, every feature one token of the text; others are
`AnyRes` and `DynamicTiling`. A frame of a clip is one tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from dflop_jax.data.media.kind import Columns, Header, Kinds
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import (
    DecodedMedium,
    Facts,
    Form,
    MediaCounts,
    Medium,
    integer_facts,
)
from dflop_jax.data.media.tiling import IMAGE, choose_grid, fit_in_box, frame_tile, padded_tiles
from dflop_jax.data.media.token_sources import TokenSources, copied_sources, insert_text
from dflop_jax.data.media.video import VIDEO
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import Tokenizer

GREY = 128  # of blank pictures, in 0 to 255
NEXT_FRAME_TEXT = "\nFrame{}: "  # InternVL's text between a clip's frames


Counts = tuple[np.ndarray, np.ndarray, np.ndarray]  # of pictures, see `VisionLayout.count`


class VisionLayout(ABC):
    """How a model sees pictures and clips: `SimpleTiles`, `AnyRes`, `DynamicTiling`, `Square`, or
    one of a user's own; a frozen dataclass, derived from this for what a simple one need not say.

    `alone` says whether a picture is the only one of its sample.

    Attributes:
      tokens_per_tile: features that the encoder gives for a tile.
      is_joined: see `medium.Medium`.
    """

    tile_px: int
    tokens_per_tile: int
    max_tiles: int
    is_joined: ClassVar[bool] = False

    @abstractmethod
    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        """(usable bool, tiles, LLM tokens), each [n], of n upright pictures."""

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        """LLM tokens of clips of int [n] frames, one tile each."""
        return frames * self.tokens_per_tile

    def min_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Pixels that tiles of a picture of this size need at least, so that a larger one may be
        decoded at a smaller scale; None where it is to be decoded whole, as published processors
        do."""
        return None

    @abstractmethod
    def cut_tiles(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Tiles uint8 [n, tile_px, tile_px, 3] of an upright RGB picture; `size` is its true
        (width, height) where it was decoded at a smaller scale."""

    def token_sources(self, width: int, height: int, alone: bool) -> TokenSources:
        """Where each LLM token of a picture comes from, over its tiles."""
        return self.clip_token_sources(self.n_tiles(width, height, alone))

    def clip_token_sources(self, frames: int) -> TokenSources:
        """The same for a clip."""
        return copied_sources(np.arange(frames * self.tokens_per_tile))

    def n_tiles(self, width: int, height: int, alone: bool) -> int:
        _, (n,), _ = self.count(*np.array([[width], [height], [alone]]))
        return int(n)


@dataclass(frozen=True)
class SimpleTiles(VisionLayout):
    """The plain layout; `max_tiles` of the grid."""

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 9

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        sizes = zip(widths.tolist(), heights.tolist())
        grids = [choose_grid(w, h, self.tile_px, self.max_tiles) for w, h in sizes]
        tiles = np.array([1 + rows * cols for rows, cols in grids], np.int64)
        return tiles > 0, tiles, self.count_clips(tiles)

    def min_size(self, width: int, height: int) -> tuple[int, int]:
        px = self.tile_px
        rows, cols = choose_grid(width, height, px, self.max_tiles)
        shown_w, shown_h = fit_in_box(width, height, max(1, cols) * px, max(1, rows) * px)
        return 2 * max(shown_w, px), 2 * max(shown_h, px)  # twice what tiles show of it

    def cut_tiles(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        def resized(width: int, height: int) -> Image.Image:
            return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)

        px, true = self.tile_px, size or image.size
        rows, cols = choose_grid(*true, px, self.max_tiles)
        base = np.asarray(resized(px, px))[None]
        if not rows * cols:
            return base
        inner = resized(*fit_in_box(*true, cols * px, rows * px))
        return np.concatenate([base, padded_tiles(inner, rows, cols, px)])


@dataclass(frozen=True)
class Square(VisionLayout):
    """Gemma 3's: each picture is resized to one square, its aspect ratio not kept.

    Pixels equal those of the published processor (`Gemma3ImageProcessorPil`) without "pan and
    scan", which published folders leave off. A frame of a clip is a picture, and sees the others
    where no text stands between.
    """

    tile_px: int
    tokens_per_tile: int
    max_tiles: int = 1
    is_joined: ClassVar[bool] = True

    def count(self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray) -> Counts:
        one = np.ones(len(widths), np.int64)
        return one > 0, one, self.count_clips(one)

    def cut_tiles(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        size_px = (self.tile_px, self.tile_px)
        return np.asarray(image.resize(size_px, Image.Resampling.BILINEAR), np.uint8)[None]


@dataclass(frozen=True)
class TileMedium(Medium):
    """Pictures and clips in the tiles of a layout.

    Attributes:
      tile_tokens: of a tile inside the encoder; 0: as many as the features that come out.
      max_frames: of a clip.
      between_frames: ids of the text that follows each frame of a clip but the last, for
        max_frames - 1 of them; () if there is none.
    """

    layout: VisionLayout
    sources: int = 1
    tile_tokens: int = 0
    max_frames: int = 32
    between_frames: tuple[tuple[int, ...], ...] = ()

    kinds: ClassVar[Kinds] = (IMAGE, VIDEO)
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({"pixels": GREY})

    def __post_init__(self) -> None:
        if self.max_frames < 1:
            raise ValueError(f"max_frames={self.max_frames} must be at least 1")
        assert len(self.between_frames) in (0, self.max_frames - 1)

    @property
    def piece_tokens(self) -> int:
        return self.tile_tokens or self.layout.tokens_per_tile

    @property
    def is_joined(self) -> bool:
        return self.layout.is_joined and not self.between_frames

    @property
    def unit_px(self) -> int:
        """Side of the smallest picture that is worth drawing."""
        return self.layout.tile_px

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        if kind == IMAGE.name:
            return MediaCounts(*self.layout.count(headers["width"], headers["height"], alone))
        frames = np.minimum(headers["frames"], self.max_frames).astype(np.int64)
        text_before = np.cumsum([0, *map(len, self.between_frames)])  # each frame
        text_between = text_before[frames - 1] if self.between_frames else 0
        return MediaCounts(frames > 0, frames, self.layout.count_clips(frames), text_between)

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        if kind == IMAGE.name:
            n = self.layout.n_tiles(header["width"], header["height"], alone=False)
        else:
            n = min(header["frames"], self.max_frames)
        return (self.piece_tokens,) * n

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        if kind == IMAGE.name:
            size = header["width"], header["height"]
            image = opened(size, self.layout.min_size(*size))
            tiles, tokens = (
                self.layout.cut_tiles(image, alone, size),
                self.layout.token_sources(*size, alone),
            )
            ids = np.full(len(tokens), -1)
        else:
            n = min(header["frames"], self.max_frames)
            tile = partial(frame_tile, tile_px=self.layout.tile_px)
            tiles = opened.spread(n, tile, header["first"], header["total"])
            tokens, text_between = self.layout.clip_token_sources(n), self.between_frames[: n - 1]
            counts = np.array([len(ids) for ids in text_between], np.int64)
            positions = np.repeat(np.arange(1, len(text_between) + 1) * (len(tokens) // n), counts)
            ids = np.insert(
                np.full(len(tokens), -1), positions, [i for ids in text_between for i in ids]
            )
            tokens = insert_text(tokens, positions)
        lengths, features = (
            (self.piece_tokens,) * len(tiles),
            len(tiles) * self.layout.tokens_per_tile,
        )
        return DecodedMedium({"pixels": tiles}, lengths, features, tokens, ids)


def tile_form(make_layout: Callable[..., VisionLayout], *fact_names: str) -> Form:
    """Return the form of a layout, which `make_clip_source` makes of tile_px, tokens_per_tile,
    max_tiles and those of the `further` facts that a model states; the tokenizer's text stands
    between frames."""

    def build(
        facts: Facts, limits: Limits, tokenizer: Tokenizer | ChatTokenizer | None
    ) -> TileMedium:
        layout_facts = {name: facts[name] for name in fact_names if name in facts}
        px, tokens, sources, inside = integer_facts(
            facts, *fact_names, tile_px=None, tokens_per_tile=None, sources=1, piece_tokens=0
        )
        n = limits.max_frames
        text_between = between_frames(tokenizer, n) if isinstance(tokenizer, ChatTokenizer) else ()
        layout = make_layout(
            tile_px=px, tokens_per_tile=tokens, max_tiles=limits.max_tiles, **layout_facts
        )
        return TileMedium(layout, sources, inside, n, text_between)

    return Form(TileMedium.kinds, build)


def between_frames(tokenizer: ChatTokenizer, n: int) -> tuple[tuple[int, ...], ...]:
    """Return the ids between the n frames of a clip, n - 1 times; () where the model writes none
    there."""
    if tokenizer.picture_ends is None:
        return ()
    begin_ids, end_ids = tokenizer.picture_ends
    return tuple(
        (*end_ids, *tokenizer.encode(NEXT_FRAME_TEXT.format(k)), *begin_ids)
        for k in range(2, n + 1)
    )


FORM, SQUARE = tile_form(SimpleTiles), tile_form(Square)
