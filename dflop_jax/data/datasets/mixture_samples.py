"""A mixture as a source of samples: what fits the limits, text and media cut where it does not."""

from __future__ import annotations

import logging

import numpy as np

from dflop_jax.data.datasets.compose import blanked, compose
from dflop_jax.data.datasets.counts import most_demanding
from dflop_jax.data.datasets.fitting import fit, preparations
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.native import Native
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.sample import Limits, OpenedBy, Sample
from dflop_jax.records import Load

MAX_TAIL = 64  # samples named as the most demanding
logger = logging.getLogger("dflop_jax.data")


class MixtureSamples:
    """The samples of a mixture that fit `limits.max_tokens`.

    By `limits.oversize` a longer one is cut (see `fitting`), left out, or an error. `counts` says
    how many records are usable, unusable, left out since the model cannot take them, and samples
    oversize. `placeholder`: token id where media stand. `blank_images`: grey tiles instead.

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
        opened_by: OpenedBy | None = None,
    ) -> None:
        self.spec, self._mixture, self._blank = spec, mixture, blank_images
        self.opened_by = opened_by
        self._placeholder = placeholder
        self._ways = preparations(spec, limits, mixture.how.between_frames, mixture.how.stamp)
        fitted = fit(mixture.counts, mixture.prompt_tokens(), self._ways, limits)
        self._place = np.flatnonzero(fitted.fits)
        self._counts = fitted.counts.taken(self._place)
        self._text, self._way = fitted.text_tokens[self._place], fitted.way[self._place]
        self._llm_tokens = fitted.llm_tokens[self._place]
        n, too_long = len(fitted.fits), np.flatnonzero(~fitted.fits)
        self.counts = {"usable": len(self._place), "unusable": mixture.unusable,
                       "left out": mixture.left_out, "oversize": len(too_long)}  # fmt: skip
        if smaller := np.count_nonzero(self._way):
            logger.warning(
                "%s: %d of %d samples are given fewer tiles or frames to fit data.max_tokens=%d",
                mixture.name, smaller, n, limits.max_tokens,
            )  # fmt: skip
        if len(too_long):
            first = int(too_long[0])
            why = (
                f"{len(too_long)} of {n} samples exceed data.max_tokens={limits.max_tokens} "
                f"({mixture.label(first)} has {int(mixture.count(first).llm_tokens)} LLM tokens)"
            )
            if limits.oversize == "error" or not len(self._place):
                raise ValueError(f"{why}; raise it, or lower data.max_tiles or data.max_frames")
            logger.warning("left out: %s", why)
        logger.info("%s: %s", self.name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    @property
    def name(self) -> str:
        return self._mixture.name

    def __len__(self) -> int:
        return len(self._place)

    def label(self, index: int) -> str:
        return self._mixture.label(int(self._place[index]))

    def tail(self) -> list[int]:
        """Samples that ask for most: no other asks for more of every module than one of them."""
        counts = self._counts
        asks = [self._llm_tokens, counts.tiles, counts.windows, counts.visual_tokens]
        return most_demanding(np.stack([*asks, counts.longest_piece], 1), MAX_TAIL)

    def part_of(self, index: int) -> str:
        """The name of the dataset that the sample is from."""
        return self._mixture.part_of(int(self._place[index]))

    def load(self, index: int) -> Load:
        count = self._counts[index]
        vision = self._ways[int(self._way[index])].vision
        tiles: int | tuple[int, ...] = count.tiles
        if isinstance(vision, Native):
            tiles = self._mixture.piece_lengths(int(self._place[index]), vision)
        return self.spec.load(tiles, count.windows, int(self._llm_tokens[index]))

    def sample(self, index: int) -> Sample:
        at = int(self._place[index])
        record = self._mixture.record(at)
        sample = compose(
            self._mixture.pieces(record),
            self._mixture.media(at, record, self._ways[int(self._way[index])]),
            self.spec,
            placeholder=self._placeholder,
            text_tokens=int(self._text[index]),
        )
        return blanked(sample) if self._blank else sample
