"""Evaluations of systems on cases, cached: the chosen plan, and its steps on held-out batches.

Policies of dflop_jax use its planner (static shapes), scheduler and simulator. Systems of
`GROUPINGS` have the same prices, memory and batches, but dynamic shapes without padding, as in
DFLOP's results (`dynamic_shapes`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar, cast, get_args

import numpy as np

from dflop_jax.config import PlanConfig, Policy
from dflop_jax.plan.evaluate import filter_fitting_loads
from dflop_jax.plan.memory import describe_savings
from dflop_jax.plan.search import SearchResult, search_plan
from dflop_jax.records import BACKWARD, FORWARD, Load, ModelProfile, Plan, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.buckets.sizes import oversize_samples
from dflop_jax.schedule.count_program import canonicalize, program_sizes
from dflop_jax.simulate.steps import simulate_step
from experiments.paper.cases import SEEDS, Case, Step, evaluation_batches, profile_data
from experiments.paper.costs import get_prices, get_profile
from experiments.paper.dynamic_shapes import simulate_batch
from experiments.paper.results import print_progress
from experiments.paper.tuning import MAX_MODEL, baseline_plans, dflop_plans, published_plan, tune

TOKEN_MULTIPLE = 128
RUN_STEPS = 100_000  # of the run that a plan is for: its stages are unrolled
MAX_PIPELINE, MAX_MICROBATCHES = 8, 64  # limits of the planner's search
PYTORCH, MEGATRON, DFLOP = "pytorch", "megatron", "dflop with dynamic shapes"
PUBLISHED = "as published"  # the baseline without tuning
BASELINES = (PYTORCH, MEGATRON)
OPTIMIZER_ONLY, SCHEDULER_ONLY = "optimizer only", "scheduler only"
# Systems with dynamic shapes -> how samples are assigned to microbatches.
GROUPINGS = {
    PUBLISHED: "arrival",
    PYTORCH: "arrival",
    MEGATRON: "arrival",
    DFLOP: "balanced",
    OPTIMIZER_ONLY: "arrival",
    SCHEDULER_ONLY: "balanced",
}
SCHEDULER_WORK = 4_000  # units that a schedule may spend on one batch


@dataclass(frozen=True)
class Evaluation:
    """A system's plan for a case and its steps. `description` gives the parallelism or, when no
    plan fits and `steps` is empty, the reason. `n_microbatches` is 0 with static shapes, where
    `n_replaced` samples of the batches fit no bucket (`replace_oversize`)."""

    description: str
    plan: Plan | None = None
    steps: tuple[Step, ...] = ()
    n_microbatches: int = 0
    n_replaced: int = 0
    search_s: float = 0.0
    schedule_s: float = 0.0

    @property
    def fits(self) -> bool:
        return bool(self.steps)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; infinite when no plan fits."""
        return mean_step_s(self.steps) if self.steps else math.inf

    @property
    def idle_share(self) -> float:
        """Mean share of device time without computation."""
        return float(np.mean([s.idle_share for s in self.steps])) if self.steps else 0.0

    @property
    def idle_device_s(self) -> float:
        """Mean idle seconds of a step, summed over devices."""
        assert self.plan is not None, self.description
        idle_s = [s.idle_share * s.makespan_s for s in self.steps]
        return float(np.mean(idle_s)) * self.plan.layout.n_devices

    def busy_s(self, segment: str) -> float:
        """Mean seconds of a step in which a segment computes."""
        return float(np.mean([s.busy_s[segment] for s in self.steps]))


def mean_step_s(steps: Iterable[Step]) -> float:
    return float(np.mean([s.makespan_s for s in steps]))


