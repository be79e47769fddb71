"""Ranks whole spaces best-first: what has the least lower bound is made exact step by step, so the
first exact ones are the best of all.

Makespans that differ by less than a millionth are equal, since the last bits of a fit differ from
machine to machine; of equals the first by name is the better one.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from dflop_jax.plan.bounds import Space, bound_families
from dflop_jax.plan.candidate import Candidate, Key
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import dip_spaces
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.one_bucket import build_plan
from dflop_jax.plan.options import describe_savings
from dflop_jax.plan.placement import layout_name
from dflop_jax.plan.space import search_families
from dflop_jax.records import Layout
from dflop_jax.schedule import arrival_buckets, capacity_of
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE

# Microbatches into which a baseline cuts a batch, below the configured most; each is scheduled.
_BASELINE_MICROBATCHES = (4, 8, 16, 32, 64)
# Steps towards exact candidates (one is simulated, or a batch of one whose groups are counted),
# after which what is near is taken: of a whole search, where memory is tight and many combinations
# of options differ by little, and of a look at one policy. Twice as many cost up to twice the time,
# where they are reached.
_MAX_STEPS, _MAX_SCREEN_STEPS = 1_500, 400
_N_FINISHED = 5  # candidates of least bounds that are made exact then; each simulates all batches
# Makespans over the best one's by one bucket, up to which a candidate is worth a closer look, and
# how many get one; each takes some tenths of a second.
CLOSE_RATIO, MAX_CLOSE = 1.05, 8
_MAX_SCREENED = 4  # candidates that a look at one policy gives
# Parts of a key that name the policy and placement, and these with the cut; the last, options.
_PLACEMENT, _CUT = 2, 4


def search_spaces(context: SearchContext) -> Iterator[Space]:
    """All that is searched for the configured policy; nothing for a baseline.

    Raises:
      ValueError: there is no placement.
    """
    for policy, of_policy in search_families(context.space_limits).items():
        yield from bound_families(policy, of_policy, context)
    if context.spec.config.policy in (DIP, "auto"):
        yield from dip_spaces(context)


def sorted_candidates(
    spaces: Sequence[Space], figure: str
) -> Iterator[tuple[float, Space, int, int]]:
    """(figure, space, layout, cut) of every candidate, the least figure first."""
    flat = [getattr(space, figure).ravel() for space in spaces]
    start = [0, *accumulate(map(len, flat))]
    values = np.concatenate([np.zeros(0), *flat])
    for i in np.argsort(values, kind="stable").tolist():
        number = bisect_right(start, i) - 1
        space = spaces[number]
        yield float(values[i]), space, *divmod(i - start[number], len(space.groups_per_batch))


class BestFirstSearch:
    """Spaces of policies and a baseline's layouts, best-first."""

    def __init__(self, evaluator: Evaluator, spaces: Sequence[Space], baseline: Sequence[Layout]):
        self.evaluator, self.context, self._spaces = evaluator, evaluator.context, spaces
        self.policies = {space.policy for space in spaces}  # those that are searched
        self.n_placements = sum(len(space.lower_bound_s) for space in spaces) + len(baseline)
        self.n_candidates = sum(int((~space.is_repeated).sum()) for space in spaces)
        self.n_fit = sum(int(np.isfinite(space.lower_bound_s).sum()) for space in spaces)
        self._evaluated = set[Key]()
        self._baseline_peaks: list[tuple[float, str]] = []
        self._exact_baselines = self._evaluate_baselines(baseline)

    def rank_placements(
        self, on_progress: Callable[[int, int], None] | None = None
    ) -> list[Candidate]:
        """The best options at each cut of the best placements, exact, best first: at least as many
        placements as are to be ranked, and as many of both as are close to the first or enough of
        these; fewer, and the best of what was looked at, where that takes too many steps."""
        n_wanted = self.context.spec.n_ranked
        ranked: list[Candidate] = []
        for candidate in self._best_first(self._spaces, _MAX_STEPS):
            is_far = len(ranked) >= MAX_CLOSE or (
                bool(ranked) and candidate.lower_bound_s > CLOSE_RATIO * ranked[0].lower_bound_s
            )
            n_placements = len(first_of_placements(ranked))
            if is_far and n_placements >= n_wanted:
                break
            ranked.append(candidate)
            if on_progress and len(first_of_placements(ranked)) > n_placements:
                on_progress(n_placements + 1, n_wanted)
        return ranked

    @property
    def n_evaluated(self) -> int:
        """Candidates that were scheduled and simulated so far."""
        return len(self._evaluated)

    def screen_policy(self, policy: str, max_s: float) -> list[Candidate]:
        """About the best candidates of a policy, best first: of what some steps find those that are
        close to the first and take at most `most_s` seconds, a few."""
        screened: list[Candidate] = []
        spaces = [space for space in self._spaces if space.policy == policy]
        for candidate in self._best_first(spaces, _MAX_SCREEN_STEPS, max_s):
            if len(screened) == _MAX_SCREENED or (
                screened and candidate.lower_bound_s > CLOSE_RATIO * screened[0].lower_bound_s
            ):
                break
            screened.append(candidate)
        return screened

    def _best_first(
        self, spaces: Sequence[Space], max_steps: int, max_s: float = math.inf
    ) -> Iterator[Candidate]:
        """The best options of each placement and cut, exact, best first; equals by name. After so
        many steps those that are exact then, and the few of least bounds, are all. Ends where all
        others take longer than `most_s`."""
        unopened = sorted_candidates(spaces, "lower_bound_s")
        upcoming = next(unopened, None)
        heap: list[tuple[float, Key, Candidate]] = []
        exact, yielded = list(self._exact_baselines), set[Key]()
        n_steps = 0
        while True:
            heap_s = heap[0][0] if heap else np.inf
            upcoming_s = upcoming[0] if upcoming else np.inf
            exact_s = min((candidate.lower_bound_s for candidate in exact), default=np.inf)
            if (lowest_s := min(heap_s, upcoming_s, exact_s)) > max_s or lowest_s == np.inf:
                return  # all others take longer, or memory does not hold them
            if exact and exact_s * (1 + TIE_TOLERANCE) < min(heap_s, upcoming_s):
                equal = [
                    candidate
                    for candidate in exact
                    if candidate.lower_bound_s <= exact_s * (1 + TIE_TOLERANCE)
                ]
                first = min(equal, key=lambda candidate: candidate.key)
                exact.remove(first)
                if first.key[:_CUT] not in yielded:
                    yielded.add(first.key[:_CUT])
                    yield first
                continue
            if upcoming and upcoming_s <= heap_s:
                expanded = self._open_candidate(*upcoming[1:])
                upcoming = next(unopened, None)
            else:
                expanded = heapq.heappop(heap)[-1].expand(self.evaluator)
                self._count_evaluated(expanded)
            for candidate in expanded:
                if candidate.is_exact:
                    exact.append(candidate)
                else:
                    heapq.heappush(heap, (candidate.lower_bound_s, candidate.key, candidate))
            n_steps += 1
            if n_steps >= max_steps:
                exact += [
                    self._expand_until_exact(candidate)
                    for *_, candidate in heapq.nsmallest(_N_FINISHED, heap)
                ]
                heap, upcoming = [], None

    def _expand_until_exact(self, candidate: Candidate) -> Candidate:
        """It, or of its choices of options what seems best."""
        while not candidate.is_exact:
            expanded = candidate.expand(self.evaluator)
            self._count_evaluated(expanded)
            candidate = min(expanded, key=lambda c: (c.lower_bound_s, c.key))
        return candidate

    def _count_evaluated(self, candidates: Iterable[Candidate]) -> None:
        """Count candidates that are simulated, each once, whatever options were."""
        self._evaluated |= {c.key[:_CUT] for c in candidates if c.is_exact}

    def _open_candidate(self, space: Space, p: int, c: int) -> list[Candidate]:
        """A candidate that nothing is counted of; nothing where devices cannot form it."""
        if not all(map(self.context.spec.allowed, space.layout_at(p, c).submeshes)):
            return []
        return [Candidate.from_space(space, p, c)]

    def smallest_candidate(self) -> tuple[float, str]:
        """(bytes of the device that needs most, placement and options) of what needs least."""
        smallest = min(self._baseline_peaks, default=(np.inf, ""))
        for min_bytes, space, p, c in sorted_candidates(self._spaces, "min_peak_bytes"):
            if min_bytes >= smallest[0]:
                break
            peak_bytes, options = space.smallest_options(p, c)
            if peak_bytes < smallest[0]:
                smallest = peak_bytes, _describe(space.plan(p, c, options).layout)
        return smallest

    def _evaluate_baselines(self, layouts: Sequence[Layout]) -> list[Candidate]:
        """A baseline's, few enough to be scheduled and simulated all, with the options that all
        modules can have alike, as frameworks of one setting for all do."""
        evaluator, context, config = self.evaluator, self.context, self.evaluator.config
        options_by_module = [context.options(m) for m in context.n_layers]
        common_options = [
            o for o in options_by_module[0] if all(o in options for options in options_by_module)
        ]
        candidates = []
        for layout in layouts:
            if not all(map(context.spec.allowed, layout.submeshes)):
                continue
            max_microbatches, ranks = config.max_microbatches, capacity_of(layout).ranks
            for microbatches in [
                *(c for c in _BASELINE_MICROBATCHES if c < max_microbatches),
                max_microbatches,
            ]:
                self.n_candidates += 1
                per_rank = -(
                    -context.spec.global_batch // (ranks[layout.modules[-1]] * microbatches)
                )
                buckets = arrival_buckets(  # quantiles of what arrives
                    evaluator.loads,
                    ranks,
                    max(1, per_rank),
                    n_buckets=config.buckets,
                    piece_tokens=context.profile.piece_tokens,
                    token_multiple=context.spec.token_multiple,
                )
                plans = [
                    build_plan(
                        layout, config.policy, buckets, context, dict.fromkeys(context.n_layers, o)
                    )
                    for o in common_options
                ]
                self._baseline_peaks += [
                    (evaluator.max_peak_bytes(p), _describe(p.layout)) for p in plans
                ]
                plans = list(filter(evaluator.fits, plans))
                if plans:
                    self.n_fit += 1
                    plan = min(plans, key=lambda p: evaluator.busy_s(p.layout))
                    plan = evaluator.evaluate(plan, 0.0)
                    candidates.append(Candidate(plan, microbatches, plan.predicted.makespan_s))
                    self._evaluated.add(candidates[-1].key[:_CUT])
        return candidates


def first_of_placements(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each placement."""
    firsts: dict[Key, Candidate] = {}
    for candidate in candidates:
        firsts.setdefault(candidate.key[:_PLACEMENT], candidate)
    return list(firsts.values())


def _describe(layout: Layout) -> str:
    return f"{layout_name(layout)}, {describe_savings(layout)}"
