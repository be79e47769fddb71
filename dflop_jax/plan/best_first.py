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

from dflop_jax.plan.bounds import Space, bounded
from dflop_jax.plan.candidate import Candidate, Key
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import dip_spaces
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import saving_words
from dflop_jax.plan.placement import name_of
from dflop_jax.plan.space import families
from dflop_jax.plan.uniform import as_plan
from dflop_jax.records import Layout
from dflop_jax.schedule import arrival_buckets, capacity_of
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE

# Microbatches into which a baseline cuts a batch, below the configured most; each is scheduled.
_ARRIVAL_CUTS = (4, 8, 16, 32, 64)
# Steps towards exact candidates (one is simulated, or a batch of one whose groups are counted),
# after which what is near is taken: of a whole search, where memory is tight and many combinations
# of options differ by little, and of a look at one policy. Twice as many cost up to twice the time,
# where they are reached.
_MOST_STEPS, _MOST_LOOK_STEPS = 1_500, 400
_NEAREST = 5  # candidates of least bounds that are made exact then; each simulates all batches
# Makespans over the best one's by one bucket, up to which a candidate is worth a closer look, and
# how many get one; each takes some tenths of a second.
CLOSE, MOST_CLOSE = 1.05, 8
_LOOKED = 4  # candidates that a look at one policy gives
# Parts of a key that name the policy and placement, and these with the cut; the last, options.
_PLACEMENT, _CUT = 2, 4


def searched(rules: Rules) -> Iterator[Space]:
    """All that is searched for the configured policy; nothing for a baseline.

    Raises:
      ValueError: there is no placement.
    """
    for policy, of_policy in families(rules.extent).items():
        yield from bounded(policy, of_policy, rules)
    if rules.spec.config.policy in (DIP, "auto"):
        yield from dip_spaces(rules)


def _sorted_by(spaces: Sequence[Space], figure: str) -> Iterator[tuple[float, Space, int, int]]:
    """(figure, space, layout, cut) of every candidate, the least figure first."""
    flat = [getattr(space, figure).ravel() for space in spaces]
    start = [0, *accumulate(map(len, flat))]
    values = np.concatenate([np.zeros(0), *flat])
    for i in np.argsort(values, kind="stable").tolist():
        number = bisect_right(start, i) - 1
        space = spaces[number]
        yield float(values[i]), space, *divmod(i - start[number], len(space.cuts))


