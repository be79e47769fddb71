"""Curves over the steps of a run that hold a bounded number of points, however long it is."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable
from typing import NamedTuple

# A curve's points, two for each pixel of the widest picture.
CURVE_POINTS = 4096

Point = tuple[float, float]


class Curve:
    """A curve that keeps the lowest and the highest value of each of a bounded number of stretches
    of equal length."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most or CURVE_POINTS
        self._length = 1  # rows in a stretch
        self._rows = 0
        self._stretches: list[tuple[Point, Point]] = []

    def add(self, x: float, value: float) -> None:
        point = x, value
        if self._rows % self._length == 0:
            if len(self._stretches) == self._most:
                self._stretches = _halved(self._stretches)
                self._length *= 2
            self._stretches.append((point, point))
        else:
            self._stretches[-1] = _joined(self._stretches[-1], (point, point))
        self._rows += 1

    def points(self, most: int | None = None) -> tuple[list[float], list[float]]:
        """(x, values) in the order of x, of `most` stretches at most."""
        stretches = self._stretches
        while most and len(stretches) > most:
            stretches = _halved(stretches)
        points = [p for stretch in stretches for p in sorted({*stretch})]
        return [x for x, _ in points], [value for _, value in points]


def _halved(stretches: list[tuple[Point, Point]]) -> list[tuple[Point, Point]]:
    odd = stretches[len(stretches) - len(stretches) % 2 :]
    pairs = zip(stretches[::2], stretches[1::2])
    return [_joined(a, b) for a, b in pairs] + odd


def _joined(a: tuple[Point, Point], b: tuple[Point, Point]) -> tuple[Point, Point]:
    """The lowest and the highest point of two stretches; a NaN gives way to any number."""
    (a_low, a_high), (b_low, b_high) = a, b
    if math.isnan(a_low[1]):
        return b
    if math.isnan(b_low[1]):
        return a
    return min(a_low, b_low, key=_value), max(a_high, b_high, key=_value)


def _value(point: Point) -> float:
    return point[1]


class _Sums(NamedTuple):
    """Of each stretch the sum of a curve's values and how many there are."""

    total: array[float]
    number: array[float]


class Means:
    """Curves over one axis that keep the mean of each of a bounded, even number of stretches of
    rows; a row may lack values of some."""

    def __init__(self, most: int) -> None:
        assert most % 2 == 0, "stretches are joined in pairs"
        self._most = most
        self._length = 1
        self._rows = 0
        self._begin = array("d")  # x of each stretch's first row
        self._sums: dict[Hashable, _Sums] = {}

    def add(self, x: float, values: Iterable[tuple[Hashable, float | None]]) -> None:
        """Add a row; None and what is not finite count for nothing."""
        if self._rows % self._length == 0:
            if len(self._begin) == self._most:
                self._halve()
            self._begin.append(x)
        self._rows += 1
        here = len(self._begin)
        for name, value in values:
            if value is None or not math.isfinite(value):
                continue
            sums = self._sums.get(name)
            if sums is None:
                sums = self._sums[name] = _Sums(array("d"), array("d"))
            _pad(sums, here)
            sums.total[-1] += value
            sums.number[-1] += 1

    def _halve(self) -> None:
        for sums in self._sums.values():
            _pad(sums, self._most)
            for column in sums:
                column[:] = array("d", (a + b for a, b in zip(column[::2], column[1::2])))
        self._begin = self._begin[::2]
        self._length *= 2

    @property
    def x(self) -> list[float]:
        """Where each stretch begins."""
        return self._begin.tolist()

    def names(self) -> list[Hashable]:
        return list(self._sums)

    def of(self, name: Hashable) -> list[float | None]:
        """The mean of each stretch; None where it has no value."""
        sums = self._sums.get(name, _Sums(array("d"), array("d")))
        _pad(sums, len(self._begin))
        return [t / n if n else None for t, n in zip(*sums)]


def _pad(sums: _Sums, length: int) -> None:
    for column in sums:
        column.extend([0.0] * (length - len(column)))
