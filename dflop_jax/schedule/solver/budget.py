"""What a search may still do, counted in work, so that the same batch gives the same answer on a
fast, a slow and a busy machine."""

from __future__ import annotations


class Budget:
    """Units of work that are left: a unit is a pair of bins priced, about 100 microseconds. A
    `part` spends from its whole."""

    def __init__(self, work: float, whole: Budget | None = None):
        self.left, self._whole = work, whole
        self.spent = 0.0

    def spend(self, work: float = 1) -> None:
        self.left -= work
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def part(self, work: float) -> Budget:
        """A budget of at most so much of this one."""
        return Budget(min(work, self.left), self)

    @property
    def done(self) -> bool:
        return self.left <= 0
