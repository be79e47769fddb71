"""What happens to samples above `max_tokens`: one meaning of `oversize` for every source.

Text is cut from the end, and where that does not suffice media are prepared smaller; what still
does not fit is left out (or drawn anew).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.data.media.counts import SampleCounts
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation

# a cut sample keeps so much of its first answer, else there would be little to learn from it
ANSWER_TOKENS = 32  # of an answer that a truncated sample must keep


@dataclass(frozen=True, eq=False)
class Fitted:
    """How n samples are prepared: their counts and the text tokens kept, from the front, int64 [n];
    `way`: which of the preparations each takes; `fits` bool [n]: whether any of them will do."""

    counts: SampleCounts
    text_tokens: np.ndarray
    way: np.ndarray
    fits: np.ndarray

    @property
    def all_tokens(self) -> np.ndarray:
        """Tokens of each sample, media among them, after text was cut."""
        return self.counts.media_tokens + self.text_tokens


def preparations(how: Preparation, oversize: str) -> tuple[Preparation, ...]:
    """Return how a sample may be prepared, to be tried in this order: as given, and under
    oversize=truncate with about half of what each medium has of it at most, a quarter, down to the
    least of each."""
    ways = [how]
    while oversize == "truncate":
        smaller = {module: medium.smaller() for module, medium in ways[-1].items()}
        if smaller == ways[-1]:
            break
        ways.append(smaller)
    return tuple(ways)


def fit(
    counts_under: Callable[[Preparation], SampleCounts],
    prompt_tokens: np.ndarray,
    ways: Sequence[Preparation],
    limits: Limits,
) -> Fitted:
    """Return how samples of `prompt_tokens` before the first answer fit the limits: each by the
    first of the ways that will do."""
    truncate = limits.oversize == "truncate"
    counts = counts_under(ways[0])
    text_tokens, fits = fit_text(counts, prompt_tokens, limits.max_tokens, truncate=truncate)
    taken = np.zeros(len(counts), np.int64)
    for way, how in enumerate(ways[1:], 1):
        if fits.all():
            break
        less = counts_under(how)
        text, now = fit_text(less, prompt_tokens, limits.max_tokens, truncate=truncate)
        moved = now & ~fits
        text_tokens, taken = np.where(moved, text, text_tokens), np.where(moved, way, taken)
        counts, fits = counts.where(~moved, less), fits | moved
    return Fitted(counts, text_tokens, taken, fits)


def fit_text(
    counts: SampleCounts, prompt_tokens: np.ndarray, max_tokens: int, *, truncate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (text tokens kept int64 [n], which samples fit bool [n]) under `max_tokens`.

    With `truncate`, text is cut from the end, media never: a sample fits when its media, its
    `prompt_tokens` and ANSWER_TOKENS of the answer (or all of a shorter one) do.
    """
    room = max_tokens - counts.media_tokens
    answer = np.minimum(counts.text_tokens - prompt_tokens, ANSWER_TOKENS)
    needed = prompt_tokens + answer if truncate else counts.text_tokens
    return np.minimum(counts.text_tokens, np.maximum(room, 0)), needed <= room
