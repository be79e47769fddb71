"""Best-first search over the spaces of layouts: it always expands the candidate with the lowest
bound, so the candidates that become exact first are the fastest of all.

Makespans within 1e-6 of each other count as equal, since the last bits of a fit differ between
machines. Ties are broken by the candidates' keys.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from dflop_jax.plan.baselines import arrival_plans, fastest_option, samples_per_rank
from dflop_jax.plan.bounds import Space, bound_families
from dflop_jax.plan.candidate import CLOSE_RATIO, Candidate, Key
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import dip_spaces
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.memory import describe_savings
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.placement import layout_name
from dflop_jax.plan.space import search_families
from dflop_jax.records import Layout
from dflop_jax.schedule.costs import TIE_TOLERANCE

OnProgress = Callable[[int, int], None]  # called with (ranked, requested) numbers of placements
# Maximum number of expansions in a whole search and in a screen of one policy. A search reaches it
# if memory is tight and many combinations of options are nearly equal; it then makes candidates
# with the lowest bounds exact and ends. Twice the limit takes up to twice the time.
_MAX_STEPS, _MAX_SCREEN_STEPS = 1_500, 100
# Maximum number of candidates whose buckets are refined, or that are made exact when a search ends
# early; each takes a few tenths of a second.
MAX_CLOSE = 8
_MAX_SCREENED = 2  # maximum number of candidates from a screen of one policy


def search_spaces(context: SearchContext) -> Iterator[Space]:
    """Yield the configured policy's spaces, none for a baseline; ValueError: no placement."""
    for policy, families in search_families(context.space_limits).items():
        yield from bound_families(policy, families, context)
    if context.spec.config.policy in (DIP, "auto"):
        yield from dip_spaces(context)


def sorted_candidates(
    spaces: Sequence[Space], figure: str
) -> Iterator[tuple[float, Space, int, int]]:
    """Yield (value of `figure`, space, layout, granularity) of every candidate, lowest first."""
    flat = [getattr(space, figure).ravel() for space in spaces]
    start = [0, *accumulate(map(len, flat))]
    values = np.concatenate([np.zeros(0), *flat])
    for i in np.argsort(values, kind="stable").tolist():
        number = bisect_right(start, i) - 1
        space = spaces[number]
        yield float(values[i]), space, *divmod(i - start[number], len(space.groups_per_batch))


