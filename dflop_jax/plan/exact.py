"""Steps of a placement at the true shapes of its microbatches, as systems with dynamic shapes run.

Here nothing is padded to a bucket: samples are dealt to microbatches and data ranks ("arrival":
in the order in which they come, which is random; "balanced": DFLOP's scheduler), samples of a
microbatch stand in one row, and attention costs the square of each sample, not of the row. Each
microbatch is a bucket of its own in a plan made for the batch, so the runtime's task lists and the
simulator are the same as everywhere.

Where encoders and LLM have equal data-parallel degrees, data ranks are replicas that meet only at
the end of a step. Otherwise all ranks exchange features at every microbatch, which then takes as
long as its slowest rank; an encoder's items are shared out evenly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import (
    in_flight_limit,
    order_tasks,
    resources,
    step_graph,
    upstream,
)
from dflop_jax.plan.placement import Placement
from dflop_jax.profile.collectives import all_reduce_s, send_s
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    ITEMS,
    REDUCE,
    Bucket,
    Event,
    ModelProfile,
    ModuleShape,
    Plan,
    SampleShape,
    SegmentPlan,
    Task,
    Trace,
)
from dflop_jax.schedule.balance import balance
from dflop_jax.sim.pipeline import simulate_step

Array = np.ndarray
_QUICK_ROUNDS, _FULL_ROUNDS = 500, 20_000  # pairs of bins priced by the balanced rule
_DIRECTIONS = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class ExactCosts:
    """Seconds of layers and ends as functions of true loads.

    A load is (items, -) of an encoder, (tokens, sum of squared sample lengths) of the LLM.
    """

    profile: ModelProfile
    hardware: Hardware | None = None
    _tables: dict[tuple[str, int, str], Array] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> CostModel:
        return CostModel(self.profile)

    def predict(self, module: str, model: int, items: float, tokens: float, kind: str) -> float:
        """As `CostModel.predict`, of one shape."""
        return self.model.predict(module, model, ModuleShape(int(items), int(tokens)), kind)

    def seconds(self, module: str, model: int, kind: str, load: Array, squares: Array) -> Array:
        """Of a layer or of both ends (`kind` as in CostModel); 0 where there is no load."""
        key = (module, model, kind)
        if module == "llm":
            c = self.coefficients(model, kind)
            return np.where(load > 0, c[0] + c[1] * load + c[2] * squares, 0.0)
        whole = np.ceil(load).astype(int)
        table = self._tables.get(key, np.zeros(1))
        if whole.max(initial=0) >= len(table):
            tokens = self.profile.item_tokens[module]
            more = range(len(table), int(1.25 * whole.max()) + 2)
            found = [self.predict(module, model, n, tokens, kind) for n in more]
            table = self._tables[key] = np.concatenate([table, found])
        return table[whole]

    def coefficients(self, model: int, kind: str) -> Array:
        """c of the LLM's c0 + c1 * tokens + c2 * squares, through three shapes."""
        key = ("llm", model, kind)
        if key not in self._tables:
            sizes = np.array([[1.0, n, n * n] for n in (256, 4096, 16384)])
            values = [self.predict("llm", model, 1, int(n), kind) for n in sizes[:, 1]]
            self._tables[key] = np.linalg.solve(sizes, np.array(values))
        return self._tables[key]

    def segment_s(
        self, s: SegmentPlan, model: int, direction: str, load: Array, squares: Array
    ) -> Array:
        """Of a segment's task, of each load."""
        kind = "backward" if direction == BACKWARD else "forward"
        share = self.profile.entry_share[s.module]
        ends = share * s.first + (1.0 - share) * s.last
        spent = s.n_layers * self.seconds(s.module, model, f"layer_{kind}", load, squares)
        if ends:
            spent = spent + ends * self.seconds(s.module, model, f"ends_{kind}", load, squares)
        return np.where(load > 0, spent + self.profile.task_overhead_s, 0.0)

    def module_s(self, module: str, model: int, load: float, squares: float) -> float:
        """Of all layers and ends, forward and backward."""
        whole = SegmentPlan(module, module, 0, self.profile.n_layers[module], "", True, True)
        at = (np.array([load]), np.array([squares]))
        return float(sum(self.segment_s(whole, model, d, *at)[0] for d in _DIRECTIONS))


