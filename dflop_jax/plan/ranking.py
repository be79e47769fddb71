"""Ranks whole spaces best-first: what has the least lower bound is made exact step by step, so the
first exact ones are the best of all.

Makespans that differ by less than a millionth are equal, since the last bits of a fit differ from
machine to machine; of equals the first by name is the better one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from dflop_jax.plan.bounds import Bounds, all_bounds
from dflop_jax.plan.candidate import Candidate, Key
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip_space import dip_bounds
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import Option, saving_words
from dflop_jax.plan.placement import name_of
from dflop_jax.plan.sizing import arrival_plan
from dflop_jax.plan.space import families
from dflop_jax.plan.uniform import as_plan
from dflop_jax.records import Layout
from dflop_jax.schedule.shapes.problem import TIE

# Microbatches into which a baseline cuts a batch, below the configured most; each is scheduled.
_ARRIVAL_CUTS = (4, 8, 16, 32, 64)
# Steps towards exact candidates (a batch of one whose groups are counted, or that is simulated),
# after which what is near is taken: of a whole search, where memory is tight and many combinations
# of options differ by little, and of a look at one policy, which also ends after so many in a row
# that find nothing fast enough. Twice as many cost up to twice the time, where they are reached.
_MOST_STEPS, _MOST_LOOK_STEPS, _MOST_SLOW_STEPS = 1_500, 200, 60
# Of those that are best by one batch, how many are compared by all: alone, one can win by a batch
# that just fits its groups (5% of a step were seen). Twice as many are simulated twice as often.
_LOOKED = 4
# Makespans over the best one's by one bucket, up to which a candidate is worth a closer look, and
# how many get one; each takes some tenths of a second.
CLOSE, MOST_CLOSE = 1.05, 8
# Parts of a key that name the policy and placement, and these with the cut; the last, options.
_PLACEMENT, _CUT = 2, 4
_NEAREST = 5  # candidates of least bounds that are made exact then; each simulates all batches


# Lower bound of a candidate, and what begins to count it.
_Upcoming = tuple[float, Callable[[], list[Candidate]]]


def searched(rules: Rules) -> Iterator[tuple[str, Bounds]]:
    """(policy, bounds) of all that is searched for the configured policy; nothing for a baseline.

    Raises:
      ValueError: there is no placement.
    """
    for policy, space in families(rules.extent).items():
        yield from ((policy, bounds) for bounds in all_bounds(space, rules))
    if rules.spec.config.policy in (DIP, "auto"):
        yield from ((DIP, bounds) for bounds in dip_bounds(rules))


class Ranking:
    """Spaces of policies, (policy, bounds) of each, and a baseline's layouts, best-first, by
    all batches to rank by or by the first `n_batches`."""

    def __init__(
        self,
        evaluator: Evaluator,
        tables: Sequence[tuple[str, Bounds]],
        baseline: Sequence[Layout],
        n_batches: int | None = None,
    ):
        self.evaluator, self.rules = evaluator, evaluator.rules
        self._n_batches = n_batches
        self._tables = tables
        self.n_placements = sum(len(b.bound_s) for _, b in tables) + len(baseline)
        self.n_candidates = self.n_fit = 0
        self._evaluated = set[Key]()
        self._arrived: list[tuple[float, str]] = []
        self._exact = self._arrivals(baseline)

    def ranked(self, on_progress: Callable[[int, int], None] | None = None) -> list[Candidate]:
        """The best options at each cut of the best placements, exact, best first: at least as many
        placements as are to be ranked, and as many of both as are close to the first or enough of
        these; fewer, and the best of what was looked at, where that takes too many steps."""
        n, first_s = self.rules.spec.n_ranked, math.inf
        best: dict[Key, Candidate] = {}
        names = set[Key]()
        for ranked in self._in_order(_MOST_STEPS):
            first_s = min(first_s, ranked.bound_s)
            far = len(best) >= MOST_CLOSE or ranked.bound_s > CLOSE * first_s
            if far and len(names) >= n:
                break
            best.setdefault(ranked.key[:_CUT], ranked)
            if ranked.key[:_PLACEMENT] not in names:
                names.add(ranked.key[:_PLACEMENT])
                if on_progress:
                    on_progress(len(names), n)
        return list(best.values())

    @property
    def n_evaluated(self) -> int:
        """Candidates that were scheduled and simulated so far."""
        return len(self._evaluated)

    @property
    def policies(self) -> set[str]:
        """Those that are searched."""
        return {policy for policy, _ in self._tables}

    def of(self, policy: str, n_batches: int | None = None) -> Ranking:
        """The ranking of a policy's candidates alone."""
        tables = [t for t in self._tables if t[0] == policy]
        return Ranking(self.evaluator, tables, (), n_batches)

    def nearly_best(self, policy: str, most_s: float) -> list[Candidate]:
        """About the best candidates of a policy, best first: those close to the first by all
        sampled batches, of the few that are best by one of them, after some simulations; none
        where none fits or takes at most `most_s` seconds."""
        alone = self.of(policy, n_batches=1)
        in_order = alone._in_order(_MOST_LOOK_STEPS, most_s)
        unlike = islice(_distinct(in_order, _CUT), _LOOKED)
        by_all = [c.by_all(self.evaluator) for c in unlike]
        by_all.sort(key=lambda c: (c.bound_s, c.key))
        return [c for c in by_all if c.bound_s <= min(most_s, CLOSE * by_all[0].bound_s)]

    def _in_order(
        self, most_steps: float = math.inf, most_s: float = math.inf
    ) -> Iterator[Candidate]:
        """All candidates, exact, best first; equals by name. After so many steps, or many in a row
        that find nothing within `most_s`, those that are exact then, and the few of least bounds,
        are all. Ends where all others take longer than `most_s`."""
        waiting = self._by_table()
        upcoming = next(waiting, None)
        heap: list[tuple[float, Key, Candidate]] = []
        exact = list(self._exact)
        n_steps = n_slow = 0
        while exact or heap or upcoming:
            known_s = heap[0][0] if heap else np.inf
            upcoming_s = upcoming[0] if upcoming else np.inf
            least_s = min((r.bound_s for r in exact), default=np.inf)
            if min(known_s, upcoming_s, least_s) > most_s:
                return
            if exact and least_s * (1 + TIE) < min(known_s, upcoming_s):
                equal = [r for r in exact if r.bound_s <= least_s * (1 + TIE)]
                first = min(equal, key=lambda r: r.key)
                exact.remove(first)
                yield first
                continue
            if upcoming and upcoming_s <= known_s:
                nearer = upcoming[1]()
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
            if nearer:  # else devices cannot form it
                n_slow = n_slow + 1 if all(r.bound_s > most_s for r in nearer) else 0
            if n_steps >= most_steps or n_slow >= _MOST_SLOW_STEPS:
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
        self._evaluated |= {r.key[:_CUT] for r in nearer if r.n_simulated}

    def _by_table(self) -> Iterator[_Upcoming]:
        """Candidates that memory holds, the least bound first."""
        flat = [b.bound_s.ravel() for _, b in self._tables]
        sizes = [len(b) for b in flat]
        bounds = np.concatenate([np.zeros(0), *flat])
        table = np.repeat(np.arange(len(flat)), sizes)
        place = np.concatenate([np.zeros(0, int), *map(np.arange, sizes)])
        self.n_candidates += sum(b.n_candidates for _, b in self._tables)
        self.n_fit += int(np.isfinite(bounds).sum())
        for i in np.argsort(bounds, kind="stable").tolist():
            if not np.isfinite(bounds[i]):
                return
            policy, of_space = self._tables[table[i]]
            p, c = divmod(int(place[i]), len(of_space.space.cuts))
            yield float(bounds[i]), partial(self._begun, policy, of_space, p, c)

    def _begun(self, policy: str, bounds: Bounds, p: int, c: int) -> list[Candidate]:
        """A candidate that nothing is counted of; nothing where devices cannot form it."""
        if not all(map(self.rules.spec.allowed, bounds.space.layout_at(p, c).submeshes)):
            return []
        return [Candidate.of(policy, bounds, p, c, self._n_batches)]

    def nearest(self) -> tuple[float, str]:
        """(bytes of the device that needs most, placement and options) of what needs least."""
        best = min(self._arrived, default=(np.inf, ""))
        flat = [b.least_bytes.ravel() for _, b in self._tables]
        table = np.repeat(np.arange(len(flat)), [len(b) for b in flat])
        place = np.concatenate([np.zeros(0, int), *(np.arange(len(b)) for b in flat)])
        least_bytes = np.concatenate([np.zeros(0), *flat])
        for i in np.argsort(least_bytes, kind="stable").tolist():
            if least_bytes[i] >= best[0]:
                break
            policy, bounds = self._tables[table[i]]
            p, c = divmod(int(place[i]), len(bounds.space.cuts))
            needed, options = bounds.least_peak(p, c)
            if needed < best[0]:
                plan = as_plan(
                    bounds.space.layout_at(p, c),
                    policy,
                    (bounds.space.bucket(p, c),),
                    self.rules,
                    options,
                )
                best = needed, _words(plan.layout)
        return best

    def _arrivals(self, layouts: Sequence[Layout]) -> list[Candidate]:
        """A baseline's, few enough to be scheduled and simulated all."""
        policy, finest = self.evaluator.config.policy, self.evaluator.config.max_microbatches
        candidates = []
        for layout in layouts:
            if not all(map(self.rules.spec.allowed, layout.submeshes)):
                continue
            for cap in [*(c for c in _ARRIVAL_CUTS if c < finest), finest]:
                self.n_candidates += 1
                buckets = arrival_plan(self.evaluator, layout, policy, cap).layout.buckets
                plans = [
                    as_plan(layout, policy, buckets, self.rules, options)
                    for options in self._alike()
                ]
                self._arrived += [(self.evaluator.most_bytes(p), _words(p.layout)) for p in plans]
                plans = list(filter(self.evaluator.fits, plans))
                if plans:
                    self.n_fit += 1
                    plan = min(plans, key=lambda p: self.evaluator.busy_s(p.layout))
                    plan = self.evaluator.evaluate(plan, 0.0)
                    makespan_s = plan.predicted.makespan_s
                    candidates.append(Candidate(plan, cap, makespan_s))
                    self._evaluated.add(candidates[-1].key[:_CUT])
        return candidates

    def _alike(self) -> list[dict[str, Option]]:
        """The options that all modules can have alike, as frameworks of one setting for all do."""
        every = [self.rules.options(m) for m in self.rules.n_layers]
        both = [o for o in every[0] if all(o in options for options in every)]
        return [dict.fromkeys(self.rules.n_layers, o) for o in both]


def placements(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each placement."""
    return list(_distinct(candidates, _PLACEMENT))


def _distinct(candidates: Iterable[Candidate], n_parts: int) -> Iterator[Candidate]:
    """The first of those whose keys are alike in so many parts."""
    known = set[Key]()
    for one in candidates:
        if one.key[:n_parts] not in known:
            known.add(one.key[:n_parts])
            yield one


def _words(layout: Layout) -> str:
    return f"{name_of(layout)}, {saving_words(layout)}"
