"""Chooses a plan: placement, cut and remat of least expected makespan, then its buckets.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). Best-first: what has the least lower
bound is made exact step by step, so the first exact ones are the best of the whole space. The
first few then get buckets of their own, and the fastest is the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import Hardware
from dflop_jax.plan.bounds import Bounds, all_bounds
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator, Priced, as_plan, sample_batches
from dflop_jax.plan.load import loads
from dflop_jax.plan.placement import Outline, Placement
from dflop_jax.plan.space import outlines
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import Bucket, DataProfile, ModelProfile, Plan, SegmentPlan, SubmeshPlan

ARRIVAL_CUTS = (4, 8, 16, 32, 64)
_LARGE_BATCH = 512  # samples; of larger batches fewer are simulated, since they differ less
FINALISTS = 3  # placements whose buckets are chosen
CLOSE = 1.05  # makespan over the best, up to which that may change their order


@dataclass(frozen=True)
class Candidate:
    """A placement with its best cut. `makespan_s` is None when it was left out, `why` says why.

    bound_s: what its makespan cannot be below. peak_bytes: of the device that needs most.
    """

    policy: str
    name: str
    microbatches: int
    remat: str
    makespan_s: float | None
    bound_s: float
    peak_bytes: float
    why: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and what it was chosen from, best first.

    candidates: the best placements in order of their makespan with one bucket. n_placements,
    n_candidates: size of the space without and with cuts; n_fit: candidates that memory holds;
    n_evaluated: how many of them were scheduled and simulated.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    n_placements: int
    n_candidates: int
    n_fit: int
    n_evaluated: int


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    *,
    n_devices: int,
    global_batch: int,
    config: PlanConfig | None = None,
    memory_bytes: float = 0.0,
    hardware: Hardware | None = None,
    remat: str = "auto",
    tied: bool = False,
    token_multiple: int = 32,
    trains: Callable[[SegmentPlan], bool] = lambda _: True,
    allowed: Callable[[SubmeshPlan], bool] = lambda _: True,
    shown: int = FINALISTS,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      memory_bytes: memory of a device; 0: not checked.
      hardware: nodes and links of the devices: what crosses them takes time, and tensor parallelism
        stays inside a node. None: links take no time.
      remat: "auto" (layers where memory needs it), or the value of every segment.
      tied: head and embedding share parameters, so the LLM stays in one segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.
      allowed: whether the devices at hand can form a submesh.
      shown: placements that are ranked exactly, for `SearchResult.candidates`.

    Raises:
      ValueError: no device, no placement, or nothing fits into `memory_bytes`; the message says by
        how much.
    """
    config = config or PlanConfig()
    if n_devices < 1 or global_batch < 1:
        raise ValueError(
            f"a plan for {n_devices} devices and {global_batch} samples a step: give at least one "
            "of each"
        )
    n_batches = max(1, round(config.sampled_batches * min(1.0, _LARGE_BATCH / global_batch)))
    batches = sample_batches(data.shapes, global_batch, n_batches)
    rules = Rules(
        costs=CostModel(profile),
        loads=loads(tuple(profile.n_layers), data.shapes, batches, global_batch),
        token_multiple=token_multiple,
        max_microbatches=config.max_microbatches,
        trains=trains,
        memory_bytes=memory_bytes,
        remat=remat,
        hardware=hardware,
    )
    evaluator = Evaluator(rules, data.shapes, batches, config, global_batch)
    search = _Search(evaluator, outlines(rules, n_devices, config, tied), allowed)
    best = search.ranked(max(shown, FINALISTS), on_progress)
    if not best:
        raise ValueError(search.why_none())
    close = [b for b in best[:FINALISTS] if b.bound_s <= CLOSE * best[0].bound_s]
    plans = [search.refined(item) for item in close]
    plan = min(plans, key=_makespan_s)  # the first of equals
    if config.policy != "blind" and config.effort == "full":
        full = search.refined(close[plans.index(plan)], "full")
        plan = full if _makespan_s(full) < _makespan_s(plan) else plan
    plan = evaluator.evaluate(plan)
    return SearchResult(
        plan,
        tuple(item.candidate() for item in best),
        n_placements=search.n_placements,
        n_candidates=search.n_candidates,
        n_fit=search.n_fit,
        n_evaluated=search.n_evaluated,
    )


def _makespan_s(plan: Plan) -> float:
    return plan.predicted["makespan_s"]


class _Item:
    """A placement with a cut, whose bound rises until it is exact."""

    def __init__(
        self,
        search: _Search,
        policy: str,
        placement: Placement,
        plan: Plan,
        cut: int,
        bound_s: float,
        most: Bucket | None = None,
        n_groups: Sequence[int] = (),
    ):
        self.search, self.policy, self.placement, self.plan = search, policy, placement, plan
        self.name, self.cut, self.bound_s, self.most = placement.name, cut, bound_s, most
        self.exact = False
        self._n_groups = list(n_groups)  # at least, of each batch
        self._spans: list[float] = []
        self._steps = self._advance()

    @property
    def key(self) -> tuple[float, bool, str, str, int]:
        """Bounds before what is exact, so that equals are compared by name."""
        return self.bound_s, self.exact, self.policy, self.name, self.cut

    def __lt__(self, other: _Item) -> bool:
        return self.key < other.key

    def advance(self) -> None:
        next(self._steps)

    def _advance(self) -> Iterator[None]:
        evaluator = self.search.evaluator
        self.search.n_evaluated += 1
        if self.plan.grouping == "arrival":
            self.plan = evaluator.evaluate(self.plan)
            self.bound_s, self.exact = _makespan_s(self.plan), True
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
            n = evaluator.n_groups(self.plan, priced.buckets, i)
            if n not in spans:
                spans[n] = priced.simulate([0] * n).makespan_s
            least[i] = spans[n]
            self.bound_s = float(np.mean(least))
            self.exact = i == len(least) - 1
            yield

    def candidate(self) -> Candidate:
        plan = self.plan
        remat = ", ".join(
            f"{m} {plan.segments_of(m)[0].remat}"
            for m in plan.modules
            if plan.segments_of(m)[0].remat != "none"
        )
        peak = max(Priced(plan, self.search.evaluator.rules).peak_bytes().values())
        return Candidate(
            self.policy,
            self.name,
            self.cut * plan.group_size,
            remat or "none",
            self.bound_s,
            self.bound_s,
            peak,
        )


