"""Which options of modules that share devices fit together, and what they come to at least.

An option makes a module cheaper to hold and dearer to run. Of all combinations only those matter
that fit, and that no other one that fits undercuts in everything. They are not listed for whole
spaces, only for candidates that are looked at; of the others it is enough to know whether any
combination fits, and the least of every quantity over the options that may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.plan.estimate import Segments
from dflop_jax.plan.options import Option
from dflop_jax.profile.state import Array
from dflop_jax.schedule.solver.problem import ROUNDING
from dflop_jax.sim.memory import Need, need_of, peaks_of


@dataclass(frozen=True)
class Member:
    """A module of a block with all its options, [n_options, ...] by segment.

    needs: of each segment. seconds: of a group forward and backward, and of the step's end:
    reduction and update.
    """

    options: tuple[Option, ...]
    needs: tuple[Need, ...]
    seconds: tuple[tuple[Array, ...], ...]

    @staticmethod
    def of(table: Segments, resource: Sequence[int], in_flight: Sequence[Array]) -> Member:
        """A table's module where its segments have so many groups in flight."""
        return Member(
            table.options,
            tuple(
                need_of(r, c.bytes, n)
                for r, c, n in zip(resource, table.costs, in_flight, strict=True)
            ),
            tuple(zip(*(c.seconds for c in table.costs), strict=True)),
        )

    def at(self, *place: Array) -> Member:
        """The same at some of the table's forms (an array), or at one form and cut."""
        here = (slice(None), *place)
        return self._each(lambda a: a[here])

    def only(self, option: int) -> Member:
        """The same with one of the options."""
        one = slice(option, option + 1)
        return replace(self._each(lambda a: a[one]), options=self.options[one])

    def needs_of(self, options: Array) -> Iterator[Need]:
        """Its needs with each of these options."""
        yield from ((r, held[options], work[options]) for r, held, work in self.needs)

    def _each(self, change: Callable[[Array], Array]) -> Member:
        return replace(
            self,
            needs=tuple((r, change(held), change(work)) for r, held, work in self.needs),
            seconds=tuple(tuple(map(change, by_segment)) for by_segment in self.seconds),
        )


@dataclass(frozen=True)
class Least:
    """The least over what may fit, [n_forms, n_cuts].

    fits: whether any combination does. peak_bytes: of the device that needs most; where modules
    share devices, what is certainly needed. seconds: of every member, as in `Member`; 0 where
    nothing fits.
    """

    fits: Array
    peak_bytes: Array
    seconds: tuple[tuple[tuple[Array, ...], ...], ...]

    def at(self, forms: Array) -> Least:
        """The same at some of the forms."""
        seconds = tuple(tuple(tuple(a[forms] for a in s) for s in m) for m in self.seconds)
        return Least(self.fits[forms], self.peak_bytes[forms], seconds)


def least(members: Sequence[Member], memory_bytes: float) -> Least:
    """What the members of a block come to at least."""
    limit = memory_bytes or np.inf
    allowed, peak = _may_fit(members, limit)
    fits = np.logical_and.reduce([a.any(axis=0) for a in allowed])
    if len(members) > 1 and memory_bytes:
        unsure = fits & ~(_some_peak(members) <= limit)
        for place in np.argwhere(unsure):
            here = [m.at(*place) for m in members]
            fits[tuple(place)] = bool((_peaks(here, _every(here)) <= limit).any())
    seconds = tuple(
        tuple(
            tuple(np.where(fits, np.where(a, s, np.inf).min(axis=0), 0.0) for s in by_segment)
            for by_segment in m.seconds
        )
        for m, a in zip(members, allowed, strict=True)
    )
    return Least(fits, peak, seconds)


def _may_fit(members: Sequence[Member], limit: float) -> tuple[list[Array], Array]:
    """(of every member which options fit beside the least of the others, the least peak)."""
    leasts = [[(r, s.min(axis=0), w.min(axis=0)) for r, s, w in m.needs] for m in members]
    allowed, peaks = [], []
    for i, m in enumerate(members):
        others = [need for j, needs in enumerate(leasts) if j != i for need in needs]
        peak = _peak([*m.needs, *others])
        allowed.append(peak <= limit)
        peaks.append(peak.min(axis=0))
    return allowed, np.maximum.reduce(peaks)


def _some_peak(members: Sequence[Member]) -> Array:
    """Peak bytes of the combination of options that each need the least alone."""
    picked: list[Need] = []
    for m in members:
        i = sum(s + w for _, s, w in m.needs).argmin(axis=0)[None]
        picked += [(r, *(np.take_along_axis(a, i, 0)[0] for a in (s, w))) for r, s, w in m.needs]
    return _peak(picked)


def _peak(needs: Iterable[Need]) -> Array:
    """Peak bytes of the resource that needs most."""
    return np.maximum.reduce(np.broadcast_arrays(*peaks_of(needs).values()))


def _every(members: Sequence[Member]) -> np.ndarray:
    """All combinations, [n_combinations, n_members], those of first options first."""
    sizes = [len(m.options) for m in members]
    return np.indices(sizes).reshape(len(sizes), -1).T


def _peaks(members: Sequence[Member], chosen: np.ndarray) -> Array:
    """Peak bytes of combinations, of members at one place."""
    each = zip(members, chosen.T, strict=True)
    return _peak(need for m, options in each for need in m.needs_of(options))


def least_peak(members: Sequence[Member]) -> tuple[float, tuple[Option, ...]]:
    """The combination that needs least at one place: (its peak bytes, every member's option)."""
    every = _every(members)
    peaks = _peaks(members, every)
    first = int(peaks.argmin())
    chosen = zip(members, every[first].tolist(), strict=True)
    return float(peaks[first]), tuple(m.options[o] for m, o in chosen)


def combinations(members: Sequence[Member], memory_bytes: float) -> Iterator[np.ndarray]:
    """The options of every member, by number, at one place: combinations that fit and that no other
    one undercuts."""
    limit = memory_bytes or np.inf
    allowed = [a.nonzero()[0] for a in _may_fit(members, limit)[0]]
    grid = np.indices([len(a) for a in allowed]).reshape(len(allowed), -1)
    chosen = np.stack([a[g] for a, g in zip(allowed, grid, strict=True)], axis=1)
    chosen = chosen[_peaks(members, chosen) <= limit]
    prices = [
        np.stack([s for by_segment in m.seconds for s in by_segment], axis=1) for m in members
    ]
    seconds = np.concatenate([p[i] for p, i in zip(prices, chosen.T, strict=True)], axis=1)
    while len(chosen):
        first = int(seconds.sum(axis=1).argmin())
        ahead = (seconds[:first] <= seconds[first] * (1 + ROUNDING)).all(axis=1)
        first = int(ahead.argmax()) if ahead.any() else first  # an equal one, but simpler
        yield chosen[first]
        undercut = (seconds >= seconds[first] * (1 - ROUNDING)).all(axis=1)
        chosen, seconds = chosen[~undercut], seconds[~undercut]
