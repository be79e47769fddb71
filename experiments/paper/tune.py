"""Tunes placements and microbatch counts at true shapes: best first by lower bounds.

A candidate's bound starts as the busiest stage's even share of the work and is replaced by that of
its dealt samples when its turn comes, so most candidates are never dealt, let alone simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.pipeline.order import resources
from dflop_jax.plan.placement import Placement
from dflop_jax.records import FORWARD, Direction, Load, Remat, SegmentPlan, SubmeshPlan
from experiments.paper.dealing import Rates, bins_of, dealt_quickly, rates_of
from experiments.paper.exact import (
    DIRECTIONS,
    Content,
    ExactCosts,
    Times,
    content_of,
    peak_bytes,
    plan_of,
    ranks_of,
    replica_trace,
    segment_seconds,
)

_SLOWEST = 2  # replicas that are simulated, of greatest lower bound


@dataclass(frozen=True)
class Tuned:
    """The best of a space; its segments say what is recomputed. `tried` placements with a
    microbatch count, of which `simulated` had a lower bound below the best."""

    placement: Placement
    n_microbatches: int
    makespan_s: float
    peak_bytes: float
    tried: int
    simulated: int

    @property
    def how(self) -> str:
        """Parallelism in short."""
        (remat,) = {s.remat for s in self.placement.segments}
        again = "" if remat == "none" else f", {remat} recomputed"
        return f"{shown(self.placement)}, {self.n_microbatches} microbatches{again}"


def tune(
    placements: Iterable[Placement],
    batches: Sequence[Sequence[Load]],
    costs: ExactCosts,
    *,
    grouping: str,
    memory_bytes: float = 0.0,
    remats: Sequence[Remat] = ("none", "layers"),
    max_microbatches: int = 0,
) -> Tuned:
    """The placement, microbatch count and remat of least mean makespan over the batches.

    Candidates are simulated in the order of their lower bounds, until a bound exceeds the best, so
    the answer is the best of all; ties break by (name, microbatches).

    Args:
      placements: those that the profile has no times for are left out.
      memory_bytes: of a device; 0: not checked.
      remats: to choose from, the same for all segments.
      max_microbatches: most that are tried; counts are powers of 2, and the most that there can
        be. 0: no limit.

    Raises:
      ValueError: nothing fits into memory; says by how much.
    """
    search = Search(batches, costs, grouping)
    known = {(t.module, t.model) for t in costs.profile.timings}
    # (bound, name, microbatches, a number against ties, bytes once dealt, placement)
    queue: list[tuple[float, str, int, int, float, Placement]] = []
    for whole in placements:
        if any((s.module, whole.mesh_of(s).model) not in known for s in whole.segments):
            continue
        most = min(map(len, batches)) // ranks_of(whole)[costs.last]
        for remat in remats:
            p = with_remat(whole, remat)
            for m in _counts(most, max_microbatches):
                queue.append((search.floor_s(p, m), p.name, m, len(queue), 0.0, p))
    heapq.heapify(queue)
    tried, simulated, least = len(queue), 0, math.inf
    best: Tuned | None = None
    while queue and (best is None or queue[0][0] < best.makespan_s):
        _, name, m, number, peak, p = heapq.heappop(queue)
        if not peak:
            peak = search.peak_bytes(p, m)
            least = min(least, peak)
            if not memory_bytes or peak <= memory_bytes:
                heapq.heappush(queue, (search.bound_s(p, m), name, m, number, peak, p))
            continue
        simulated += 1
        mean_s = search.makespan_s(p, m, best.makespan_s if best else math.inf)
        if best is None or mean_s < best.makespan_s:
            best = Tuned(p, m, mean_s, peak, tried, simulated)
    if best is None:
        raise ValueError(
            f"no placement fits into {memory_bytes / 2**30:.1f} GiB a device: the least needs "
            f"{least / 2**30:.1f} GiB; use more devices or higher degrees"
        )
    return replace(best, simulated=simulated)


def shown(placement: Placement) -> str:
    """Stages x data x tensor of each module: "vision 1x8x4, llm 4x2x4"."""
    parts = []
    for module in dict.fromkeys(s.module for s in placement.segments):
        segments = [s for s in placement.segments if s.module == module]
        mesh = placement.mesh_of(segments[0])
        parts.append(f"{module} {len(segments)}x{mesh.data}x{mesh.model}")
    meshes = {frozenset(m.devices) for m in placement.submeshes}
    used = [frozenset(placement.mesh_of(s).devices) for s in placement.segments]
    return ", ".join(parts) + (" (shared)" if len(used) > len(meshes) else "")


def with_remat(placement: Placement, remat: Remat) -> Placement:
    """The placement with every segment's `remat` replaced."""
    return replace(placement, segments=tuple(replace(s, remat=remat) for s in placement.segments))


def largest_amounts(contents: Sequence[Content]) -> dict[str, float]:
    """Most of each module on a rank."""
    return {m: max(float(c.amount[m].max()) for c in contents) for m in contents[0].amount}


def _counts(most: int, limit: int) -> list[int]:
    """Powers of 2 up to `most` and that itself, or up to the limit."""
    if limit and most > limit:
        return [2**k for k in range(limit.bit_length()) if 2**k <= limit]
    return sorted({*(2**k for k in range(most.bit_length())), most}) if most else []


