"""One decoded training example, and what a data source offers to the rest of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dflop_jax.data.media.mel import MelSpec, encoder_tokens
from dflop_jax.data.media.token_sources import TokenSources
from dflop_jax.records import SampleShape

FORMS = ("tiles", "anyres", "dynamic")


@dataclass(frozen=True)
class MediaSpec:
    """What the model asks of media.

    Attributes:
      tile_px: side of a square tile in pixels; 0: it takes no pictures.
      tokens_per_tile: features that the encoder gives for a tile.
      form: "tiles" (a grid and an overview, their features as they are), "anyres" (LLaVA-OneVision)
        or "dynamic" (InternVL).
      sources: features that an LLM token is a weighted sum of, 1 for a plain copy.
      sound: of the audio encoder; None: it takes no sound.
    """

    tile_px: int = 0
    tokens_per_tile: int = 0
    form: str = "tiles"
    sources: int = 1
    sound: MelSpec | None = None

    def __post_init__(self) -> None:
        if min(self.tile_px, self.tokens_per_tile) < 0 or bool(self.tile_px) != bool(
            self.tokens_per_tile
        ):
            raise ValueError(f"tile_px and tokens_per_tile must be at least 1, got {self}")
        if self.form not in FORMS or self.sources < 1:
            raise ValueError(f"form is one of {', '.join(FORMS)}, sources at least 1, got {self}")

    @classmethod
    def of(cls, preprocessing: Mapping[str, Mapping[str, Any]]) -> MediaSpec:
        """From what a model says of its encoders (`MultimodalModel.preprocessing`): the fields
        above for "vision", those of MelSpec for "audio"."""
        sound = MelSpec(**preprocessing["audio"]) if "audio" in preprocessing else None
        return cls(**preprocessing.get("vision", {}), sound=sound)

    def features_per_item(self, module: str) -> int:
        """Features that an encoder gives for a tile or a window."""
        if module == "vision":
            return self.tokens_per_tile
        assert self.sound is not None, module
        return int(encoder_tokens(np.array(self.sound.window_frames)))

    def no_items(self, module: str, n: int) -> dict[str, np.ndarray]:
        """An encoder's fields of `n` items that hold nothing."""
        if module == "vision":
            return {"pixels": np.zeros((n, self.tile_px, self.tile_px, 3), np.uint8)}
        assert self.sound is not None, module
        mel = np.zeros((n, self.sound.n_mels, self.sound.window_frames), np.float32)
        return {"mel": mel, "mel_frames": np.zeros(n, np.int32)}


@dataclass(frozen=True)
class Limits:
    """How large a sample may be, and what happens to a larger one (see DataConfig)."""

    max_tiles: int = 9
    max_frames: int = 32
    max_tokens: int = 1024
    oversize: str = "truncate"


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample of t LLM tokens, n tiles and w windows of sound.

    tokens: int32 [t]; supervised: bool [t], whether this is an answer token, to be predicted.
    tiles: uint8 [n, tile_px, tile_px, 3], image tiles and video frames in the order of their tags.
    visual: where each token comes from among the n * tokens_per_tile features of all tiles; of
      text and sound all weights are 0 and `newline` is False.
    frames: how many of the tiles are video frames.
    mel: float32 [w, n_mels, frames]; mel_frames: int32 [w], how many of them are no padding.
    audio: int32 [t], the token's place among the features of all windows, -1 if it is no sound;
      empty for a sample without sound.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    tiles: np.ndarray
    visual: TokenSources
    frames: int = 0
    mel: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    mel_frames: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    audio: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def shape(self) -> SampleShape:
        t = len(self.tokens)
        media = int((self.visual.used | self.visual.newline).sum()) + int((self.audio >= 0).sum())
        return SampleShape(len(self.tiles), t - media, t, self.frames, len(self.mel))

    def items(self, module: str) -> dict[str, np.ndarray]:
        """An encoder's fields, leading dim items."""
        if module == "vision":
            return {"pixels": self.tiles}
        return {"mel": self.mel, "mel_frames": self.mel_frames}


class Source(Protocol):
    """A dataset with random access. `sample(i).shape == shape(i)` for every i."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> MediaSpec: ...

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
