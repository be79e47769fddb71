"""Modules side by side or on the same devices, and what their groups take, to choose shapes for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Edge,
    Layout,
    Load,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    SubmeshPlan,
)
from dflop_jax.schedule import ShapeProblem

Seconds = Callable[[Bucket], Mapping[str, float]]  # of a group of every module
_FORWARD_SHARE = 1 / 3  # of forward and backward
_CALL_SHARE = 0.02  # of an average microbatch, which launching a program takes


def whole_modules(
    ranks: Mapping[str, int],
    edges: tuple[Edge, ...] = (),
    *,
    shared: bool = False,
    group_size: int = 1,
) -> Layout:
    """Every module whole on so many data ranks: on devices of its own, or on `shared` ones."""
    submeshes, first = [], 0
    for m, n in ranks.items():
        submeshes.append(SubmeshPlan(m, 0 if shared else first, 1, n, 1))
        first += n
    segments = tuple(SegmentPlan(m, m, 0, 1, m, True, True) for m in ranks)
    return Layout(tuple(submeshes), segments, edges=edges, group_size=group_size)


def prices_by(seconds: Seconds) -> Callable[[Layout], Prices]:
    """Prices of layouts of whole modules; what others read has a forward and a backward."""

    def prices(layout: Layout) -> Prices:
        senders = {e.source for e in layout.edges}
        programs: dict[ProgramId, Price] = {}
        for bucket in layout.buckets:
            took_s = seconds(bucket)
            for m, shape in bucket.shapes:
                shares: dict[Direction, float] = {BACKWARD: 1.0}
                if m in senders:
                    shares = {FORWARD: _FORWARD_SHARE, BACKWARD: 1 - _FORWARD_SHARE}
                for direction, share in shares.items():
                    price = Price(took_s.get(m, 0.0) * share)
                    programs.setdefault(ProgramId(m, shape, direction), price)
        return Prices(programs)

    return prices


def even_seconds(
    loads: Sequence[Load], ranks: Mapping[str, int], global_batch: int, most_microbatches: int = 16
) -> Seconds:
    """Each module takes 1 s for an average batch without padding, and some for each call."""
    scale = global_batch / len(loads)
    volume = {m: sum(s.tokens(m) for s in loads) * scale / n for m, n in ranks.items()}
    call_s = _CALL_SHARE / most_microbatches

    def seconds(bucket: Bucket) -> Mapping[str, float]:
        return {m: s.size / volume[m] + call_s for m, s in bucket.shapes if volume[m]}

    return seconds


def problem_of(layout: Layout, seconds: Seconds, global_batch: int, **options: Any) -> ShapeProblem:
    """What shapes are chosen for on such a layout; `options` are fields of it."""
    return ShapeProblem(layout, prices_by(seconds), global_batch, **options)