class _Search:
    """The space of a policy, ranked best-first."""

    def __init__(
        self,
        evaluator: Evaluator,
        space: dict[str, list[Outline]],
        allowed: Callable[[SubmeshPlan], bool],
    ):
        self.evaluator, self.rules, self.allowed = evaluator, evaluator.rules, allowed
        self.n_placements = sum(map(len, space.values()))
        self.n_candidates = self.n_fit = self.n_evaluated = 0
        self.least_bytes = np.inf
        self._ready: list[_Item] = []
        self._tables: list[tuple[str, Bounds]] = []
        for policy, found in space.items():
            if policy == "blind":
                self._ready += self._arrivals(policy, found)
            else:
                self._tables += [(policy, b) for b in all_bounds(found, self.rules)]

    def ranked(self, n: int, on_progress: Callable[[int, int], None] | None) -> list[_Item]:
        """The best item of each of the `n` best placements, exact, best first."""
        waiting = self._by_bound()
        upcoming = next(waiting, None)
        heap = list(self._ready)
        heapq.heapify(heap)
        best: dict[tuple[str, str], _Item] = {}
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

    def _item(self, bound_s: float, policy: str, found: Bounds, p: int, c: int) -> _Item | None:
        placement = self.rules.placement(found.outlines[p])
        if not all(map(self.allowed, placement.submeshes)):
            return None
        remat = found.remats[found.choice[p, c]]
        plan = as_plan(placement, policy, (found.bucket(p, c),), remat)
        fit = np.flatnonzero(np.isfinite(found.bound_s[p]))
        most = found.bucket(p, int(fit[0])) if self.rules.memory_bytes else None
        groups = found.groups[:, p, c].astype(int).tolist()
        return _Item(self, policy, placement, plan, int(found.cuts[c]), bound_s, most, groups)

    def _arrivals(self, policy: str, outlines: Sequence[Outline]) -> list[_Item]:
        """The blind baseline's: a bound is the work of its microbatches without bubbles."""
        most = self.evaluator.config.max_microbatches
        items = []
        for outline in outlines:
            placement = self.rules.placement(outline)
            if not all(map(self.allowed, placement.submeshes)):
                continue
            for cap in [*(c for c in ARRIVAL_CUTS if c < most), most]:
                self.n_candidates += 1
                remats = [dict.fromkeys(self.rules.n_layers, r) for r in self.rules.remats]
                plan = self.evaluator.arrival_plan(placement, policy, cap)
                for remat in remats:
                    plan = as_plan(placement, policy, plan.buckets, remat)
                    peak = self._peak_bytes(plan)
                    self.least_bytes = min(self.least_bytes, peak)
                    if self._fits(plan):
                        self.n_fit += 1
                        items.append(_Item(self, policy, placement, plan, cap, 0.0))
                        break
        return items

    def refined(self, item: _Item, effort: str = "quick") -> Plan:
        """The item's plan with the buckets that suit it best, if they are better than its own."""
        if item.plan.grouping == "arrival":
            return item.plan
        try:
            plan = self.evaluator.with_buckets(item.plan, item.most, effort)
        except ValueError:  # memory holds the largest sample only beside a smaller share
            return self.evaluator.evaluate(item.plan, effort)
        plan = self.evaluator.evaluate(self._keeping_more(plan), effort)
        if self._fits(plan) and _makespan_s(plan) < item.bound_s:
            return plan
        return self.evaluator.evaluate(item.plan, effort)

    def _keeping_more(self, plan: Plan) -> Plan:
        """The plan without the remat that its buckets do not need."""
        for m in plan.modules if self.rules.remat == "auto" else ():
            kept = tuple(replace(s, remat="none") if s.module == m else s for s in plan.segments)
            other = replace(plan, segments=kept)
            plan = other if self._fits(other) else plan
        return plan

    def _fits(self, plan: Plan) -> bool:
        limit = self.rules.memory_bytes
        return not limit or self._peak_bytes(plan) <= limit

    def _peak_bytes(self, plan: Plan) -> float:
        return max(Priced(plan, self.rules).peak_bytes().values())

    def why_none(self) -> str:
        if not self.n_fit and np.isfinite(self.least_bytes):
            over = (self.least_bytes - self.rules.memory_bytes) / 2**30
            return (
                f"no plan fits into {self.rules.memory_bytes / 2**30:.2f} GiB per device: the "
                f"smallest needs {over:.2f} GiB more; use more devices, a larger plan.max_model or "
                "plan.max_stage, or smaller samples"
            )
        return "no placement: the devices at hand cannot form its submeshes"
