"""Offline choice of the shapes that are compiled: at most K buckets for the data at hand.

`choose_buckets` keeps the best of some starting sets (chains of sizes), refines it while real
schedules of sampled batches get faster, and asks an integer program over these batches, which
begins with it, for a better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.batch import Batch, Capacity, rows_needed
from dflop_jax.schedule.buckets.milp import SLACKS, solve_choices
from dflop_jax.schedule.buckets.problem import (
    BucketEvaluator,
    Buckets,
    ShapeProblem,
    first_least,
    less,
    roomiest_first,
)
from dflop_jax.schedule.buckets.sizes import Move, Sizes, bucket_of, chains, finest, sizes_of
from dflop_jax.schedule.sampled_batches import LARGE_BATCH, drifted_batches, sample_batches

_USUAL_BATCH = 100  # samples; of larger batches fewer are scheduled in proportion
_MILP_NODES = 1  # of the integer program's branch and bound
_MILP_SHARE = 0.3  # of the batches that refinement may schedule, again for the MILP's answer
_SCALES = (0.85, 1.18, 0.94, 1.06)  # factors by which refinement scales a capacity, in turn
_ROW_FACTORS = (2.0, 0.5)  # factors by which it multiplies packed rows of the same tokens, in turn


@dataclass(frozen=True)
class _Effort:
    """Work of a choice: starts tried, on how many batches first, how many of them then on all
    `batches`; batches scheduled in all (`budget`; it ends the refinement), units of work for each.

    Of the integer program the batches whose groups it chooses, at most, and amounts of slack; of
    its candidates cuts of a batch over the finest that is sensible, and lengths of packed rows (or,
    where a row takes one piece, numbers of rows) in the last module and in the others. Twice as
    many candidates or batches make it twice as large.
    """

    starts: int
    first: int
    finalists: int
    batches: int
    budget: int
    work: int
    milp_batches: int
    slacks: tuple[float, ...]
    cuts: tuple[float, ...]
    last_lengths: int
    other_lengths: int


_EFFORTS = {
    "quick": _Effort(
        6, first=4, finalists=1, batches=4, budget=24, work=300,
        milp_batches=2, slacks=SLACKS[1:], cuts=(0.8, 1.2), last_lengths=4, other_lengths=1,
    ),
    "full": _Effort(
        12, first=3, finalists=3, batches=12, budget=280, work=1000,
        milp_batches=4, slacks=SLACKS, cuts=(0.5, 0.8, 1.2, 2.0), last_lengths=5, other_lengths=2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BucketChoice:
    """Chosen buckets, the roomiest first, and what scheduling sampled batches with them gave.

    expected_s: mean simulated makespan of a global batch. padding: by module, mean padded share of
    the executed tokens. made_by: "search" or "integer", who proposed them; gain: by how much that
    is faster than what the other proposed, relative. gap: how far below its own best answer the
    integer program's optimum may be, relative; 1 where it was not asked.
    """

    buckets: Buckets
    expected_s: float
    padding: dict[str, float]
    made_by: str = "search"
    gain: float = 0.0
    gap: float = 1.0


def choose_buckets(
    loads: Sequence[Load],
    problem: ShapeProblem,
    *,
    effort: str = "full",
    seed: int = 0,
    with_milp: bool = True,
    start: BucketChoice | None = None,
) -> BucketChoice:
    """At most `problem.n_buckets` buckets that minimise the expected step on these loads (a
    DataProfile's). The answer depends on the arguments alone.

    A decoder on two data ranks, 1 ms a call and 10 us a token. One call at each of two shapes has
    room for 2 x (768 + 512) tokens, as many as a batch of these 16 samples has:

    >>> from dflop_jax.records import BACKWARD, Layout, Load, Price, Prices, ProgramId
    >>> from dflop_jax.records import SegmentPlan, SubmeshPlan
    >>> from dflop_jax.schedule import ShapeProblem, choose_buckets
    >>> def prices(layout):
    ...     seconds = {s: 1e-3 + 1e-5 * s.size for s in layout.shapes("decoder")}
    ...     return Prices({ProgramId("decoder", s, BACKWARD): Price(t) for s, t in seconds.items()})
    >>> all_layers = SegmentPlan("decoder", "decoder", 0, 4, "decoder", True, True)
    >>> layout = Layout((SubmeshPlan("decoder", 0, 1, 2, 1),), (all_layers,))
    >>> loads = [Load({"decoder": (40 + 16 * i,)}) for i in range(16)]
    >>> choice = choose_buckets(loads, ShapeProblem(layout, prices, global_batch=16, n_buckets=2))
    >>> [b.name for b in choice.buckets]
    ['decoder:1x768', 'decoder:1x512']

    Args:
      effort: "full" (seconds), or "quick" (a fifth of it: fewer batches, a smaller integer
        program), good enough to rank plans. Either does a fixed amount of work.
      with_milp: False leaves the integer program out.
      start: the answer of the same choice without it, to go on from.

    Raises:
      ValueError: a sample that no bucket within the limits can hold, or an unknown effort.
    """
    if effort not in _EFFORTS:
        raise ValueError(f"effort={effort!r} is not one of {', '.join(_EFFORTS)}")
    work = _EFFORTS[effort]
    sizes = sizes_of(loads, problem)
    front = Batch(largest(loads, tuple(sizes)), tuple(sizes))
    share = min(1.0, _USUAL_BATCH / problem.global_batch)
    few = max(1, round(work.first * share))
    batches = _drawn(loads, problem, work.batches, seed)
    budget = round(work.budget * max(0.3, share))
    evaluator = BucketEvaluator(batches, problem, work=work.work, budget=budget)
    chained = chains(sizes, problem)[: work.starts]
    if start is None:
        starts = [_holding(one, front, sizes, problem.capacity) for one in chained]
        best = _best_start(starts, evaluator, few, work.finalists)
        start = _choice(_refined(best, sizes, evaluator, front, problem), evaluator)
    if not with_milp:
        return start
    answers = solve_choices(
        _candidates((*chained, start.buckets), sizes, problem, work),
        evaluator.batches[: work.milp_batches],
        problem,
        must_hold=front,
        start=start.buckets,
        slacks=work.slacks,
        max_nodes=_MILP_NODES,
    )
    others = [buckets for buckets in answers if buckets != start.buckets]
    evaluator.left = round(_MILP_SHARE * budget)
    other = start
    if others:
        best = _best_start(others, evaluator, len(batches), 1)
        other = _choice(_refined(best, sizes, evaluator, front, problem), evaluator)
    wins = less(other.expected_s, start.expected_s)
    slower, faster = (start, other) if wins else (other, start)
    return replace(
        faster,
        made_by="integer" if wins else "search",
        gain=1 - faster.expected_s / slower.expected_s,
        gap=min(answers.values(), default=1.0),
    )


def _choice(buckets: Buckets, evaluator: BucketEvaluator) -> BucketChoice:
    n = len(evaluator.batches)
    expected_s, padding = evaluator.mean_s(buckets, n), {}
    for m in evaluator.problem.ranks:
        room = sum(evaluator.scheduled(buckets, i)[1][m] for i in range(n))
        used = sum(int(b.tokens[m].sum()) for b in evaluator.batches)
        padding[m] = 1 - used / room if room else 0.0
    return BucketChoice(roomiest_first(buckets), expected_s, padding)


def _drawn(loads: Sequence[Load], problem: ShapeProblem, usual: int, seed: int) -> list[list[Load]]:
    """Global batches drawn from the loads, every second one drifted."""
    least = max(2, round(4 * min(1.0, LARGE_BATCH / problem.global_batch)))
    n = max(least, round(usual * min(1.0, 2 * _USUAL_BATCH / problem.global_batch)))
    plain = sample_batches(loads, problem.global_batch, n - n // 2, seed)
    modules = tuple(problem.ranks)
    drifted = drifted_batches(loads, modules, problem.global_batch, n // 2, seed)
    return [b for pair in zip_longest(plain, drifted) for b in pair if b is not None]


def _holding(buckets: Buckets, front: Batch, sizes: Sizes, capacity: Capacity) -> Buckets:
    """The set with rows added to its roomiest bucket until it holds every sample."""
    ranked = roomiest_first(buckets)
    first, rest = ranked[0], ranked[1:]
    while not front.able_any((first, *rest), capacity).all():
        more = {}
        for m, size in sizes.items():
            shape = first.shape(m) or size.shape(0, holds_all=True)
            assert shape is not None, "a module with volume has a shape"
            needs = max(rows_needed(load.lengths(m), shape) for load in front.loads)
            short = needs > shape.rows * capacity.ranks[m]
            more[m] = Shape(shape.rows + 1, shape.tokens) if short else shape
        grown = Bucket.of(more)
        assert grown != first, "a row that holds the longest piece was chosen"
        first = grown
    return (first, *rest)


def _best_start(
    starts: Sequence[Buckets], evaluator: BucketEvaluator, few: int, n_final: int
) -> Buckets:
    """The fastest start on all batches of the `n_final` that are fastest on the first `few`."""
    tried: list[Buckets] = []
    for start in starts:
        if tried and evaluator.spent:
            break
        evaluator.mean_s(start, few)
        tried.append(start)
    finalists: list[Buckets] = []
    while tried and len(finalists) < n_final:
        finalists.append(tried.pop(first_least([evaluator.mean_s(s, few) for s in tried])))
    n = len(evaluator.batches)
    return finalists[first_least([evaluator.mean_s(s, n) for s in finalists])]


def _refined(
    best: Buckets, sizes: Sizes, evaluator: BucketEvaluator, front: Batch, problem: ShapeProblem
) -> Buckets:
    """Scale one or all modules of one bucket, leave one out, or cut its tokens into more or fewer
    rows, while that makes the batches faster."""
    every = tuple(sizes)
    packed = tuple(m for m in every if not sizes[m].piece)
    parts = [every, *((m,) for m in every if len(every) > 1)]
    moves = [Move(i, part, f) for f, i, part in product(_SCALES, range(len(best)), parts)]
    if len(every) > 1:
        moves += [Move(i, (m,), 0.0) for i in range(len(best)) for m in every[:-1]]
    if any(s.rows > 1 for b in best for m, s in b.shapes if m in packed):
        moves += [Move(i, packed, cut=c) for c, i in product(_ROW_FACTORS, range(len(best)))]
    untried = len(moves)
    while untried > 0 and not evaluator.spent:
        move = moves.pop(0)
        moves.append(move)
        untried -= 1
        moved = move.applied(best[move.bucket], sizes)
        if moved is None or moved in best:
            continue
        buckets = (*best[: move.bucket], moved, *best[move.bucket + 1 :])
        if front.able_any(buckets, problem.capacity).all() and evaluator.beats(buckets, best):
            best, untried = buckets, len(moves)
    return best


def _candidates(
    starts: Sequence[Buckets], sizes: Sizes, problem: ShapeProblem, work: _Effort
) -> list[Bucket]:
    """Candidates of the MILP: the buckets of all starts, one that holds every sample, and others
    that cut an average batch into a few numbers of microbatches with rows of several lengths."""
    candidates = dict.fromkeys(b for start in starts for b in start)
    candidates[bucket_of(sizes, {}, holds_all=True)] = None
    *others, last = sizes
    for cut in work.cuts:
        tokens = {m: s.volume / (cut * finest(sizes, problem)) for m, s in sizes.items()}
        options = [sizes[m].choices(tokens[m], work.other_lengths) for m in others]
        for shapes in product(*options, sizes[last].choices(tokens[last], work.last_lengths)):
            candidates[Bucket.of(dict(zip(sizes, shapes, strict=True)))] = None
    return list(candidates)


def largest(loads: Sequence[Load], modules: Sequence[str]) -> list[Load]:
    """Loads that together ask for all that any does: a set of buckets that holds these holds all.

    No other load has as many tokens, pieces and as long a piece of every module; those of unequal
    pieces may yet need more rows, so the one that needs most at each number of pieces stays too.
    """

    def key(load: Load) -> tuple[int, ...]:
        each = []
        for m in modules:
            lengths = load.lengths(m)
            each += [sum(lengths), max(lengths, default=0), len(lengths)]
        return tuple(each)

    by_key = {key(load): load for load in loads}
    ranked = sorted(by_key, reverse=True)
    front: list[tuple[int, ...]] = []
    for one in ranked:
        if not any(all(a >= b for a, b in zip(other, one)) for other in front):
            front.append(one)
    return [by_key[k] for k in front]