class BestFirstSearch:
    """Best-first search over the policies' spaces and a baseline's layouts."""

    def __init__(
        self, evaluator: PlanEvaluator, spaces: Sequence[Space], baselines: Sequence[Layout]
    ):
        self.evaluator, self.context, self._spaces = evaluator, evaluator.context, spaces
        self.policies = {space.policy for space in spaces}
        self.n_placements = sum(len(space.lower_bound_s) for space in spaces) + len(baselines)
        self.n_candidates = sum(int((~space.is_repeated).sum()) for space in spaces)
        self.n_fit = sum(int(np.isfinite(space.lower_bound_s).sum()) for space in spaces)
        self._evaluated = set[Key]()
        self._baseline_peaks: list[tuple[float, str]] = []
        self._baselines = [c for layout in baselines for c in self._evaluate_baseline(layout)]

    def rank_placements(self, on_progress: OnProgress | None = None) -> list[Candidate]:
        """Return exact candidates, fastest first, each with its granularity's best options. They
        cover the requested number of placements and include others close to the fastest."""
        n_wanted = self.context.spec.n_shown
        ranked: list[Candidate] = []
        for one in self._best_first(self._spaces, _MAX_STEPS):
            is_far = bool(ranked) and one.lower_bound_s > CLOSE_RATIO * ranked[0].lower_bound_s
            n_placements = len(first_per_placement(ranked))
            if (is_far or len(ranked) >= MAX_CLOSE) and n_placements >= n_wanted:
                break
            ranked.append(one)
            if on_progress and len(first_per_placement(ranked)) > n_placements:
                on_progress(n_placements + 1, n_wanted)
        return ranked

    @property
    def n_evaluated(self) -> int:
        """Number of candidates scheduled and simulated so far."""
        return len(self._evaluated)

    def find_first(self) -> Candidate | None:
        """Return the fastest candidate of a short search; None: none fits into memory."""
        return next(self._best_first(self._spaces, _MAX_SCREEN_STEPS), None)

    def screen_policy(self, policy: str, max_s: float) -> list[Candidate]:
        """Return a policy's fastest candidates, up to `max_s` per step, from a short search."""
        screened: list[Candidate] = []
        spaces = [space for space in self._spaces if space.policy == policy]
        for one in self._best_first(spaces, _MAX_SCREEN_STEPS, max_s):
            is_far = bool(screened) and one.lower_bound_s > CLOSE_RATIO * screened[0].lower_bound_s
            if is_far or len(screened) == _MAX_SCREENED:
                break
            screened.append(one)
        return screened

    def _best_first(
        self, spaces: Sequence[Space], max_steps: int, max_s: float = math.inf
    ) -> Iterator[Candidate]:
        """Yield the exact candidate with the best options of each placement and granularity, by
        makespan, then key. Ends when the others exceed `max_s`; after `max_steps` expansions only
        exact candidates and a few with the lowest bounds follow."""
        unopened = sorted_candidates(spaces, "lower_bound_s")
        upcoming = next(unopened, None)
        heap: list[tuple[float, Key, Candidate]] = []
        exact, yielded = list(self._baselines), set[Key]()
        n_steps = 0
        while True:
            heap_s = heap[0][0] if heap else np.inf
            upcoming_s = upcoming[0] if upcoming else np.inf
            exact_s = min((one.lower_bound_s for one in exact), default=np.inf)
            if (lowest_s := min(heap_s, upcoming_s, exact_s)) > max_s or lowest_s == np.inf:
                return  # all others take longer or do not fit into memory
            tie_s = exact_s * (1 + TIE_TOLERANCE)
            if exact and tie_s < min(heap_s, upcoming_s):
                first = min((c for c in exact if c.lower_bound_s <= tie_s), key=lambda c: c.key)
                exact.remove(first)
                if first.granularity not in yielded:
                    yielded.add(first.granularity)
                    yield first
                continue
            if upcoming and upcoming_s <= heap_s:
                _, space, p, c = upcoming
                allowed = map(self.context.spec.allowed, space.layout_at(p, c).submeshes)
                expanded = [Candidate.from_space(space, p, c)] if all(allowed) else []
                upcoming = next(unopened, None)
            else:
                expanded = self._expand(heapq.heappop(heap)[-1])
            exact += [one for one in expanded if one.is_exact]
            for one in expanded:
                if not one.is_exact:
                    heapq.heappush(heap, (one.lower_bound_s, one.key, one))
            n_steps += 1
            if n_steps >= max_steps:
                exact += [self._finish(one) for *_, one in heapq.nsmallest(MAX_CLOSE, heap)]
                heap, upcoming = [], None

    def _expand(self, candidate: Candidate) -> list[Candidate]:
        """Call `Candidate.expand` and count simulated granularities, once for all options."""
        expanded = candidate.expand(self.evaluator)
        self._evaluated |= {one.granularity for one in expanded if one.is_exact}
        return expanded

    def _finish(self, candidate: Candidate) -> Candidate:
        """Expand the candidate, always the part with the lowest bound, until it is exact."""
        while not candidate.is_exact:
            candidate = min(self._expand(candidate), key=lambda c: (c.lower_bound_s, c.key))
        return candidate

    def smallest_candidate(self) -> tuple[float, str]:
        """Return (maximum bytes per device, description) of the candidate that needs least."""
        smallest = min(self._baseline_peaks, default=(np.inf, ""))
        for min_bytes, space, p, c in sorted_candidates(self._spaces, "min_peak_bytes"):
            if min_bytes >= smallest[0]:
                break
            peak_bytes, options = space.smallest_options(p, c)
            if peak_bytes < smallest[0]:
                smallest = peak_bytes, _describe(space.plan(p, c, options).layout)
        return smallest

    def _evaluate_baseline(self, layout: Layout) -> Iterator[Candidate]:
        """Yield the evaluated layout at each granularity that fits, with one option everywhere."""
        evaluator = self.evaluator
        if not all(map(self.context.spec.allowed, layout.submeshes)):
            return
        for per_rank, microbatches in samples_per_rank(evaluator, layout).items():
            self.n_candidates += 1
            plans = arrival_plans(evaluator, layout, per_rank)
            self._baseline_peaks += [
                (evaluator.max_peak_bytes(p), _describe(p.layout)) for p in plans
            ]
            if plan := fastest_option(evaluator, plans):
                self.n_fit += 1
                plan = evaluator.evaluate(plan, 0.0)
                candidate = Candidate(plan, microbatches, plan.predicted.makespan_s)
                self._evaluated.add(candidate.granularity)
                yield candidate


def first_per_placement(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each placement."""
    firsts: dict[Key, Candidate] = {}
    for one in candidates:
        firsts.setdefault(one.placement, one)
    return list(firsts.values())


def _describe(layout: Layout) -> str:
    return f"{layout_name(layout)}, {describe_savings(layout)}"