@dataclass(frozen=True)
class Loads:
    """What each microbatch of a batch holds on each data rank, [microbatches, ranks]."""

    items: Mapping[str, Array]
    tokens: Array
    squares: Array

    def of(self, module: str) -> Array:
        return self.tokens if module == "llm" else self.items[module]


@dataclass(frozen=True)
class ExactStep:
    """One step. `idle_share`: of all devices' time; `busy_s`: seconds that each segment computes
    (the mean over its data ranks); `trace`: of the slowest replica and, where there are several,
    of the one that is done first."""

    makespan_s: float
    idle_share: float
    busy_s: Mapping[str, float]
    trace: Trace
    plan: Plan


@dataclass(frozen=True)
class Tuned:
    """The best of a space; `tried` placements with a microbatch count, of which `simulated` had a
    lower bound below the best."""

    placement: Placement
    n_microbatches: int
    makespan_s: float
    peak_bytes: float
    tried: int
    simulated: int


def ranks_of(placement: Placement) -> dict[str, int]:
    """Data-parallel degree of each module."""
    return {s.module: placement.mesh_of(s).data for s in placement.segments}


def is_replicated(placement: Placement) -> bool:
    """Whether data ranks are replicas that meet only at the end of a step."""
    return len(set(ranks_of(placement).values())) == 1


def bins_of(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    n_microbatches: int,
    grouping: str,
    max_rounds: int = _FULL_ROUNDS,
) -> Array:
    """Bin of each sample, int [samples]: microbatch * LLM ranks + rank.

    Raises:
      ValueError: fewer samples than bins, or an unknown grouping.
    """
    ranks = ranks_of(placement)["llm"]
    n_bins = n_microbatches * ranks
    if n_microbatches < 1 or n_bins > len(batch):
        raise ValueError(
            f"{len(batch)} samples do not fill {n_microbatches} microbatches on {ranks} ranks; "
            "use fewer microbatches or a larger global batch"
        )
    if grouping == "arrival":
        return np.arange(len(batch)) % n_bins
    if grouping != "balanced":
        raise ValueError(f"grouping {grouping!r} is not arrival or balanced")
    columns, grouped = _prices(costs, placement, batch)
    found = balance(
        columns,
        n_bins,
        time_limit_s=30.0,
        bin_group=1 if is_replicated(placement) else ranks,
        grouped=() if is_replicated(placement) else grouped,
        max_rounds=max_rounds,
    )
    return found.bins


def _prices(
    costs: ExactCosts, placement: Placement, batch: Sequence[SampleShape]
) -> tuple[Array, tuple[int, ...]]:
    """(seconds that each sample adds to each kind of stage [samples, kinds], which kinds hold
    encoders only). Stages that no sample loads more than another does are left out."""
    plan = _plan(placement, (Bucket(1, 1),))
    of, ranks = resources(plan), ranks_of(placement)
    rate: dict[int, dict[str, float]] = {}
    for s in plan.segments:
        low, high = (np.array([x]) for x in ((1024.0, 5120.0) if s.module == "llm" else (8.0, 40.0)))
        tp = plan.submesh(s.submesh).model
        each = sum(
            float(
                (
                    costs.segment_s(s, tp, d, high, high * 1024)
                    - costs.segment_s(s, tp, d, low, low * 1024)
                )[0]
            )
            for d in _DIRECTIONS
        ) / float(high[0] - low[0])
        spread = ranks[s.module] if s.module != "llm" and not is_replicated(placement) else 1
        at = rate.setdefault(of[s.submesh], {})
        at[s.module] = at.get(s.module, 0.0) + each / spread
    kinds = [
        a for a in rate.values()
        if not any(
            b is not a and all(b.get(m, 0.0) > v for m, v in a.items()) for b in rate.values()
        )
    ]  # fmt: skip
    kinds = list({tuple(sorted(k.items())): k for k in kinds}.values())
    columns = [[sum(v * x.load(m) for m, v in k.items()) for k in kinds] for x in batch]
    return np.array(columns), tuple(i for i, k in enumerate(kinds) if "llm" not in k)


