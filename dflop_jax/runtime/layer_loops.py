"""Splits a sequence of layer kinds into loops over repeated periods, so that little is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class LayerLoop:
    """Layers from number `start` on: `repeats` times those of `period`."""

    start: int
    period: tuple[Any, ...]
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + len(self.period) * self.repeats

    def rows(self, kinds: Sequence[Any]) -> tuple[range, ...]:
        """Of each layer of the period the places of its repeats among those layers of the sequence
        `kinds` that are of its kind."""
        rows = []
        for j, kind in enumerate(self.period):
            step, first = self.period.count(kind), kinds[: self.start + j].count(kind)
            rows.append(range(first, first + step * self.repeats, step))
        return tuple(rows)


@lru_cache(maxsize=1024)
def split_into_loops(kinds: Sequence[Any]) -> tuple[LayerLoop, ...]:
    """Loops that go through layers of these kinds in their order: the sum of their periods is as
    small as it can be, and of such the loops are few.

    By the shortest path from cut to cut, O(n^2 log n) comparisons of periods.
    """
    kinds, n = tuple(kinds), len(kinds)
    # By cut: (layers that are compiled, loops) of the best way there, and its last loop.
    shortest: list[tuple[int, int, LayerLoop | None]] = [(0, 0, None)]
    shortest += [(n + 1, n + 1, None)] * n
    for i in range(n):
        layers, loops, _ = shortest[i]
        for size in range(1, n - i + 1):
            period = kinds[i : i + size]
            stop = i + size
            while kinds[stop - size : stop] == period:
                cost = layers + size, loops + 1
                if cost < shortest[stop][:2]:
                    shortest[stop] = (*cost, LayerLoop(i, period, (stop - i) // size))
                stop += size
                if stop > n:
                    break
    path: list[LayerLoop] = []
    while n:
        last = shortest[n][2]
        assert last is not None
        path.append(last)
        n = last.start
    return tuple(reversed(path))
