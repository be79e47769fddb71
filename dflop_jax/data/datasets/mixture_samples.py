"""A mixture as a source of samples: what fits the limits, cut where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.compose import blanked, compose
from dflop_jax.data.media.counts import most_demanding
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.sample import OpenedBy, Sample
from dflop_jax.data.text.pieces import TextPiece, first_tokens
from dflop_jax.records import Load

Weighting = Callable[[Sequence[TextPiece], Sequence[float]], Sequence[TextPiece]]
MAX_TAIL = 64  # samples named as the most demanding
logger = logging.getLogger("dflop_jax.data")


class MixtureSamples:
    """The samples of a mixture that fit `limits.max_tokens`.

    By `limits.oversize` a longer one is cut (see `counts.fit`), left out, or an error. `counts`
    says how many records are usable, unusable, left out since the model cannot take them, and
    samples oversize. `placeholder`: token id where media stand. `blank_images`: nothing is seen.
    `weighting` makes pieces, and the weights of a record's answers, into what is trained on.

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
        counts, fits = mixture.fit(limits)
        self._place, whole = np.flatnonzero(fits), mixture.counts()
        self._counts = counts.taken(self._place)
        n, too_long = len(fits), np.flatnonzero(~fits)
        self.counts = {"usable": len(self._place), "unusable": mixture.unusable,
                       "left out": mixture.left_out, "oversize": len(too_long)}  # fmt: skip
        if cut := np.count_nonzero(counts.n_media[fits] < whole.n_media[fits]):
            logger.warning(
                "%s: %d of %d samples are cut before some of their media by data.max_tokens=%d",
                mixture.name, cut, n, limits.max_tokens,
            )  # fmt: skip
        if len(too_long):
            first = int(too_long[0])
            why = (
                f"{len(too_long)} of {n} samples exceed data.max_tokens={limits.max_tokens} "
                f"({mixture.label(first)} has {int(whole.all_tokens[first])} tokens)"
            )
            if limits.oversize == "error" or not len(self._place):
                raise ValueError(f"{why}; raise it, or lower the limits of media (data.max_...)")
            logger.warning("left out: %s", why)
        logger.info("%s: %s", self.name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    def __len__(self) -> int:
        return len(self._place)

    def label(self, index: int) -> str:
        return self._mixture.label(int(self._place[index]))

    def tail(self) -> list[int]:
        """Samples that ask for most: no other asks for more of every module than one of them."""
        asks = [self._counts.all_tokens[:, None], self._counts.asks()]
        return most_demanding(np.concatenate(asks, 1), MAX_TAIL)

    def part_of(self, index: int) -> str:
        """The name of the dataset that the sample is from."""
        return self._mixture.part_of(int(self._place[index]))

    def load(self, index: int) -> Load:
        counts = self._counts.taken(slice(index, index + 1))
        return self._mixture.load(int(self._place[index]), counts)

    def sample(self, index: int) -> Sample:
        place, how = int(self._place[index]), self._mixture.how
        record = self._mixture.record(place)
        pieces: Sequence[TextPiece] = self._mixture.pieces(record)
        if self._weighting:
            try:
                pieces = self._weighting(pieces, record.weights)
            except ValueError as e:
                raise ValueError(f"{record.name}: {e}") from None
        stop = int(self._counts.text_tokens[index] + self._counts.n_media[index])
        pieces = first_tokens(pieces, stop)
        media = self._mixture.media(place, record, {p.medium for p in pieces})
        sample = compose(pieces, media, how, placeholder=self._placeholder)
        return blanked(sample, how) if self._blank else sample
