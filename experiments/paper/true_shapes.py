"""Steps of a plan whose microbatches have shapes of their own, as systems with dynamic shapes run.

Samples are dealt to microbatches and data ranks, "arrival": in the order in which they come, which
is random, or "balanced": by DFLOP's scheduler. Nothing is padded: a microbatch of a module is one
row of its tokens, or as many rows as it has pieces where a row takes one. Prices, task lists, the
simulator and memory are those of all plans.

Where all modules have equal data degrees, data ranks are replicas that meet only at the end of a
step, so each has a schedule of its own. Otherwise all ranks exchange features at every microbatch,
which then takes as long as its slowest rank; what modules before the last compute is shared out
evenly.
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
from experiments.paper.costs import cost_model, prices_of

Array = np.ndarray
# By module, first of all an amount, which are pieces where a row takes one, else tokens; then the
# content of the pieces by feature: [1 + features, ...].
Amounts = Mapping[str, Array]
# Units of the balanced rule: the largest sample first, and no more. With 5,000 units steps of
# SigLIP-6B + Qwen2.5-7B and Qwen2-Audio-7B on 64 A100 took 2 and 7% longer.
_WORK = 0
# Replicas whose stages look faster than this share of the slowest's are not simulated. In 16
# pipelined steps of SigLIP-6B + Qwen2.5-7B on 64 A100 the slowest replica looked at least 0.87 as
# slow as the one that looked slowest.
_LOOKS_SLOW = 0.8
_USUAL = {True: 16, False: 4096}  # pieces, tokens of the microbatch by whose price samples balance


def amounts_of(profile: ModelProfile, batch: Sequence[Load]) -> Amounts:
    """Of every sample, [1 + features, samples]."""
    amounts = {}
    for m in profile.n_layers:
        lengths = [load.lengths(m) for load in batch]
        counts = map(len, lengths) if m in profile.piece_tokens else map(sum, lengths)
        content = [piece_content([load], m).sum(axis=1) for load in batch]
        amounts[m] = np.vstack([np.array([*counts], float), np.transpose(content)])
    return amounts


def shape_of(profile: ModelProfile, module: str, amount: float) -> Shape | None:
    """The shape that holds an amount; None: there is nothing to hold."""
    n, tile = int(np.ceil(amount - 1e-9)), profile.piece_tokens.get(module)
    return (Shape(n, tile) if tile else Shape(1, n)) if n else None


def is_replicated(plan: Plan) -> bool:
    """Whether data ranks are replicas that meet only at the end of a step."""
    return len({plan.layout.data_ranks(m) for m in plan.layout.modules}) == 1


def dealt(plan: Plan, samples: Amounts, bins: Array, n_microbatches: int) -> Amounts:
    """What samples in bins (microbatch * ranks of the last module + rank) add up to, [microbatches,
    ranks] each. A module that shares its amounts out evenly has a single column."""
    last, replicated = plan.layout.modules[-1], is_replicated(plan)
    n_bins = n_microbatches * plan.layout.data_ranks(last)
    sums = {}
    for m, columns in samples.items():
        added = np.stack(
            [np.bincount(bins, x, n_bins).reshape(n_microbatches, -1) for x in columns]
        )
        if m != last and not replicated:
            added = added.sum(axis=2, keepdims=True) / plan.layout.data_ranks(m)
            added[0] = np.ceil(added[0])
        sums[m] = added
    return sums


def tasks_of(costs: CostModel, segment: SegmentPlan) -> tuple[Direction, ...]:
    """What a microbatch runs in a segment: the forward of the last is part of its backward."""
    return (FORWARD, BACKWARD) if costs.has_forward(segment) else (BACKWARD,)


def segment_s(costs: CostModel, plan: Plan, amounts: Amounts) -> dict[str, Array]:
    """Seconds of all of a microbatch's tasks in each segment, by amounts."""
    known: dict[object, Array] = {}
    seconds = {}
    for s in plan.layout.segments:
        mesh = plan.layout.submesh(s.submesh).shape
        key = costs.price_key(s), mesh
        if key not in known:
            amount, *content = amounts[s.module]
            tile = costs.profile.piece_tokens.get(s.module)
            rows, tokens = (amount, tile) if tile else (1.0 * (amount > 0), amount)
            predictions = costs.predict(s.module, mesh.model, rows, tokens)
            segment = costs.segment(replace(s, zero=1), mesh)  # no transfers between data ranks
            known[key] = sum(
                segment.task_s(1, predictions, d)
                + content_seconds(segment.content_s(1, d), content)
                for d in tasks_of(costs, s)
            )
        seconds[s.name] = known[key]
    return seconds


def stage_s(costs: CostModel, plan: Plan, amounts: Amounts) -> Array:
    """The same on each stage, devices that no other segments use: [stages, ...]."""
    of = submesh_resources(plan.layout)
    stages: dict[int, Array] = {}
    for s, seconds in zip(
        plan.layout.segments, segment_s(costs, plan, amounts).values(), strict=True
    ):
        stages[of[s.submesh]] = stages.get(of[s.submesh], 0.0) + seconds
    return np.stack(np.broadcast_arrays(*stages.values()))