def _loads(
    batch: Sequence[SampleShape], bins: Array, n_bins: int, m: int, modules: Iterable[str]
) -> Loads:
    def total(values: Sequence[float]) -> Array:
        return np.bincount(bins, np.array(values, float), n_bins).reshape(m, -1)

    return Loads(
        {k: total([s.load(k) for s in batch]) for k in modules if k in ITEMS},
        total([s.llm_tokens for s in batch]),
        total([float(s.llm_tokens) ** 2 for s in batch]),
    )


def segment_seconds(
    costs: ExactCosts, placement: Placement, loads: Loads
) -> dict[tuple[str, str], Array]:
    """(segment, direction) -> seconds [replicas, microbatches]; one row where ranks are coupled."""
    found = {}
    replicated = is_replicated(placement)
    for s in placement.segments:
        mesh = placement.mesh_of(s)
        load, squares = loads.of(s.module), loads.squares
        if not replicated and s.module != "llm":
            load = np.ceil(load.sum(axis=1, keepdims=True) / mesh.data)
            squares = load
        for d in _DIRECTIONS:
            each = costs.segment_s(s, mesh.model, d, load, squares)
            found[s.name, d] = each.T if replicated else each.max(axis=1)[None]
    return found


def bound_s(placement: Placement, seconds: Mapping[tuple[str, str], Array]) -> float:
    """A lower bound of `makespan_s` without the step's end: the busiest stage of a replica, behind
    the shortest way in and before the shortest way out."""
    plan = _plan(placement, (Bucket(1, 1),))
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


def tune(
    placements: Iterable[Placement],
    batches: Sequence[Sequence[SampleShape]],
    costs: ExactCosts,
    *,
    grouping: str,
    memory_bytes: float = 0.0,
    microbatches: Callable[[int], Sequence[int]] | None = None,
) -> Tuned:
    """The placement and microbatch count of least mean makespan over the batches, by simulation.

    Candidates are simulated in the order of their lower bounds, until a bound exceeds the best.

    Args:
      placements: those that the profile has no times for are left out.
      microbatches: counts to try by the most that there can be; None: powers of 2 and that.

    Raises:
      ValueError: nothing fits into memory; says by how much.
    """
    known = {(t.module, t.model) for t in costs.profile.timings}
    search = _Search(batches, costs, grouping)
    # (bound, name, microbatches, whether the samples are dealt already, placement)
    queue: list[tuple[float, str, int, bool, Placement]] = []
    for p in placements:
        if any((s.module, p.mesh_of(s).model) not in known for s in p.segments):
            continue
        most = min(map(len, batches)) // ranks_of(p)["llm"]
        for m in (microbatches or _powers)(most) if most else ():
            queue.append((search.floor_s(p, m), p.name, m, False, p))
    heapq.heapify(queue)
    tried, simulated, least = len(queue), 0, math.inf
    best: Tuned | None = None
    while queue and (best is None or queue[0][0] < best.makespan_s):
        _, name, m, is_dealt, p = heapq.heappop(queue)
        loads = [search.dealt(p, m, i) for i in range(len(batches))]
        times = [segment_seconds(costs, p, x) for x in loads]
        if not is_dealt:
            peak = peak_bytes(costs, p, _most(p, loads))
            least = min(least, peak)
            if not memory_bytes or peak <= memory_bytes:
                found = float(np.mean([bound_s(p, t) for t in times])) + reduce_s(costs, p)
                heapq.heappush(queue, (found, name, m, True, p))
            continue
        simulated += 1
        mean = float(np.mean([search.makespan_s(p, x, t) for x, t in zip(loads, times)]))
        if best is None or mean < best.makespan_s:
            best = Tuned(p, m, mean, peak_bytes(costs, p, _most(p, loads)), tried, simulated)
    if best is None:
        raise ValueError(
            f"no placement fits into {memory_bytes / 2**30:.1f} GiB a device: the least needs "
            f"{least / 2**30:.1f} GiB; use more devices or higher degrees"
        )
    return replace(best, simulated=simulated)


