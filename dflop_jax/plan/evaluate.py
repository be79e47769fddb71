"""What a plan would cost: sampled batches scheduled by the real scheduler and simulated on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.plan.baselines import BASELINES
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.links import send_seconds, step_end_seconds
from dflop_jax.plan.placement import Placement
from dflop_jax.records import Bucket, Plan, SampleShape, Task, Trace
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.cover import demand
from dflop_jax.schedule.online import capacity_of, schedule_batch
from dflop_jax.schedule.shapes.choose import arrival_buckets, choose_buckets
from dflop_jax.sim import memory
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

LOOKAHEADS = (1, 2, 4)  # groups in flight beyond 1F1B's
_WORTH_MEMORY = 0.005  # share of the makespan that a longer lookahead has to bring
_RANK_ROUNDS = 400  # pairs of rows priced for a batch of a plan that is ranked


def sample_batches(
    shapes: Sequence[SampleShape], global_batch: int, n: int, seed: int = 0
) -> list[list[SampleShape]]:
    """`n` global batches drawn from the profile's shapes, without repeats where it has enough."""
    rng = np.random.default_rng(seed)
    pick = [rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes))]
    for _ in range(n - 1):
        pick.append(rng.choice(len(shapes), global_batch, replace=global_batch > len(shapes)))
    return [[shapes[int(i)] for i in row] for row in pick]


def as_plan(
    placement: Placement,
    policy: str,
    buckets: Sequence[Bucket],
    remat: Mapping[str, str] | None = None,
) -> Plan:
    """`remat` by module; None: none."""
    segments = tuple(
        replace(s, remat=(remat or {}).get(s.module, "none")) for s in placement.segments
    )
    return Plan(
        policy,
        placement.submeshes,
        segments,
        tuple(buckets),
        group_size=placement.group_size,
        grouping="arrival" if policy in BASELINES else "balanced",
    )


