"""What the planner itself is asked about: a model, its data and its devices, under each policy.

Plans here are those of a run: static shapes from the planner, batches from the scheduler, and the
simulator on the runtime's task lists. The Megatron-LM-like baseline has the same prices, memory and
batches, but true shapes: it pays for no padding, as in DFLOP's results. What is reported are
batches that no search saw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflop_jax.config import PlanConfig, Policy
from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import Hardware, find_hardware
from dflop_jax.plan.options import saving_words
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.search import search_plan
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import DataProfile, Load, ModelProfile, Plan, Prices, Remat, Schedule, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.sim.pipeline import simulate_step
from experiments.paper.common import (
    MAX_MODEL,
    MEMORY_SHARE,
    TUNING,
    on_all_cores,
    placements,
    say,
)
from experiments.paper.dealing import run_step
from experiments.paper.exact import ExactCosts
from experiments.paper.systems import predicted
from experiments.paper.tune import tune

H100 = find_hardware("h100")
TOKEN_MULTIPLE = 128
MAX_PIPELINE, MAX_MICROBATCHES = 8, 64  # of what the planner tries
SEEN, REPORTED, TAIL = 4_000, 2, 64  # samples, global batches, largest samples
_LARGE_BATCH = 1_024  # samples; of larger batches one is reported, since they differ less
_WORK = 4_000  # units of the scheduler's work for a reported batch
BASELINE: Policy = "megatron"
REMATS: tuple[Remat, ...] = ("none", "named", "layers", "segment")  # that it may choose from


@dataclass(frozen=True)
class Case:
    """A model on devices. `loads(n, seed)` draws samples in arrival order."""

    name: str
    model: Callable[[], MultimodalModel]
    loads: Callable[[int, int], list[Load]]
    n_devices: int
    global_batch: int
    hardware: Hardware = H100

    @property
    def n_reported(self) -> int:
        """Global batches that are simulated."""
        return 1 if self.global_batch > _LARGE_BATCH else REPORTED

    @property
    def memory_bytes(self) -> float:
        """What a device's plan may take."""
        return MEMORY_SHARE * self.hardware.memory_bytes


@dataclass(frozen=True)
class Step:
    """A reported batch as it was scheduled and simulated."""

    schedule: Schedule
    trace: Trace


@dataclass(frozen=True)
class Answer:
    """What a policy makes of a case: its parallelism in `words`, mean seconds of a step, share of
    the devices' time in which they compute nothing, seconds of the search and of a batch's
    schedule. Baselines have no `plan` of static shapes. Where nothing fits, seconds are infinite
    and `words` say why."""

    words: str
    step_s: float = math.inf
    idle_share: float = 0.0
    search_s: float = 0.0
    schedule_s: float = 0.0
    plan: Plan | None = None
    steps: tuple[Step, ...] = ()

    @property
    def fits(self) -> bool:
        return self.step_s < math.inf


def mean_s(steps: Iterable[Step]) -> float:
    return float(np.mean([s.trace.makespan_s for s in steps]))


def _idle_share(plan: Plan, steps: Iterable[Step]) -> float:
    size = {m.name: m.n_devices for m in plan.submeshes}
    busy = [
        sum(share * size.get(name, 0) for name, share in s.trace.busy_fraction().items())
        for s in steps
    ]
    return 1 - float(np.mean(busy)) / plan.n_devices


def profile_of(case: Case) -> ModelProfile:
    """Predicted times and bytes of the case's model on its devices."""
    return predicted(case.model(), case.hardware)


@cache
def seen(case: Case) -> DataProfile:
    """What the planner knows of the data: samples, and the largest of those that are reported."""
    known = case.loads(SEEN, 0)
    every = [*known, *(load for batch in reported(case) for load in batch)]
    tail = {
        i
        for m in profile_of(case).n_layers
        for i in sorted(range(len(every)), key=lambda i: -every[i].tokens(m))[:TAIL]
    }
    return DataProfile(case.name, len(every), tuple(known), tuple(every[i] for i in sorted(tail)))


