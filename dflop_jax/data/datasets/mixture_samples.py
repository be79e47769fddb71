"""A mixture as a source of samples: what fits the limits, text and media cut where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from dflop_jax.data.datasets.fitting import fit, preparations
from dflop_jax.data.datasets.llava_records import Record
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.compose import blanked, compose
from dflop_jax.data.media.counts import most_demanding
from dflop_jax.data.media.limits import SIZE_FIELDS, SMALLER, Limits
from dflop_jax.data.sample import OpenedBy, Sample
from dflop_jax.data.text.pieces import TextPiece
from dflop_jax.records import Load

Weighting = Callable[[Sequence[TextPiece], Sequence[float]], Sequence[TextPiece]]
MAX_TAIL = 64  # samples named as the most demanding
logger = logging.getLogger("dflop_jax.data")


class MixtureSamples:
    """The samples of a mixture that fit `limits.max_tokens`.

    By `limits.oversize` a longer one is cut (see `fitting`), left out, or an error. `counts` says
    how many records are usable, unusable, left out since the model cannot take them, and samples
    oversize. `placeholder`: token id where media stand. `blank_images`: nothing is
    seen. `weighting` makes pieces, and the weights of a record's answers, into what is trained on.

    Raises:
      ValueError: nothing fits, or something does not under oversize="error".
    """

    def __init__(
        self,
        mixture: MixtureSource,
        limits: Limits,
        *,
        placeholder: int,
        blank_images: bool = False,
        opened_by: OpenedBy | None = None,
        weighting: Weighting | None = None,
    ) -> None:
        self._mixture, self._blank, self._weighting = mixture, blank_images, weighting
        self.name, self.digest, self.opened_by = mixture.name, mixture.digest, opened_by
        self._placeholder = placeholder
        self._ways = preparations(mixture.how, limits.oversize)
        fitted = fit(mixture.counts, mixture.prompt_tokens(), self._ways, limits)
        self._place = np.flatnonzero(fitted.fits)
        self._counts = fitted.counts.taken(self._place)
        self._text, self._way = fitted.text_tokens[self._place], fitted.way[self._place]
        self._tokens = fitted.all_tokens[self._place]
        n, too_long = len(fitted.fits), np.flatnonzero(~fitted.fits)
        self.counts = {"usable": len(self._place), "unusable": mixture.unusable,
                       "left out": mixture.left_out, "oversize": len(too_long)}  # fmt: skip
        if smaller := np.count_nonzero(self._way):
            logger.warning(
                "%s: %d of %d samples are given %s to fit data.max_tokens=%d",
                mixture.name, smaller, n, SMALLER, limits.max_tokens,
            )  # fmt: skip
        if len(too_long):
            first = int(too_long[0])
            why = (
                f"{len(too_long)} of {n} samples exceed data.max_tokens={limits.max_tokens} "
                f"({mixture.label(first)} has {int(mixture.counts().all_tokens[first])} tokens)"
            )
            if limits.oversize == "error" or not len(self._place):
                raise ValueError(f"{why}; raise it, or lower {SIZE_FIELDS}")
            logger.warning("left out: %s", why)
        logger.info("%s: %s", self.name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    def __len__(self) -> int:
        return len(self._place)

    def label(self, index: int) -> str:
        return self._mixture.label(int(self._place[index]))

    def tail(self) -> list[int]:
        """Samples that ask for most: no other asks for more of every module than one of them."""
        asks = [self._tokens[:, None], self._counts.asks()]
        return most_demanding(np.concatenate(asks, 1), MAX_TAIL)

    def part_of(self, index: int) -> str:
        """The name of the dataset that the sample is from."""
        return self._mixture.part_of(int(self._place[index]))

    def load(self, index: int) -> Load:
        how = self._ways[int(self._way[index])]
        place, pieces = int(self._place[index]), self._counts.pieces[index]
        return self._mixture.load(place, how, pieces, int(self._tokens[index]))

    def record(self, index: int) -> Record:
        """Return the sample's turns and where its media are; ValueError when it changed since."""
        return self._mixture.record(int(self._place[index]))

    def sample(self, index: int) -> Sample:
        place, how = int(self._place[index]), self._ways[int(self._way[index])]
        record = self._mixture.record(place)
        pieces: Sequence[TextPiece] = self._mixture.pieces(record)
        if self._weighting:
            try:
                pieces = self._weighting(pieces, record.weights)
            except ValueError as e:
                raise ValueError(f"{record.name}: {e}") from None
        sample = compose(
            pieces,
            self._mixture.media(place, record, how),
            how,
            placeholder=self._placeholder,
            text_tokens=int(self._text[index]),
        )
        return blanked(sample, how) if self._blank else sample
