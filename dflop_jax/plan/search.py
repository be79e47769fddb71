"""Chooses a plan: the placement, buckets and microbatch count of least expected makespan.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). A placement whose lower bound
exceeds the best makespan found so far is left out, which keeps the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.pipeline.order import in_flight_limit, with_backward
from dflop_jax.plan.placement import Placement, separate, uniform
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    Bucket,
    DataProfile,
    ModelProfile,
    Plan,
    SampleShape,
    SegmentPlan,
)
from dflop_jax.schedule.buckets import arrival_buckets, choose_buckets
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

MICROBATCH_CAPS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """One evaluated placement and microbatch cap; `makespan_s` is None when it was left out."""

    name: str
    makespan_s: float | None
    lower_bound_s: float
    peak_bytes: float
    why: str


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan and what it was chosen from, best first."""

    plan: Plan
    candidates: tuple[Candidate, ...]


def sample_batches(
    shapes: Sequence[SampleShape], global_batch: int, n: int, seed: int = 0
) -> list[list[SampleShape]]:
    """`n` global batches drawn from the profile's shapes, without repeats where it has enough."""
    rng = np.random.default_rng(seed)
    pick = [rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes))]
    for _ in range(n - 1):
        pick.append(rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes)))
    return [[shapes[int(i)] for i in row] for row in pick]


