"""Systems at true shapes: the plans that each may have, and the one of least expected step.

A plan with a number of microbatches is first known by its busiest stage's even share of each batch,
then by that of dealt samples, then by simulation, a batch at a time. What seems least is looked at
more closely, until the least one is simulated on every batch; so most are never dealt, and few are
simulated more than once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.placement import SpaceLimits, relative_layer_costs
from dflop_jax.plan.space import baseline_layouts, separate_families
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import Layout, Plan, Remat, Scheduling, with_remat
from experiments.paper.cases import Case, tuning
from experiments.paper.costs import cost_model
from experiments.paper.true_shapes import (
    Amounts,
    amounts_of,
    bins_of,
    dealt,
    peak_bytes,
    replica_s,
    slowest_replica,
    stage_s,
)

MAX_MODEL, MAX_STAGE = 8, 16
_DEALT_FIRST = 2  # tuning batches before any is simulated: of one, random samples tell little
STAGES = 4  # of the public code's training script
REMATS: tuple[Remat, ...] = ("none", "named", "layers", "segment")  # of a whole model
_EVERY_SPLIT = 64  # devices up to which DFLOP's space has every split of them; else about `_SPLITS`
_SPLITS = 32


def plan_of(case: Case, policy: str, layout: Layout) -> Plan:
    """A layout as a plan whose shapes are not known yet."""
    profile, node = cost_model(case).profile, case.hardware.devices_per_node
    joined = replace(layout, edges=profile.edges, tied=profile.tied)
    return Plan(policy, joined, Scheduling(node=node))


def baseline_plans(case: Case, policy: str) -> Iterator[Plan]:
    """All placements of a baseline that there are prices of."""
    profile = cost_model(case).profile
    bounds = {"max_model": MAX_MODEL, "max_stage": MAX_STAGE}
    for layout in baseline_layouts(policy, case.n_devices, profile.n_layers, **bounds):
        if is_timed(cost_model(case), layout):
            yield plan_of(case, policy, layout)


def published_plan(case: Case) -> tuple[Plan, int]:
    """The whole model under the only degrees that the public code's training script names, and
    nothing tuned: (plan, microbatches).

    The script has 64 GPUs in four pipeline stages with tensor parallelism of 8; modules whose heads
    do not divide by 8 take the highest degree that does. Layers are dealt to stages by count, every
    layer is recomputed as in the public code, a microbatch is a sample.

    Raises:
      ValueError: no such placement, or it does not fit.
    """
    costs = cost_model(case)
    staged = [p for p in baseline_plans(case, "pytorch") if len(p.layout.submeshes) == STAGES]
    if not staged:
        raise ValueError(f"{case.n_devices} devices are not {STAGES} pipeline stages")
    plan = with_remat(max(staged, key=lambda p: p.layout.submeshes[0].model), "layers")
    n = case.global_batch // plan.layout.data_ranks(plan.layout.modules[-1])
    batches = [amounts_of(costs.profile, b) for b in tuning(case)]
    needed = peak_bytes(costs, plan, _largest(_dealt(costs, plan, n, batches, "arrival")))
    if needed > case.memory_bytes:
        raise ValueError(_too_large(case, needed))
    return plan, n


def is_timed(costs: CostModel, layout: Layout) -> bool:
    """Whether the profile has times for all that a layout runs."""
    timed = {(t.module, t.model) for t in costs.profile.timings}
    return all((s.module, layout.submesh(s.submesh).model) in timed for s in layout.segments)


def dflop_plans(case: Case) -> Iterator[Plan]:
    """All placements of the encoders and the LLM on devices of their own, without pipelines inside
    programs, which batch microbatches to groups of one shape, and without pipelines of encoders,
    since data ranks do. Beyond 64 devices splits move in steps of a 32nd."""
    profile = cost_model(case).profile
    costs = relative_layer_costs(profile)
    step = case.n_devices // _SPLITS if case.n_devices > _EVERY_SPLIT else 1
    degrees = dict.fromkeys(profile.n_layers, range(1, MAX_MODEL + 1))
    alike = dict.fromkeys(profile.n_layers, 1)
    config = PlanConfig(max_model=MAX_MODEL, max_stage=MAX_STAGE)
    node = case.hardware.devices_per_node
    limits = SpaceLimits(profile.n_layers, degrees, (), alike, case.n_devices, node, config)
    for family in separate_families(limits):
        *encoders, _ = family.parallelisms
        if family.max_stages > 1 or any(f.n_segments > 1 for f in encoders):
            continue
        for i, (*_, first) in enumerate(family.first_device.tolist()):
            if first % family.parallelisms[-1].mesh.model or first % step:
                continue
            layout = family.layout(i, profile.n_layers, costs)
            if is_timed(cost_model(case), layout):
                yield plan_of(case, "dflop", layout)


@dataclass
class _Candidate:
    """A plan with a number of microbatches, and what is known of its steps on the tuning batches.

    Seconds of every batch if it were shared out evenly, `even_s`; of the first of them as they are
    `dealt`, by the replica whose stages look slowest, `dealt_s`; and as they are simulated.
    """

    plan: Plan
    n_microbatches: int
    even_s: np.ndarray
    dealt: list[Amounts] = field(default_factory=list)
    dealt_s: list[float] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        """Of all batches; those that are not looked at so closely are as much slower than they seem
        as the others are."""
        mean_s = float(self.even_s.mean())
        for seemed_s, closer_s in ((self.even_s, self.dealt_s), (self.dealt_s, self.simulated_s)):
            if closer_s:
                mean_s *= sum(closer_s) / sum(seemed_s[: len(closer_s)])
        return mean_s


def tuned(case: Case, plans: Sequence[Plan], grouping: str) -> tuple[Plan, int]:
    """The plan and the number of microbatches of least mean makespan over the tuning batches.

    Every plan is tried as it is and with every recompute policy for the whole model, in powers of 2
    microbatches and as many as there can be; ties go to the plan that comes first.

    Raises:
      ValueError: nothing fits into memory; says by how much.
    """
    costs = cost_model(case)
    batches = [amounts_of(costs.profile, b) for b in tuning(case)]
    sums = {m: np.stack([b[m].sum(axis=1) for b in batches], 1) for m in costs.profile.n_layers}
    candidates = []
    for plan in (p for each in plans for p in _recomputed(costs, each)):
        counts = _counts(case.global_batch // plan.layout.data_ranks(plan.layout.modules[-1]))
        for n, even_s in zip(counts, _even_s(costs, plan, sums, counts), strict=True):
            candidates.append(_Candidate(plan, n, even_s))
    queue = [(c.mean_s, i) for i, c in enumerate(candidates)]
    heapq.heapify(queue)
    least = math.inf
    while queue:
        _, i = heapq.heappop(queue)
        c = candidates[i]
        n_simulated = len(c.simulated_s)
        if n_simulated == len(batches):
            return c.plan, c.n_microbatches
        if n_simulated < len(c.dealt):
            seconds, _ = slowest_replica(case, c.plan, c.dealt[n_simulated], looks_slow=1.0)
            c.simulated_s.append(seconds)
        else:
            more = batches[n_simulated:][: 1 if c.dealt else _DEALT_FIRST]
            c.dealt += _dealt(costs, c.plan, c.n_microbatches, more, grouping)
            needed = peak_bytes(costs, c.plan, _largest(c.dealt))
            least = min(least, needed)
            if needed > case.memory_bytes:
                c.dealt = []
                continue
            c.dealt_s = [float(replica_s(costs, c.plan, b).max()) for b in c.dealt]
        heapq.heappush(queue, (c.mean_s, i))
    raise ValueError(_too_large(case, least))


def _too_large(case: Case, least: float) -> str:
    return (
        f"no placement fits into {case.memory_bytes / 2**30:.1f} GiB a device: the least needs "
        f"{least / 2**30:.1f} GiB; use more devices or higher degrees"
    )


def _dealt(
    costs: CostModel, plan: Plan, n: int, batches: Sequence[Amounts], grouping: str
) -> list[Amounts]:
    """What each batch's samples add up to in n microbatches."""
    return [dealt(plan, b, bins_of(costs, plan, b, n, grouping), n) for b in batches]


def _recomputed(costs: CostModel, plan: Plan) -> list[Plan]:
    """The plan as it is, and under each policy of which there are prices for every module."""
    known = [costs.priced_policies(m) for m in costs.profile.n_layers]
    alike = [with_remat(plan, r) for r in REMATS if all(r in policies for policies in known)]
    return alike if plan in alike else [plan, *alike]


def _counts(most: int) -> list[int]:
    return sorted({*(2**k for k in range(most.bit_length())), most}) if most else []


def _even_s(costs: CostModel, plan: Plan, sums: Amounts, counts: list[int]) -> np.ndarray:
    """About the seconds of a step whose microbatches share each batch out evenly, [counts,
    batches]; `sums` are those of the batches, [1 + features, batches]."""
    n = np.array(counts, float)[:, None]
    each = {m: of[:, None] / (n * plan.layout.data_ranks(m)) for m, of in sums.items()}
    stages = stage_s(costs, plan, each)
    even_s: np.ndarray = (n - 1) * stages.max(axis=0) + stages.sum(axis=0)
    return even_s


def _largest(batches: Sequence[Amounts]) -> dict[str, float]:
    """Most of each module on a rank."""
    return {m: max(float(b[m][0].max()) for b in batches) for m in batches[0]}
