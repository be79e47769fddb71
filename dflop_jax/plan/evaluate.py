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
from dflop_jax.schedule.online import capacity_of, schedule_batch
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

LOOKAHEADS = (1, 2, 4)  # groups in flight beyond 1F1B's
_WORTH_MEMORY = 0.005  # share of the makespan that a longer lookahead has to bring


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
        memory_bytes: float = 0.0,
    ):
        self.memory_bytes = memory_bytes
        self.costs, self.data, self.config = CostModel(profile), data, config
        self.profile, self.global_batch, self.trains = profile, global_batch, trains
        self.token_multiple = token_multiple
        self.batches = sample_batches(data.shapes, global_batch, config.sampled_batches)
        # Token counts of every item of an average batch: what must be computed at the least.
        self._share = 1.0 / len(self.batches)
        seen = [s for batch in self.batches for s in batch]
        self._lengths = {
            m: np.repeat(float(n), sum(s.load(m) for s in seen))
            for m, n in profile.item_tokens.items()
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
        room = capacity_of(draft)
        trainable = [s.name for s in draft.segments if self.trains(s)]

        def seconds(bucket: Bucket) -> tuple[float, ...]:
            one = replace(draft, buckets=(bucket,))
            return bucket_costs(one, self.costs.task_seconds(one), trainable).seconds[0]

        if policy == "blind":
            per_rank = max(1, -(-self.global_batch // (room.llm_ranks * cap)))
            buckets = arrival_buckets(
                self.data.shapes,
                per_rank,
                n_buckets=self.config.buckets,
                data_ranks=room.llm_ranks,
                token_multiple=self.token_multiple,
            )
        else:
            buckets = choose_buckets(
                self.data.shapes,
                global_batch=self.global_batch,
                n_buckets=self.config.buckets,
                vision_ranks=room.vision_ranks,
                llm_ranks=room.llm_ranks,
                audio_ranks=room.audio_ranks,
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
        """The plan with its predicted figures, and with the lookahead that makes it fastest."""
        trainable = [s.name for s in plan.segments if self.trains(s)]
        seconds = self.costs.task_seconds(plan)
        prices = bucket_costs(plan, seconds, trainable)
        schedules = [schedule_batch(b, plan, prices, step=i) for i, b in enumerate(self.batches)]
        buckets = [[g[0].bucket for g in schedule.groups] for schedule in schedules]

        def predicted(plan: Plan) -> Plan:
            traces = [
                simulate_step(plan, b, seconds, trainable, concurrency=self.profile.concurrency)
                for b in buckets
            ]
            busy = [trace.busy_fraction() for trace in traces]
            peak = self.costs.peak_bytes(plan, in_flight_limit(plan))
            figures = {"makespan_s": float(np.mean([t.makespan_s for t in traces]))}
            for m in plan.submeshes:
                if found := [b[m.name] for b in busy if m.name in b]:
                    figures[f"busy_fraction.{m.name}"] = float(np.mean(found))
            figures |= {f"peak_bytes.{n}": v for n, v in peak.items()}
            return replace(plan, predicted=figures)

        best = predicted(plan)
        for lookahead in LOOKAHEADS if plan.grouping == "balanced" else ():
            other = predicted(replace(plan, lookahead=lookahead))
            fits = not self.memory_bytes or peak_bytes(other) <= self.memory_bytes
            worth = (1 - _WORTH_MEMORY) * best.predicted["makespan_s"]
            best = other if fits and other.predicted["makespan_s"] < worth else best
        return best


def peak_bytes(plan: Plan) -> float:
    """Of the device that needs the most memory."""
    return max(v for k, v in plan.predicted.items() if k.startswith("peak_bytes."))


def _with_buckets(placement: Placement, buckets: tuple[Bucket, ...], policy: str) -> Plan:
    return Plan(
        policy,
        placement.submeshes,
        placement.segments,
        buckets,
        group_size=placement.group_size,
        grouping="arrival" if policy == "blind" else "balanced",
    )