class Ranking:
    """Spaces of policies and a baseline's layouts, best-first."""

    def __init__(self, evaluator: Evaluator, spaces: Sequence[Space], baseline: Sequence[Layout]):
        self.evaluator, self.rules, self._spaces = evaluator, evaluator.rules, spaces
        self.policies = {space.policy for space in spaces}  # those that are searched
        self.n_placements = sum(len(space.bound_s) for space in spaces) + len(baseline)
        self.n_candidates = sum(int((~space.repeated).sum()) for space in spaces)
        self.n_fit = sum(int(np.isfinite(space.bound_s).sum()) for space in spaces)
        self._evaluated = set[Key]()
        self._arrived: list[tuple[float, str]] = []
        self._exact = self._arrivals(baseline)

    def ranked(self, on_progress: Callable[[int, int], None] | None = None) -> list[Candidate]:
        """The best options at each cut of the best placements, exact, best first: at least as many
        placements as are to be ranked, and as many of both as are close to the first or enough of
        these; fewer, and the best of what was looked at, where that takes too many steps."""
        n = self.rules.spec.n_ranked
        best: list[Candidate] = []
        for one in self._in_order(self._spaces, _MOST_STEPS):
            far = len(best) >= MOST_CLOSE or (bool(best) and one.bound_s > CLOSE * best[0].bound_s)
            n_names = len(placements(best))
            if far and n_names >= n:
                break
            best.append(one)
            if on_progress and len(placements(best)) > n_names:
                on_progress(n_names + 1, n)
        return best

    @property
    def n_evaluated(self) -> int:
        """Candidates that were scheduled and simulated so far."""
        return len(self._evaluated)

    def nearly_best(self, policy: str, most_s: float) -> list[Candidate]:
        """About the best candidates of a policy, best first: of what some steps find those that are
        close to the first and take at most `most_s` seconds, a few."""
        best: list[Candidate] = []
        spaces = [space for space in self._spaces if space.policy == policy]
        for one in self._in_order(spaces, _MOST_LOOK_STEPS, most_s):
            if len(best) == _LOOKED or (best and one.bound_s > CLOSE * best[0].bound_s):
                break
            best.append(one)
        return best

    def _in_order(
        self, spaces: Sequence[Space], most_steps: int, most_s: float = math.inf
    ) -> Iterator[Candidate]:
        """The best options of each placement and cut, exact, best first; equals by name. After so
        many steps those that are exact then, and the few of least bounds, are all. Ends where all
        others take longer than `most_s`."""
        waiting = _sorted_by(spaces, "bound_s")
        upcoming = next(waiting, None)
        heap: list[tuple[float, Key, Candidate]] = []
        exact, known = list(self._exact), set[Key]()
        n_steps = 0
        while True:
            known_s = heap[0][0] if heap else np.inf
            upcoming_s = upcoming[0] if upcoming else np.inf
            least_s = min((r.bound_s for r in exact), default=np.inf)
            if (nearest_s := min(known_s, upcoming_s, least_s)) > most_s or nearest_s == np.inf:
                return  # all others take longer, or memory does not hold them
            if exact and least_s * (1 + TIE_TOLERANCE) < min(known_s, upcoming_s):
                equal = [r for r in exact if r.bound_s <= least_s * (1 + TIE_TOLERANCE)]
                first = min(equal, key=lambda r: r.key)
                exact.remove(first)
                if first.key[:_CUT] not in known:
                    known.add(first.key[:_CUT])
                    yield first
                continue
            if upcoming and upcoming_s <= known_s:
                nearer = self._begun(*upcoming[1:])
                upcoming = next(waiting, None)
            else:
                nearer = heapq.heappop(heap)[-1].nearer(self.evaluator)
                self._note(nearer)
            for r in nearer:
                if r.is_exact:
                    exact.append(r)
                else:
                    heapq.heappush(heap, (r.bound_s, r.key, r))
            n_steps += 1
            if n_steps >= most_steps:
                exact += [self._made_exact(r) for *_, r in heapq.nsmallest(_NEAREST, heap)]
                heap, upcoming = [], None

    def _made_exact(self, one: Candidate) -> Candidate:
        """It, or of its choices of options what seems best."""
        while not one.is_exact:
            nearer = one.nearer(self.evaluator)
            self._note(nearer)
            one = min(nearer, key=lambda r: (r.bound_s, r.key))
        return one

    def _note(self, nearer: Iterable[Candidate]) -> None:
        """Count candidates that are simulated, each once, whatever options were."""
        self._evaluated |= {r.key[:_CUT] for r in nearer if r.is_exact}

    def _begun(self, space: Space, p: int, c: int) -> list[Candidate]:
        """A candidate that nothing is counted of; nothing where devices cannot form it."""
        if not all(map(self.rules.spec.allowed, space.layout_at(p, c).submeshes)):
            return []
        return [Candidate.of(space, p, c)]

    def nearest(self) -> tuple[float, str]:
        """(bytes of the device that needs most, placement and options) of what needs least."""
        best = min(self._arrived, default=(np.inf, ""))
        for least_bytes, space, p, c in _sorted_by(self._spaces, "least_bytes"):
            if least_bytes >= best[0]:
                break
            needed, options = space.least_peak(p, c)
            if needed < best[0]:
                best = needed, _words(space.plan(p, c, options).layout)
        return best

    def _arrivals(self, layouts: Sequence[Layout]) -> list[Candidate]:
        """A baseline's, few enough to be scheduled and simulated all, with the options that all
        modules can have alike, as frameworks of one setting for all do."""
        evaluator, rules, config = self.evaluator, self.rules, self.evaluator.config
        every = [rules.options(m) for m in rules.n_layers]
        alike = [o for o in every[0] if all(o in options for options in every)]
        candidates = []
        for layout in layouts:
            if not all(map(rules.spec.allowed, layout.submeshes)):
                continue
            finest, ranks = config.max_microbatches, capacity_of(layout).ranks
            for cap in [*(c for c in _ARRIVAL_CUTS if c < finest), finest]:
                self.n_candidates += 1
                per_rank = -(-rules.spec.global_batch // (ranks[layout.modules[-1]] * cap))
                buckets = arrival_buckets(  # quantiles of what arrives
                    evaluator.loads,
                    ranks,
                    max(1, per_rank),
                    n_buckets=config.buckets,
                    piece_tokens=rules.profile.piece_tokens,
                    token_multiple=rules.spec.token_multiple,
                )
                plans = [
                    as_plan(layout, config.policy, buckets, rules, dict.fromkeys(rules.n_layers, o))
                    for o in alike
                ]
                self._arrived += [(evaluator.most_bytes(p), _words(p.layout)) for p in plans]
                plans = list(filter(evaluator.fits, plans))
                if plans:
                    self.n_fit += 1
                    plan = min(plans, key=lambda p: evaluator.busy_s(p.layout))
                    plan = evaluator.evaluate(plan, 0.0)
                    candidates.append(Candidate(plan, cap, plan.predicted.makespan_s))
                    self._evaluated.add(candidates[-1].key[:_CUT])
        return candidates


def placements(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each placement."""
    firsts: dict[Key, Candidate] = {}
    for one in candidates:
        firsts.setdefault(one.key[:_PLACEMENT], one)
    return list(firsts.values())


def _words(layout: Layout) -> str:
    return f"{name_of(layout)}, {saving_words(layout)}"
