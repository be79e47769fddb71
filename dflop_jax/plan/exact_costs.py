"""What placements cost at the true shapes of microbatches: seconds, bytes, sends, the step's end.

A load is what a microbatch holds on a data rank: items of an encoder, tokens of the LLM and the sum
of its samples' squared lengths, which attention costs when samples stand in one row unpadded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import in_flight_limit, resources, upstream
from dflop_jax.plan.placement import Placement
from dflop_jax.profile.collectives import all_reduce_s, send_s
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    ITEMS,
    Bucket,
    ModelProfile,
    ModuleShape,
    Plan,
    SampleShape,
    SegmentPlan,
    Task,
)

Array = np.ndarray
DIRECTIONS = (FORWARD, BACKWARD)
# (segment, direction) -> seconds [replicas, microbatches]
Times = Mapping[tuple[str, str], Array]


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

    def ends_share(self, s: SegmentPlan) -> float:
        """Share of its module's ends that a segment runs."""
        share = self.profile.entry_share[s.module]
        return share * s.first + (1.0 - share) * s.last

    def segment_s(
        self, s: SegmentPlan, model: int, direction: str, load: Array, squares: Array
    ) -> Array:
        """Of a segment's task, of each load."""
        kind = "backward" if direction == BACKWARD else "forward"
        ends = self.ends_share(s)
        spent = s.n_layers * self.seconds(s.module, model, f"layer_{kind}", load, squares)
        if ends:
            spent = spent + ends * self.seconds(s.module, model, f"ends_{kind}", load, squares)
        return np.where(load > 0, spent + self.profile.task_overhead_s, 0.0)

    def module_s(self, module: str, model: int, load: float, squares: float) -> float:
        """Of all layers and ends, forward and backward."""
        whole = SegmentPlan(module, module, 0, self.profile.n_layers[module], "", True, True)
        at = (np.array([load]), np.array([squares]))
        return float(sum(self.segment_s(whole, model, d, *at)[0] for d in DIRECTIONS))


@dataclass(frozen=True)
class Loads:
    """What each microbatch of a batch holds on each data rank, [microbatches, ranks]."""

    items: Mapping[str, Array]
    tokens: Array
    squares: Array

    def of(self, module: str) -> Array:
        return self.tokens if module == "llm" else self.items[module]


def ranks_of(placement: Placement) -> dict[str, int]:
    """Data-parallel degree of each module."""
    return {s.module: placement.mesh_of(s).data for s in placement.segments}


def is_replicated(placement: Placement) -> bool:
    """Whether data ranks are replicas that meet only at the end of a step."""
    return len(set(ranks_of(placement).values())) == 1


def sum_loads(
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
        for d in DIRECTIONS:
            each = costs.segment_s(s, mesh.model, d, load, squares)
            found[s.name, d] = each.T if replicated else each.max(axis=1)[None]
    return found


def largest_load(placement: Placement, loads: Sequence[Loads]) -> dict[str, float]:
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
    bucket = Bucket(
        items.get("tiles", 0), max(1, math.ceil(load["llm"])), 1, items.get("windows", 0)
    )
    plan = plan_of(placement, (bucket,))
    return max(costs.model.peak_bytes(plan, in_flight_limit(plan)).values())


def resources_of(placement: Placement) -> dict[str, int]:
    return resources(plan_of(placement, (Bucket(1, 1),)))


def plan_of(placement: Placement, buckets: tuple[Bucket, ...]) -> Plan:
    return Plan("exact", placement.submeshes, placement.segments, buckets)


def replica_plan(placement: Placement, loads: Loads, r: int) -> Plan:
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


def sends_of(costs: ExactCosts, plan: Plan) -> dict[Task, float]:
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
                one = costs.predict(below.module, low.model, shape.items, shape.tokens, "hidden")
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
        n_bytes = float(p.layer_param_bytes[s.module] * s.n_layers)
        n_bytes += p.ends_param_bytes[s.module] * (s.first + s.last) / 2
        one = all_reduce_s(n_bytes / mesh.model, mesh.data, costs.hardware, stride=mesh.model)
        spent[s.submesh] = spent.get(s.submesh, 0.0) + one
    return max(spent.values())
