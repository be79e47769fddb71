"""A plan in the last round of the search, and which of them is the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflop_jax.plan.candidate import Candidate
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule import BucketChoice
from dflop_jax.schedule.shapes.evaluate import TIE


@dataclass(frozen=True)
class Finalist:
    """A plan whose buckets were chosen, and what is known of it.

    of: the candidate that it was made of, None: not known. finest: microbatches into which its
    buckets cut a mean batch at most. choice: how they were chosen, None: they follow from the
    candidate. glance_s: its seconds at a glance. seconds: by which evaluated plans are compared.
    prices: of its own programs, once they are timed.
    """

    plan: Plan
    of: Candidate | None = None
    finest: int = 0
    choice: BucketChoice | None = None
    glance_s: float = math.inf
    seconds: float = math.inf
    prices: Prices | None = None


def fastest_of(judged: Sequence[Finalist]) -> Finalist:
    """The plan of least seconds; of equals that of fewer buckets, then the first."""
    least_s = min(j.seconds for j in judged)
    equal = [j for j in judged if j.seconds <= least_s * (1 + TIE)]
    return min(equal, key=lambda j: len(j.plan.layout.buckets))
