"""Which processes are slower than the rest, step by step.

Processes that run one program at the same shape are compared with each other, so a wrong prediction
blames nobody. A process whose programs no other runs is compared with what these take alone, and
counts as slow only as far as the others keep to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dflop_jax.pipeline.task_times import TaskTimes

_REMEMBERED_STEPS = 9  # whose median is a factor; twice as many follow a change half as fast
_LEAST_STEPS = 5  # of a process before it is named
# Of slow steps, less those that were not, before a process is named: where they take milliseconds,
# what else a machine does makes now one and now another slow (a line each 4 steps of 35 ms).
_LEAST_S = 2.0
SLOW, RECOVERED = 1.4, 1.2  # times the rest's: above, named; below again, no more
_REPORTED = 32  # processes in a row of metrics, the slowest ones: more would fill disk and trackers


def slowness(times: Sequence[TaskTimes], alone_s: np.ndarray) -> dict[int, float]:
    """How many times longer a process takes than it should; those that cannot be told are left out.

    Of tasks that others run too, all seconds count. Of others, the lower quartile: waiting for
    inputs makes some tasks look slow, a slow process all of them.

    Args:
      times: [processes, tasks], seconds in one step; each process in one of them.
      alone_s: float64 [tasks of the step], seconds of a task run alone, 0 where they are not known.
    """
    by_price: dict[int, float] = {}
    for group in times:
        alone = alone_s[group.places]
        ratios = group.times[:, alone > 0] / alone[alone > 0]
        if ratios.size:
            place = ratios.shape[1] // 4
            quartiles = np.partition(ratios, place, axis=1)[:, place].tolist()
            by_price |= {p: q for p, q in zip(group.processes, quartiles, strict=True) if q}
    others = medians_of_others(np.array([[*by_price.values()]]))[0].tolist()
    slow = {
        p: min(ratio, ratio / rest)
        for (p, ratio), rest in zip(by_price.items(), others, strict=True)
        if len(by_price) > 1
    }
    for group, rest in zip(times, _rests(times, len(alone_s)), strict=True):
        shared = ~np.isnan(rest[0])  # who runs a task has others, or nobody has
        rest_s = rest[:, shared].sum(axis=1)
        ratios = group.times[:, shared].sum(axis=1) / np.where(rest_s > 0, rest_s, np.inf)
        known = zip(group.processes, ratios.tolist(), rest_s.tolist(), strict=True)
        slow |= {p: ratio for p, ratio, seconds in known if seconds > 0}
    return slow


def _rests(times: Sequence[TaskTimes], n_tasks: int) -> list[np.ndarray]:
    """For each of `times`, for each process and task the median of all other processes that ran it,
    NaN where none did."""
    counts = np.zeros(n_tasks, int)
    for group in times:
        counts[group.places] += len(group.processes)
    if all((counts[group.places] == len(group.processes)).all() for group in times):
        return [medians_of_others(group.times.T).T for group in times]  # no task is of two of them
    # All seconds in one array, those of a task side by side.
    first = np.cumsum(counts) - counts
    taken, places = first.copy(), []
    seconds = np.empty(int(counts.sum()))
    for group in times:
        places.append(taken[group.places] + np.arange(len(group.processes))[:, None])
        seconds[places[-1]] = group.times
        taken[group.places] += len(group.processes)
    rest = np.full(len(seconds), np.nan)
    for n in np.unique(counts[counts > 1]):
        these = first[counts == n][:, None] + np.arange(n)
        rest[these] = medians_of_others(seconds[these])
    return [rest[place] for place in places]


def medians_of_others(values: np.ndarray) -> np.ndarray:
    """The median, for each value, of all others in its row, [rows, n]; NaN where there is none."""
    n = values.shape[1]
    if n < 2:
        return np.full(values.shape, np.nan)
    # Without one value the others are the sorted row less that place: the middle moves by one.
    middle = (n - 1) // 2
    places = range(max(middle - 1, 0), middle + 2)
    ordered = np.partition(values, places, axis=1)
    here, above = ordered[:, [middle]], ordered[:, [middle + 1]]
    if n % 2 == 0:
        return np.where(values > here, here, above)
    below = ordered[:, [middle - 1]]
    return (np.where(values < here, here, below) + np.where(values > here, here, above)) / 2


class Stragglers:
    """Names each process that stays slow once, with its factor, and again when it is slow no more;
    `factors` are medians of the last steps, so they decay when a process recovers.

    Where a process's whole work is one program that others run too, nothing it could be given makes
    it faster: shapes are static. Where its programs are its own, correction raises their prices.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._recent = np.empty((0, _REMEMBERED_STEPS))  # by process, oldest first, at first NaN
        self._usual = np.empty(0)  # their medians
        self._slow_s = np.empty(0)  # for how long these are slow, see _LEAST_S
        self._named: set[int] = set()

    @property
    def factors(self) -> dict[str, float]:
        """The factors of the slowest processes, for the metrics."""
        known = np.flatnonzero(~np.isnan(self._usual))
        slowest = known[np.argsort(-self._usual[known], kind="stable")[:_REPORTED]]
        return {str(p): float(self._usual[p]) for p in np.sort(slowest)}

    def after_step(self, step: int, seen: Mapping[int, float], step_s: float) -> None:
        """Take in the `slowness` of a step, which took so many seconds."""
        if not seen:
            return
        processes = np.array([*seen])
        new = np.full((max(0, processes.max() + 1 - len(self._recent)), _REMEMBERED_STEPS), np.nan)
        self._recent = np.concatenate([self._recent, new])
        self._slow_s = np.concatenate([self._slow_s, np.zeros(len(new))])
        self._recent[processes, :-1] = self._recent[processes, 1:]
        self._recent[processes, -1] = [*seen.values()]
        ordered = np.sort(self._recent, axis=1)  # NaN last
        counts = np.count_nonzero(~np.isnan(ordered), axis=1)
        every = np.arange(len(ordered))
        self._usual = (ordered[every, (counts - 1) // 2] + ordered[every, counts // 2]) / 2
        slow = (self._usual > SLOW) & (counts >= _LEAST_STEPS)
        self._slow_s = np.maximum(self._slow_s + np.where(slow, step_s, -step_s), 0.0)
        slow &= self._slow_s >= _LEAST_S
        for p in sorted({*np.flatnonzero(slow).tolist()} - self._named):
            self._named.add(p)
            self._log(
                f"step {step}: process {p} takes {self._usual[p]:.1f} times as long as it should, "
                "and all wait for it; if it stays so, end the run (SIGTERM saves it) and go on "
                "without its host by --resume auto, which plans for the devices that are left"
            )
        for p in sorted(p for p in self._named if self._usual[p] < RECOVERED):
            self._named.discard(p)
            self._log(f"step {step}: process {p} is no longer slow ({self._usual[p]:.1f} times)")