class _Search:
    """What the candidates of a search share: sums over the batches, dealt samples, task orders."""

    def __init__(self, batches: Sequence[Sequence[SampleShape]], costs: ExactCosts, grouping: str):
        self.batches, self.costs, self.grouping = batches, costs, grouping
        self._dealt: dict[tuple, Loads] = {}
        self._orders: dict[tuple, tuple[list[Task], dict[Task, tuple[Task, ...]]]] = {}
        self._totals: dict[str, tuple[float, float]] = {}
        for module in costs.profile.n_layers:
            each = np.array([s.load(module) for b in batches for s in b], float)
            self._totals[module] = (
                float(each.sum()) / len(batches),
                float((each**2).sum()) / len(batches),
            )
        self._rates: dict[tuple[str, int, str], tuple[float, float]] = {}

    def floor_s(self, p: Placement, m: int) -> float:
        """Seconds of the busiest stage if its ranks shared the mean batch out perfectly."""
        busy: dict[str, float] = {}
        final = p.segments[-1].name
        entry = self.costs.profile.entry_share
        for s in p.segments:
            mesh = p.mesh_of(s)
            ends = entry[s.module] * s.first + (1 - entry[s.module]) * s.last
            for d in _DIRECTIONS:
                if (s.name, d) != (final, FORWARD):
                    one = s.n_layers * self._volume_s(s.module, mesh.model, d, "layer", m, mesh.data)
                    one += ends * self._volume_s(s.module, mesh.model, d, "ends", m, mesh.data)
                    busy[s.submesh] = busy.get(s.submesh, 0.0) + one
        of = _resources(p)
        merged: dict[int, float] = {}
        for name, one in busy.items():
            merged[of[name]] = merged.get(of[name], 0.0) + one
        return max(merged.values()) + reduce_s(self.costs, p)

    def _volume_s(
        self, module: str, model: int, direction: str, part: str, m: int, ranks: int
    ) -> float:
        """Seconds of one rank's even share of the mean batch, in m microbatches."""
        kind = f"{part}_{'backward' if direction == BACKWARD else 'forward'}"
        load, squares = self._totals[module]
        if module == "llm":
            c = self.costs.coefficients(model, kind)
            return m * max(c[0], 0.0) + (c[1] * load + c[2] * squares) / ranks
        key = (module, model, kind)
        if key not in self._rates:
            most = max(s.load(module) for b in self.batches for s in b)
            items = np.arange(1.0, 2 + max(most, load / 4))
            each = self.costs.seconds(module, model, kind, items, items) / items
            self._rates[key] = (float(each.min()), 0.0)
        return self._rates[key][0] * load / ranks

    def dealt(self, p: Placement, m: int, index: int) -> Loads:
        """Loads of a batch; in arrival order they depend on few things."""
        ranks = ranks_of(p)
        key = (index, m, ranks["llm"], None if self.grouping == "arrival" else p)
        if key not in self._dealt:
            bins = bins_of(self.costs, p, self.batches[index], m, self.grouping, 0)
            self._dealt[key] = _loads(self.batches[index], bins, m * ranks["llm"], m, ranks)
        return self._dealt[key]

    def makespan_s(
        self, p: Placement, loads: Loads, times: Mapping[tuple[str, str], Array]
    ) -> float:
        """As `run_bins` would say; all replicas in one pass where they have the same tasks."""
        plan = _replica_plan(p, loads, 0)
        key = (tuple((s.module, s.submesh) for s in p.segments), p.submeshes, len(plan.buckets))
        if not all((loads.of(m) > 0).all() for m in ranks_of(p)):
            n = len(next(iter(times.values())))
            return max(
                _replica(self.costs, p, loads, times, r)[0].makespan_s for r in range(n)
            ) + reduce_s(self.costs, p)
        if key not in self._orders:
            every = [s.name for s in plan.segments]
            graph = step_graph(plan, range(len(plan.buckets)), every)
            order = [t for t in order_tasks(plan, graph) if t.group >= 0]
            self._orders[key] = (order, graph.waits_for)
        order, waits = self._orders[key]
        of = resources(plan)
        where = {s.name: s.submesh for s in plan.segments}
        sends = [
            _sends(self.costs, _replica_plan(p, loads, r)) if self.costs.hardware else {}
            for r in range(len(next(iter(times.values()))))
        ]
        free: dict[object, Array | float] = {}
        ends: dict[Task, Array | float] = {}
        for task in order:
            on, g = where[task.segment], task.group
            start: Array | float = free.get(of[on], 0.0)
            for below in waits[task]:
                end = ends[below]
                if (source := where[below.segment]) != on:
                    name = below.segment if below.direction == FORWARD else task.segment
                    late = np.array([x.get(Task(name, g, below.direction), 0.0) for x in sends])
                    link = (source, on)
                    end = free[link] = np.maximum(free.get(link, 0.0), end) + late
                start = np.maximum(start, end)
            ends[task] = free[of[on]] = start + times[task.segment, task.direction][:, g]
        last = np.max([np.max(e) for e in ends.values()])
        return float(last) + reduce_s(self.costs, p)


