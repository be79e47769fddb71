"""What encoders ask of their media, as plain facts for whoever prepares the data."""

from __future__ import annotations

from typing import Any

from models.sizes import AudioSize, TileLayout, VisionSize

FRAMES_PER_S = 100  # of log-mel features


def vision_facts(size: VisionSize, layout: TileLayout) -> dict[str, Any]:
    """Tiles of a vision tower; under "anyres" an LLM token is a weighted sum of four features."""
    return {
        "form": layout,
        "tile_px": size.tile_px,
        "tokens_per_tile": size.tokens_per_tile,
        "sources": 4 if layout == "anyres" else 1,
        **dict(size.processing.facts if size.processing else ()),
    }


def audio_facts(size: AudioSize, max_windows: int) -> dict[str, Any]:
    """Windows of an audio encoder, and how many of a longer sound it is given."""
    return {
        "n_mels": size.mel_bins,
        "window_s": size.frames / FRAMES_PER_S,
        "max_windows": max_windows,
        **dict(size.facts),
    }
