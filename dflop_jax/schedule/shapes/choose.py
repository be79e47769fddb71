"""Offline choice of the shapes that are compiled: at most K buckets for the data at hand.

`choose_buckets` collects starting sets (chains of sizes; with effort "full" also the answer of a
MILP over sampled global batches), keeps the one that schedules them best and refines it while real
schedules of the batches get faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from dflop_jax.records import ITEMS, Bucket, SampleShape
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.cover import Capacity
from dflop_jax.schedule.search import best_groups
from dflop_jax.schedule.shapes.milp import SecondsOf, roomiest_first, solve_choice
from dflop_jax.schedule.shapes.search import Evaluator, Sizes, best_start, chains, refine, span_s

_ARRIVAL_DRAWS = 512  # microbatches drawn to see what arrival order needs
_UNEVEN = 2.5  # how far a candidate's tiles per token may be from the data's
# Samples; of larger batches fewer are scheduled, since they take longer and differ less.
_USUAL_BATCH, _LARGE_BATCH = 100, 512
_EVALUATE_ROUNDS = 4000  # as the online scheduler spends


@dataclass(frozen=True)
class _Effort:
    """Work of a choice: starts tried, on how many batches first, how many of them then on all
    `batches`; batches scheduled in all (`budget`; it ends the refinement), pairs of rows priced for
    each; nodes of the MILP (0: none) over `first` batches."""

    starts: int
    first: int
    finalists: int
    batches: int
    budget: int
    rounds: int
    milp_nodes: int


_EFFORTS = {
    "quick": _Effort(6, first=4, finalists=1, batches=4, budget=24, rounds=300, milp_nodes=0),
    "full": _Effort(12, first=3, finalists=3, batches=12, budget=280, rounds=1000, milp_nodes=1),
}


@dataclass(frozen=True)
class BucketChoice:
    """Chosen buckets, the roomiest first, and what scheduling sampled batches with them gave.

    expected_s: mean makespan of a global batch (`overlapped_makespan`). padding: by module, mean
    padded share of the executed LLM tokens or encoder items.
    """

    buckets: tuple[Bucket, ...]
    expected_s: float
    padding: dict[str, float]


def choose_buckets(
    shapes: Sequence[SampleShape],
    *,
    global_batch: int,
    n_buckets: int = 4,
    vision_ranks: int = 1,
    llm_ranks: int = 1,
    audio_ranks: int = 0,
    group_size: int = 1,
    seconds: SecondsOf | None = None,
    token_multiple: int = 128,
    max_tiles: int | None = None,
    max_tokens: int | None = None,
    max_microbatches: int = 16,
    effort: str = "full",
    seed: int = 0,
    time_limit_s: float = 60.0,
) -> BucketChoice:
    """At most `n_buckets` capacities (tiles, windows, rows of tokens) that minimise expected padded
    time.

    Args:
      shapes: of the training data (a DataProfile's).
      vision_ranks, llm_ranks, audio_ranks: data-parallel degrees; 0 without such an encoder.
      group_size: microbatches run by one program call.
      seconds: per-module seconds of one microbatch of a bucket; by default each module's time is
        its volume, scaled so that the modules are equally busy on this data, plus 2% of a
        microbatch of the mean size for each call.
      token_multiple: tokens are a multiple of it (128 on GPU).
      max_tiles, max_tokens: largest capacity per data rank that memory allows.
      max_microbatches: most microbatches that an average batch is cut into.
      effort: "full" (seconds), or "quick" (a tenth of it: no MILP, fewer batches), good enough
        to rank plans. Either does a fixed amount of work, so the answer depends on the arguments
        only.
      time_limit_s: a safety cap far above that work; an answer that meets it is still valid.

    Raises:
      ValueError: a sample that no bucket within the limits can hold, or an unknown effort.
    """
    if effort not in _EFFORTS:
        raise ValueError(f"effort={effort!r} is not one of {', '.join(_EFFORTS)}")
    work = _EFFORTS[effort]
    deadline_s = time.perf_counter() + time_limit_s
    capacity = Capacity(vision_ranks, llm_ranks, group_size, audio_ranks)
    rng = np.random.default_rng(seed)
    least = max(1, round(4 * min(1.0, _LARGE_BATCH / global_batch)))
    n_batches = max(least, round(work.batches * min(1.0, 2 * _USUAL_BATCH / global_batch)))
    picks = [rng.choice(len(shapes), global_batch) for _ in range(n_batches)]
    batches = [[shapes[i] for i in pick] for pick in picks]
    sizes = _sizes(shapes, capacity, global_batch, token_multiple, max_tiles, max_tokens)
    seconds = seconds or even_seconds(shapes, capacity, global_batch, max_microbatches)
    front = _largest(shapes, capacity.modules)
    share = min(1.0, _USUAL_BATCH / global_batch)
    few = max(1, round(work.first * share))
    evaluator = Evaluator(
        batches,
        capacity,
        seconds,
        rounds=work.rounds,
        budget=round(work.budget * max(0.3, share)),
        deadline_s=deadline_s,
    )
    starts = chains(sizes, n_buckets, max_microbatches, seconds)[: work.starts]
    if work.milp_nodes:
        chosen = solve_choice(
            _candidates(sizes, capacity, max_microbatches, shapes),
            batches[:few],
            capacity,
            n_buckets,
            seconds,
            must_hold=front,
            max_nodes=work.milp_nodes,
            time_limit_s=time_limit_s / 2,
        )
        starts.append(chosen)
    best = refine(best_start(starts, evaluator, few, work.finalists), sizes, evaluator, front)
    return evaluate_buckets(
        roomiest_first(best), batches, capacity, seconds, max_rounds=work.rounds
    )


def evaluate_buckets(
    buckets: Sequence[Bucket],
    batches: Sequence[Sequence[SampleShape]],
    capacity: Capacity,
    seconds: SecondsOf,
    *,
    max_rounds: int = _EVALUATE_ROUNDS,
) -> BucketChoice:
    """Schedule the batches with these buckets: what they really cost and pad."""
    costs = BucketCosts(tuple(tuple(seconds(b)) for b in buckets))
    modules = capacity.modules
    spent_s, used, room = 0.0, np.zeros(len(modules)), np.zeros(len(modules))
    for batch in batches:
        groups, _, _ = best_groups(batch, buckets, capacity, costs, max_rounds=max_rounds)
        spent_s += span_s(groups, costs)
        used += [sum(s.load(m) for s in batch) for m in modules]
        for b, _ in groups:
            room += [capacity.room(buckets[b], m) for m in modules]
    share = 1 - used / np.maximum(room, np.maximum(used, 1))
    return BucketChoice(
        buckets=tuple(buckets),
        expected_s=spent_s / len(batches),
        padding=dict(zip(modules, share.tolist(), strict=True)),
    )


def _sizes(
    shapes: Sequence[SampleShape],
    capacity: Capacity,
    global_batch: int,
    token_multiple: int,
    max_tiles: int | None,
    max_tokens: int | None,
) -> Sizes:
    scale = global_batch / len(shapes)
    least_tokens = _round_up(max(s.llm_tokens for s in shapes), token_multiple)
    least_items = {
        m: -(-max(s.load(m) for s in shapes) // ranks) for m, ranks in capacity.encoders.items()
    }
    most_tokens = None if max_tokens is None else max_tokens // token_multiple * token_multiple
    most_items = {} if max_tiles is None else {"vision": max_tiles}
    for least, most, unit in (
        (least_tokens, most_tokens, "tokens"),
        (least_items.get("vision", 0), max_tiles, "tiles"),
    ):
        if most is not None and most < least:
            raise ValueError(
                f"the largest sample needs a capacity of {least} {unit}, memory allows {most}: "
                "drop or truncate such samples, or use more ranks"
            )
    return Sizes(
        multiple=token_multiple,
        batch_tokens=sum(s.llm_tokens for s in shapes) * scale / capacity.llm_ranks,
        batch_items={
            m: sum(s.load(m) for s in shapes) * scale / n for m, n in capacity.encoders.items()
        },
        least_tokens=least_tokens,
        least_items=least_items,
        most_tokens=most_tokens,
        most_items=most_items,
        mean_tokens=sum(s.llm_tokens for s in shapes) / len(shapes),
    )


def _candidates(
    sizes: Sizes, capacity: Capacity, max_microbatches: int, shapes: Sequence[SampleShape]
) -> list[Bucket]:
    """Candidates of the MILP: an average batch cut evenly into geometrically spaced numbers of
    microbatches, separately for encoder items and tokens, in pairs that the data can fill about
    equally; one that holds every sample; and those without what some samples have nothing of."""
    group = capacity.group_size
    cuts = group * np.unique(
        np.round(np.geomspace(max_microbatches / 4, 6 * max_microbatches, 11) / group).astype(int)
    )
    every = sizes.bucket({}, 0, holds_all=True)
    found = {every: None}
    for t_cut, k_cut in product(cuts[cuts > 0].tolist(), repeat=2):
        if 1 / _UNEVEN <= t_cut / k_cut <= _UNEVEN:
            items = {m: volume / t_cut for m, volume in sizes.batch_items.items()}
            found[sizes.bucket(items, sizes.batch_tokens / k_cut)] = None
    for module in capacity.encoders:
        if sizes.least_items[module] and any(s.load(module) == 0 for s in shapes):
            found |= dict.fromkeys([replace(b, **{ITEMS[module]: 0}) for b in found])
    return list(found)


def even_seconds(
    shapes: Sequence[SampleShape], capacity: Capacity, global_batch: int, max_microbatches: int
) -> SecondsOf:
    """Each module takes 1 s for an average batch without padding; 2% of an average microbatch per
    call stands for launching it."""
    scale = global_batch / len(shapes)
    tokens = sum(s.llm_tokens for s in shapes) * scale / capacity.llm_ranks
    volume = {m: sum(s.load(m) for s in shapes) * scale / n for m, n in capacity.encoders.items()}
    call_s = 0.02 / max_microbatches

    def seconds(bucket: Bucket) -> tuple[float, ...]:
        llm_s = bucket.tokens * bucket.rows / tokens + call_s
        items = {m: bucket.items(m) for m in volume}
        return (
            *(n / volume[m] + call_s if n and volume[m] else 0.0 for m, n in items.items()),
            llm_s,
        )

    return seconds


def arrival_buckets(
    shapes: Sequence[SampleShape],
    per_rank: int,
    *,
    n_buckets: int = 4,
    data_ranks: int = 1,
    token_multiple: int = 128,
    seed: int = 0,
) -> tuple[Bucket, ...]:
    """Buckets of the baseline: `per_rank` rows of one sample each, padded to the longest.

    Capacities are quantiles of what microbatches drawn in arrival order need (longest sample,
    most tiles or windows of a rank); the last holds `per_rank` of the largest sample.
    """
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(shapes), size=(_ARRIVAL_DRAWS, data_ranks, per_rank))
    tokens_N, tiles_N, windows_N = np.array([(s.llm_tokens, s.tiles, s.windows) for s in shapes]).T
    longest = tokens_N[picks].max(axis=(1, 2))
    tiles, windows = (n[picks].sum(axis=2).max(axis=1) for n in (tiles_N, windows_N))
    buckets = {
        Bucket(
            tiles=int(np.quantile(tiles, q)),
            tokens=_round_up(np.quantile(longest, q), token_multiple),
            rows=per_rank,
            windows=int(np.quantile(windows, q)),
        )
        for q in np.arange(1, n_buckets) / n_buckets
    }
    most = _round_up(tokens_N.max(), token_multiple)
    tiles_of_all, windows_of_all = int(tiles_N.max()) * per_rank, int(windows_N.max()) * per_rank
    buckets.add(Bucket(tiles_of_all, most, per_rank, windows_of_all))
    return roomiest_first(list(buckets))


def _round_up(value: float, multiple: int) -> int:
    return max(multiple, int(-(-value // multiple)) * multiple)


def _largest(shapes: Sequence[SampleShape], modules: Sequence[str]) -> list[SampleShape]:
    """Shapes that no other reaches in all that is counted: a bucket set that holds these holds
    all."""
    front: list[SampleShape] = []
    for shape in sorted(shapes, key=lambda s: (-s.llm_tokens, -s.tiles, -s.windows)):
        if not any(all(f.load(m) >= shape.load(m) for m in modules) for f in front):
            front.append(shape)
    return front