def _powers(most: int) -> list[int]:
    return sorted({*(2**k for k in range(most.bit_length())), most})


def _most(placement: Placement, loads: Sequence[Loads]) -> dict[str, float]:
    """Largest load of a rank, by module."""
    ranks = ranks_of(placement)
    found = {}
    for m in ranks:
        each = [x.of(m) for x in loads]
        if m != "llm" and not is_replicated(placement):
            each = [np.ceil(x.sum(axis=1) / ranks[m]) for x in each]
        found[m] = max(float(x.max()) for x in each)
    return found


def peak_bytes(costs: ExactCosts, placement: Placement, load: Mapping[str, float]) -> float:
    """Bytes of the device that needs most, with `load` as the largest on a rank of each module."""
    items = {ITEMS[m]: math.ceil(n) for m, n in load.items() if m != "llm"}
    bucket = Bucket(items.get("tiles", 0), max(1, math.ceil(load["llm"])), 1, items.get("windows", 0))
    plan = _plan(placement, (bucket,))
    return max(costs.model.peak_bytes(plan, in_flight_limit(plan)).values())


def run_step(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    n_microbatches: int,
    grouping: str,
    max_rounds: int = _FULL_ROUNDS,
) -> ExactStep:
    """Simulate one step of a batch; ValueError as for `bins_of`."""
    bins = bins_of(costs, placement, batch, n_microbatches, grouping, max_rounds)
    return run_bins(costs, placement, batch, bins, n_microbatches)


def run_bins(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    bins: Array,
    n_microbatches: int,
    times: Mapping[tuple[str, str], Array] | None = None,
) -> ExactStep:
    """Simulate one step of a batch whose samples lie in given bins; `times` replaces the predicted
    seconds (as `segment_seconds`)."""
    ranks = ranks_of(placement)
    loads = _loads(batch, bins, n_microbatches * ranks["llm"], n_microbatches, ranks)
    times = times or segment_seconds(costs, placement, loads)
    n_replicas = ranks["llm"] if is_replicated(placement) else 1
    traces = [_replica(costs, placement, loads, times, r) for r in range(n_replicas)]
    ends = [trace.makespan_s for trace, _ in traces]
    reduced_s = reduce_s(costs, placement)
    makespan_s = max(ends) + reduced_s
    plan = _plan(placement, (Bucket(1, 1),))
    busy = {
        s.name: sum(
            e.end_s - e.start_s for t, _ in traces for e in t.events
            if e.segment == s.name and e.direction in _DIRECTIONS
        ) / n_replicas
        for s in plan.segments
    }  # fmt: skip
    spent = sum(busy[s.name] * plan.submesh(s.submesh).n_devices for s in plan.segments)
    used = len({d for m in plan.submeshes for d in m.devices})
    slowest, first = int(np.argmax(ends)), int(np.argmin(ends))
    shown, own = traces[slowest]
    events = shown.events
    if n_replicas > 1:
        events += tuple(replace(e, submesh=f"{e.submesh} first") for e in traces[first][0].events)
        events = tuple(replace(e, segment=e.segment) for e in events)
    if reduced_s:
        last = {s.submesh: s.name for s in plan.segments}
        events += tuple(
            Event(m, name, -1, REDUCE, max(ends), makespan_s) for m, name in last.items()
        )
    return ExactStep(
        makespan_s,
        1.0 - spent / (used * makespan_s),
        busy,
        Trace(0, "simulated", events),
        own,
    )