@cache
def reported(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that are simulated, none of which the planner chooses by."""
    return tuple(tuple(case.loads(case.global_batch, 1 + i)) for i in range(case.n_reported))


def prices_of(case: Case, plan: Plan) -> Prices:
    return plan_prices(plan, profile_of(case), case.hardware)


def run_steps(case: Case, plan: Plan) -> tuple[Step, ...]:
    """The reported batches under a plan."""
    prices, names = prices_of(case, plan), [s.name for s in plan.segments]
    steps = []
    for i, batch in enumerate(reported(case)):
        work = min(plan.work_budget or _WORK, _WORK)
        schedule = schedule_batch(batch, plan, prices, names, step=i, work=work)
        steps.append(Step(schedule, simulate_step(plan, schedule, prices, names)))
    return tuple(steps)


Key = tuple[Case, Policy]
_KNOWN: dict[Key, Answer] = {}


def answer(case: Case, policy: Policy) -> Answer:
    """The policy's plan for the case, and its steps."""
    key = (case, policy)
    if key not in _KNOWN:
        _KNOWN[key] = _answer(*key)
    return _KNOWN[key]


def prepare(keys: Iterable[Key]) -> None:
    """Compute answers on all cores, a case at a time on each; `answer` then knows them."""
    jobs: dict[Case, list[Policy]] = {}
    for case, policy in dict.fromkeys(keys):
        if (case, policy) not in _KNOWN:
            jobs.setdefault(case, []).append(policy)
    in_order = sorted(jobs.items(), key=lambda j: -j[0].n_devices)
    for case, found in on_all_cores(_answers, in_order):
        _KNOWN.update(((case, policy), a) for policy, a in found.items())


def _answers(job: tuple[Case, list[Policy]]) -> tuple[Case, dict[Policy, Answer]]:
    case, policies = job
    return case, {policy: _answer(case, policy) for policy in policies}


def _answer(case: Case, policy: Policy) -> Answer:
    start_s = time.perf_counter()
    try:
        found = _tuned(case) if policy == BASELINE else _planned(case, policy)
    except ValueError as e:
        found = Answer(str(e))
    say(f"{case.name}, {policy}: {time.perf_counter() - start_s:.1f} s")
    return found


def _tuned(case: Case) -> Answer:
    """The baseline at the true shapes of its microbatches, tuned as for DFLOP's results."""
    costs = ExactCosts(CostModel(profile_of(case)), case.hardware)
    batches = [case.loads(case.global_batch, 100 + i) for i in range(min(TUNING, case.n_reported))]
    start_s = time.perf_counter()
    tuned = tune(
        placements(BASELINE, case.n_devices, costs.profile, case.hardware),
        batches,
        costs,
        grouping="arrival",
        memory_bytes=case.memory_bytes,
        remats=_priced(costs.model),
    )
    search_s = time.perf_counter() - start_s
    steps = [
        run_step(costs, tuned.placement, batch, tuned.n_microbatches, "arrival")
        for batch in reported(case)
    ]
    return Answer(
        tuned.how,
        float(np.mean([s.makespan_s for s in steps])),
        float(np.mean([s.idle_share for s in steps])),
        search_s,
    )


def _priced(costs: CostModel) -> list[Remat]:
    """Those of `REMATS` that there are prices of, for every module."""
    known = [costs.fits.known_policies(module) for module in costs.profile.n_layers]
    return [r for r in REMATS if all(r in policies for policies in known)]


def _planned(case: Case, policy: Policy) -> Answer:
    """The planner's choice, and the reported batches under it."""
    config = PlanConfig(
        policy=policy,
        effort="quick",
        buckets=4,
        max_model=MAX_MODEL,
        max_stage=MAX_PIPELINE,
        max_microbatches=MAX_MICROBATCHES,
        sampled_batches=2,
    )
    profile, data = profile_of(case), seen(case)
    start_s = time.perf_counter()
    plan = search_plan(
        profile,
        data,
        n_devices=case.n_devices,
        global_batch=case.global_batch,
        config=config,
        memory_bytes=case.memory_bytes,
        hardware=case.hardware,
        token_multiple=TOKEN_MULTIPLE,
    ).plan
    search_s = time.perf_counter() - start_s
    steps = run_steps(case, plan)
    return Answer(
        parallelism(plan),
        mean_s(steps),
        _idle_share(plan, steps),
        search_s,
        max(s.schedule.elapsed_s for s in steps),
        plan,
        steps,
    )


def parallelism(plan: Plan) -> str:
    """Pipeline x data x tensor of each module, groups that feed one, and what saves memory."""
    parts = []
    for module in plan.modules:
        segments = plan.segments_of(module)
        mesh = plan.submesh(segments[0].submesh)
        parts.append(f"{module} {mesh.stage * len(segments)}x{mesh.data}x{mesh.model}")
    words = saving_words(plan)
    fed = f"; up to {plan.fan_in} sub-microbatches" if plan.fan_in > 1 else ""
    return ", ".join(parts) + fed + (f"; {words}" if words != "none" else "")
