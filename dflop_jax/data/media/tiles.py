"""Pictures and clips as square tiles: a layout cuts them and says which tokens show what.

The plain layout is an overview tile and a grid, every feature one token of the text; others are
`AnyRes` and `DynamicTiling`. A frame of a clip is one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from PIL import Image

from dflop_jax.data.media.kind import Columns, Header, Kinds
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Counted, Decoded, Facts, Form, Medium, numbers
from dflop_jax.data.media.tiling import (
    IMAGE,
    count_tiles,
    frame_tile,
    needed_size,
    picture_tiles,
)
from dflop_jax.data.media.token_sources import TokenSources, plain, with_text
from dflop_jax.data.media.video import VIDEO
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import Tokenizer

GREY = 128  # of blank pictures, in 0 to 255
NEXT_FRAME = "\nFrame{}: "  # InternVL's text between a clip's frames


class VisionLayout(Protocol):
    """How a model sees pictures and clips: `SimpleTiles`, `AnyRes`, `DynamicTiling`, or one of a
    user's own; a frozen dataclass.

    `alone` says whether a picture is the only one of its sample.
    """

    @property
    def tile_px(self) -> int: ...

    @property
    def tokens_per_tile(self) -> int:
        """Features that the encoder gives for a tile."""
        ...

    @property
    def max_tiles(self) -> int: ...

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(usable bool, tiles, LLM tokens), each [n], of n upright pictures."""
        ...

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        """LLM tokens of clips of int [n] frames, one tile each."""
        ...

    def least_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Pixels that tiles of a picture of this size need at least, so that a larger one may be
        decoded at a smaller scale; None where it is to be decoded whole."""
        ...

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Tiles uint8 [n, tile_px, tile_px, 3] of an upright RGB picture; `size` is its true
        (width, height) where it was decoded at a smaller scale."""
        ...

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        """Where each LLM token of a picture comes from, over its tiles."""
        ...

    def place_clip(self, frames: int) -> TokenSources:
        """The same for a clip."""
        ...


@dataclass(frozen=True)
class SimpleTiles:
    """The plain layout; `max_tiles` of the grid."""

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
    def joined(self) -> bool:
        return getattr(self.layout, "joined", False) and not self.between_frames

    @property
    def unit_px(self) -> int:
        """Side of the smallest picture that is worth drawing."""
        return self.layout.tile_px

    @cached_property
    def _text_before(self) -> np.ndarray:
        """Tokens of text before each frame, int64 [max_frames]."""
        return np.cumsum([0, *map(len, self.between_frames)])

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> Counted:
        if kind == IMAGE.name:
            return Counted(*self.layout.count(headers["width"], headers["height"], alone))
        frames = np.minimum(headers["frames"], self.max_frames).astype(np.int64)
        between = self._text_before[frames - 1] if self.between_frames else 0
        return Counted(frames > 0, frames, self.layout.count_clips(frames), between)

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> Decoded:
        if kind == IMAGE.name:
            size = header["width"], header["height"]
            image = opened(size, self.layout.least_size(*size))
            tiles = self.layout.cut(image, alone, size)
        else:
            n = min(header["frames"], self.max_frames)
            tile = partial(frame_tile, tile_px=self.layout.tile_px)
            tiles = opened.spread(n, tile, header["first"], header["total"])
        return replace(self._placed(kind, header, alone, len(tiles)), fields={"pixels": tiles})

    def unseen(self, kind: str, header: Header, alone: bool) -> Decoded:
        if kind != IMAGE.name:
            return self._placed(kind, header, alone, min(header["frames"], self.max_frames))
        _, (n,), _ = self.layout.count(*np.array([[header["width"]], [header["height"]], [alone]]))
        return self._placed(kind, header, alone, int(n))

    def _placed(self, kind: str, header: Header, alone: bool, n: int) -> Decoded:
        """A medium of n tiles, without them."""
        lengths, features = (self.piece_tokens,) * n, n * self.layout.tokens_per_tile
        if kind == IMAGE.name:
            tokens = self.layout.place(header["width"], header["height"], alone)
            return Decoded({}, lengths, features, tokens, np.full(len(tokens), -1))
        tokens, between = self.layout.place_clip(n), self.between_frames[: n - 1]
        counts = np.array([len(ids) for ids in between], np.int64)
        places = np.repeat(np.arange(1, len(between) + 1) * (len(tokens) // n), counts)
        text = [i for ids in between for i in ids]
        ids = np.insert(np.full(len(tokens), -1), places, text)
        return Decoded({}, lengths, features, with_text(tokens, places), ids)


def tile_form(make: Callable[..., VisionLayout], *further: str) -> Form:
    """Return the form of a layout, which `make` makes of (tile_px, tokens_per_tile, max_tiles) and
    those of the `further` facts that a model states; the tokenizer's text stands between frames."""

    def build(
        facts: Facts, limits: Limits, tokenizer: Tokenizer | ChatTokenizer | None
    ) -> TileMedium:
        own = {name: facts[name] for name in further if name in facts}
        px, tokens, sources, inside = numbers(
            facts, *further, tile_px=None, tokens_per_tile=None, sources=1, piece_tokens=0
        )
        n = limits.max_frames
        between = between_frames(tokenizer, n) if isinstance(tokenizer, ChatTokenizer) else ()
        layout = make(px, tokens, limits.max_tiles, **own)
        return TileMedium(layout, sources, inside, n, between)

    return Form(TileMedium.kinds, build)


def between_frames(tokenizer: ChatTokenizer, n: int) -> tuple[tuple[int, ...], ...]:
    """Return the ids between the n frames of a clip, n - 1 times; () where the model writes none
    there."""
    if tokenizer.picture_ends is None:
        return ()
    begin, end = tokenizer.picture_ends
    return tuple((*end, *tokenizer.encode(NEXT_FRAME.format(k)), *begin) for k in range(2, n + 1))


FORM = tile_form(SimpleTiles)
