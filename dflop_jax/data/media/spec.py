"""What a model asks of media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop_jax.data.media.mel import MelSpec, encoder_tokens
from dflop_jax.records import Load

FORMS = ("tiles", "anyres", "dynamic", "native")


@dataclass(frozen=True)
class MediaSpec:
    """What the model asks of media.

    Attributes:
      tile_px: side of a square tile in pixels; 0: it takes no pictures.
      tokens_per_tile: features that the encoder gives for a tile.
      form: "tiles" (a grid and an overview, their features as they are), "anyres"
        (LLaVA-OneVision), "dynamic" (InternVL) or "native" (Qwen3-VL), which has no tiles.
      sources: features that an LLM token is a weighted sum of, 1 for a plain copy.
      sound: of the audio encoder; None: it takes no sound.
      piece_tokens: by module, tokens of a tile or window inside its encoder; as many as the
        features that come out, where it does not say.
      patch_px, merge, frames: of the form "native", see `media.native.Native`.
    """

    tile_px: int = 0
    tokens_per_tile: int = 0
    form: str = "tiles"
    sources: int = 1
    sound: MelSpec | None = None
    piece_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    patch_px: int = 0
    merge: int = 1
    frames: int = 1

    def __post_init__(self) -> None:
        if min(self.tile_px, self.tokens_per_tile) < 0 or bool(self.tile_px) != bool(
            self.tokens_per_tile
        ):
            raise ValueError(f"tile_px and tokens_per_tile must be at least 1, got {self}")
        if self.form not in FORMS or self.sources < 1:
            raise ValueError(f"form is one of {', '.join(FORMS)}, sources at least 1, got {self}")
        if (self.form == "native") != (self.patch_px > 0) or min(self.merge, self.frames) < 1:
            raise ValueError(f"the form native, and no other, has patch_px; got {self}")
        if any(n < 1 for n in self.piece_tokens.values()):
            raise ValueError(f"a piece has at least one token, got {dict(self.piece_tokens)}")

    @classmethod
    def of(
        cls, preprocessing: Mapping[str, Mapping[str, Any]], piece_tokens: Mapping[str, int]
    ) -> MediaSpec:
        """Return what a model says of its encoders (`MultimodalModel.preprocessing` and
        `.piece_tokens`): the fields above for "vision", those of MelSpec for "audio"."""
        sound = MelSpec(**preprocessing["audio"]) if "audio" in preprocessing else None
        known = {m: int(n) for m, n in piece_tokens.items()}
        return cls(**preprocessing.get("vision", {}), sound=sound, piece_tokens=known)

    def features_per_piece(self, module: str) -> int:
        """Features that an encoder gives for a tile or a window."""
        if module == "vision":
            return self.tokens_per_tile
        assert self.sound is not None, module
        return int(encoder_tokens(np.array(self.sound.window_frames)))

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures."""
        return self.tile_px + self.patch_px > 0

    def load(self, tiles: int | Sequence[int], windows: int, tokens: int) -> Load:
        """Return what a sample of so many tiles (or pieces of so many patches), windows of sound
        and LLM tokens asks of every module."""
        seen = (self._tokens("vision"),) * tiles if isinstance(tiles, int) else tuple(tiles)
        heard = (self._tokens("audio"),) * windows if windows else ()
        pieces = {m: lengths for m, lengths in (("vision", seen), ("audio", heard)) if lengths}
        return Load({**pieces, "llm": (tokens,)} if tokens else pieces)

    def _tokens(self, module: str) -> int:
        return self.piece_tokens.get(module) or self.features_per_piece(module)
