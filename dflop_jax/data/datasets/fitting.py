"""What happens to samples above `max_tokens`: one meaning of `oversize` for every source.

Text is cut from the end, and where that does not suffice media are prepared with fewer tiles and
frames; what still does not fit is left out (or drawn anew).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from dflop_jax.data.datasets.counts import Preprocessing, SampleCounts, VisionLayout
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.internvl_tiles import DynamicTiling
from dflop_jax.data.media.native import MIN_CLIP_PIXELS, Native
from dflop_jax.data.media.simple_tiles import SimpleTiles
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.sample import Limits
from dflop_jax.data.text.stamps import Stamp

GRID = range(1, 7)  # rows and columns of LLaVA-OneVision's grids
# a cut sample keeps so much of its first answer, else there would be little to learn from it
ANSWER_TOKENS = 32
Between = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Fitted:
    """How n samples are prepared: their counts and the text tokens kept, from the front, int64 [n];
    `way`: which of the preparations each takes; `fits` bool [n]: whether any of them will do."""

    counts: SampleCounts
    text_tokens: np.ndarray
    way: np.ndarray
    fits: np.ndarray

    @property
    def llm_tokens(self) -> np.ndarray:
        """LLM tokens of each sample, after text was cut."""
        return self.counts.llm_tokens - self.counts.text_tokens + self.text_tokens


def preprocessing(
    spec: MediaSpec, limits: Limits, between_frames: Between = (), stamp: Stamp | None = None
) -> Preprocessing:
    """Return the published preparation of a model's form, under the limits.

    Args:
      between_frames, stamp: text among a clip's frames, see `Preprocessing`.
    """
    vision: VisionLayout | Native | None = None
    px, most = spec.tile_px, limits.max_tiles
    if spec.tile_px and spec.form == "anyres":
        grids = tuple((px * r, px * c) for r in GRID for c in GRID)
        vision = AnyRes(px, isqrt(spec.tokens_per_tile), most, grids)
    elif spec.tile_px and spec.form == "dynamic":
        vision = DynamicTiling(px, max_tiles=most, tokens_per_tile=spec.tokens_per_tile)
    elif spec.tile_px:
        vision = SimpleTiles(px, spec.tokens_per_tile, most)
    elif spec.form == "native":
        vision = Native(
            spec.patch_px,
            spec.merge,
            spec.frames,
            limits.min_pixels,
            limits.max_pixels,
            limits.max_clip_pixels,
            max(spec.frames, limits.max_frames),
            limits.frames_per_s,
        )
    return Preprocessing(vision, spec.sound, limits.max_frames, between_frames, stamp)


def preparations(
    spec: MediaSpec, limits: Limits, between_frames: Between = (), stamp: Stamp | None = None
) -> tuple[Preprocessing, ...]:
    """Return how a sample may be prepared, to be tried in this order: as the limits say, and under
    oversize=truncate with half of `max_tiles` (at native resolution, of the pixels) and
    `max_frames`, a quarter, down to the least of each."""
    ways = [preprocessing(spec, limits, between_frames, stamp)]
    smaller = _halved(limits, spec)
    while limits.oversize == "truncate" and smaller != limits:
        limits, smaller = smaller, _halved(smaller, spec)
        between = between_frames[: limits.max_frames - 1]
        ways.append(preprocessing(spec, limits, between, stamp))
    return tuple(ways)


def _halved(limits: Limits, spec: MediaSpec) -> Limits:
    frames = -(-limits.max_frames // 2)
    if spec.form != "native":
        return replace(limits, max_tiles=-(-limits.max_tiles // 2), max_frames=frames)
    return replace(
        limits,
        max_frames=max(spec.frames, frames),
        max_pixels=max(limits.min_pixels, limits.max_pixels // 2),
        max_clip_pixels=max(MIN_CLIP_PIXELS, limits.max_clip_pixels // 2),
    )


def fit(
    counts_under: Callable[[Preprocessing], SampleCounts],
    prompt_tokens: np.ndarray,
    ways: Sequence[Preprocessing],
    limits: Limits,
) -> Fitted:
    """Return how samples of `prompt_tokens` before the first answer fit the limits: each by the
    first of the ways that will do."""
    truncate = limits.oversize == "truncate"
    counts = counts_under(ways[0])
    kept, fits = fit_text(counts, prompt_tokens, limits.max_tokens, truncate=truncate)
    taken = np.zeros(len(counts), np.int64)
    for way, how in enumerate(ways[1:], 1):
        if fits.all():
            break
        less = counts_under(how)
        text, now = fit_text(less, prompt_tokens, limits.max_tokens, truncate=truncate)
        moved = now & ~fits
        kept, taken = np.where(moved, text, kept), np.where(moved, way, taken)
        counts, fits = counts.where(~moved, less), fits | moved
    return Fitted(counts, kept, taken, fits)


def fit_text(
    counts: SampleCounts, prompt_tokens: np.ndarray, max_tokens: int, *, truncate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (text tokens kept int64 [n], which samples fit bool [n]) under `max_tokens`.

    With `truncate`, text is cut from the end, media never: a sample fits when its media, its
    `prompt_tokens` and ANSWER_TOKENS of the answer (or all of a shorter one) do.
    """
    room = max_tokens - (counts.llm_tokens - counts.text_tokens)
    answer = np.minimum(counts.text_tokens - prompt_tokens, ANSWER_TOKENS)
    needed = prompt_tokens + answer if truncate else counts.text_tokens
    return np.minimum(counts.text_tokens, np.maximum(room, 0)), needed <= room