class Search:
    """What the candidates of a search share: sums over the batches, and dealt samples."""

    def __init__(self, batches: Sequence[Sequence[Load]], costs: ExactCosts, grouping: str):
        self.batches, self.costs, self.grouping = batches, costs, grouping
        self._dealt: dict[tuple[object, ...], Content] = {}
        self._volumes: dict[tuple[object, ...], float] = {}
        samples = [load for batch in batches for load in batch]
        n = len(batches)
        modules = list(costs.profile.n_layers)
        self._mean = {m: sum(costs.amount(s, m) for s in samples) / n for m in modules}
        self._pairs = {m: sum(k * k for s in samples for k in s.lengths(m)) / n for m in modules}

    def floor_s(self, p: Placement, m: int) -> float:
        """A lower bound that no dealing changes: seconds of the busiest stage if its ranks shared
        the mean batch out perfectly."""
        of, fused = resources(plan_of(self.costs, p)), p.segments[-1].name
        busy: dict[int, float] = {}
        for s in p.segments:
            for d in DIRECTIONS:
                if (s.name, d) != (fused, FORWARD):
                    r = of[s.submesh]
                    busy[r] = busy.get(r, 0.0) + self._volume_s(s, p.mesh_of(s), d, m)
        return max(busy.values())

    def _volume_s(self, s: SegmentPlan, mesh: SubmeshPlan, direction: Direction, m: int) -> float:
        """Seconds of one rank's even share of the mean batch, in m microbatches."""
        key = (s.module, s.n_layers, s.first, s.last, s.remat, mesh.shape, direction, m)
        if key not in self._volumes:
            ranks = m * mesh.data
            amount = np.array([self._mean[s.module] / ranks])
            pairs = np.array([self._pairs[s.module] / ranks])
            if s.module in self.costs.profile.piece_tokens:
                sizes = np.arange(1.0, 2.0 + max(64.0, self._mean[s.module] / 4))
                by_size = self.costs.segment_s(s, mesh, direction, sizes, np.zeros(1)) / sizes
                content_s = self.costs.segment_s(s, mesh, direction, np.zeros(1), pairs)
                volume_s = m * (amount * by_size.min() + content_s)
            else:  # an overhead, a linear and a convex part
                volume_s = m * self.costs.segment_s(s, mesh, direction, amount, pairs)
            self._volumes[key] = float(volume_s[0])
        return self._volumes[key]

    def dealt(self, p: Placement, m: int, index: int) -> Content:
        """What a batch comes to, remembered for placements that deal alike."""
        ranks, rates = ranks_of(p), None
        if self.grouping == "balanced":
            rates = rates_of(self.costs, p)
        key = (index, m, tuple(ranks.items()), rates)
        if key not in self._dealt:
            bins = self._bins(p, m, index, rates)
            self._dealt[key] = content_of(self.costs, p, self.batches[index], bins, m)
        return self._dealt[key]

    def _bins(self, p: Placement, m: int, index: int, rates: Rates | None) -> np.ndarray:
        batch, ranks = self.batches[index], ranks_of(p)[self.costs.last]
        if rates is None:
            return bins_of(self.costs, p, batch, m, self.grouping)
        return dealt_quickly(self.costs, rates, batch, m * ranks, ranks)

    def peak_bytes(self, p: Placement, m: int) -> float:
        contents = [self.dealt(p, m, i) for i in range(len(self.batches))]
        return peak_bytes(self.costs, p, largest_amounts(contents))

    def bound_s(self, p: Placement, m: int) -> float:
        """A lower bound on the mean makespan of the dealt batches."""
        times = (segment_seconds(self.costs, p, c) for c in self._contents(p, m))
        return float(np.mean([replica_bounds(self.costs, p, t).max() for t in times]))

    def makespan_s(self, p: Placement, m: int, limit_s: float = math.inf) -> float:
        """Mean makespan, of the replicas that look slowest; infinite once it cannot be below the
        limit."""
        contents = self._contents(p, m)
        bounds = [
            replica_bounds(self.costs, p, segment_seconds(self.costs, p, c)) for c in contents
        ]
        spans = [float(b.max()) for b in bounds]
        for i, content in enumerate(contents):
            for r in np.argsort(-bounds[i], kind="stable")[:_SLOWEST].tolist():
                run = replica_trace(self.costs, p, content, r)[0]
                spans[i] = max(spans[i], run.makespan_s)
                if np.mean(spans) >= limit_s:
                    return math.inf
        return float(np.mean(spans))

    def _contents(self, p: Placement, m: int) -> list[Content]:
        return [self.dealt(p, m, i) for i in range(len(self.batches))]


def replica_bounds(costs: ExactCosts, placement: Placement, seconds: Times) -> np.ndarray:
    """A lower bound on each replica's makespan without the step's end, [replicas]: the busiest
    stage, behind the shortest way in and before the shortest way out through the stages before it,
    of which each feeds the next."""
    of, fused = resources(plan_of(costs, placement)), placement.segments[-1].name
    busy: dict[int, np.ndarray] = {}
    for s in placement.segments:
        forward = 0.0 if s.name == fused else seconds[s.name, FORWARD]
        both = forward + seconds[s.name, DIRECTIONS[1]]
        busy[of[s.submesh]] = busy.get(of[s.submesh], np.zeros(both.shape)) + both
    before = np.zeros(1)
    bounds = np.zeros(len(next(iter(busy.values()))))
    for by_microbatch in busy.values():
        bounds = np.maximum(bounds, by_microbatch.sum(axis=1) + before)
        before = before + by_microbatch.min(axis=1)
    return bounds