class Evaluator:
    """Schedules and simulates the same sampled batches on every plan."""

    def __init__(
        self,
        rules: Rules,
        shapes: Sequence[SampleShape],
        batches: Sequence[Sequence[SampleShape]],
        config: PlanConfig,
        global_batch: int,
    ):
        self.rules, self.shapes, self.batches = rules, shapes, batches
        self.config, self.global_batch = config, global_batch
        self._groups: dict[tuple[object, ...], int] = {}

    def priced(self, plan: Plan) -> Priced:
        return Priced(plan, self.rules)

    def peak_bytes(self, plan: Plan) -> float:
        """Of the device that needs the most memory."""
        return max(self.priced(plan).peak_bytes().values())

    def fits(self, plan: Plan) -> bool:
        limit = self.rules.memory_bytes
        return not limit or self.peak_bytes(plan) <= limit

    def n_groups(self, plan: Plan, prices: BucketCosts, batch: int) -> int:
        """Groups of a batch under a plan of one bucket, which decide its makespan."""
        capacity = capacity_of(plan)
        key = (plan.grouping, capacity, plan.buckets, batch)
        if key not in self._groups:
            schedule = schedule_batch(
                self.batches[batch], plan, prices, max_rounds=_RANK_ROUNDS, time_limit_s=60.0
            )
            self._groups[key] = len(schedule.groups)
        return self._groups[key]

    def least_groups(self, plan: Plan, batch: int) -> int:
        """Groups that a batch needs at least under a plan of one bucket."""
        wanted = demand(self.batches[batch], plan.buckets, capacity_of(plan))
        return int(np.ceil((wanted.need_D / wanted.room_DC[:, 0]).max(initial=1.0)))

    def arrival_plan(self, placement: Placement, policy: str, cap: int) -> Plan:
        """A plan of the blind baseline, whose buckets are quantiles of what arrives."""
        draft = as_plan(placement, policy, (Bucket(1, 1),))
        ranks = capacity_of(draft).llm_ranks
        buckets = arrival_buckets(
            self.shapes,
            max(1, -(-self.global_batch // (ranks * cap))),
            n_buckets=self.config.buckets,
            data_ranks=ranks,
            token_multiple=self.rules.token_multiple,
        )
        return replace(draft, buckets=buckets)

    def with_buckets(self, plan: Plan, most: Bucket | None, finest: int, effort: str) -> Plan:
        """The plan with the buckets that suit it best, none larger than `most`, cutting an average
        batch into at most `finest` microbatches.

        Raises:
          ValueError: the largest sample needs a larger one.
        """
        room = capacity_of(plan)

        def seconds(bucket: Bucket) -> tuple[float, ...]:
            return self.priced(replace(plan, buckets=(bucket,))).buckets.seconds[0]

        buckets = choose_buckets(
            self.shapes,
            global_batch=self.global_batch,
            n_buckets=self.config.buckets,
            vision_ranks=room.vision_ranks,
            llm_ranks=room.llm_ranks,
            audio_ranks=room.audio_ranks,
            group_size=plan.group_size,
            seconds=seconds,
            token_multiple=self.rules.token_multiple,
            max_tiles=most.tiles if most else None,
            max_tokens=most.rows * most.tokens if most else None,
            max_microbatches=finest,
            effort=effort,
        ).buckets
        return replace(plan, buckets=tuple(buckets))

    def evaluate(self, plan: Plan) -> Plan:
        """The plan with its predicted figures, and with the lookahead that makes it fastest."""
        prices = self.priced(plan).buckets
        schedules = [schedule_batch(b, plan, prices, step=i) for i, b in enumerate(self.batches)]
        runs = [[g[0].bucket for g in schedule.groups] for schedule in schedules]
        best = self._predicted(plan, runs)
        for lookahead in LOOKAHEADS if plan.grouping == "balanced" else ():
            other = self._predicted(replace(plan, lookahead=lookahead), runs)
            fits = self.fits(other)
            worth = (1 - _WORTH_MEMORY) * best.predicted["makespan_s"]
            best = other if fits and other.predicted["makespan_s"] < worth else best
        return best

    def _predicted(self, plan: Plan, runs: Sequence[Sequence[int]]) -> Plan:
        priced = self.priced(plan)
        traces = [priced.simulate(buckets) for buckets in runs]
        busy = [trace.busy_fraction() for trace in traces]
        figures = {"makespan_s": float(np.mean([t.makespan_s for t in traces]))}
        for m in plan.submeshes:
            if found := [b[m.name] for b in busy if m.name in b]:
                figures[f"busy_fraction.{m.name}"] = float(np.mean(found))
        figures |= {f"peak_bytes.{n}": v for n, v in priced.peak_bytes().items()}
        return replace(plan, predicted=figures)


class Priced:
    """A plan with the seconds of its tasks, sends and collectives."""

    def __init__(self, plan: Plan, rules: Rules):
        self.plan, self.rules = plan, rules
        self.trainable = [s.name for s in plan.segments if rules.trains(s)]
        self.tasks: dict[Task, float] = rules.costs.task_seconds(plan)
        self.ends = step_end_seconds(plan, rules.costs.profile, rules.hardware)
        self.sends = send_seconds(plan, rules.costs, rules.hardware)

    @property
    def buckets(self) -> BucketCosts:
        return bucket_costs(self.plan, self.tasks, self.trainable)

    def simulate(self, buckets: Sequence[int]) -> Trace:
        """A step whose groups have these buckets."""
        return simulate_step(
            self.plan,
            buckets,
            {**self.tasks, **self.ends},
            self.trainable,
            concurrency=self.rules.costs.profile.concurrency,
            sends=self.sends,
        )

    def peak_bytes(self) -> dict[str, float]:
        limits = in_flight_limit(self.plan)
        return memory.peak_bytes(self.plan, self.rules.costs, limits, self.trainable)