def bins_of(
    costs: CostModel,
    plan: Plan,
    samples: Amounts,
    n_microbatches: int,
    grouping: str,
) -> Array:
    """Bin of each sample, int [samples]: microbatch * ranks of the last module + rank.

    Raises:
      ValueError: fewer samples than bins, or an unknown grouping.
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
    columns, grouped = _stage_columns(costs, plan, samples)
    return balance(columns, n_bins, bin_group=ranks if grouped else 1, grouped=grouped, work=_WORK)


def _stage_columns(costs: CostModel, plan: Plan, samples: Amounts) -> tuple[Array, tuple[int, ...]]:
    """Seconds that each sample adds to the stages, [samples, stages], without those that no sample
    loads more than another stage; and the columns of which all ranks of a microbatch share one."""
    last, coupled = plan.layout.modules[-1], not is_replicated(plan)
    alone = []  # by module, [stages, samples]
    for m, sums in samples.items():
        usual = _USUAL[m in costs.profile.piece_tokens]
        units = np.array([usual, *np.ones(len(sums) - 1)])
        probes = {k: np.zeros((len(units), len(units))) for k in samples}
        probes[m] = np.diag(units)
        rates = stage_s(costs, plan, probes) / units
        ranks = plan.layout.data_ranks(m) if coupled and m != last else 1
        alone.append(rates @ sums / ranks)
    columns, of_last = sum(alone).T, alone[-1].any(axis=1)
    stages = range(columns.shape[1])

    def is_exceeded(j: int) -> bool:
        others = [k for k in stages if k != j and (columns[:, k] >= columns[:, j]).all()]
        return any(k < j or (columns[:, k] > columns[:, j]).any() for k in others)

    binding = [j for j in stages if not is_exceeded(j)]
    grouped = [place for place, j in enumerate(binding) if coupled and not of_last[j]]
    return columns[:, binding], tuple(grouped)


def pipeline_s(stages: Array) -> Array:
    """About the seconds of microbatches' tasks in 1F1B, [stages, microbatches, replicas] to
    [replicas]: the busiest stage, and one way through the others."""
    busiest = stages.sum(axis=1).argmax(axis=0)
    in_busiest = np.take_along_axis(stages, busiest[None, None], axis=0)[0]
    return in_busiest.sum(axis=0) + (stages.sum(axis=0) - in_busiest).min(axis=0)


def replica_s(costs: CostModel, plan: Plan, amounts: Amounts) -> Array:
    """About the seconds of a step without its end on each replica, or of the coupled whole."""
    stages = stage_s(costs, plan, amounts)
    return pipeline_s(stages if is_replicated(plan) else stages.max(axis=2, keepdims=True))


def schedules_of(
    costs: CostModel, plan: Plan, amounts: Amounts, replicas: Sequence[int]
) -> list[Schedule]:
    """The groups of each of some replicas, or of the coupled whole, replica 0; they do not say
    which pieces they hold."""
    if not is_replicated(plan):
        amounts = {m: sums.max(axis=2, keepdims=True) for m, sums in amounts.items()}
    n_microbatches = len(amounts[plan.layout.modules[-1]][0])
    schedules = []
    for r in replicas:
        groups: list[Group] = []
        for i in range(n_microbatches):
            shapes = {
                m: shape_of(costs.profile, m, amounts[m][0][i, r]) for m in plan.layout.modules
            }
            there = [m for m, shape in shapes.items() if shape]
            place = {m: len(groups) + k for k, m in enumerate(there)}
            for m in there:
                feeds = tuple(place[t] for t in plan.layout.targets(m) if t in place)
                content = tuple(amounts[m][1:, i, r].astype(int).tolist())
                groups.append(Group(m, shapes[m], feeds, content))
        schedules.append(Schedule(0, tuple(groups)))
    return schedules


def with_shapes(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with the shapes that the schedule has."""
    buckets = dict.fromkeys(Bucket.from_shapes({g.module: g.shape}) for g in schedule.groups)
    return plan.with_layout(buckets=tuple(buckets))


def simulated(case: Case, plan: Plan, schedule: Schedule) -> float:
    """Seconds of a step by one replica's schedule, the step's end over all data ranks included."""
    plan = with_shapes(plan, schedule)
    names = [s.name for s in plan.layout.segments]
    return simulate_step(plan, schedule, prices_of(case, plan), names).makespan_s


def slowest_replica(
    case: Case, plan: Plan, amounts: Amounts, looks_slow: float = _LOOKS_SLOW
) -> tuple[float, Schedule]:
    """Seconds and schedule of the slowest replica, or of the coupled whole; simulated are those
    that look as slow as `looks_slow` times the seconds of the one that looks slowest."""
    costs = cost_model(case)
    about_s = replica_s(costs, plan, amounts)
    simulate = np.flatnonzero(about_s >= looks_slow * about_s.max())
    schedules = schedules_of(costs, plan, amounts, simulate.tolist())
    each_s = [simulated(case, plan, s) for s in schedules]
    slowest = int(np.argmax(each_s))
    return each_s[slowest], schedules[slowest]


def run_step(
    case: Case, plan: Plan, batch: Sequence[Load], n_microbatches: int, grouping: str
) -> Step:
    """Simulate one step of a batch; ValueError as for `bins_of`."""
    costs = cost_model(case)
    samples = amounts_of(costs.profile, batch)
    bins = bins_of(costs, plan, samples, n_microbatches, grouping)
    amounts = dealt(plan, samples, bins, n_microbatches)
    took_s, schedule = slowest_replica(case, plan, amounts)
    seconds = segment_s(costs, plan, amounts)
    busy_s = {name: float(x.sum(axis=0).mean()) for name, x in seconds.items()}
    return Step(with_shapes(plan, schedule), schedule, took_s, busy_s)


def peak_bytes(costs: CostModel, plan: Plan, largest: Mapping[str, float]) -> float:
    """Bytes of the device that needs most, with `largest` amounts on a rank of each module."""
    shapes = {m: shape for m, n in largest.items() if (shape := shape_of(costs.profile, m, n))}
    plan = plan.with_layout(buckets=(Bucket.from_shapes(shapes),))
    return max(memory.peak_bytes(plan.layout, costs, in_flight_limit(plan)).values())
