"""What a model asks of media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop_jax.data.media.mel import MelSpec, encoder_tokens
from dflop_jax.records import Load

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
      piece_tokens: by module, tokens of a tile or window inside its encoder; as many as the
        features that come out, where it does not say.
    """

    tile_px: int = 0
    tokens_per_tile: int = 0
    form: str = "tiles"
    sources: int = 1
    sound: MelSpec | None = None
    piece_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if min(self.tile_px, self.tokens_per_tile) < 0 or bool(self.tile_px) != bool(
            self.tokens_per_tile
        ):
            raise ValueError(f"tile_px and tokens_per_tile must be at least 1, got {self}")
        if self.form not in FORMS or self.sources < 1:
            raise ValueError(f"form is one of {', '.join(FORMS)}, sources at least 1, got {self}")
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

    def load(self, tiles: int, windows: int, tokens: int) -> Load:
        """Return what a sample of so many tiles, windows of sound and LLM tokens asks of every
        module."""
        pieces = {module: (self._tokens(module),) * n
                  for module, n in (("vision", tiles), ("audio", windows)) if n}  # fmt: skip
        return Load({**pieces, "llm": (tokens,)} if tokens else pieces)

    def _tokens(self, module: str) -> int:
        return self.piece_tokens.get(module) or self.features_per_piece(module)
