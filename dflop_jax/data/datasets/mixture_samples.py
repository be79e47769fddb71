"""A mixture as a source of samples: what fits the limits, text cut where it does not."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import isqrt

import numpy as np

from dflop_jax.data.datasets.compose import compose, fit_text
from dflop_jax.data.datasets.costs import Preprocessing, VisionLayout
from dflop_jax.data.datasets.layout import grey_tiles
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.internvl_tiles import DynamicTiling
from dflop_jax.data.media.simple_tiles import SimpleTiles
from dflop_jax.data.sample import Limits, MediaSpec, Sample
from dflop_jax.records import SampleShape

GRID = range(1, 7)  # rows and columns of LLaVA-OneVision's grids
logger = logging.getLogger("dflop_jax.data")


def preprocessing(
    spec: MediaSpec, limits: Limits, between_frames: tuple[tuple[int, ...], ...] = ()
) -> Preprocessing:
    """The published preparation of a model's form, under the limits."""
    vision: VisionLayout | None = None
    px, most = spec.tile_px, limits.max_tiles
    if spec.tile_px and spec.form == "anyres":
        grids = tuple((px * r, px * c) for r in GRID for c in GRID)
        vision = AnyRes(px, isqrt(spec.tokens_per_tile), most, grids)
    elif spec.tile_px and spec.form == "dynamic":
        vision = DynamicTiling(px, max_tiles=most, tokens_per_tile=spec.tokens_per_tile)
    elif spec.tile_px:
        vision = SimpleTiles(px, spec.tokens_per_tile, most)
    return Preprocessing(vision, spec.sound, limits.max_frames, between_frames)


class MixtureSamples:
    """The samples of a mixture that fit `limits.max_tokens`.

    By `limits.oversize` the text of a longer one is cut from the end, it is left out, or it is an
    error. Under "truncate", one whose media leave no room for an answer is prepared with half of
    `max_tiles` and `max_frames`, a quarter, and so on; what does not fit with one of each is left
    out. `placeholder`: token id where media stand. `blank_images`: grey tiles instead.

    Raises:
      ValueError: nothing fits, or something does not under oversize="error".
    """

    def __init__(
        self,
        mixture: MixtureSource,
        spec: MediaSpec,
        limits: Limits,
        *,
        placeholder: int,
        blank_images: bool = False,
    ) -> None:
        self.spec, self._mixture, self._blank = spec, mixture, blank_images
        self._placeholder = placeholder
        costs, prompt = mixture.costs(), mixture.prompt_tokens()
        truncate = limits.oversize == "truncate"
        kept, fits = fit_text(costs, prompt, limits.max_tokens, truncate=truncate)
        self._ways = [mixture.how]
        way = np.zeros(len(costs), np.int64)  # which of them a sample takes
        small = limits
        while truncate and not fits.all() and max(small.max_tiles, small.max_frames) > 1:
            small = replace(
                small, max_tiles=-(-small.max_tiles // 2), max_frames=-(-small.max_frames // 2)
            )
            between = mixture.how.between_frames[: small.max_frames - 1]
            self._ways.append(preprocessing(spec, small, between))
            less = mixture.costs(self._ways[-1])
            text, now = fit_text(less, prompt, limits.max_tokens, truncate=True)
            moved = now & ~fits
            kept, way = np.where(moved, text, kept), np.where(moved, len(self._ways) - 1, way)
            costs, fits = costs.where(~moved, less), fits | moved
        if n := np.count_nonzero(way):
            logger.warning(
                "%s: %d of %d samples are given fewer tiles or frames to fit data.max_tokens=%d",
                mixture.name, n, len(costs), limits.max_tokens,
            )  # fmt: skip
        self._place = np.flatnonzero(fits)
        self._costs, self._text = costs.taken(self._place), kept[self._place]
        self._way = way[self._place]
        left_out = np.flatnonzero(~fits)
        if len(left_out):
            first = mixture.label(int(left_out[0]))
            why = (
                f"{len(left_out)} of {len(costs)} samples exceed data.max_tokens="
                f"{limits.max_tokens} ({first} has {int(costs.llm_tokens[left_out[0]])} LLM tokens)"
            )
            if limits.oversize == "error" or not len(self._place):
                raise ValueError(f"{why}; raise it, or lower data.max_tiles or data.max_frames")
            logger.warning("left out: %s", why)

    @property
    def name(self) -> str:
        return self._mixture.name

    def __len__(self) -> int:
        return len(self._place)

    def label(self, index: int) -> str:
        return self._mixture.label(int(self._place[index]))

    def shape(self, index: int) -> SampleShape:
        cost, text = self._costs[index], int(self._text[index])
        media = cost.visual_tokens + cost.audio_tokens
        text += cost.frame_text_tokens
        return SampleShape(cost.tiles, text, text + media, cost.frames, cost.windows)

    def sample(self, index: int) -> Sample:
        at = int(self._place[index])
        found = compose(
            self._mixture.pieces(at),
            self._mixture.media(at, self._ways[int(self._way[index])]),
            self.spec,
            placeholder=self._placeholder,
            text_tokens=int(self._text[index]),
        )
        if self._blank:
            return replace(found, tiles=grey_tiles(len(found.tiles), self.spec))
        return found
