"""What systems make of cases, each computed once: the plan that they choose, and its steps on
batches that no search saw.

The product's policies run as the runtime runs them: static shapes from the planner, batches from
the scheduler, and the simulator on the runtime's task lists. Systems of `TRUE_SHAPES` have the same
prices, memory and batches, but pay for no padding, as in DFLOP's results (`true_shapes`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar, cast, get_args

import numpy as np

from dflop_jax.config import PlanConfig, Policy
from dflop_jax.plan.memory import describe_savings
from dflop_jax.plan.search import search_plan
from dflop_jax.records import BACKWARD, FORWARD, Plan, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.count_program import canonicalize, program_sizes
from dflop_jax.simulate.steps import simulate_step
from experiments.paper.cases import Case, Step, reported, seen
from experiments.paper.costs import prices_of, profile_of
from experiments.paper.results import say
from experiments.paper.true_shapes import run_step
from experiments.paper.tune import MAX_MODEL, baseline_plans, dflop_plans, published_plan, tuned

TOKEN_MULTIPLE = 128
MAX_PIPELINE, MAX_MICROBATCHES = 8, 64  # of what the planner tries with static shapes
PYTORCH, MEGATRON, DFLOP = "pytorch", "megatron", "dflop at true shapes"
PUBLISHED = "as published"  # the baseline that no one tuned
BASELINES = (PYTORCH, MEGATRON)
OPTIMIZER_ONLY, SCHEDULER_ONLY = "optimizer only", "scheduler only"
# Systems at true shapes -> how samples meet microbatches.
TRUE_SHAPES = {
    PUBLISHED: "arrival",
    PYTORCH: "arrival",
    MEGATRON: "arrival",
    DFLOP: "balanced",
    OPTIMIZER_ONLY: "arrival",
    SCHEDULER_ONLY: "balanced",
}
_WORK = 4_000  # units of the scheduler's work for a reported batch


@dataclass(frozen=True)
class Answer:
    """A system's plan for a case, in `words` its parallelism, and reported steps; `n_microbatches`
    of a system at true shapes. Seconds of the search and of a batch's schedule. Where nothing fits
    there is no step, and `words` say why."""

    words: str
    plan: Plan | None = None
    steps: tuple[Step, ...] = ()
    n_microbatches: int = 0
    search_s: float = 0.0
    schedule_s: float = 0.0

    @property
    def fits(self) -> bool:
        return bool(self.steps)

    @property
    def step_s(self) -> float:
        """Seconds of a step, on average; infinite where nothing fits."""
        return mean_s(self.steps) if self.steps else math.inf

    @property
    def idle_share(self) -> float:
        """Of the devices' time: that in which they compute nothing, on average."""
        return float(np.mean([s.idle_share for s in self.steps])) if self.steps else 0.0

    @property
    def idle_device_s(self) -> float:
        """Seconds that devices idle in a step, all together."""
        assert self.plan is not None, self.words
        each = [s.idle_share * s.makespan_s for s in self.steps]
        return float(np.mean(each)) * self.plan.layout.n_devices

    def busy_s(self, segment: str) -> float:
        """Seconds of a step that a segment computes, on average."""
        return float(np.mean([s.busy_s[segment] for s in self.steps]))


def mean_s(steps: Iterable[Step]) -> float:
    return float(np.mean([s.makespan_s for s in steps]))


def run_steps(case: Case, plan: Plan) -> tuple[Step, ...]:
    """The reported batches under a plan of static shapes, scheduled as in a run."""
    prices, names = prices_of(case, plan), [s.name for s in plan.layout.segments]
    program = canonicalize(program_sizes(plan.layout))
    steps = []
    for i, batch in enumerate(reported(case)):
        work = min(plan.scheduling.work_budget or _WORK, _WORK)
        schedule = schedule_batch(batch, plan, prices, names, step=i, program=program, work=work)
        trace = simulate_step(plan, schedule, prices, names)
        steps.append(Step(plan, schedule, trace.makespan_s, computing_s(plan, trace)))
    return tuple(steps)


def padding(case: Case, made: Answer) -> dict[str, float]:
    """By module the share of the tokens that programs compute which are padding, over all reported
    batches; for plans of static shapes."""
    used = {m: sum(x.tokens(m) for b in reported(case) for x in b) for m in case.model().modules}
    computed = dict.fromkeys(used, 0)
    for step in made.steps:
        for g in step.schedule.groups:
            ranks = step.plan.layout.data_ranks(g.module)
            computed[g.module] += g.microbatches * ranks * g.shape.size
    return {m: 1 - used[m] / n if n else 0.0 for m, n in computed.items()}


