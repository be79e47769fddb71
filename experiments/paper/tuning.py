"""Systems with dynamic shapes: the plans of each, and a search for the fastest one.

A candidate is a plan with a number of microbatches. Its step time is estimated for balanced
batches, then for assigned samples, then by simulation of one batch after the other. The search
refines the fastest candidate until that one is simulated on every batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.placement import SpaceLimits, relative_layer_costs
from dflop_jax.plan.space import baseline_layouts, separate_families
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import Layout, Plan, Remat, Scheduling, with_remat
from experiments.paper.cases import Case, tuning_batches
from experiments.paper.costs import get_cost_model
from experiments.paper.dynamic_shapes import (
    Amounts,
    assign_bins,
    estimate_replica_s,
    find_slowest_replica,
    max_peak_bytes,
    predict_stage_s,
    sum_amounts,
    sum_bins,
)

MAX_MODEL, MAX_STAGE = 8, 16
MIN_ASSIGNED_BATCHES = 2  # tuning batches, since one random batch misleads
REMATS: tuple[Remat, ...] = ("none", "named", "layers", "segment")  # the same for all modules
DEVICE_SPLITS = 32  # of more than twice as many devices; fewer are split in every way


def make_plan(case: Case, policy: str, layout: Layout) -> Plan:
    """Make a plan of a layout, without buckets."""
    profile, node = get_cost_model(case).profile, case.hardware.devices_per_node
    joined = replace(layout, edges=profile.edges, tied=profile.tied)
    return Plan(policy, joined, Scheduling(node=node))


def baseline_plans(case: Case, policy: str) -> Iterator[Plan]:
    """Yield a plan for each of a baseline's placements whose tensor degree divides the last
    module; other modules have the highest degree that divides them, on the same devices."""
    costs = get_cost_model(case)
    bounds = {"max_model": MAX_MODEL, "max_stage": MAX_STAGE}
    for layout in baseline_layouts(policy, case.n_devices, costs.profile.n_layers, **bounds):
        layout = lower_degrees(costs, layout)
        if is_profiled(costs, layout):
            yield make_plan(case, policy, layout)


def lower_degrees(costs: CostModel, layout: Layout) -> Layout:
    """Return the layout with, for each module before the last, the highest tensor degree up to its
    stage's that the profile covers."""
    submeshes, segments = {m.name: m for m in layout.submeshes}, []
    for s in layout.segments:
        mesh = layout.submesh(s.submesh)
        profiled = {t.model for t in costs.profile.timings if t.module == s.module}
        degree = max(d for d in profiled if mesh.model % d == 0)
        if degree < mesh.model and s.module != layout.modules[-1]:
            data = mesh.n_devices // degree
            own = replace(mesh, name=f"{s.module} of {mesh.name}", data=data, model=degree)
            submeshes[own.name], s = own, replace(s, submesh=own.name)
        segments.append(s)
    used = {s.submesh for s in segments}
    kept = tuple(m for name, m in submeshes.items() if name in used)
    return replace(layout, submeshes=kept, segments=tuple(segments))


def published_plan(case: Case) -> tuple[Plan, int]:
    """Return the untuned (plan, microbatches) of the case's paper: `case.untuned`.

    Tensor degrees are the highest that divide a module's sizes, at most a node's devices. Every
    microbatch is one sample.

    Raises:
      ValueError: the paper states no configuration, or none of its placements exists or fits.
    """
    if case.untuned is None:
        raise ValueError(f"the paper of {case.name} states no configuration of its baseline")
    costs, placements = get_cost_model(case), list(baseline_plans(case, "pytorch"))
    batches = [sum_amounts(costs.profile, b) for b in tuning_batches(case)]
    min_peak_bytes = math.inf
    for n_stages, remat in product(case.untuned.stages, case.untuned.remats):
        plans = [p for p in placements if len({m.first for m in p.layout.submeshes}) == n_stages]
        if not plans or not _is_priced(costs, remat):
            continue
        plan = with_remat(max(plans, key=_max_degree), remat)
        n = case.global_batch // plan.layout.data_ranks(plan.layout.modules[-1])
        assigned = _assign_batches(costs, plan, n, batches, "arrival")
        peak_bytes = max_peak_bytes(costs, plan, _max_amounts(assigned))
        if peak_bytes <= case.memory_bytes:
            return plan, n
        min_peak_bytes = min(min_peak_bytes, peak_bytes)
    if min_peak_bytes == math.inf:
        raise ValueError(f"{case.n_devices} devices do not form {case.untuned.stages[0]} stages")
    raise ValueError(_format_memory_error(case, min_peak_bytes))


def _max_degree(plan: Plan) -> int:
    return max(m.model for m in plan.layout.submeshes)


def is_profiled(costs: CostModel, layout: Layout) -> bool:
    """Whether the profile has times for every module and tensor degree of a layout."""
    timed = {(t.module, t.model) for t in costs.profile.timings}
    return all((s.module, layout.submesh(s.submesh).model) in timed for s in layout.segments)


def dflop_plans(case: Case) -> Iterator[Plan]:
    """Yield all placements of the encoders and the LLM on separate devices. Programs have no inner
    pipelines, because these need groups of one shape, and encoders use data ranks instead of
    pipeline stages."""
    profile = get_cost_model(case).profile
    costs = relative_layer_costs(profile)
    step = case.n_devices // DEVICE_SPLITS if case.n_devices > 2 * DEVICE_SPLITS else 1
    degrees = dict.fromkeys(profile.n_layers, range(1, MAX_MODEL + 1))
    one_each = dict.fromkeys(profile.n_layers, 1)
    config = PlanConfig(max_model=MAX_MODEL, max_stage=MAX_STAGE)
    node = case.hardware.devices_per_node
    limits = SpaceLimits(profile.n_layers, degrees, (), one_each, case.n_devices, node, config)
    for family in separate_families(limits):
        *encoders, _ = family.parallelisms
        if family.max_stages > 1 or any(f.n_segments > 1 for f in encoders):
            continue
        for i, (*_, first) in enumerate(family.first_device.tolist()):
            if first % family.parallelisms[-1].mesh.model or first % step:
                continue
            layout = family.layout(i, profile.n_layers, costs)
            if is_profiled(get_cost_model(case), layout):
                yield make_plan(case, "dflop", layout)


