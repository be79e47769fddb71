"""A plan in the last round of the search, and what its trials took."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.plan.candidate import Candidate
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule import BucketChoice

# Share of a step that second recompute policies must save, since they double the programs to be
# compiled; twice as much leaves some of them out.
WORTH_PROGRAMS = 0.01


@dataclass(frozen=True)
class Finalist:
    """A plan whose buckets were chosen, and what is known of it.

    of: the candidate that it was made of, None: not known. finest: microbatches into which its
    buckets cut a mean batch at most. choice: how they were chosen, None: they follow from the
    candidate. trials_s: its seconds in the first trials, which are the same for all. prices: of its
    own programs, once they are timed.
    """

    plan: Plan
    of: Candidate | None = None
    finest: int = 0
    choice: BucketChoice | None = None
    trials_s: tuple[float, ...] = ()
    prices: Prices | None = None

    def seconds(self, n: int) -> float:
        """By which it is compared after `n` trials."""
        taken_s = float(np.mean(self.trials_s[:n]))
        return taken_s * (1 + WORTH_PROGRAMS) if self.plan.scheduling.kept else taken_s

    def gain_over(self, other: Finalist) -> float:
        """Share of the other's seconds that it saves, by the trials that both ran."""
        n = min(len(self.trials_s), len(other.trials_s))
        return 1 - self.seconds(n) / other.seconds(n)

    def with_about_s(self) -> Plan:
        """The plan with about its makespan, which its trials took."""
        about_s = float(np.mean(self.trials_s))
        return replace(self.plan, predicted=replace(self.plan.predicted, makespan_s=about_s))