def computing_s(plan: Plan, trace: Trace) -> dict[str, float]:
    """Seconds that each segment computes in a trace, the step's end not counted."""
    seconds = dict.fromkeys((s.name for s in plan.layout.segments), 0.0)
    submesh = {s.name: s.submesh for s in plan.layout.segments}
    for e in trace.events:
        if e.direction in (FORWARD, BACKWARD) and e.submesh == submesh[e.segment]:
            seconds[e.segment] += e.end_s - e.start_s
    return seconds


Key = tuple[Case, str]
_KNOWN: dict[Key, Answer] = {}


def answer(case: Case, system: str) -> Answer:
    """What a system, one of the product's policies or of `TRUE_SHAPES`, makes of a case."""
    key = (case, system)
    if key not in _KNOWN:
        _KNOWN[key] = _answer(*key)
    return _KNOWN[key]


def prepare(keys: Iterable[Key]) -> None:
    """Compute answers on all cores, a case at a time on each; `answer` then knows them."""
    jobs: dict[Case, list[str]] = {}
    for case, system in dict.fromkeys(keys):
        if (case, system) not in _KNOWN:
            jobs.setdefault(case, []).append(system)
    # Those of many devices take longest.
    in_order = sorted(jobs.items(), key=lambda job: -job[0].n_devices)
    for answers in on_all_cores(_answers, in_order):
        _KNOWN.update(answers)


Job, Done = TypeVar("Job"), TypeVar("Done")


def on_all_cores(work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    """What is made of every job, as it comes, on as many processes as there are cores; in this one
    where only one could be used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(len(jobs), cores or 1)
    if workers < 2:
        yield from map(work, jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        try:
            for done in as_completed([pool.submit(work, job) for job in jobs]):
                yield done.result()
        finally:  # where one failed the others would run on unread before it is said
            pool.shutdown(wait=False, cancel_futures=True)


def _answers(job: tuple[Case, list[str]]) -> dict[Key, Answer]:
    case, systems = job
    return {(case, system): _answer(case, system) for system in systems}


def _answer(case: Case, system: str) -> Answer:
    profile_of(
        case
    )  # here, since a model that cannot be traced is an error, not one without a plan
    start_s, begun_s = time.perf_counter(), time.process_time()
    try:
        made = _at_true_shapes(case, system) if system in TRUE_SHAPES else _planned(case, system)
    except ValueError as e:
        made = Answer(str(e))
    took_s, worked_s = time.perf_counter() - start_s, time.process_time() - begun_s
    what = f"{case.name}, {case.n_devices} devices, {system}"
    say(f"{what}: {took_s:.1f} s, {worked_s:.1f} s of a core")
    return made


def _at_true_shapes(case: Case, system: str) -> Answer:
    grouping = TRUE_SHAPES[system]
    start_s = time.perf_counter()
    if system == PUBLISHED:
        plan, n = published_plan(case)
    elif system in (DFLOP, OPTIMIZER_ONLY):
        plan, n = tuned(case, list(dflop_plans(case)), grouping)
    else:
        plans = baseline_plans(case, PYTORCH if system == PYTORCH else MEGATRON)
        plan, n = tuned(case, list(plans), grouping)
    search_s = time.perf_counter() - start_s
    steps = tuple(run_step(case, plan, batch, n, grouping) for batch in reported(case))
    return Answer(f"{parallelism(plan)}, {n} microbatches", plan, steps, n, search_s)


def _planned(case: Case, policy: str) -> Answer:
    """The planner's choice, and the reported batches under it."""
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
    profile, data = profile_of(case), seen(case)
    start_s = time.perf_counter()
    plan = search_plan(
        profile,
        data,
        n_devices=case.n_devices,
        global_batch=case.global_batch,
        config=config,
        memory_bytes=case.memory_bytes,
        token_multiple=TOKEN_MULTIPLE,
    ).plan
    search_s = time.perf_counter() - start_s
    steps = run_steps(case, plan)
    schedule_s = max(s.schedule.elapsed_s for s in steps)
    return Answer(parallelism(plan), plan, steps, 0, search_s, schedule_s)


def parallelism(plan: Plan) -> str:
    """Pipeline x data x tensor of each module, groups that feed one, and what saves memory."""
    parts = []
    for module in plan.layout.modules:
        segments = plan.layout.segments_of(module)
        mesh = plan.layout.submesh(segments[0].submesh)
        parts.append(f"{module} {mesh.stage * len(segments)}x{mesh.data}x{mesh.model}")
    words = describe_savings(plan.layout)
    fed = f"; up to {plan.layout.fan_in} sub-microbatches" if plan.layout.fan_in > 1 else ""
    return ", ".join(parts) + fed + (f"; {words}" if words != "none" else "")