@dataclass
class _Candidate:
    """A plan with a number of microbatches, and step times on the tuning batches: estimated for
    balanced batches, estimated for the first batches as `assigned`, and simulated for some."""

    plan: Plan
    n_microbatches: int
    balanced_s: np.ndarray
    assigned: list[Amounts] = field(default_factory=list)
    assigned_s: list[float] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        """Mean step time, with estimates scaled by the error on the batches of the next level."""
        mean_s, coarse_s = float(self.balanced_s.mean()), self.balanced_s
        for refined_s in (self.assigned_s, self.simulated_s):
            if refined_s:
                mean_s *= sum(refined_s) / sum(coarse_s[: len(refined_s)])
            coarse_s = refined_s
        return mean_s


def tune(case: Case, plans: Sequence[Plan], grouping: str) -> tuple[Plan, int]:
    """Return the (plan, microbatches) with the lowest mean makespan over the tuning batches.

    Each plan is tried with its own and with every uniform recompute policy, and with powers of 2
    microbatches and the highest possible number. Ties go to the first plan.

    Raises:
      ValueError: no plan fits into memory; the message gives the lowest need.
    """
    costs = get_cost_model(case)
    batches = [sum_amounts(costs.profile, b) for b in tuning_batches(case)]
    sums = {m: np.stack([b[m].sum(axis=1) for b in batches], 1) for m in costs.profile.n_layers}
    candidates = []
    for plan in (variant for p in plans for variant in _list_remats(costs, p)):
        n_ranks = plan.layout.data_ranks(plan.layout.modules[-1])
        counts = _microbatch_counts(case.global_batch // n_ranks)
        step_s = _predict_balanced_s(costs, plan, sums, counts)
        candidates += [_Candidate(plan, n, s) for n, s in zip(counts, step_s, strict=True)]
    queue = [(c.mean_s, i) for i, c in enumerate(candidates)]
    heapq.heapify(queue)
    min_peak_bytes = math.inf
    while queue:
        _, i = heapq.heappop(queue)
        candidate = candidates[i]
        plan, n, assigned = candidate.plan, candidate.n_microbatches, candidate.assigned
        n_simulated = len(candidate.simulated_s)
        if n_simulated == len(batches):
            return plan, n
        if n_simulated < len(assigned):
            step_s, _ = find_slowest_replica(case, plan, assigned[n_simulated], 1.0)
            candidate.simulated_s.append(step_s)
        else:
            unassigned = batches[n_simulated:][: 1 if assigned else MIN_ASSIGNED_BATCHES]
            assigned += _assign_batches(costs, plan, n, unassigned, grouping)
            peak_bytes = max_peak_bytes(costs, plan, _max_amounts(assigned))
            min_peak_bytes = min(min_peak_bytes, peak_bytes)
            if peak_bytes > case.memory_bytes:
                assigned.clear()
                continue
            estimates_s = (estimate_replica_s(costs, plan, b) for b in assigned)
            candidate.assigned_s = [float(s.max()) for s in estimates_s]
        heapq.heappush(queue, (candidate.mean_s, i))
    raise ValueError(_format_memory_error(case, min_peak_bytes))


def _format_memory_error(case: Case, min_peak_bytes: float) -> str:
    return (
        f"no placement fits into {case.memory_bytes / 2**30:.1f} GiB per device; the smallest "
        f"needs {min_peak_bytes / 2**30:.1f} GiB; use more devices or higher degrees"
    )


def _assign_batches(
    costs: CostModel, plan: Plan, n: int, batches: Sequence[Amounts], grouping: str
) -> list[Amounts]:
    """Assign each batch to n microbatches and sum the amounts of its samples."""
    return [sum_bins(plan, b, assign_bins(costs, plan, b, n, grouping), n) for b in batches]


def _list_remats(costs: CostModel, plan: Plan) -> list[Plan]:
    """Return the plan, and its variants under each policy that has prices for every module."""
    variants = [with_remat(plan, r) for r in REMATS if _is_priced(costs, r)]
    return variants if plan in variants else [plan, *variants]


def _is_priced(costs: CostModel, remat: Remat) -> bool:
    return all(remat in costs.priced_policies(m) for m in costs.profile.n_layers)


def _microbatch_counts(max_count: int) -> list[int]:
    return sorted({*(2**k for k in range(max_count.bit_length())), max_count}) if max_count else []


def _predict_balanced_s(
    costs: CostModel, plan: Plan, batch_sums: Amounts, counts: list[int]
) -> np.ndarray:
    """Estimate step seconds with equal microbatches, [counts, batches], from the `batch_sums` of
    amounts, [1 + features, batches]."""
    n = np.array(counts, float)[:, None]
    amounts = {m: x[:, None] / (n * plan.layout.data_ranks(m)) for m, x in batch_sums.items()}
    stages = predict_stage_s(costs, plan, amounts)
    step_s: np.ndarray = (n - 1) * stages.max(axis=0) + stages.sum(axis=0)
    return step_s


def _max_amounts(batches: Sequence[Amounts]) -> dict[str, float]:
    """Return the largest amount of each module on a rank."""
    return {m: max(float(b[m][0].max()) for b in batches) for m in batches[0]}
