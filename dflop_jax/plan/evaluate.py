"""What a placement would cost: buckets chosen for it, batches scheduled and simulated on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.pipeline.order import in_flight_limit, with_backward
from dflop_jax.plan.placement import Placement
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


def sample_batches(
    shapes: Sequence[SampleShape], global_batch: int, n: int, seed: int = 0
) -> list[list[SampleShape]]:
    """`n` global batches drawn from the profile's shapes, without repeats where it has enough."""
    rng = np.random.default_rng(seed)
    pick = [rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes))]
    for _ in range(n - 1):
        pick.append(rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes)))
    return [[shapes[int(i)] for i in row] for row in pick]


class Evaluator:
    """What every placement is evaluated with: costs, sampled batches, the rules of the run."""

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
            alone = layer_s * self._share * s.n_layers / mesh.stage / mesh.data
            alone *= self.costs.slowdown(mesh)
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
