"""Chooses a plan: the placement, buckets and microbatch count of least expected makespan.

The expectation is over global batches sampled from the data profile, each scheduled by the real
scheduler and simulated on the runtime's task lists (DFLOP's Data-aware 3D Parallelism Optimizer,
arXiv 2603.25120, with an expectation instead of mean shapes). A placement whose lower bound
exceeds the best makespan found so far is left out, which keeps the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflop_jax.config import PlanConfig
from dflop_jax.plan.evaluate import Evaluator, peak_bytes
from dflop_jax.plan.placement import Placement, separate, shared, uniform
from dflop_jax.records import DataProfile, ModelProfile, Plan, SegmentPlan, SubmeshPlan

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
    allowed: Callable[[SubmeshPlan], bool] = lambda _: True,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The plan of least expected makespan for a policy, within memory.

    Args:
      memory_bytes: memory of a device; 0: not checked.
      tied: head and embedding share parameters, so the LLM stays in one segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.
      allowed: whether the devices at hand can form a submesh.

    Raises:
      ValueError: nothing fits into `memory_bytes`; the message says by how much.
    """
    config = config or PlanConfig()
    search = Evaluator(profile, data, config, global_batch, token_multiple, trains, memory_bytes)
    ranked = sorted(
        (
            (search.lower_bound_s(p, policy), p.name, policy, p)
            for policy, p in _placements(profile, n_devices, config, tied, allowed)
        ),
        key=lambda t: t[:2],
    )
    plans: list[Plan] = []
    tried: list[Candidate] = []
    most = config.max_microbatches
    caps = [*(c for c in MICROBATCH_CAPS if c < most), most]
    for i, (bound, name, policy, placement) in enumerate(ranked):
        if plans and bound >= min(map(_makespan_s, plans)):
            tried.append(Candidate(name, None, bound, 0.0, "its lower bound exceeds the best"))
            continue
        for cap in caps:
            plan, candidate = _try(search, placement, policy, cap, bound, memory_bytes)
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
        fits = not memory_bytes or peak_bytes(full) <= memory_bytes
        best = full if fits and _makespan_s(full) < _makespan_s(best) else best
    return SearchResult(best, tuple(tried))


def _placements(
    profile: ModelProfile,
    n_devices: int,
    config: PlanConfig,
    tied: bool,
    allowed: Callable[[SubmeshPlan], bool],
) -> list[tuple[str, Placement]]:
    """(policy, placement) of the configured space, as far as the devices allow it and the profile
    has timings of its tensor-parallel degrees."""
    spaces = {"dflop": separate, "orch": shared, "blind": uniform}
    wanted = ("dflop", "orch") if config.policy == "auto" else (config.policy,)
    spaces = {policy: spaces[policy] for policy in wanted}
    measured = {(t.module, t.model) for t in profile.timings}
    found = [
        (policy, p)
        for policy, space in spaces.items()
        for p in space(
            n_devices,
            profile.n_layers,
            max_model=config.max_model,
            max_stage=config.max_stage,
            tied=tied,
        )
        if all((s.module, p.mesh_of(s).model) in measured for s in p.segments)
        and all(map(allowed, p.submeshes))
    ]
    if not found:
        raise ValueError(
            f"policy {config.policy} has no placement on {n_devices} devices: separate encoder and "
            "LLM submeshes need two; raise plan.devices or use plan.policy auto"
        )
    return found


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


def _try(
    search: Evaluator,
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
    peak = peak_bytes(plan)
    if memory_bytes and peak > memory_bytes:
        over = (peak - memory_bytes) / 2**30
        return None, Candidate(name, None, bound, peak, f"needs {over:.2f} GiB more per device")
    return plan, Candidate(name, plan.predicted["makespan_s"], bound, peak, "")
