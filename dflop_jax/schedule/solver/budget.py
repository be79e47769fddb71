"""What a search may still do, counted in work, so that the same batch gives the same answer on a
fast, a slow and a busy machine."""

from __future__ import annotations

import math
import time


class Budget:
    """Units of work that are left: a unit is a pair of bins priced, about 100 microseconds.

    Only `balance` sets a deadline (`time.perf_counter()`) on top. A `part` spends from its whole.
    """

    def __init__(self, work: float, deadline_s: float = math.inf, whole: Budget | None = None):
        self.left, self.deadline_s, self._whole = work, deadline_s, whole
        self.spent = 0.0

    def spend(self, work: float = 1) -> None:
        self.left -= work
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def part(self, work: float) -> Budget:
        """A budget of at most so much of this one."""
        return Budget(min(work, self.left), self.deadline_s, self)

    @property
    def left_s(self) -> float:
        if self.deadline_s == math.inf:
            return math.inf
        return self.deadline_s - time.perf_counter()

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.left_s <= 0
