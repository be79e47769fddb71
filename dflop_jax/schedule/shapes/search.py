"""Search for bucket sets by scheduling sampled batches with them: what packs decides, not volume.

Starts are chains: one main size and a few smaller ones, encoder items and tokens in the data's own
ratio.
Sizes within a factor of two keep the pipeline steady, and small ones top up the last microbatches.
Where attention over a long row of several samples is dear, chains of several short rows are tried
too. The best start is refined by scaling one capacity at a time, or by cutting its rows anew. Work
is counted in batches scheduled, so the answer does not depend on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dflop_jax.records import ITEMS, Bucket, SampleShape
from dflop_jax.schedule.costs import BucketCosts, overlapped_makespan
from dflop_jax.schedule.cover import Capacity
from dflop_jax.schedule.groups import Groups
from dflop_jax.schedule.search import best_groups
from dflop_jax.schedule.shapes.milp import SecondsOf

Buckets = tuple[Bucket, ...]

# Chains, the most promising first (by held-out makespans of five data sets and meshes): cuts of a
# batch over the finest that is sensible, and how far below the main size the smallest lies.
_TOPS, _DEPTHS = (0.62, 0.8, 1.0, 0.45), (0.5, 0.7)
_BEND = 1.3  # sizes of a chain are denser near the main one
_STEPS = (0.85, 1.18, 0.94, 1.06)  # factors by which refinement scales a capacity
_ROWS = (1, 2, 4, 8)  # of a chain's buckets
_CHEAPER = 0.97  # than with fewer rows, or a chain of so many is not worth trying
_WORSE = 1.01  # a set that is this much behind after some batches is given up


@dataclass(frozen=True)
class Sizes:
    """What capacities may be: tokens a multiple of `multiple`, each between what the largest
    sample needs and what memory allows (`None`: no limit), volumes of an average batch per rank.
    """

    multiple: int
    batch_tokens: float
    batch_items: Mapping[str, float]
    least_tokens: int
    least_items: Mapping[str, int]
    most_tokens: int | None
    most_items: Mapping[str, int]
    mean_tokens: float

    def bucket(
        self, items: Mapping[str, float], tokens: float, rows: int = 1, holds_all: bool = False
    ) -> Bucket:
        """The bucket of about these capacities, its tokens in about so many equal rows; `holds_all`
        makes it hold the largest sample."""
        if self.most_tokens is not None:
            tokens = min(tokens, self.most_tokens)
        if holds_all:
            rows = min(rows, max(1, round(tokens / self.least_tokens)))
        k = self.multiple * max(1, int(np.ceil(tokens / rows / self.multiple - 1e-9)))
        if holds_all:
            k = max(k, self.least_tokens)
        if self.most_tokens is not None:
            k = min(k, self.most_tokens)
            rows = min(rows, self.most_tokens // k)
        room = {}
        for m, least in self.least_items.items():
            n = int(np.ceil(items.get(m, 0) - 1e-9)) if least else 0
            n = max(n, least) if holds_all else max(n, 0)
            room[ITEMS[m]] = min(n, self.most_items.get(m, n))
        return Bucket(room.get("tiles", 0), k, rows, room.get("windows", 0))


def chains(
    sizes: Sizes, n_buckets: int, max_microbatches: int, seconds: SecondsOf
) -> list[Buckets]:
    """Starts of at most K sizes below each of a few main sizes, the most promising first: each
    with one row and with as many as make the LLM's share cheaper."""
    finest = min(
        float(max_microbatches),
        1.2 * sizes.batch_tokens / sizes.least_tokens,
        *(1.2 * sizes.batch_items[m] / n for m, n in sizes.least_items.items() if n),
    )
    below_K = (np.arange(n_buckets) / max(1, n_buckets - 1)) ** _BEND
    found: dict[Buckets, None] = {}
    for top, depth in product(_TOPS, _DEPTHS):
        cut = max(1.0, finest * top)
        items = {m: volume / cut for m, volume in sizes.batch_items.items()}
        tokens = sizes.batch_tokens / cut
        least_s = np.inf
        for rows in _ROWS:
            if rows > 1 and tokens / rows < sizes.mean_tokens:
                break
            whole = sizes.bucket(items, tokens, rows)
            price_s = seconds(whole)[-1] / (whole.rows * whole.tokens)
            if price_s > least_s * _CHEAPER:
                break
            least_s = price_s
            chain = [
                sizes.bucket(
                    {m: share * n for m, n in items.items()},
                    share * tokens,
                    rows,
                    holds_all=place == 0,
                )
                for place, share in enumerate((1 - depth * below_K).tolist())
            ]
            found[tuple(dict.fromkeys(chain))] = None
    return list(found)


