"""Simulated steps of a plan with dynamic shapes.

The grouping assigns samples to microbatches and data ranks: "arrival" in their random order,
"balanced" with DFLOP's scheduler. A module's microbatch is one row of its tokens or one row per
piece, without padding.

When all modules have equal data degrees, data ranks are replicas that synchronise only at the end
of a step, and each has its own schedule. Otherwise all ranks exchange features at every
microbatch, which takes as long as its slowest rank; modules before the last spread their work
evenly over their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan import memory
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Group,
    Load,
    ModelProfile,
    Plan,
    Schedule,
    SegmentPlan,
    Shape,
    content_seconds,
    piece_content,
)
from dflop_jax.schedule import balance
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import in_flight_limit, submesh_resources
from experiments.paper.cases import Case, Step
from experiments.paper.costs import get_cost_model, get_prices

Array = np.ndarray
# By module, pieces (of modules with one piece a row) or tokens, then content by feature:
# [1 + features, ...].
Amounts = Mapping[str, Array]
# Replicas with lower estimates, as a share of the highest, are not simulated. In 16 pipelined steps
# of SigLIP-6B + Qwen2.5-7B on 64 A100 the slowest replica had at least 0.87 of it.
MIN_ESTIMATE_SHARE = 0.8
PROBE_AMOUNTS = {True: 16, False: 4096}  # pieces, tokens whose price balances samples


def sum_amounts(profile: ModelProfile, batch: Sequence[Load]) -> Amounts:
    """Return the amounts of every sample, [1 + features, samples]."""
    amounts = {}
    for module in profile.n_layers:
        lengths = [load.lengths(module) for load in batch]
        counts = map(len, lengths) if module in profile.piece_tokens else map(sum, lengths)
        content = [piece_content([load], module).sum(axis=1) for load in batch]
        amounts[module] = np.vstack([np.array([*counts], float), np.transpose(content)])
    return amounts


def make_shape(profile: ModelProfile, module: str, amount: float) -> Shape | None:
    """Return the shape for an amount, or None for 0."""
    n, tile = int(np.ceil(amount - 1e-9)), profile.piece_tokens.get(module)
    return (Shape(n, tile) if tile else Shape(1, n)) if n else None


def is_replicated(plan: Plan) -> bool:
    """Whether data ranks are replicas that synchronise only at the end of a step."""
    return len({plan.layout.data_ranks(m) for m in plan.layout.modules}) == 1


def sum_bins(plan: Plan, samples: Amounts, bins: Array, n_microbatches: int) -> Amounts:
    """Sum samples by bin (microbatch * last module's ranks + rank) to [..., microbatches, ranks].
    A module that spreads its work evenly has a single column."""
    last, replicated = plan.layout.modules[-1], is_replicated(plan)
    n_bins = n_microbatches * plan.layout.data_ranks(last)
    sums = {}
    for m, columns in samples.items():
        bin_sums = np.stack(
            [np.bincount(bins, x, n_bins).reshape(n_microbatches, -1) for x in columns]
        )
        if m != last and not replicated:
            bin_sums = bin_sums.sum(axis=2, keepdims=True) / plan.layout.data_ranks(m)
            bin_sums[0] = np.ceil(bin_sums[0])
        sums[m] = bin_sums
    return sums


def segment_tasks(costs: CostModel, segment: SegmentPlan) -> tuple[Direction, ...]:
    """Directions that a segment runs; the last segment's backward includes its forward."""
    return (FORWARD, BACKWARD) if costs.has_forward(segment) else (BACKWARD,)


def predict_segment_s(costs: CostModel, plan: Plan, amounts: Amounts) -> dict[str, Array]:
    """Predict the seconds of a microbatch's tasks in each segment."""
    seconds_by_key: dict[object, Array] = {}
    seconds = {}
    for s in plan.layout.segments:
        mesh = plan.layout.submesh(s.submesh).shape
        key = costs.price_key(s), mesh
        if key not in seconds_by_key:
            amount, *content = amounts[s.module]
            tile = costs.profile.piece_tokens.get(s.module)
            rows, tokens = (amount, tile) if tile else (1.0 * (amount > 0), amount)
            predictions = costs.predict(s.module, mesh.model, rows, tokens)
            # No transfers between data ranks, unless a sample's modules are on different ones.
            exchanged = 0.0 if is_replicated(plan) else None
            segment = costs.segment(replace(s, zero=1), mesh, exchanged)
            seconds_by_key[key] = sum(
                segment.task_s(1, predictions, d)
                + content_seconds(segment.content_s(1, d), content)
                for d in segment_tasks(costs, s)
            )
        seconds[s.name] = seconds_by_key[key]
    return seconds


def predict_stage_s(costs: CostModel, plan: Plan, amounts: Amounts) -> Array:
    """Predict the seconds of a microbatch's tasks on each stage (set of devices), [stages, ...]."""
    resources = submesh_resources(plan.layout)
    stages: dict[int, Array] = {}
    for s, seconds in zip(
        plan.layout.segments, predict_segment_s(costs, plan, amounts).values(), strict=True
    ):
        stages[resources[s.submesh]] = stages.get(resources[s.submesh], 0.0) + seconds
    return np.stack(np.broadcast_arrays(*stages.values()))


def assign_bins(
    costs: CostModel, plan: Plan, samples: Amounts, n_microbatches: int, grouping: str
) -> Array:
    """Return the bin of each sample, int [samples]: microbatch * ranks of the last module + rank.

    Raises:
      ValueError: there are fewer samples than bins, or the grouping is unknown.
    """
    last = plan.layout.modules[-1]
    n, ranks = len(samples[last][0]), plan.layout.data_ranks(last)
    n_bins = n_microbatches * ranks
    if n_microbatches < 1 or n_bins > n:
        raise ValueError(
            f"{n} samples do not fill {n_microbatches} microbatches on {ranks} ranks; "
            "use fewer microbatches or a larger global batch"
        )
    if grouping == "arrival":
        return np.arange(n) % n_bins
    if grouping != "balanced":
        raise ValueError(f"grouping {grouping!r} is not arrival or balanced")
    columns, grouped = _sample_stage_seconds(costs, plan, samples)
    group = ranks if grouped else 1
    # Longest first without refinement: with 5,000 units of work steps of SigLIP-6B + Qwen2.5-7B
    # and Qwen2-Audio-7B on 64 A100 took 2 and 7% longer.
    return balance(columns, n_bins, bin_group=group, grouped=grouped, work=0)


def _sample_stage_seconds(
    costs: CostModel, plan: Plan, samples: Amounts
) -> tuple[Array, tuple[int, ...]]:
    """Return the seconds that samples add to the stages, [samples, stages], without stages that
    another one always exceeds; and the columns that all ranks of a microbatch share."""
    last, is_coupled = plan.layout.modules[-1], not is_replicated(plan)
    module_columns = []  # by module, [stages, samples]
    for m, sums in samples.items():
        probe_amount = PROBE_AMOUNTS[m in costs.profile.piece_tokens]
        units = np.array([probe_amount, *np.ones(len(sums) - 1)])
        probes = {k: np.zeros((len(units), len(units))) for k in samples}
        probes[m] = np.diag(units)
        rates = predict_stage_s(costs, plan, probes) / units
        ranks = plan.layout.data_ranks(m) if is_coupled and m != last else 1
        module_columns.append(rates @ sums / ranks)
    stage_seconds, is_in_last_module = sum(module_columns).T, module_columns[-1].any(axis=1)
    stages = range(stage_seconds.shape[1])

    def is_exceeded(stage: int) -> bool:
        others = [
            k
            for k in stages
            if k != stage and (stage_seconds[:, k] >= stage_seconds[:, stage]).all()
        ]
        return any(
            k < stage or (stage_seconds[:, k] > stage_seconds[:, stage]).any() for k in others
        )

    binding = [j for j in stages if not is_exceeded(j)]
    grouped = [i for i, j in enumerate(binding) if is_coupled and not is_in_last_module[j]]
    return stage_seconds[:, binding], tuple(grouped)


def estimate_pipeline_s(stages: Array) -> Array:
    """Estimate 1F1B seconds from task seconds, [stages, microbatches, replicas] to [replicas]: the
    busiest stage, and one pass through the others."""
    busiest = stages.sum(axis=1).argmax(axis=0)
    in_busiest = np.take_along_axis(stages, busiest[None, None], axis=0)[0]
    return in_busiest.sum(axis=0) + (stages.sum(axis=0) - in_busiest).min(axis=0)


def estimate_replica_s(costs: CostModel, plan: Plan, amounts: Amounts) -> Array:
    """Estimate step seconds, without the end of the step, by replica or for all coupled ranks."""
    stages = predict_stage_s(costs, plan, amounts)
    return estimate_pipeline_s(stages if is_replicated(plan) else stages.max(axis=2, keepdims=True))


def build_schedules(
    costs: CostModel, plan: Plan, amounts: Amounts, replicas: Sequence[int]
) -> list[Schedule]:
    """Build schedules, without pieces, of some replicas or of all coupled ranks (replica 0)."""
    if not is_replicated(plan):
        amounts = {m: sums.max(axis=2, keepdims=True) for m, sums in amounts.items()}
    n_microbatches = len(amounts[plan.layout.modules[-1]][0])
    schedules = []
    for r in replicas:
        groups: list[Group] = []
        for i in range(n_microbatches):
            shapes = {
                m: make_shape(costs.profile, m, amounts[m][0][i, r]) for m in plan.layout.modules
            }
            present = [m for m, shape in shapes.items() if shape]
            group_index = {m: len(groups) + k for k, m in enumerate(present)}
            for m in present:
                feeds = tuple(group_index[t] for t in plan.layout.targets(m) if t in group_index)
                content = tuple(amounts[m][1:, i, r].astype(int).tolist())
                groups.append(Group(m, shapes[m], feeds, content))
        schedules.append(Schedule(0, tuple(groups)))
    return schedules


def set_buckets(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan with the shapes of the schedule as buckets."""
    buckets = dict.fromkeys(Bucket.from_shapes({g.module: g.shape}) for g in schedule.groups)
    return plan.with_layout(buckets=tuple(buckets))


def simulate_replica(case: Case, plan: Plan, schedule: Schedule) -> float:
    """Simulate one replica's step, with the end of the step over all data ranks; return seconds."""
    plan = set_buckets(plan, schedule)
    names = [s.name for s in plan.layout.segments]
    return simulate_step(plan, schedule, get_prices(case, plan), names).makespan_s


def find_slowest_replica(
    case: Case, plan: Plan, amounts: Amounts, min_estimate_share: float = MIN_ESTIMATE_SHARE
) -> tuple[float, Schedule]:
    """Return step seconds and schedule of the slowest replica, or of all coupled ranks. Replicas
    with estimates below `min_estimate_share` of the highest are not simulated."""
    costs = get_cost_model(case)
    estimates_s = estimate_replica_s(costs, plan, amounts)
    replicas = np.flatnonzero(estimates_s >= min_estimate_share * estimates_s.max())
    schedules = build_schedules(costs, plan, amounts, replicas.tolist())
    simulated_s = [simulate_replica(case, plan, s) for s in schedules]
    slowest = int(np.argmax(simulated_s))
    return simulated_s[slowest], schedules[slowest]


def simulate_batch(
    case: Case, plan: Plan, batch: Sequence[Load], n_microbatches: int, grouping: str
) -> Step:
    """Simulate a step of one batch; raises ValueError as `assign_bins`."""
    costs = get_cost_model(case)
    samples = sum_amounts(costs.profile, batch)
    bins = assign_bins(costs, plan, samples, n_microbatches, grouping)
    amounts = sum_bins(plan, samples, bins, n_microbatches)
    step_s, schedule = find_slowest_replica(case, plan, amounts)
    seconds = predict_segment_s(costs, plan, amounts)
    busy_s = {name: float(x.sum(axis=0).mean()) for name, x in seconds.items()}
    return Step(tuple(batch), set_buckets(plan, schedule), schedule, step_s, busy_s)


def max_peak_bytes(costs: CostModel, plan: Plan, max_amounts: Mapping[str, float]) -> float:
    """Return the highest peak bytes of a device with these amounts on a rank of each module."""
    shapes = {
        m: shape for m, n in max_amounts.items() if (shape := make_shape(costs.profile, m, n))
    }
    plan = plan.with_layout(buckets=(Bucket.from_shapes(shapes),))
    return max(memory.peak_bytes(plan.layout, costs, in_flight_limit(plan)).values())
