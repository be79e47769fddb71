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

from dflop_jax.pipeline.order import order_tasks, resources, step_graph
from dflop_jax.plan.links import send_seconds
from dflop_jax.plan.placement import Placement
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    SampleShape,
    SegmentPlan,
    SubmeshPlan,
    Task,
)
from experiments.paper.exact import bins_of, dealt_quickly, prices_of, replica_trace
from experiments.paper.exact_costs import (
    DIRECTIONS,
    Array,
    ExactCosts,
    Loads,
    Times,
    is_replicated,
    largest_load,
    peak_bytes,
    plan_of,
    ranks_of,
    replica_plan,
    resources_of,
    segment_seconds,
    step_end_s,
    sum_loads,
)


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


def tune(
    placements: Iterable[Placement],
    batches: Sequence[Sequence[SampleShape]],
    costs: ExactCosts,
    *,
    grouping: str,
    memory_bytes: float = 0.0,
    remats: Sequence[str] = ("none", "layers"),
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
    search = _Search(batches, costs, grouping)
    known = {(t.module, t.model) for t in costs.profile.timings}
    # (bound, name, microbatches, a number against ties, bytes once dealt, placement)
    queue: list[tuple[float, str, int, int, float, Placement]] = []
    for whole in placements:
        if any((s.module, whole.mesh_of(s).model) not in known for s in whole.segments):
            continue
        most = min(map(len, batches)) // ranks_of(whole)["llm"]
        for remat in remats:
            p = with_remat(whole, remat)
            for m in _counts(most, max_microbatches):
                queue.append((search.floor_s(p, m), p.name, m, len(queue), 0.0, p))
    heapq.heapify(queue)
    tried, simulated, least = len(queue), 0, math.inf
    best: Tuned | None = None
    while queue and (best is None or queue[0][0] < best.makespan_s):
        _, name, m, number, peak, p = heapq.heappop(queue)
        loads = [search.dealt(p, m, i) for i in range(len(batches))]
        times = [segment_seconds(costs, p, x) for x in loads]
        if not peak:
            peak = peak_bytes(costs, p, largest_load(p, loads))
            least = min(least, peak)
            if not memory_bytes or peak <= memory_bytes:
                found = float(np.mean([bound_s(p, t) for t in times])) + search.end_s(p)
                heapq.heappush(queue, (found, name, m, number, peak, p))
            continue
        simulated += 1
        mean = float(np.mean([search.makespan_s(p, x, t) for x, t in zip(loads, times)]))
        if best is None or mean < best.makespan_s:
            best = Tuned(p, m, mean, peak, tried, simulated)
    if best is None:
        raise ValueError(
            f"no placement fits into {memory_bytes / 2**30:.1f} GiB a device: the least needs "
            f"{least / 2**30:.1f} GiB; use more devices or higher degrees"
        )
    return replace(best, simulated=simulated)


def with_remat(placement: Placement, remat: str) -> Placement:
    """The placement with every segment's `remat` replaced."""
    return replace(placement, segments=tuple(replace(s, remat=remat) for s in placement.segments))


def _counts(most: int, limit: int) -> list[int]:
    """Powers of 2 up to `most` and that itself, or up to the limit."""
    if limit and most > limit:
        return [2**k for k in range(limit.bit_length()) if 2**k <= limit]
    return sorted({*(2**k for k in range(most.bit_length())), most}) if most else []


class _Search:
    """What the candidates of a search share: sums over the batches, dealt samples, task orders."""

    def __init__(self, batches: Sequence[Sequence[SampleShape]], costs: ExactCosts, grouping: str):
        self.batches, self.costs, self.grouping = batches, costs, grouping
        self._dealt: dict[tuple, Loads] = {}
        self._orders: dict[tuple, tuple[list[Task], dict[Task, tuple[Task, ...]]]] = {}
        self._rates: dict[tuple, float] = {}
        self._volumes: dict[tuple, float] = {}
        self._ends: dict[tuple, float] = {}
        self._smallest: dict[tuple, float] = {}
        each = {m: [s.load(m) for b in batches for s in b] for m in costs.profile.n_layers}
        self._mean = {m: sum(n) / len(batches) for m, n in each.items()}  # of a batch
        self._least = {m: float(min(n)) for m, n in each.items()}  # of a sample
        self._squares = sum(n * n for n in each["llm"]) / len(batches)

    def floor_s(self, p: Placement, m: int) -> float:
        """A lower bound that no dealing changes: seconds of the busiest stage if its ranks shared
        the mean batch out perfectly, behind and before the other stages' for the smallest sample.
        """
        of, final = resources_of(p), p.segments[-1].name
        ranks = ranks_of(p)
        busy: dict[int, float] = {}
        ahead: dict[int, float] = {}
        for s in p.segments:
            mesh = p.mesh_of(s)
            least = self._least[s.module]
            if not is_replicated(p) and s.module != "llm":
                least = math.ceil(least * ranks["llm"] / mesh.data)
            r = of[s.submesh]
            ahead[r] = ahead.get(r, 0.0) + self._alone_s(s, mesh, least)
            for d in DIRECTIONS:
                if (s.name, d) != (final, FORWARD):
                    busy[r] = busy.get(r, 0.0) + self._volume_s(s, mesh, d, m)
        best = before = 0.0
        for r in busy:
            best = max(best, before + busy[r])
            before += ahead[r]
        return best + self.end_s(p)

    def _alone_s(self, s: SegmentPlan, mesh: SubmeshPlan, load: float) -> float:
        """Seconds of a single sample of this load, forward and backward."""
        key = (*_like(s), mesh.model, load)
        if key not in self._smallest:
            at = (np.array([load]), np.array([load * load]))
            each = [self.costs.segment_s(s, mesh, d, *at) for d in DIRECTIONS]
            self._smallest[key] = float(sum(x[0] for x in each))
        return self._smallest[key]

    def _volume_s(self, s: SegmentPlan, mesh: SubmeshPlan, direction: str, m: int) -> float:
        """Seconds of one rank's even share of the mean batch, in m microbatches."""
        key = (*_like(s), mesh.model, mesh.data, direction, m)
        if key not in self._volumes:
            each = m * mesh.data
            load = np.array([self._mean[s.module] / each])
            if s.module == "llm":  # linear in tokens and squares
                squares = np.array([self._squares / each])
                one = m * self.costs.segment_s(s, mesh, direction, load, squares)
            else:
                one = m * load * self._least_rate(s, mesh, direction)
            self._volumes[key] = float(one[0])
        return self._volumes[key]

    def _least_rate(self, s: SegmentPlan, mesh: SubmeshPlan, direction: str) -> float:
        """Least seconds of an item, in microbatches of any size up to a quarter of a batch."""
        key = (*_like(s), mesh.model, direction)
        if key not in self._rates:
            items = np.arange(1.0, 2.0 + max(64.0, self._mean[s.module] / 4))
            each = self.costs.segment_s(s, mesh, direction, items, items) / items
            self._rates[key] = float(each.min())
        return self._rates[key]

    def end_s(self, p: Placement) -> float:
        """`step_end_s`, remembered: it does not depend on microbatches and remat."""
        key = (p.submeshes, tuple((s.submesh, s.start, s.stop) for s in p.segments))
        if key not in self._ends:
            self._ends[key] = step_end_s(self.costs, p)
        return self._ends[key]

    def dealt(self, p: Placement, m: int, index: int) -> Loads:
        """Loads of a batch, remembered for placements that deal alike."""
        ranks, prices = ranks_of(p), None
        if self.grouping == "balanced":
            prices = prices_of(self.costs, p)
        key = (index, m, ranks["llm"], prices)
        if key not in self._dealt:
            batch = self.batches[index]
            if prices is None:
                bins = bins_of(self.costs, p, batch, m, self.grouping)
            else:
                bins = dealt_quickly(prices, batch, m * ranks["llm"], ranks["llm"])
            self._dealt[key] = sum_loads(batch, bins, m, ranks)
        return self._dealt[key]

    def makespan_s(self, p: Placement, loads: Loads, times: Times) -> float:
        """As `run_bins` would say; all replicas in one pass where they have the same tasks."""
        n_replicas = len(next(iter(times.values())))
        if not all((loads.of(m) > 0).all() for m in ranks_of(p)):
            traces = [replica_trace(self.costs, p, loads, times, r)[0] for r in range(n_replicas)]
            return max(t.makespan_s for t in traces) + self.end_s(p)
        plan = replica_plan(p, loads, 0)
        key = (tuple((s.name, s.submesh) for s in p.segments), p.submeshes, len(plan.buckets))
        if key not in self._orders:
            every = [s.name for s in plan.segments]
            graph = step_graph(plan, range(len(plan.buckets)), every)
            order = [t for t in order_tasks(plan, graph) if t.group >= 0]
            self._orders[key] = (order, graph.waits_for)
        order, waits = self._orders[key]
        of = resources(plan)
        where = {s.name: s.submesh for s in plan.segments}
        sends = self._sends(p, loads, n_replicas)
        free: dict[object, Array | float] = {}
        ends: dict[Task, Array | float] = {}
        for task in order:
            on, g = where[task.segment], task.group
            start: Array | float = free.get(of[on], 0.0)
            for below in waits[task]:
                end = ends[below]
                if (source := where[below.segment]) != on:
                    name = below.segment if below.direction == FORWARD else task.segment
                    if (name, below.direction) in sends:
                        link = (source, on)
                        late = sends[name, below.direction][:, g]
                        end = free[link] = np.maximum(free.get(link, 0.0), end) + late
                start = np.maximum(start, end)
            ends[task] = free[of[on]] = start + times[task.segment, task.direction][:, g]
        last = np.max([np.max(e) for e in ends.values()])
        return float(last) + self.end_s(p)

    def _sends(self, p: Placement, loads: Loads, n_replicas: int) -> Times:
        """Of (segment, direction), [replicas, microbatches]: lines through two loads of the segment
        that reads, which is what a link makes of them."""
        coupled, ranks = not is_replicated(p), ranks_of(p)
        load = {m: (x.max(axis=1)[None] if coupled else x.T) for m, x in [("llm", loads.tokens)]}
        for m, x in loads.items.items():
            load[m] = np.ceil(x.sum(axis=1) / ranks[m])[None] if coupled else x.T
        low, high = {"llm": 1024, "": 8}, {"llm": 4096, "": 32}  # tokens; items of encoders
        probes = tuple(Bucket(at[""], at["llm"], 1, at[""]) for at in (low, high))
        reader = {s.name: "llm" if s.last else s.module for s in p.segments}
        found: dict[tuple[str, str], Array] = {}
        for r in range(n_replicas):
            plan = replace(replica_plan(p, loads, r), buckets=probes)
            at = send_seconds(plan, self.costs.model, self.costs.hardware)
            for task, first in at.items():
                if task.group == 0:
                    name, d, m = task.segment, task.direction, reader[task.segment]
                    x, kind = load[m], "llm" if m == "llm" else ""
                    slope = (at[Task(name, 1, d)] - first) / (high[kind] - low[kind])
                    line = first + slope * (x[r] - low[kind])
                    found.setdefault((name, d), np.zeros(x.shape))[r] = line
        return found


def _like(s: SegmentPlan) -> tuple:
    """What a segment's costs depend on."""
    return s.module, s.n_layers, s.first, s.last, s.remat


def bound_s(placement: Placement, seconds: Times) -> float:
    """A lower bound of `makespan_s` without the step's end: the busiest stage of a replica, behind
    the shortest way in and before the shortest way out."""
    plan = plan_of(placement)
    of, final = resources(plan), plan.segments[-1].name
    busy: dict[int, Array] = {}
    order: list[int] = []
    ahead: dict[int, Array] = {}
    for s in plan.segments:
        forward = 0.0 if s.name == final else seconds[s.name, FORWARD]
        both = forward + seconds[s.name, BACKWARD]
        r = of[s.submesh]
        if r not in busy:
            order.append(r)
        busy[r] = busy.get(r, 0.0) + both.sum(axis=1)
        ahead[r] = ahead.get(r, 0.0) + both
    best, before = 0.0, np.zeros(1)
    for r in order:
        best = max(best, float((busy[r] + before).max()))
        before = before + ahead[r].min(axis=1)
    return best