def _resources(placement: Placement) -> dict[str, int]:
    return resources(_plan(placement, (Bucket(1, 1),)))


def _plan(placement: Placement, buckets: tuple[Bucket, ...]) -> Plan:
    return Plan("exact", placement.submeshes, placement.segments, buckets)


def _replica_plan(placement: Placement, loads: Loads, r: int) -> Plan:
    """The plan of one replica (or of the coupled whole); its buckets are the exact shapes of its
    microbatches."""
    replicated, ranks = is_replicated(placement), ranks_of(placement)
    submeshes = placement.submeshes
    if replicated:
        submeshes = tuple(replace(m, first=m.first + r * m.model, data=1) for m in submeshes)

    def held(module: str) -> list[int]:
        each = loads.items.get(module, np.zeros_like(loads.tokens))
        each = each[:, r] if replicated else each.sum(axis=1) / ranks.get(module, 1)
        return [math.ceil(n) for n in each]

    tokens = loads.tokens[:, r] if replicated else loads.tokens.max(axis=1)
    buckets = tuple(
        Bucket(tiles, max(1, int(n)), 1, windows)
        for tiles, n, windows in zip(held("vision"), tokens, held("audio"))
    )
    return Plan("exact", submeshes, placement.segments, buckets)


def _replica(
    costs: ExactCosts,
    placement: Placement,
    loads: Loads,
    times: Mapping[tuple[str, str], Array],
    r: int,
) -> tuple[Trace, Plan]:
    """One replica (or the coupled whole): its trace and its plan."""
    plan = _replica_plan(placement, loads, r)
    seconds = {
        Task(s, g, d): float(x) for (s, d), each in times.items() for g, x in enumerate(each[r])
    }
    names = [s.name for s in plan.segments]
    sends = _sends(costs, plan) if costs.hardware else None
    trace = simulate_step(plan, range(len(plan.buckets)), seconds, names, sends=sends)
    return trace, plan


def _sends(costs: ExactCosts, plan: Plan) -> dict[Task, float]:
    """What crosses between submeshes, by (segment, bucket, direction): activations of half
    precision, each device of the smaller side sending or receiving its share."""
    hardware = costs.hardware
    assert hardware is not None
    found: dict[Task, float] = {}
    for above in plan.segments:
        for below in upstream(plan, above):
            if below.submesh == above.submesh:
                continue
            low, high = plan.submesh(below.submesh), plan.submesh(above.submesh)
            node = hardware.devices_per_node
            across = {d // node for d in low.devices} != {d // node for d in high.devices}
            lanes = min(low.n_devices, high.n_devices)
            for b, bucket in enumerate(plan.buckets):
                shape = bucket.shape_of(below.module, costs.profile.item_tokens)
                if not shape.items:
                    continue
                one = costs.predict(
                    below.module, low.model, shape.items, shape.tokens, "hidden"
                )
                sent = send_s(one * low.data / lanes, hardware, across=across)
                found[Task(below.name, b, FORWARD)] = found[Task(below.name, b, BACKWARD)] = sent
    return found


def reduce_s(costs: ExactCosts, placement: Placement) -> float:
    """Seconds of the step's end: float32 gradients added up over the data ranks of every stage at
    once, the slowest counts; 0 without hardware."""
    if costs.hardware is None:
        return 0.0
    spent: dict[str, float] = {}
    for s in placement.segments:
        mesh, p = placement.mesh_of(s), costs.profile
        n_bytes = p.layer_param_bytes[s.module] * s.n_layers
        n_bytes += p.ends_param_bytes[s.module] * (s.first + s.last) / 2
        one = all_reduce_s(n_bytes / mesh.model, mesh.data, costs.hardware, stride=mesh.model)
        spent[s.submesh] = spent.get(s.submesh, 0.0) + one
    return max(spent.values())


