"""How large a sample may be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from dflop_jax.config import DataConfig

PICTURE_PIXELS = (65_536, 16_777_216)  # of a picture at native resolution, as published
CLIP_PIXELS = 25_165_824  # of all frames of a clip there at most, as published


@dataclass(frozen=True)
class Limits:
    """How large a sample may be, and what happens to a larger one (see DataConfig)."""

    max_tiles: int = 9
    max_frames: int = 32
    max_tokens: int = 1024
    oversize: str = "truncate"
    min_pixels: int = PICTURE_PIXELS[0]
    max_pixels: int = PICTURE_PIXELS[1]
    max_clip_pixels: int = CLIP_PIXELS
    frames_per_s: float = 2.0

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        """Return those of a configuration."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})