class Evaluator:
    """Seconds of sampled batches under bucket sets, each batch scheduled once per set, until the
    budget of scheduled batches is spent."""

    def __init__(
        self,
        batches: Sequence[Sequence[SampleShape]],
        capacity: Capacity,
        seconds: SecondsOf,
        *,
        rounds: int,
        budget: int,
        deadline_s: float,
    ):
        self.batches, self.capacity, self.seconds = batches, capacity, seconds
        self.rounds, self.left, self.deadline_s = rounds, budget, deadline_s
        self._seconds: dict[Bucket, tuple[float, ...]] = {}
        self._spans: dict[tuple[Buckets, int], float] = {}

    @property
    def spent(self) -> bool:
        return self.left <= 0 or time.perf_counter() >= self.deadline_s

    def costs(self, buckets: Buckets) -> BucketCosts:
        for b in buckets:
            if b not in self._seconds:
                self._seconds[b] = tuple(self.seconds(b))
        return BucketCosts(tuple(self._seconds[b] for b in buckets))

    def span_s(self, buckets: Buckets, batch: int) -> float:
        key = (buckets, batch)
        if key not in self._spans:
            costs = self.costs(buckets)
            groups, _, _ = best_groups(
                self.batches[batch], buckets, self.capacity, costs, max_rounds=self.rounds
            )
            self._spans[key] = span_s(groups, costs)
            self.left -= 1
        return self._spans[key]

    def mean_s(self, buckets: Buckets, n: int) -> float:
        return sum(self.span_s(buckets, i) for i in range(n)) / n

    def beats(self, buckets: Buckets, best: Buckets) -> bool:
        """Whether a set is faster than `best` on all batches; given up early when far behind."""
        own = other = 0.0
        for i in range(len(self.batches)):
            own, other = own + self.span_s(buckets, i), other + self.span_s(best, i)
            if own > other * (_WORSE if i + 1 < len(self.batches) else 1):
                return False
        return own < other


def span_s(groups: Groups, costs: BucketCosts) -> float:
    return overlapped_makespan([costs.seconds[b] for b, held in groups for _ in held])


def best_start(starts: Sequence[Buckets], evaluator: Evaluator, few: int, n_final: int) -> Buckets:
    """The fastest start on all batches of the `n_final` that are fastest on the first `few`."""
    tried: list[Buckets] = []
    for start in starts:
        if tried and evaluator.spent:
            break
        evaluator.mean_s(start, few)
        tried.append(start)
    ranked = sorted(tried, key=lambda s: evaluator.mean_s(s, few))[:n_final]
    return min(ranked, key=lambda s: evaluator.mean_s(s, len(evaluator.batches)))


def refine(
    best: Buckets, sizes: Sizes, evaluator: Evaluator, front: Sequence[SampleShape]
) -> Buckets:
    """Scale one or all capacities of one bucket, or cut its tokens into more or fewer rows, while
    that makes the batches faster."""
    encoders = tuple(sizes.least_items)
    moves = list(product(_STEPS, range(len(best)), ("all", "llm", *encoders)))
    moves += [(0.0, i, m) for i in range(len(best)) for m in encoders]  # without such items
    if any(b.rows > 1 for b in best):
        moves += list(product((2.0, 0.5), range(len(best)), ("rows",)))
    untried = len(moves)
    while untried > 0 and not evaluator.spent:
        f, i, what = moves.pop(0)
        moves.append((f, i, what))
        untried -= 1
        moved = _scaled(best[i], f, what, sizes)
        buckets = (*best[:i], moved, *best[i + 1 :])
        held = all(any(evaluator.capacity.holds(b, s) for b in buckets) for s in front)
        if held and moved not in best and evaluator.beats(buckets, best):
            best, untried = buckets, len(moves)
    return best


def _scaled(bucket: Bucket, factor: float, what: str, sizes: Sizes) -> Bucket:
    """The bucket with one or all capacities scaled, by at least one unit, or its rows cut anew."""
    items = {m: bucket.items(m) for m in sizes.least_items}
    tokens, rows = bucket.tokens, bucket.rows
    step = 1 if factor > 1 else -1
    if what == "rows":
        return sizes.bucket(items, tokens * rows, max(1, int(rows * factor)))
    for m, n in items.items():
        if what in ("all", m) and n:
            items[m] = max(0, _further(round(n * factor), n, step))
    if what in ("all", "llm"):
        at = bucket.tokens // sizes.multiple
        tokens = sizes.multiple * max(1, _further(round(at * factor), at, step))
    return sizes.bucket(items, tokens * rows, rows)


def _further(value: int, than: int, step: int) -> int:
    return max(value, than + 1) if step > 0 else min(value, than - 1)
