"""Which memory options of modules that share devices fit together, and the fastest of those.

An option makes a module cheaper to hold and slower to run. Only combinations matter that fit and
that no other fitting combination beats in every quantity. They are listed for single candidates
(`best_combinations`); for whole spaces it is enough to know whether any combination fits and the
minimum of every quantity over the options that may fit (`block_minimum`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflop_jax.plan.memory import SegmentNeed, resource_peaks, segment_need
from dflop_jax.plan.module_tables import ModuleTable
from dflop_jax.plan.options import MemoryOption
from dflop_jax.profile.state import Array
from dflop_jax.schedule.balance_problem import ROUNDING


@dataclass(frozen=True)
class ModuleOptions:
    """A module with all its options.

    needs: bytes of each segment, [n_options, n_rows, n_granularities]. seconds: of each segment,
    [4, n_options, ...], as in `ModuleTable`.
    """

    options: tuple[MemoryOption, ...]
    needs: tuple[SegmentNeed, ...]
    seconds: tuple[Array, ...]

    @staticmethod
    def from_table(
        table: ModuleTable, resources: Sequence[int], in_flight: Sequence[Array]
    ) -> ModuleOptions:
        """The table's module with its segments on these resources and so many groups in flight."""
        needs = map(segment_need, resources, table.n_bytes, in_flight)
        return ModuleOptions(table.options, tuple(needs), table.seconds)

    def select(self, *index: Array) -> ModuleOptions:
        """The module at some rows of its table (an array), or at one row and granularity."""
        return self._index((slice(None), *index))

    def with_option(self, option: int) -> ModuleOptions:
        """The module with one of its options."""
        one = slice(option, option + 1)
        return replace(self._index((one,)), options=self.options[one])

    def _index(self, index: tuple[Any, ...]) -> ModuleOptions:
        needs = tuple((r, live[index], work[index]) for r, live, work in self.needs)
        return replace(
            self, needs=needs, seconds=tuple(s[(slice(None), *index)] for s in self.seconds)
        )


@dataclass(frozen=True)
class BlockMinimum:
    """Minima over the options of a block of modules, [n_rows, n_granularities].

    fits: whether any combination fits into memory. peak_bytes: lower bound for the fullest device.
    seconds: of every module's segments, [4, ...] as in `ModuleTable`; 0 where nothing fits.
    """

    fits: Array
    peak_bytes: Array
    seconds: tuple[tuple[Array, ...], ...]

    def select(self, rows: Array) -> BlockMinimum:
        """The minima at some rows."""
        seconds = tuple(tuple(s[:, rows] for s in module) for module in self.seconds)
        return BlockMinimum(self.fits[rows], self.peak_bytes[rows], seconds)


def block_minimum(modules: Sequence[ModuleOptions], memory_bytes: float) -> BlockMinimum:
    """Minima over the options of modules that share devices; `memory_bytes` 0: no limit."""
    limit = memory_bytes or np.inf
    may_fit, peak_bytes = _options_that_may_fit(modules, limit)
    fits = np.logical_and.reduce([a.any(axis=0) for a in may_fit])
    if len(modules) > 1 and memory_bytes:
        for index in np.argwhere(fits & ~(_peak_of_smallest(modules) <= limit)):
            peak, _ = smallest_combination([m.select(*index) for m in modules])
            fits[tuple(index)] = peak <= limit
    seconds = (
        tuple(np.where(fits, np.where(a, s, np.inf).min(axis=1), 0.0) for s in m.seconds)
        for m, a in zip(modules, may_fit, strict=True)
    )
    return BlockMinimum(fits, peak_bytes, tuple(seconds))


def _options_that_may_fit(
    modules: Sequence[ModuleOptions], limit: float
) -> tuple[list[Array], Array]:
    """(of every module which options fit beside the minimum of the others, the lowest peak)."""
    minima = [[(r, s.min(axis=0), w.min(axis=0)) for r, s, w in m.needs] for m in modules]
    may_fit, peaks = [], []
    for i, m in enumerate(modules):
        other_needs = [need for j, needs in enumerate(minima) if j != i for need in needs]
        peak = _peak_bytes([*m.needs, *other_needs])
        may_fit.append(peak <= limit)
        peaks.append(peak.min(axis=0))
    return may_fit, np.maximum.reduce(peaks)


def _peak_of_smallest(modules: Sequence[ModuleOptions]) -> Array:
    """Peak bytes where every module has the option that needs the least alone."""
    needs: list[SegmentNeed] = []
    for m in modules:
        i = sum(s + w for _, s, w in m.needs).argmin(axis=0)[None]
        needs += [(r, *(np.take_along_axis(a, i, 0)[0] for a in (s, w))) for r, s, w in m.needs]
    return _peak_bytes(needs)


def _peak_bytes(needs: Iterable[SegmentNeed]) -> Array:
    """Peak bytes of the resource that needs most."""
    return np.maximum.reduce(np.broadcast_arrays(*resource_peaks(needs).values()))


def _peaks_of(modules: Sequence[ModuleOptions], numbers: np.ndarray) -> Array:
    """Peak bytes of combinations, [n_combinations, n_modules], at one row and granularity."""
    columns = zip(modules, numbers.T, strict=True)
    return _peak_bytes((r, live[o], work[o]) for m, o in columns for r, live, work in m.needs)


def smallest_combination(
    modules: Sequence[ModuleOptions],
) -> tuple[float, tuple[MemoryOption, ...]]:
    """(peak bytes, options) of the combination that needs least, at one row and granularity; the
    first one of several."""
    sizes = [len(m.options) for m in modules]
    numbers = np.indices(sizes).reshape(len(sizes), -1).T
    peaks = _peaks_of(modules, numbers)
    i = int(peaks.argmin())
    chosen = zip(modules, numbers[i].tolist(), strict=True)
    return float(peaks[i]), tuple(m.options[o] for m, o in chosen)


def best_combinations(
    modules: Sequence[ModuleOptions], memory_bytes: float
) -> Iterator[np.ndarray]:
    """The option of every module, by number, at one row and granularity, of each combination that
    fits and that no other one beats; fastest first, and of equals the first."""
    limit = memory_bytes or np.inf
    may_fit = [a.nonzero()[0] for a in _options_that_may_fit(modules, limit)[0]]
    grid = np.indices([len(a) for a in may_fit]).reshape(len(may_fit), -1)
    numbers = np.stack([a[g] for a, g in zip(may_fit, grid, strict=True)], axis=1)
    numbers = numbers[_peaks_of(modules, numbers) <= limit]
    seconds = np.concatenate(
        [np.concatenate(m.seconds)[:, o].T for m, o in zip(modules, numbers.T, strict=True)], axis=1
    )
    while len(numbers):
        fastest = int(seconds.sum(axis=1).argmin())
        is_equal = (seconds[:fastest] <= seconds[fastest] * (1 + ROUNDING)).all(axis=1)
        fastest = int(is_equal.argmax()) if is_equal.any() else fastest
        yield numbers[fastest]
        is_beaten = (seconds >= seconds[fastest] * (1 - ROUNDING)).all(axis=1)
        numbers, seconds = numbers[~is_beaten], seconds[~is_beaten]
