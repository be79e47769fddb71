"""Pictures and clips for Gemma 4: resized to the largest size within a token limit, in whole blocks
of patches, keeping the aspect ratio.

Sizes and pixels equal those of the published processors (`Gemma4ImageProcessorPil`,
`Gemma4VideoProcessor`). In the text, each frame of a clip follows its time in minutes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt
from typing import ClassVar

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.media.kind import Columns
from dflop_jax.data.media.medium import DecodedMedium, Facts, Form, Grid, integer_facts
from dflop_jax.data.media.native import ClipLayout, Native, NativeMedium, cached_encode
from dflop_jax.data.media.video import ClipHeader
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer


@dataclass(frozen=True)
class Fitted(Native):
    """Settings of patch sizes and token limits."""

    soft_tokens: int = 280  # maximum tokens of a picture
    frame_tokens: int = 70  # maximum tokens of a frame

    def __post_init__(self) -> None:
        if min(self.soft_tokens, self.frame_tokens) < 1:
            raise ValueError(
                f"data.max_pixels={self.max_pixels} must leave a block of {self.block_px}x"
                f"{self.block_px} pixels"
            )

    def blocks(self, headers: Columns) -> tuple[np.ndarray, np.ndarray]:
        sizes = zip(headers["width"].tolist(), headers["height"].tolist(), strict=True)
        blocks = [fitted_blocks(w, h, self.block_px, self.soft_tokens) for w, h in sizes]
        rows, cols = np.array(blocks, np.int64).reshape(-1, 2).T
        return rows, cols

    def clip(self, clip: ClipHeader) -> ClipLayout:
        """Return `max_frames` frames at equal steps from the first, or all if there are fewer."""
        n = min(self.max_frames, clip.total)
        frames = tuple(clip.first + i * clip.total // n for i in range(n))
        seconds = tuple(i * clip.rate_den / clip.rate_num for i in frames)
        rows, cols = fitted_blocks(clip.width, clip.height, self.block_px, self.frame_tokens)
        return ClipLayout(frames, seconds, (rows * self.merge, cols * self.merge))


def fitted_blocks(width: int, height: int, block_px: int, tokens: int) -> Grid:
    """Return rows and columns of a picture's blocks: the largest grid of its aspect ratio, rounded
    down, with up to `tokens` blocks; a single line for a very thin picture."""
    scale = sqrt(tokens * block_px**2 / (width * height))
    rows, cols = floor(scale * height / block_px), floor(scale * width / block_px)
    if rows == 0:
        return 1, min(width // height, tokens)
    if cols == 0:
        return min(height // width, tokens), 1
    return rows, cols


@dataclass(frozen=True)
class FittedMedium(NativeMedium):
    """Preparation of pictures and clips for Gemma 4."""

    native: Fitted
    uses_keys: ClassVar[bool] = False

    def time_text(self, index: int, second: float) -> str:
        return f"{' ' * (index > 0)}{int(second // 60):02d}:{int(second % 60):02d} "

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        return {}  # positions count tokens


def _build(facts: Facts, limits: DataConfig, tokenizer: AnyTokenizer | None) -> FittedMedium:
    patch_px, merge, soft, frame = integer_facts(
        facts, patch_px=None, merge=1, soft_tokens=None, frame_tokens=None
    )
    max_tokens = limits.max_pixels // (patch_px * merge) ** 2
    fits = Fitted(
        patch_px,
        merge,
        1,
        max_pixels=limits.max_pixels,
        max_frames=limits.max_frames,
        soft_tokens=min(soft, max_tokens),
        frame_tokens=min(frame, max_tokens),
    )
    ends = tokenizer.frame_ends if isinstance(tokenizer, ChatTokenizer) else ((), ())
    return FittedMedium(fits, cached_encode(tokenizer), ends)


FORM = Form(FittedMedium.kinds, _build)
