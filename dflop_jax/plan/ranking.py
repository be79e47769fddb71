"""Ranks whole spaces best-first: what has the least lower bound is made exact step by step, so the
first exact ones are the best of all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.plan.bounds import Bounds, all_bounds
from dflop_jax.plan.evaluate import Evaluator, as_plan
from dflop_jax.plan.placement import Outline, Placement
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


class Item:
    """A placement with a cut, whose bound rises until it is exact."""

    def __init__(
        self,
        ranking: Ranking,
        policy: str,
        name: str,
        plan: Plan,
        cut: int,
        bound_s: float,
        most: Bucket | None = None,
        n_groups: Sequence[int] = (),
    ):
        self._ranking, self.policy, self.plan = ranking, policy, plan
        self.name, self.cut, self.bound_s, self.most = name, cut, bound_s, most
        self.exact = False
        self._n_groups = list(n_groups)  # at least, of each batch
        self._steps = self._advance()

    @property
    def key(self) -> tuple[float, bool, str, str, int]:
        """Bounds before what is exact, so that equals are compared by name."""
        return self.bound_s, self.exact, self.policy, self.name, self.cut

    def __lt__(self, other: Item) -> bool:
        return self.key < other.key

    def advance(self) -> None:
        next(self._steps)

    def _advance(self) -> Iterator[None]:
        evaluator = self._ranking.evaluator
        self._ranking.n_evaluated += 1
        if self.plan.grouping == "arrival":
            self.plan = evaluator.evaluate(self.plan)
            self.bound_s, self.exact = self.plan.predicted["makespan_s"], True
            yield
            return
        priced = evaluator.priced(self.plan)
        spans: dict[int, float] = {}
        least = []
        for i, n in enumerate(self._n_groups):
            n = max(n, evaluator.least_groups(self.plan, i))
            if n not in spans:
                spans[n] = priced.simulate([0] * n).makespan_s
            least.append(spans[n])
        self.bound_s = float(np.mean(least))
        yield
        for i in range(len(least)):
            n = self._n_groups[i] = evaluator.n_groups(self.plan, priced.buckets, i)
            if n not in spans:
                spans[n] = priced.simulate([0] * n).makespan_s
            least[i] = spans[n]
            self.bound_s = float(np.mean(least))
            self.exact = i == len(least) - 1
            yield

    def candidate(self) -> Candidate:
        plan, priced = self.plan, self._ranking.evaluator.priced(self.plan)
        remat = [f"{m} {r}" for m in plan.modules if (r := plan.segments_of(m)[0].remat) != "none"]
        if plan.grouping == "arrival":
            busy = [{m.name: plan.predicted.get(f"busy_fraction.{m.name}", 0.0)
                     for m in plan.submeshes}]  # fmt: skip
            spans = [self.bound_s]
        else:
            traces = [priced.simulate([0] * n) for n in self._n_groups]
            busy, spans = [t.busy_fraction() for t in traces], [t.makespan_s for t in traces]
        busy_s = {
            m.name: float(np.mean([b.get(m.name, 0.0) * s for b, s in zip(busy, spans)]))
            for m in plan.submeshes
        }
        return Candidate(
            policy=self.policy,
            name=self.name,
            microbatches=self.cut * plan.group_size,
            remat=", ".join(remat) or "none",
            makespan_s=self.bound_s,
            busy_s=busy_s,
            peak_bytes=max(priced.peak_bytes().values()),
        )


class Ranking:
    """Spaces of policies, ranked best-first."""

    def __init__(
        self,
        evaluator: Evaluator,
        space: Mapping[str, Sequence[Outline]],
        baseline: Sequence[Placement],
        allowed: Callable[[SubmeshPlan], bool],
    ):
        self.evaluator, self.rules, self.allowed = evaluator, evaluator.rules, allowed
        self.n_placements = sum(map(len, space.values())) + len(baseline)
        self.n_candidates = self.n_fit = self.n_evaluated = 0
        self.least_bytes = np.inf
        self._ready = self._arrivals(baseline)
        self._tables = [(p, b) for p, found in space.items() for b in all_bounds(found, self.rules)]

    def ranked(self, n: int, on_progress: Callable[[int, int], None] | None) -> list[Item]:
        """The best item of each of the `n` best placements, exact, best first."""
        waiting = self._by_bound()
        upcoming = next(waiting, None)
        heap = list(self._ready)
        heapq.heapify(heap)
        best: dict[tuple[str, str], Item] = {}
        while heap or upcoming:
            if upcoming and (not heap or upcoming[0] <= heap[0].bound_s):
                item = self._item(*upcoming)
                if item is not None:
                    heapq.heappush(heap, item)
                upcoming = next(waiting, None)
                continue
            item = heapq.heappop(heap)
            if not item.exact:
                item.advance()
                heapq.heappush(heap, item)
                continue
            if best.setdefault((item.policy, item.name), item) is item and on_progress:
                on_progress(len(best), n)
            if len(best) == n:
                break
        return list(best.values())

    def _by_bound(self) -> Iterator[tuple[float, str, Bounds, int, int]]:
        """Candidates that memory holds, the least bound first."""
        flat = [(b.bound_s.ravel(), i) for i, (_, b) in enumerate(self._tables)]
        bounds = np.concatenate([np.zeros(0), *(b for b, _ in flat)])
        table = np.concatenate([np.zeros(0, int), *(np.full(len(b), i) for b, i in flat)])
        at = np.concatenate([np.zeros(0, int), *(np.arange(len(b)) for b, _ in flat)])
        self.n_candidates += len(bounds)
        self.n_fit += int(np.isfinite(bounds).sum())
        self.least_bytes = min(
            [self.least_bytes, *(float(b.peak_bytes.min()) for _, b in self._tables)]
        )
        for i in np.argsort(bounds, kind="stable").tolist():
            if not np.isfinite(bounds[i]):
                return
            policy, found = self._tables[table[i]]
            yield float(bounds[i]), policy, found, *divmod(int(at[i]), len(found.cuts))

    def _item(self, bound_s: float, policy: str, found: Bounds, p: int, c: int) -> Item | None:
        placement = self.rules.placement(found.outlines[p])
        if not all(map(self.allowed, placement.submeshes)):
            return None
        remat = found.remats[found.choice[p, c]]
        plan = as_plan(placement, policy, (found.bucket(p, c),), remat)
        fit = np.flatnonzero(np.isfinite(found.bound_s[p]))
        most = found.bucket(p, int(fit[0])) if self.rules.memory_bytes else None
        groups = found.groups[:, p, c].astype(int).tolist()
        return Item(self, policy, placement.name, plan, int(found.cuts[c]), bound_s, most, groups)

    def _arrivals(self, placements: Sequence[Placement]) -> list[Item]:
        """A baseline's, few enough to be simulated all."""
        policy, most = self.evaluator.config.policy, self.evaluator.config.max_microbatches
        items = []
        for placement in placements:
            if not all(map(self.allowed, placement.submeshes)):
                continue
            for cap in [*(c for c in ARRIVAL_CUTS if c < most), most]:
                self.n_candidates += 1
                remats = [dict.fromkeys(self.rules.n_layers, r) for r in self.rules.remats]
                plan = self.evaluator.arrival_plan(placement, policy, cap)
                for remat in remats:
                    plan = as_plan(placement, policy, plan.buckets, remat)
                    peak = self.evaluator.peak_bytes(plan)
                    self.least_bytes = min(self.least_bytes, peak)
                    if self.evaluator.fits(plan):
                        self.n_fit += 1
                        items.append(Item(self, policy, placement.name, plan, cap, 0.0))
                        break
        return items