class _Search:
    """What every candidate is evaluated with."""

    def __init__(
        self,
        profile: ModelProfile,
        data: DataProfile,
        config: PlanConfig,
        global_batch: int,
        token_multiple: int,
        trains: Callable[[SegmentPlan], bool],
    ):
        self.costs, self.data, self.config = CostModel(profile), data, config
        self.profile, self.global_batch, self.trains = profile, global_batch, trains
        self.token_multiple = token_multiple
        self.batches = sample_batches(data.shapes, global_batch, config.sampled_batches)
        # Token counts of every item of an average batch: what must be computed at the least.
        self._share = 1.0 / len(self.batches)
        seen = [s for batch in self.batches for s in batch]
        tiles = sum(s.tiles for s in seen)
        self._lengths = {
            m: np.repeat(float(profile.patches_per_tile), tiles) for m in profile.n_layers
        } | {"llm": np.array([float(s.llm_tokens) for s in seen])}

    def lower_bound_s(self, placement: Placement, policy: str) -> float:
        """No padding, no bubble, no launches; and no more than `concurrency` devices at once."""
        plan = _with_buckets(placement, (Bucket(1, 1),), policy)
        backward = with_backward(plan, [s.name for s in plan.segments if self.trains(s)])
        slowest, device_s = 0.0, 0.0
        for s in plan.segments:
            mesh = plan.submesh(s.submesh)
            kinds = ["layer_forward"] if s.name != plan.segments[-1].name else []
            kinds += ["layer_backward"] if s.name in backward else []
            layer_s = sum(
                self.costs.work(s.module, mesh.model, k, self._lengths[s.module]) for k in kinds
            )
            crowded = max(1.0, mesh.n_devices / self.profile.concurrency)
            timed = max(1.0, mesh.model / self.profile.concurrency)
            alone = layer_s * self._share * s.n_layers / mesh.stage / mesh.data
            alone *= crowded / timed
            slowest = max(slowest, alone)
            device_s += alone * min(mesh.n_devices, self.profile.concurrency)
        return max(slowest, device_s / self.profile.concurrency)

    def plan(self, placement: Placement, policy: str, cap: int, effort: str) -> Plan:
        """The placement with buckets chosen for it, and its predicted figures."""
        draft = _with_buckets(placement, (Bucket(1, 1),), policy)
        vision = draft.data_ranks("vision") if "vision" in draft.modules else 0
        llm = draft.data_ranks("llm")

        trainable = [s.name for s in draft.segments if self.trains(s)]

        def seconds(bucket: Bucket) -> tuple[float, ...]:
            one = replace(draft, buckets=(bucket,))
            return bucket_costs(one, self.costs.task_seconds(one), trainable).seconds[0]

        if policy == "blind":
            per_rank = max(1, -(-self.global_batch // (llm * cap)))
            buckets = arrival_buckets(
                self.data.shapes,
                per_rank,
                n_buckets=self.config.buckets,
                data_ranks=llm,
                token_multiple=self.token_multiple,
            )
        else:
            buckets = choose_buckets(
                self.data.shapes,
                global_batch=self.global_batch,
                n_buckets=self.config.buckets,
                vision_ranks=vision,
                llm_ranks=llm,
                group_size=draft.group_size,
                seconds=seconds,
                token_multiple=self.token_multiple,
                max_microbatches=cap,
                effort=effort,
            ).buckets
        return self.evaluate(replace(draft, buckets=tuple(buckets)))

    def refined(self, plan: Plan, cap: int) -> Plan:
        """The plan's placement with the full bucket search."""
        placement = Placement(plan.submeshes, plan.segments, plan.group_size)
        return self.plan(placement, plan.policy, cap, "full")

    def evaluate(self, plan: Plan) -> Plan:
        """The plan with its predicted figures."""
        trainable = [s.name for s in plan.segments if self.trains(s)]
        seconds = self.costs.task_seconds(plan)
        prices = bucket_costs(plan, seconds, trainable)
        spans, busy = [], {m.name: [] for m in plan.submeshes}  # type: ignore[var-annotated]
        for i, batch in enumerate(self.batches):
            schedule = schedule_batch(batch, plan, prices, step=i)
            trace = simulate_step(
                plan,
                [g[0].bucket for g in schedule.groups],
                seconds,
                trainable,
                concurrency=self.profile.concurrency,
            )
            spans.append(trace.makespan_s)
            for name, fraction in trace.busy_fraction().items():
                busy[name].append(fraction)
        peak = self.costs.peak_bytes(plan, in_flight_limit(plan))
        predicted = {"makespan_s": float(np.mean(spans))}
        predicted |= {f"busy_fraction.{n}": float(np.mean(v)) for n, v in busy.items() if v}
        predicted |= {f"peak_bytes.{n}": v for n, v in peak.items()}
        return replace(plan, predicted=predicted)


def _with_buckets(placement: Placement, buckets: tuple[Bucket, ...], policy: str) -> Plan:
    return Plan(
        policy,
        placement.submeshes,
        placement.segments,
        buckets,
        group_size=placement.group_size,
        grouping="arrival" if policy == "blind" else "balanced",
    )


def search_plan(
    profile: ModelProfile,
    data: DataProfile,
    *,
    n_devices: int,
    global_batch: int,
    config: PlanConfig | None = None,
    memory_bytes: float = 0.0,
    tied: bool = False,
    token_multiple: int = 32,
    trains: Callable[[SegmentPlan], bool] = lambda _: True,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      memory_bytes: memory of a device; 0: not checked.
      tied: head and embedding share parameters, so the LLM stays in one segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.

    Raises:
      ValueError: nothing fits into `memory_bytes`; the message says by how much.
    """
    config = config or PlanConfig()
    search = _Search(profile, data, config, global_batch, token_multiple, trains)
    space = uniform if config.policy == "blind" else separate
    measured = {(t.module, t.model) for t in profile.timings}
    placements = [
        p
        for p in space(
            n_devices,
            profile.n_layers,
            max_model=config.max_model,
            max_stage=config.max_stage,
            tied=tied,
        )
        if all(
            (s.module, m.model) in measured
            for s in p.segments
            for m in p.submeshes
            if m.name == s.submesh
        )
    ]
    if not placements:
        raise ValueError(
            f"policy {config.policy} has no placement on {n_devices} devices: separate encoder and "
            "LLM submeshes need two; raise plan.devices or use plan.policy blind"
        )
    ranked = sorted(
        ((search.lower_bound_s(p, config.policy), p.name, p) for p in placements),
        key=lambda t: t[:2],
    )
    plans: list[Plan] = []
    tried: list[Candidate] = []
    most = config.max_microbatches
    caps = [*(c for c in MICROBATCH_CAPS if c < most), most]
    for i, (bound, name, placement) in enumerate(ranked):
        if plans and bound >= min(map(_makespan_s, plans)):
            tried.append(Candidate(name, None, bound, 0.0, "its lower bound exceeds the best"))
            continue
        for cap in caps:
            plan, candidate = _try(search, placement, config.policy, cap, bound, memory_bytes)
            tried.append(candidate)
            plans += [plan] if plan else []
        if on_progress:
            on_progress(i + 1, len(ranked))
    tried.sort(key=lambda c: (c.makespan_s is None, c.makespan_s or c.lower_bound_s, c.name))
    if not plans:
        raise ValueError(_why_none(tried, memory_bytes))
    # Sorting is stable and the order of `ranked` is fixed, so ties break by (bound, name, cap).
    plans.sort(key=_makespan_s)
    best = plans[0]
    if config.policy != "blind" and config.effort == "full":
        # Placements were ranked with quickly chosen buckets; the winner gets the full search.
        full = search.refined(best, most)
        fits = not memory_bytes or _peak_bytes(full) <= memory_bytes
        best = full if fits and _makespan_s(full) < _makespan_s(best) else best
    return SearchResult(best, tuple(tried))


def _why_none(tried: Sequence[Candidate], memory_bytes: float) -> str:
    peaks = [c.peak_bytes for c in tried if c.peak_bytes > 0]
    if not peaks:
        return f"no placement can hold the data: {tried[0].why}"
    over = (min(peaks) - memory_bytes) / 2**30
    return (
        f"no plan fits into {memory_bytes / 2**30:.2f} GiB per device: the smallest needs "
        f"{over:.2f} GiB more; use more devices, a larger plan.max_model or plan.max_stage, or "
        "smaller samples"
    )


def _makespan_s(plan: Plan) -> float:
    return plan.predicted["makespan_s"]


def _peak_bytes(plan: Plan) -> float:
    return max(v for k, v in plan.predicted.items() if k.startswith("peak_bytes."))


def _try(
    search: _Search,
    placement: Placement,
    policy: str,
    cap: int,
    bound: float,
    memory_bytes: float,
) -> tuple[Plan | None, Candidate]:
    name = f"{placement.name} m<={cap}"
    try:
        plan = search.plan(placement, policy, cap, "quick")
    except ValueError as e:  # this placement cannot hold the largest sample
        return None, Candidate(name, None, bound, 0.0, str(e))
    peak = _peak_bytes(plan)
    if memory_bytes and peak > memory_bytes:
        over = (peak - memory_bytes) / 2**30
        return None, Candidate(name, None, bound, peak, f"needs {over:.2f} GiB more per device")
    return plan, Candidate(name, plan.predicted["makespan_s"], bound, peak, "")
