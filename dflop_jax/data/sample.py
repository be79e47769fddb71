"""One decoded training example, and what a data source offers to the rest of the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflop_jax.records import SampleShape


@dataclass(frozen=True)
class VisionSpec:
    """What the model asks of pictures: square tiles of `tile_px` pixels, `tokens_per_tile` each."""

    tile_px: int
    tokens_per_tile: int

    def __post_init__(self) -> None:
        if self.tile_px < 1 or self.tokens_per_tile < 1:
            raise ValueError(f"tile_px and tokens_per_tile must be at least 1, got {self}")


@dataclass(frozen=True)
class Limits:
    """How large a sample may be, and what happens to a larger one (see DataConfig)."""

    max_tiles: int = 9
    max_frames: int = 32
    max_tokens: int = 1024
    oversize: str = "truncate"


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample of `n` tiles and `t` LLM tokens.

    tiles: uint8 [n, tile_px, tile_px, 3], image tiles and video frames in the order of their tags.
    tokens: int32 [t].
    visual: int32 [t], index of the token among the sample's n * tokens_per_tile visual tokens
      (tile * tokens_per_tile + k), or -1 for text.
    supervised: bool [t], whether this token is an answer token that is to be predicted.
    frames: how many of the tiles are video frames.
    """

    tiles: np.ndarray
    tokens: np.ndarray
    visual: np.ndarray
    supervised: np.ndarray
    frames: int = 0

    @property
    def shape(self) -> SampleShape:
        text = int((self.visual < 0).sum())
        return SampleShape(len(self.tiles), text, len(self.tokens), self.frames)


class Source(Protocol):
    """A dataset with random access. `sample(i).shape == shape(i)` for every i."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> VisionSpec: ...

    def __len__(self) -> int: ...

    def shape(self, index: int) -> SampleShape:
        """From headers and text only: no pixel is decoded."""
        ...

    def sample(self, index: int) -> Sample:
        """The decoded sample. Raises ValueError, naming it, when it cannot be decoded."""
        ...

    def label(self, index: int) -> str:
        """How logs and errors call the sample."""
        ...