def replace_oversize(case: Case, plan: Plan) -> tuple[list[tuple[Load, ...]], int]:
    """Return the evaluation batches with other samples, as in a run, for those that fit no bucket,
    and the number of replaced samples.

    Raises:
      ValueError: no sample fits.
    """
    batches, n_replaced = [], 0
    for i, batch in enumerate(evaluation_batches(case)):
        loads, oversize = list(batch), oversize_samples(batch, plan)
        if oversize:
            others = case.draw_loads(case.global_batch, SEEDS["replacement"] + i)
            for k, other in zip(oversize, cycle(filter_fitting_loads(plan, others))):
                loads[k] = other
        batches.append(tuple(loads))
        n_replaced += len(oversize)
    return batches, n_replaced


def simulate_batches(case: Case, plan: Plan) -> tuple[Step, ...]:
    """Schedule and simulate the evaluation batches under a plan of static shapes, as a run does."""
    prices, names = get_prices(case, plan), [s.name for s in plan.layout.segments]
    program = canonicalize(program_sizes(plan.layout))
    steps = []
    for i, batch in enumerate(replace_oversize(case, plan)[0]):
        work = min(plan.scheduling.work_budget or SCHEDULER_WORK, SCHEDULER_WORK)
        schedule = schedule_batch(batch, plan, prices, names, step=i, program=program, work=work)
        trace = simulate_step(plan, schedule, prices, names)
        steps.append(Step(batch, plan, schedule, trace.makespan_s, segment_compute_s(plan, trace)))
    return tuple(steps)


def padding_shares(evaluation: Evaluation) -> dict[str, float]:
    """Return each module's share of padding in the computed tokens of a plan of static shapes."""
    needed_tokens, computed_tokens = Counter[str](), Counter[str]()
    for step in evaluation.steps:
        computed_tokens.update(step.schedule.count_tokens(step.plan.layout))
        for m in step.plan.layout.modules:
            needed_tokens[m] += sum(x.tokens(m) for x in step.loads)
    return {m: 1 - needed_tokens[m] / n if n else 0.0 for m, n in computed_tokens.items()}


def segment_compute_s(plan: Plan, trace: Trace) -> dict[str, float]:
    """Return the seconds that each segment computes in a trace, without the end of the step."""
    seconds = dict.fromkeys((s.name for s in plan.layout.segments), 0.0)
    submesh = {s.name: s.submesh for s in plan.layout.segments}
    for e in trace.events:
        if e.direction in (FORWARD, BACKWARD) and e.submesh == submesh[e.segment]:
            seconds[e.segment] += e.end_s - e.start_s
    return seconds


Key = tuple[Case, str]
_EVALUATIONS: dict[Key, Evaluation] = {}


def evaluate(case: Case, system: str) -> Evaluation:
    """Evaluate a policy of dflop_jax or a system of `GROUPINGS` on a case, once per process."""
    key = (case, system)
    if key not in _EVALUATIONS:
        _EVALUATIONS[key] = _evaluate_uncached(*key)
    return _EVALUATIONS[key]


def count_replaced() -> tuple[int, int]:
    """Return how many samples were replaced, and how many evaluated, under plans of static shapes
    in this process's cache."""
    static = [a for (_, system), a in _EVALUATIONS.items() if system not in GROUPINGS]
    n_samples = sum(len(step.loads) for a in static for step in a.steps)
    return sum(a.n_replaced for a in static), n_samples


def evaluate_all(keys: Iterable[Key]) -> None:
    """Evaluate on all cores, one model at a time on each, since its profile takes about 10 s, and
    cache the results for `evaluate`."""
    jobs: dict[Any, list[Key]] = {}
    for case, system in dict.fromkeys(keys):
        if (case, system) not in _EVALUATIONS:
            jobs.setdefault((case.name, case.model, case.hardware), []).append((case, system))
    largest_first = sorted(jobs.values(), key=lambda job: -sum(case.n_devices for case, _ in job))
    for evaluations in map_on_all_cores(_evaluate_keys, largest_first):
        _EVALUATIONS.update(evaluations)


Job = TypeVar("Job")
Done = TypeVar("Done")


