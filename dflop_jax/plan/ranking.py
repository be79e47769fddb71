"""Ranks whole spaces best-first: what has the least lower bound is made exact step by step, so the
first exact ones are the best of all.

Makespans that differ by less than a millionth are equal, since the last bits of a fit differ from
machine to machine; of equals the first by name is the better one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.plan.bounds import Bounds, all_bounds
from dflop_jax.plan.evaluate import TIE, Evaluator, Uniform, as_plan
from dflop_jax.plan.placement import Placement
from dflop_jax.plan.space import Family
from dflop_jax.records import Bucket, Plan, SubmeshPlan

ARRIVAL_CUTS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """A placement with its best cut into groups of one bucket, simulated.

    busy_s: seconds that each submesh computes in a step of `makespan_s`, on average. peak_bytes:
    of the device that needs most.
    """

    policy: str
    name: str
    microbatches: int
    remat: str
    makespan_s: float
    busy_s: dict[str, float]
    peak_bytes: float


@dataclass(frozen=True)
class Choice:
    """A placement with a cut: what is ranked. `most` is the largest bucket that memory holds, None:
    any. `uniform` simulates its groups; None: a baseline, whose batches are scheduled at once."""

    policy: str
    name: str
    cut: int
    plan: Plan
    most: Bucket | None = None
    uniform: Uniform | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.policy, self.name, self.cut


@dataclass(frozen=True)
class Ranked:
    """What is known of a choice: its mean makespan is at least `bound_s`.

    groups: of each sampled batch, at least. n_scheduled: batches whose groups were counted by the
    scheduler; -1: not even the least number was simulated. It is exact with all of them.
    """

    choice: Choice
    bound_s: float
    groups: tuple[int, ...] = ()
    n_scheduled: int = -1

    @property
    def exact(self) -> bool:
        return self.n_scheduled == len(self.groups)

    def refined(self, evaluator: Evaluator) -> Ranked:
        """The choice a step nearer to exact."""
        choice, uniform = self.choice, self.choice.uniform
        if uniform is None:
            plan = evaluator.evaluate(choice.plan, self.bound_s)
            return replace(
                self,
                choice=replace(choice, plan=plan),
                bound_s=plan.predicted.makespan_s,
                n_scheduled=0,
            )
        groups, n = list(self.groups), self.n_scheduled
        if n >= 0:
            groups[n] = max(groups[n], evaluator.n_groups(choice.plan, n, groups[n]))
        return replace(
            self, groups=tuple(groups), n_scheduled=n + 1, bound_s=uniform.makespan_s(groups)
        )

    def candidate(self, evaluator: Evaluator) -> Candidate:
        plan, uniform = self.choice.plan, self.choice.uniform
        if uniform is None:
            figures = plan.predicted
            busy_s = {m: b * figures.makespan_s for m, b in figures.busy_fraction.items()}
        else:
            traces = [uniform.trace(n) for n in self.groups]
            seconds = [{m: b * t.makespan_s for m, b in t.busy_fraction().items()} for t in traces]
            busy_s = {
                m.name: float(np.mean([s.get(m.name, 0.0) for s in seconds]))
                for m in plan.submeshes
            }
        remat = [f"{m} {r}" for m in plan.modules if (r := plan.segments_of(m)[0].remat) != "none"]
        return Candidate(
            policy=self.choice.policy,
            name=self.choice.name,
            microbatches=self.choice.cut * plan.group_size,
            remat=", ".join(remat) or "none",
            makespan_s=self.bound_s,
            busy_s=busy_s,
            peak_bytes=evaluator.most_bytes(plan),
        )


class Ranking:
    """Spaces of policies, ranked best-first."""

    def __init__(
        self,
        evaluator: Evaluator,
        space: Mapping[str, Sequence[Family]],
        baseline: Sequence[Placement],
        allowed: Callable[[SubmeshPlan], bool],
    ):
        self.evaluator, self.rules, self.allowed = evaluator, evaluator.rules, allowed
        self.n_placements = sum(len(f) for found in space.values() for f in found) + len(baseline)
        self.n_candidates = self.n_fit = self.n_evaluated = 0
        self.least_bytes = np.inf
        self._arrivals = self._arrival_choices(baseline)
        self._tables = [
            (policy, b) for policy, found in space.items() for b in all_bounds(found, self.rules)
        ]

    def ranked(self, n: int, on_progress: Callable[[int, int], None] | None) -> list[Ranked]:
        """The best choice of each of the `n` best placements, exact, best first."""
        best: dict[tuple[str, str], Ranked] = {}
        for ranked in self._in_order():
            name = ranked.choice.policy, ranked.choice.name
            if name not in best:
                best[name] = ranked
                if on_progress:
                    on_progress(len(best), n)
            if len(best) == n:
                break
        return list(best.values())

    def _in_order(self) -> Iterator[Ranked]:
        """All choices, exact, best first; equals by name."""
        exact: list[Ranked] = []
        for ranked, next_s in self._by_bound():
            if ranked is not None:
                exact.append(ranked)
            while exact:
                least_s = min(r.bound_s for r in exact)
                if next_s <= least_s * (1 + TIE):
                    break
                equal = [r for r in exact if r.bound_s <= least_s * (1 + TIE)]
                first = min(equal, key=lambda r: r.choice.key)
                exact.remove(first)
                yield first

    def _by_bound(self) -> Iterator[tuple[Ranked | None, float]]:
        """Exact choices as they are found, and a bound on all that were not found yet; None: only
        the bound rose."""
        waiting = self._by_table()
        upcoming = next(waiting, None)
        heap: list[tuple[float, tuple[str, str, int], Ranked]] = []
        for choice in self._arrivals:
            heap.append((0.0, choice.key, Ranked(choice, 0.0)))
        heapq.heapify(heap)
        while heap or upcoming:
            if upcoming and (not heap or upcoming[0] <= heap[0][0]):
                ranked = self._first_known(*upcoming)
                if ranked is not None:
                    heapq.heappush(heap, (ranked.bound_s, ranked.choice.key, ranked))
                upcoming = next(waiting, None)
                continue
            *_, ranked = heapq.heappop(heap)
            if ranked.n_scheduled < 0:
                self.n_evaluated += 1
            ranked = ranked.refined(self.evaluator)
            if not ranked.exact:
                heapq.heappush(heap, (ranked.bound_s, ranked.choice.key, ranked))
            next_s = min(heap[0][0] if heap else np.inf, upcoming[0] if upcoming else np.inf)
            yield (ranked if ranked.exact else None), next_s
        yield None, np.inf

    def _by_table(self) -> Iterator[tuple[float, str, Bounds, int, int]]:
        """Candidates that memory holds, the least bound first."""
        flat = [b.bound_s.ravel() for _, b in self._tables]
        sizes = [len(b) for b in flat]
        bounds = np.concatenate([np.zeros(0), *flat])
        table = np.repeat(np.arange(len(flat)), sizes)
        place = np.concatenate([np.zeros(0, int), *map(np.arange, sizes)])
        self.n_candidates += len(bounds)
        self.n_fit += int(np.isfinite(bounds).sum())
        self.least_bytes = min(
            [self.least_bytes, *(float(b.peak_bytes.min()) for _, b in self._tables)]
        )
        for i in np.argsort(bounds, kind="stable").tolist():
            if not np.isfinite(bounds[i]):
                return
            policy, found = self._tables[table[i]]
            yield float(bounds[i]), policy, found, *divmod(int(place[i]), len(found.cuts))

    def _first_known(
        self, bound_s: float, policy: str, bounds: Bounds, p: int, c: int
    ) -> Ranked | None:
        """A choice with what its bounds say; None where devices cannot form its submeshes."""
        placement = self.rules.placement(bounds.outline(p))
        if not all(map(self.allowed, placement.submeshes)):
            return None
        remat = bounds.remats[bounds.choice[p, c]]
        plan = as_plan(placement, policy, (bounds.bucket(p, c),), self.rules, remat)
        fit = np.flatnonzero(np.isfinite(bounds.bound_s[p]))
        most = bounds.bucket(p, int(fit[0])) if self.rules.memory_bytes else None
        uniform = self.evaluator.uniform(plan, bounds.pairs(p, c))
        choice = Choice(policy, placement.name, int(bounds.cuts[c]), plan, most, uniform)
        return Ranked(choice, bound_s, tuple(bounds.groups[:, p, c].astype(int).tolist()))

    def _arrival_choices(self, placements: Sequence[Placement]) -> list[Choice]:
        """A baseline's, few enough to be simulated all."""
        policy, most = self.evaluator.config.policy, self.evaluator.config.max_microbatches
        choices = []
        for placement in placements:
            if not all(map(self.allowed, placement.submeshes)):
                continue
            for cap in [*(c for c in ARRIVAL_CUTS if c < most), most]:
                self.n_candidates += 1
                buckets = self.evaluator.arrival_plan(placement, policy, cap).buckets
                for r in self.rules.remats:
                    remat = dict.fromkeys(self.rules.n_layers, r)
                    plan = as_plan(placement, policy, buckets, self.rules, remat)
                    self.least_bytes = min(self.least_bytes, self.evaluator.most_bytes(plan))
                    if self.evaluator.fits(plan):
                        self.n_fit += 1
                        choices.append(Choice(policy, placement.name, cap, plan))
                        break
        return choices
