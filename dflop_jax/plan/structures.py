"""What a step costs with separate submeshes or with a loop, and where its time goes, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.hardware import GIB
from dflop_jax.plan.best_first import BestFirstSearch, search_spaces
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import ROUND_WORK, PlanEvaluator
from dflop_jax.plan.placement import fits_structure, layout_name
from dflop_jax.plan.refine_buckets import refine_candidates
from dflop_jax.plan.space import allowed_baselines
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Layout,
    Load,
    ModelProfile,
    Plan,
    Schedule,
    Trace,
)
from dflop_jax.schedule import quick_schedule
from dflop_jax.simulate.steps import simulate_step

# The flags of `PlanConfig` that require each structure.
STRUCTURES: Mapping[str, Mapping[str, Any]] = {
    "separate submeshes": {"submeshes": "separate"},
    "a loop": {"loop": "require"},
}
_FREE_LINKS = 1e12  # links so many times as fast take less than a nanosecond a step


@dataclass(frozen=True)
class TimeUse:
    """Where the time of a mean step goes."""

    bubble: float  # share of the devices' time without a program, or in ticks that fill a loop
    padding: float  # share of the devices' time that programs spend on padding
    link_s: float  # by which the step would be shorter if links took no time


@dataclass(frozen=True)
class StructureCost:
    """The best plan of a structure; without one, the reason."""

    structure: str
    plan: str = ""  # policy and placement; "" if there is none
    step_s: float = 0.0  # predicted
    extra_s: float = 0.0  # per step, over the chosen plan
    use: TimeUse | None = None
    reason: str = ""  # why there is no plan


def structure_costs(
    evaluator: PlanEvaluator, chosen: Plan, ranked: Iterable[Candidate], tail: Sequence[Load]
) -> list[StructureCost]:
    """Return the cost of the chosen plan and of the best plan of each structure: the first of the
    `ranked` candidates (fastest first), else of a short search."""

    def cost(structure: str, plan: Plan) -> StructureCost:
        name = f"{plan.policy}: {layout_name(plan.layout)}"
        step_s, chosen_s = plan.predicted.makespan_s, chosen.predicted.makespan_s
        return StructureCost(structure, name, step_s, step_s - chosen_s, time_use(evaluator, plan))

    ranked, costs = list(ranked), [cost("chosen", chosen)]
    for name, required in STRUCTURES.items():
        config = replace(evaluator.config, **required)
        if fits_structure(chosen.layout, config):
            costs.append(replace(costs[0], structure=name))
            continue
        try:
            plan = _best_plan(evaluator.with_spec(config=config), ranked, tail)
        except ValueError as error:
            costs.append(StructureCost(name, reason=str(error)))
        else:
            costs.append(cost(name, plan))
    return costs


def _best_plan(evaluator: PlanEvaluator, ranked: Iterable[Candidate], tail: Sequence[Load]) -> Plan:
    """Return the best plan of the configured structure, with buckets fitted to the data;
    ValueError: there is none."""
    config = evaluator.config
    first = next((c for c in ranked if fits_structure(c.plan.layout, config)), None)
    only_first = BestFirstSearch(evaluator, (), ())
    plan = refine_candidates(only_first, [first or _find_first(evaluator)], tail)[0]
    return evaluator.evaluate(plan, plan.predicted.makespan_s)


def _find_first(evaluator: PlanEvaluator) -> Candidate:
    """Return the best candidate of a short search; ValueError: there is none."""
    context = evaluator.context
    baselines = allowed_baselines(context.space_limits)
    search = BestFirstSearch(evaluator, list(search_spaces(context)), baselines)
    if first := search.find_first():
        return first
    min_bytes, smallest = search.smallest_candidate()
    missing = (min_bytes - context.spec.memory_bytes) / GIB
    raise ValueError(
        f"the smallest plan ({smallest}) needs {missing:.2f} GiB more a device; use more devices"
    )


def time_use(evaluator: PlanEvaluator, plan: Plan) -> TimeUse:
    """Return where the time of the plan's evaluated steps goes."""
    context, layout, batches = evaluator.context, plan.layout, evaluator.evaluation_batches
    priced = context.price_layout(layout), context.trainable(layout)
    costs = CostModel(_with_free_links(context.profile))
    free_links = layout_prices(layout, costs, plan.scheduling.grouping)
    step_s = link_s = bubble_s = padding_s = 0.0  # the last two of all devices
    for batch in batches:
        schedule = quick_schedule(batch, plan, *priced, ROUND_WORK)
        trace = simulate_step(plan, schedule, *priced)
        step_s += trace.makespan_s
        link_s += trace.makespan_s - simulate_step(plan, schedule, free_links, priced[1]).makespan_s
        padding = padding_fractions(layout, schedule, batch)
        bubble_s += trace.makespan_s * layout.n_devices
        for module, device_s in device_seconds(layout, trace):
            bubble_s -= device_s
            padding_s += device_s * padding.get(module, 0.0)
    device_s = step_s * layout.n_devices
    return TimeUse(bubble_s / device_s, padding_s / device_s, link_s / len(batches))


def device_seconds(layout: Layout, trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield (module, seconds of all its devices) of each event that computes; "" for one that
    reduces or updates. Ticks that fill or drain a loop do not count."""
    segments = {s.name: (s, layout.submesh(s.submesh)) for s in layout.segments}
    for event in trace.events:
        segment, mesh = segments[event.segment]
        device_s = (event.end_s - event.start_s) * mesh.n_devices
        if event.direction in (FORWARD, BACKWARD):
            ticks = segment.ticks(mesh.stage, layout.group_size)
            yield segment.module, device_s * (1 - (mesh.stage - 1) / ticks)
        elif event.submesh == mesh.name:
            yield "", device_s


def padding_fractions(
    layout: Layout, schedule: Schedule, loads: Sequence[Load]
) -> dict[str, float]:
    """Return the share of padding in each module's tokens of a scheduled batch."""
    n_tokens = schedule.count_tokens(layout)
    used = {m: sum(load.tokens(m) for load in loads) for m in n_tokens}
    return {m: 1 - used[m] / n for m, n in n_tokens.items() if n}


def _with_free_links(profile: ModelProfile) -> ModelProfile:
    if profile.hardware is None:
        return profile
    hardware = replace(
        profile.hardware.with_links(_FREE_LINKS),
        measured=(),
        link_latency_s=1 / _FREE_LINKS,
        network_latency_s=1 / _FREE_LINKS,
    )
    return replace(profile, hardware=hardware)
