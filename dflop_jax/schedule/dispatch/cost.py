"""What the pieces that lie on one data rank cost a phase of training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflop_jax.schedule.solver.problem import Floats


@dataclass(frozen=True)
class PhaseCost:
    """Cost of n pieces of lengths l on one rank (OrchMLLM, arXiv 2503.23830).

    Without padding it is linear * sum l + square * sum l^2. A `padded` phase computes every piece
    at the length of the longest: n * (linear * max l + square * (max l)^2).
    """

    linear: float = 1.0
    square: float = 0.0
    padded: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.linear < np.inf and 0 <= self.square < np.inf):
            raise ValueError(f"coefficients must be finite and not negative, got {self}")

    def each(self, lengths: NDArray[np.number]) -> Floats:
        """Cost of each piece alone."""
        x = np.asarray(lengths, float)
        return self.linear * x + self.square * x * x

    def of_ranks(self, lengths: NDArray[np.number], ranks: NDArray[np.int64], n: int) -> Floats:
        """[n]: what each of n ranks costs, where each piece lies on the rank named beside it."""
        each = self.each(lengths)
        if not self.padded:
            return np.bincount(ranks, each, n).astype(float)
        longest = np.zeros(n)
        np.maximum.at(longest, ranks, each)
        counts = np.bincount(ranks, minlength=n).astype(float)
        return longest * counts


# What a program costs of its content where its attention kernel skips what is not of one piece;
# the rest of it depends on its static shape alone, which all ranks share.
PAIRS = PhaseCost(linear=0.0, square=1.0)