def map_on_all_cores(function: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    """Yield the function's result for each job as it completes, with a process for each core. One
    job or core needs no other process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(len(jobs), cores or 1)
    if workers < 2:
        yield from map(function, jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        try:
            for future in as_completed([pool.submit(function, job) for job in jobs]):
                yield future.result()
        finally:  # after a failure, report it without waiting for the other jobs
            pool.shutdown(wait=False, cancel_futures=True)


def _evaluate_keys(job: list[Key]) -> dict[Key, Evaluation]:
    return {(case, system): _evaluate_uncached(case, system) for case, system in job}


def _evaluate_uncached(case: Case, system: str) -> Evaluation:
    get_profile(case)  # outside the try: a model that cannot be traced is an error
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    try:
        evaluation = (
            _evaluate_dynamic_shapes(case, system)
            if system in GROUPINGS
            else _evaluate_static_shapes(case, system)
        )
    except ValueError as e:
        evaluation = Evaluation(str(e))
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    label = f"{case.name}, {case.n_devices} devices, {case.global_batch} samples, {system}"
    print_progress(f"{label}: {wall_s:.1f} s, {cpu_s:.1f} s of a core")
    return evaluation


def _evaluate_dynamic_shapes(case: Case, system: str) -> Evaluation:
    grouping = GROUPINGS[system]
    start_s = time.perf_counter()
    if system == PUBLISHED:
        plan, n = published_plan(case)
    elif system in (DFLOP, OPTIMIZER_ONLY):
        plan, n = tune(case, list(dflop_plans(case)), grouping)
    else:
        plans = baseline_plans(case, PYTORCH if system == PYTORCH else MEGATRON)
        plan, n = tune(case, list(plans), grouping)
    search_s = time.perf_counter() - start_s
    steps = tuple(
        simulate_batch(case, plan, batch, n, grouping) for batch in evaluation_batches(case)
    )
    description = f"{describe_parallelism(plan)}, {n} microbatches"
    return Evaluation(description, plan, steps, n, search_s=search_s)


def search_case(case: Case, policy: str, profile: ModelProfile, **options: Any) -> SearchResult:
    """Return the search for a policy of dflop_jax at a profile's prices; see `search_plan`."""
    assert policy in get_args(Policy), policy
    config = PlanConfig(
        policy=cast(Policy, policy),
        effort="quick",
        buckets=4,
        max_model=MAX_MODEL,
        max_stage=MAX_PIPELINE,
        max_microbatches=MAX_MICROBATCHES,
        sampled_batches=2,
    )
    return search_plan(
        profile,
        profile_data(case),
        n_devices=case.n_devices,
        global_batch=case.global_batch,
        config=config,
        memory_bytes=case.memory_bytes,
        steps=RUN_STEPS,
        token_multiple=TOKEN_MULTIPLE,
        **options,
    )


def _evaluate_static_shapes(case: Case, policy: str) -> Evaluation:
    """Search a plan for a policy of dflop_jax and simulate the evaluation batches under it."""
    profile = get_profile(case)
    profile_data(case)  # cached here, so that it is not part of `search_s`
    start_s = time.perf_counter()
    plan = search_case(case, policy, profile).plan
    search_s = time.perf_counter() - start_s
    steps = simulate_batches(case, plan)
    schedule_s = max(s.schedule.elapsed_s for s in steps)
    n_replaced = replace_oversize(case, plan)[1]
    return Evaluation(describe_parallelism(plan), plan, steps, 0, n_replaced, search_s, schedule_s)


def describe_parallelism(plan: Plan) -> str:
    """Describe each module's pipeline x data x tensor degrees, fan-in and memory savings."""
    parts = []
    for module in plan.layout.modules:
        segments = plan.layout.segments_of(module)
        mesh = plan.layout.submesh(segments[0].submesh)
        parts.append(f"{module} {mesh.stage * len(segments)}x{mesh.data}x{mesh.model}")
    savings = describe_savings(plan.layout)
    fan_in = f"; up to {plan.layout.fan_in} sub-microbatches" if plan.layout.fan_in > 1 else ""
    return ", ".join(parts) + fan_in + (f"; {savings}" if savings != "none" else "")
