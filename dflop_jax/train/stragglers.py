"""Which processes are slower than the rest, step by step.

Processes that run one program at the same shape are compared with each other, so a wrong prediction
blames nobody. A process whose programs no other runs is compared with what these take alone, and
counts as slow only as far as the others keep to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from dflop_jax.records import Task

_MEMORY = 9  # steps that a factor remembers
_ENOUGH = 5  # steps before a process is named
SLOW, RECOVERED = 1.4, 1.2  # times the rest's: above, named; below again, no more


def slowness(
    times: Sequence[Mapping[Task, float]], alone_s: Callable[[Task], float]
) -> dict[int, float]:
    """How many times longer a process takes than it should; those that cannot be told are left out.

    Of tasks that others run too, all seconds count. Of others, the lower quartile: waiting for
    inputs makes some tasks look slow, a slow process all of them.

    Args:
      times: by process, seconds of its tasks in one step.
      alone_s: seconds of a task run alone, 0 where they are not known.
    """
    takers: dict[Task, list[int]] = {}
    for p, own in enumerate(times):
        for task in own:
            takers.setdefault(task, []).append(p)
    by_price = {
        p: ratio
        for p, own in enumerate(times)
        if (ratio := _quartile([s / alone_s(t) for t, s in own.items() if alone_s(t) > 0]))
    }
    found: dict[int, float] = {}
    for p, own in enumerate(times):
        shared = {t: [times[q][t] for q in takers[t] if q != p] for t in own if len(takers[t]) > 1}
        rest_s = sum(map(median, shared.values()))
        others = [r for q, r in by_price.items() if q != p]
        if rest_s > 0:
            found[p] = sum(own[t] for t in shared) / rest_s
        elif p in by_price and others:
            found[p] = min(by_price[p], by_price[p] / median(others))
    return found


def _quartile(values: Sequence[float]) -> float:
    """The lower quartile, 0 of nothing."""
    return sorted(values)[len(values) // 4] if values else 0.0


class Stragglers:
    """Names each slow process once, with its factor, and again when it is slow no more; `factors`
    are medians of the last steps, so they decay when a process recovers.

    Where a process's whole work is one program that others run too, nothing it could be given makes
    it faster: shapes are static. Where its programs are its own, correction raises their prices.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._recent: dict[int, tuple[float, ...]] = {}
        self._named: set[int] = set()

    @property
    def factors(self) -> dict[str, float]:
        """By process, for the metrics."""
        return {str(p): median(seen) for p, seen in sorted(self._recent.items())}

    def after_step(self, step: int, seen: Mapping[int, float]) -> None:
        """Take in the `slowness` of a step."""
        for p, factor in seen.items():
            self._recent[p] = (*self._recent.get(p, ()), factor)[-_MEMORY:]
            usual = median(self._recent[p])
            if p in self._named and usual < RECOVERED:
                self._named.discard(p)
                self._log(f"step {step}: process {p} is no longer slow ({usual:.1f} times)")
            elif p not in self._named and usual > SLOW and len(self._recent[p]) >= _ENOUGH:
                self._named.add(p)
                self._log(
                    f"step {step}: process {p} takes {usual:.1f} times as long as it should, and "
                    "all wait for it; if it stays so, end the run (SIGTERM saves it) and go on "
                    "without its host by --resume auto, which plans for the devices that are left"
                )
