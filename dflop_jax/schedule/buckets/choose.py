"""Choose the buckets to compile before training: at most K, for the profiled data.

`choose_buckets` takes the best of some starting sets (chains of sizes), refines it while schedules
of sampled batches get faster, and then solves an integer program over these batches, starting from
that set, to find a better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.batch import (
    LARGE_BATCH,
    Batch,
    drifted_batches,
    rows_needed,
    sample_batches,
)
from dflop_jax.schedule.buckets import sizes as bucket_sizes
from dflop_jax.schedule.buckets.milp import SLACKS, solve_bucket_milp
from dflop_jax.schedule.buckets.problem import (
    BucketEvaluator,
    BucketProblem,
    Buckets,
    first_min,
    is_less,
    largest_first,
)
from dflop_jax.schedule.buckets.sizes import Move, Sizes

INTEGER_PROGRAM = "an integer program"
_USUAL_BATCH = 100  # samples; the number of larger batches is reduced in proportion
# Minimum share of the budget for large batches; also the additional share for the MILP's solution.
_MIN_SHARE = 0.3
_SCALES = (0.85, 1.18, 0.94, 1.06)  # factors on a capacity that refinement tries in turn
_ROW_FACTORS = (2.0, 0.5)  # factors on the number of packed rows, at equal tokens, in turn


@dataclass(frozen=True)
class _Effort:
    """The limits on the work of `choose_buckets`."""

    starts: int  # starting sets
    first: int  # batches on which all starting sets are evaluated
    finalists: int  # sets that are then evaluated on all `batches`
    batches: int  # sampled batches
    budget: int  # batches scheduled in total; refinement stops then
    work: int  # units of work per scheduled batch
    milp_batches: int  # batches of the integer program
    slacks: tuple[float, ...]  # of the integer program; one solution for each
    cuts: tuple[float, ...]  # of candidates: microbatches per batch over `max_cuts`
    # Number of row lengths of candidates (or of row counts, if a row takes one piece) in the last
    # module and in the others.
    last_lengths: int
    other_lengths: int


_EFFORTS = {
    "quick": _Effort(
        6,
        first=4,
        finalists=1,
        batches=4,
        budget=24,
        work=300,
        milp_batches=2,
        slacks=SLACKS[1:],
        cuts=(0.8, 1.2),
        last_lengths=4,
        other_lengths=1,
    ),
    "full": _Effort(
        12,
        first=3,
        finalists=3,
        batches=12,
        budget=280,
        work=1000,
        milp_batches=4,
        slacks=SLACKS,
        cuts=(0.5, 0.8, 1.2, 2.0),
        last_lengths=5,
        other_lengths=2,
    ),
}


@dataclass(frozen=True)
class BucketChoice:
    """The chosen buckets, largest first, and the expected makespan with them."""

    buckets: Buckets
    expected_s: float  # mean simulated makespan of a global batch
    method: str = "a search"  # or INTEGER_PROGRAM, whose solution the search refines


def choose_buckets(
    loads: Sequence[Load],
    problem: BucketProblem,
    *,
    effort: str = "full",
    seed: int = 0,
    with_milp: bool = True,
    start: BucketChoice | None = None,
) -> BucketChoice:
    """Choose at most `problem.n_buckets` buckets that minimise the expected step time on these
    loads (of a DataProfile). The result depends on the arguments only.

    Example: a decoder on two data ranks that takes 1 ms per call and 10 us per token. One call of
    each of two shapes holds 2 x (768 + 512) tokens, as many as a batch of these 16 samples has.

    >>> from dflop_jax.records import BACKWARD, Layout, Load, Price, Prices, ProgramId
    >>> from dflop_jax.records import SegmentPlan, SubmeshPlan
    >>> from dflop_jax.schedule import BucketProblem, choose_buckets
    >>> def prices(layout):
    ...     seconds = {s: 1e-3 + 1e-5 * s.size for s in layout.shapes("decoder")}
    ...     return Prices({ProgramId("decoder", s, BACKWARD): Price(t) for s, t in seconds.items()})
    >>> all_layers = SegmentPlan("decoder", "decoder", 0, 4, "decoder", True, True)
    >>> layout = Layout((SubmeshPlan("decoder", 0, 1, 2, 1),), (all_layers,))
    >>> loads = [Load({"decoder": (40 + 16 * i,)}) for i in range(16)]
    >>> choice = choose_buckets(loads, BucketProblem(layout, prices, global_batch=16, n_buckets=2))
    >>> [b.name for b in choice.buckets]
    ['decoder:1x768', 'decoder:1x512']

    Args:
      effort: "full" takes seconds; "quick" takes a fifth, with fewer batches and a smaller integer
        program, and is enough to rank plans. Both do a fixed amount of work.
      with_milp: whether to use the integer program.
      start: the result of the same call with `with_milp=False`, from which to continue.

    Raises:
      ValueError: no bucket within the limits can hold some sample, or `effort` is unknown.
    """
    if effort not in _EFFORTS:
        raise ValueError(f"effort={effort!r} is not one of {', '.join(_EFFORTS)}")
    work = _EFFORTS[effort]
    sizes = bucket_sizes.sizes_of(loads, problem)
    front = Batch(dominating_loads(loads, tuple(sizes)), problem.capacity)
    batch_share = min(1.0, _USUAL_BATCH / problem.global_batch)
    n_first = max(1, round(work.first * batch_share))
    batches = _draw_batches(loads, problem, work.batches, seed)
    budget = round(work.budget * max(_MIN_SHARE, batch_share))
    evaluator = BucketEvaluator(batches, problem, work=work.work, budget=budget)
    chain_sets = bucket_sizes.bucket_chains(sizes, problem)[: work.starts]
    if start is None:
        starts = [_grow_to_hold(one, front, sizes) for one in chain_sets]
        best_set = _best_start(starts, evaluator, n_first, work.finalists)
        start = _refined_choice(best_set, sizes, evaluator, front)
    if not with_milp:
        return start
    evaluator.remaining = round(_MIN_SHARE * budget)
    milp_sets = solve_bucket_milp(
        _candidates((*chain_sets, start.buckets), sizes, problem, work),
        evaluator.batches[: work.milp_batches],
        problem,
        must_hold=front,
        start=start.buckets,
        slacks=work.slacks,
    )
    milp_choice = start
    if other_sets := [buckets for buckets in milp_sets if buckets != start.buckets]:
        best_set = _best_start(other_sets, evaluator, len(evaluator.batches), 1)
        milp_choice = _refined_choice(best_set, sizes, evaluator, front)
        milp_choice = replace(milp_choice, method=INTEGER_PROGRAM)
    return milp_choice if is_less(milp_choice.expected_s, start.expected_s) else start


def _refined_choice(
    buckets: Buckets, sizes: Sizes, evaluator: BucketEvaluator, front: Batch
) -> BucketChoice:
    refined = _refine(buckets, sizes, evaluator, front)
    n_batches = len(evaluator.batches)
    return BucketChoice(largest_first(refined), evaluator.mean_s(refined, n_batches))


def _draw_batches(
    loads: Sequence[Load], problem: BucketProblem, usual: int, seed: int
) -> list[list[Load]]:
    """Draw global batches from the loads; every second one is drifted."""
    size = problem.global_batch
    min_batches = max(2, round(4 * min(1.0, LARGE_BATCH / size)))
    n = max(min_batches, round(usual * min(1.0, 2 * _USUAL_BATCH / size)))
    plain = sample_batches(loads, size, n - n // 2, seed)
    drifted = drifted_batches(loads, tuple(problem.ranks), size, n // 2, seed)
    return [b for pair in zip_longest(plain, drifted) for b in pair if b is not None]


def _grow_to_hold(buckets: Buckets, front: Batch, sizes: Sizes) -> Buckets:
    """Add rows to the largest bucket of a set until it holds every sample; return the set."""
    first, *rest = largest_first(buckets)
    while not front.any_can_hold((first, *rest)).all():
        shapes = {}
        for m, size in sizes.items():
            shape = first.shape(m) or size.shape(0, holds_largest=True)
            assert shape is not None, "a module with volume has a shape"
            needs = max(rows_needed(load.lengths(m), shape) for load in front.loads)
            is_short = needs > shape.rows * front.capacity.ranks[m]
            shapes[m] = Shape(shape.rows + 1, shape.tokens) if is_short else shape
        first = Bucket.from_shapes(shapes)
    return (first, *rest)


def _best_start(
    starts: Sequence[Buckets], evaluator: BucketEvaluator, n_first: int, n_final: int
) -> Buckets:
    """Return the fastest set on all batches among the `n_final` fastest on the first `n_first`."""
    starts_left: list[Buckets] = []
    for start in starts:
        if not starts_left or not evaluator.is_spent:
            evaluator.mean_s(start, n_first)
            starts_left.append(start)
    finalists: list[Buckets] = []
    while starts_left and len(finalists) < n_final:
        fastest = first_min([evaluator.mean_s(s, n_first) for s in starts_left])
        finalists.append(starts_left.pop(fastest))
    n = len(evaluator.batches)
    return finalists[first_min([evaluator.mean_s(s, n) for s in finalists])]


def _refine(
    best_buckets: Buckets, sizes: Sizes, evaluator: BucketEvaluator, front: Batch
) -> Buckets:
    """Return the set after moves that make the batches faster: scale one or all modules of a
    bucket, drop a module, or split its tokens into more or fewer rows."""
    all_modules = tuple(sizes)
    packed = tuple(m for m in all_modules if not sizes[m].piece_tokens)
    subsets = [all_modules, *((m,) for m in all_modules if len(all_modules) > 1)]
    every = range(len(best_buckets))
    moves = [Move(i, subset, f) for f, i, subset in product(_SCALES, every, subsets)]
    if len(all_modules) > 1:
        moves += [Move(i, (m,), 0.0) for i in every for m in all_modules[:-1]]
    if any(s.rows > 1 for b in best_buckets for m, s in b.shapes if m in packed):
        moves += [Move(i, packed, cut=c) for c, i in product(_ROW_FACTORS, every)]
    untried = len(moves)
    while untried > 0 and not evaluator.is_spent:
        move = moves.pop(0)
        moves.append(move)
        untried -= 1
        new_bucket = move.apply(best_buckets[move.bucket], sizes)
        if new_bucket is None or new_bucket in best_buckets:
            continue
        buckets = (*best_buckets[: move.bucket], new_bucket, *best_buckets[move.bucket + 1 :])
        if front.any_can_hold(buckets).all() and evaluator.is_faster(buckets, best_buckets):
            best_buckets, untried = buckets, len(moves)
    return best_buckets


def _candidates(
    starts: Sequence[Buckets], sizes: Sizes, problem: BucketProblem, work: _Effort
) -> list[Bucket]:
    """Return candidates of the MILP: the buckets of all starting sets, one that holds every sample,
    and buckets for several numbers of microbatches and row lengths of an average batch."""
    candidates = dict.fromkeys(b for start in starts for b in start)
    candidates[bucket_sizes.make_bucket(sizes, {}, holds_largest=True)] = None
    *other_modules, last = sizes
    for cut in work.cuts:
        tokens = {
            m: s.volume / (cut * bucket_sizes.max_cuts(sizes, problem)) for m, s in sizes.items()
        }
        options = [sizes[m].choices(tokens[m], work.other_lengths) for m in other_modules]
        for shapes in product(*options, sizes[last].choices(tokens[last], work.last_lengths)):
            candidates[Bucket.from_shapes(dict(zip(sizes, shapes, strict=True)))] = None
    return list(candidates)


def dominating_loads(loads: Sequence[Load], modules: Sequence[str]) -> list[Load]:
    """Return a subset of loads such that buckets that hold the subset hold all loads. A load is
    dropped if another one has at least as many tokens and pieces, and at least as long a longest
    piece, in every module."""

    def key(load: Load) -> tuple[int, ...]:
        lengths = [load.lengths(m) for m in modules]
        return tuple(n for each in lengths for n in (sum(each), max(each, default=0), len(each)))

    by_key = {key(load): load for load in loads}
    kept_keys: list[tuple[int, ...]] = []
    for amounts in sorted(by_key, reverse=True):
        if not any(all(a >= b for a, b in zip(larger, amounts)) for larger in kept_keys):
            kept_keys.append(amounts)
    return [by_key[k] for k in kept_keys]
