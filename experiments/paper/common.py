"""What the paper's experiments share: systems tuned once, steps simulated once, tables printed.

Every system is given the same predicted costs, cluster, memory and batches. All of them may
recompute each layer in backward where memory needs it. Systems are tuned on batches of their own,
and what is reported is the mean over other batches.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from dflop_jax.hardware import Hardware
from dflop_jax.plan.baselines import BASELINES as SPACES
from dflop_jax.plan.placement import Placement, ends_in_layers, lay_out
from dflop_jax.plan.space import separate
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import Load, ModelProfile, Trace
from experiments.paper import data
from experiments.paper.dealing import run_step
from experiments.paper.exact import ExactCosts, ExactStep
from experiments.paper.public_rule import pipelined, public_rule
from experiments.paper.systems import CLUSTER, Setup, costs, profile_of, take_costs
from experiments.paper.tune import Tuned, tune, with_remat

MAX_MODEL, MAX_STAGE = 8, 16
MEMORY_SHARE = 0.95  # of a device's memory; the rest is the framework's
TUNING, REPORTED = 2, 4  # global batches that a system is tuned on, and that are reported
BASELINES = ("pytorch", "megatron")


@dataclass(frozen=True)
class Outcome:
    """A tuned system and its steps."""

    setup: Setup
    system: str
    grouping: str
    tuned: Tuned
    steps: tuple[ExactStep, ...]
    n_devices: int
    global_batch: int
    search_s: float

    @property
    def costs(self) -> ExactCosts:
        return costs_of(self.setup)

    @property
    def step_s(self) -> float:
        return float(np.mean([s.makespan_s for s in self.steps]))

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s

    @property
    def idle_share(self) -> float:
        return float(np.mean([s.idle_share for s in self.steps]))

    @property
    def idle_device_s(self) -> float:
        """Seconds that devices idle in a step, all together."""
        each = [s.idle_share * s.makespan_s for s in self.steps]
        return float(np.mean(each)) * self.n_devices


@dataclass
class Result:
    """One experiment's table for the report. `why` explains what differs from the paper."""

    name: str
    title: str
    paper: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    bars: dict[str, list[float]] = field(default_factory=dict)
    "series of the picture: name -> a value per label"
    labels: list[str] = field(default_factory=list)
    unit: str = ""


# System -> (its space, how samples meet microbatches).
SYSTEMS = {
    "pytorch": ("pytorch", "arrival"),
    "megatron": ("megatron", "arrival"),
    "dflop": ("dflop", "balanced"),
    "optimizer only": ("dflop", "arrival"),
    "scheduler only": ("megatron", "balanced"),
}


def placements(
    space: str, n_devices: int, profile: ModelProfile, hardware: Hardware
) -> Iterator[Placement]:
    """A space without what no one would run: tensor parallelism across nodes, and pipelines inside
    one program, which batch microbatches to groups. DFLOP's encoder is no pipeline here (data ranks
    do), its layers are dealt by what the ends cost, and beyond 64 devices its split moves in steps
    of a 32nd."""
    bounds = {"max_model": MAX_MODEL, "max_stage": MAX_STAGE}
    if space != "dflop":
        yield from SPACES[space](n_devices, profile.n_layers, **bounds)
        return
    step = max(1, n_devices // 32) if n_devices > 64 else 1
    ends = ends_in_layers(profile)
    for family in separate(n_devices, profile.n_layers, **bounds):
        *others, _ = family.forms
        inside = all(f.mesh[2] <= hardware.devices_per_node for f in family.forms)
        if family.group_size > 1 or any(f.n_segments > 1 for f in others) or not inside:
            continue
        for i in range(len(family)):
            outline = family.outline(i)
            first = outline.firsts[-1]
            if first % outline.forms[-1].mesh[2] == 0 and first % step == 0:
                yield lay_out(outline, profile.n_layers, ends)


@cache
def costs_of(setup: Setup) -> ExactCosts:
    return ExactCosts(CostModel(profile_of(setup)), CLUSTER)


Job, Done = TypeVar("Job"), TypeVar("Done")
# (model, system, devices, samples a step)
Key = tuple[Setup, str, int, int]
_KNOWN: dict[Key, Outcome] = {}


def outcome(setup: Setup, system: str, n_devices: int = 64, global_batch: int = 256) -> Outcome:
    """A system tuned for a model, and simulated steps of it; ValueError where nothing fits."""
    key = (setup, system, n_devices, global_batch)
    if key not in _KNOWN:
        _KNOWN[key] = _outcome(*key)
    return _KNOWN[key]


def prepare(keys: Iterable[Key]) -> None:
    """Compute outcomes on all cores, a model at a time on each; `outcome` then knows them."""
    jobs: dict[tuple[Setup, int, int], list[Key]] = {}
    for key in dict.fromkeys(keys):
        if key not in _KNOWN:
            jobs.setdefault((key[0], key[2], key[3]), []).append(key)
    # the largest first: they take longest
    order = sorted(jobs, key=lambda j: -j[1])
    for found in on_all_cores(_outcomes, [jobs[j] for j in order]):
        _KNOWN.update(found)
        setup, _, n_devices, batch = next(iter(found))
        say(f"{setup.name}, {n_devices} devices, batch {batch}")


def on_all_cores(work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    """What is made of every job, as it comes, on as many processes as there are cores; in this one
    where only one could be used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(len(jobs), cores or 1)
    if workers < 2:
        yield from map(work, jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, take_costs, (costs(),)) as pool:
        for done in as_completed([pool.submit(work, job) for job in jobs]):
            yield done.result()


def _outcomes(keys: Sequence[Key]) -> dict[Key, Outcome]:
    return {key: _outcome(*key) for key in keys}


def _outcome(setup: Setup, system: str, n_devices: int, global_batch: int) -> Outcome:
    costs = costs_of(setup)
    memory = MEMORY_SHARE * CLUSTER.memory_bytes
    start_s = time.perf_counter()
    if system == "dflop-public":
        grouping = "balanced"
        tuned = _public(setup, costs, n_devices, global_batch, memory)
    else:
        space, grouping = SYSTEMS[system]
        tuned = tune(
            placements(space, n_devices, costs.profile, CLUSTER),
            seen_batches(setup, global_batch, TUNING, 100),
            costs,
            grouping=grouping,
            memory_bytes=memory,
        )
    search_s = time.perf_counter() - start_s
    first, *rest = (
        run_step(costs, tuned.placement, b, tuned.n_microbatches, grouping)
        for b in seen_batches(setup, global_batch, REPORTED, 1)
    )
    nothing = Trace(0, "simulated", ())  # of a hundred outcomes, one trace each is enough
    steps = (first, *(replace(s, trace=nothing) for s in rest))
    return Outcome(setup, system, grouping, tuned, steps, n_devices, global_batch, search_s)


def _public(
    setup: Setup, costs: ExactCosts, n_devices: int, global_batch: int, memory: float
) -> Tuned:
    """The public optimizer's choice, with layers recomputed only if nothing fits without."""
    loads = data.profile(setup.mixture, setup.layout).loads
    timed = {(t.module, t.model) for t in costs.profile.timings}
    known = [
        p
        for p in pipelined(
            n_devices,
            costs.profile.n_layers,
            max_model=MAX_MODEL,
            max_stage=MAX_STAGE,
        )
        if all((s.module, p.mesh_of(s).model) in timed for s in p.segments)
        and all(m.first % m.model == 0 for m in p.submeshes)
    ]
    args = {"global_batch": global_batch, "memory_bytes": memory}
    try:
        p, m, t = public_rule(known, costs, loads, **args)
    except ValueError:
        known = [with_remat(p, "layers") for p in known]
        p, m, t = public_rule(known, costs, loads, **args)
    return Tuned(p, m, t, 0.0, len(known), 0)


@cache
def seen_batches(
    setup: Setup, global_batch: int, n: int, seed: int
) -> tuple[tuple[Load, ...], ...]:
    """Global batches in arrival order; the seed tells those of tuning from those reported."""
    found = data.batches(setup.mixture, setup.layout, global_batch, n, seed)
    return tuple(map(tuple, found))


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x"


def percent(x: float) -> str:
    return f"{100 * x:.0f}%"


_STARTED_S = time.perf_counter()


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.perf_counter() - _STARTED_S:5.0f} s] {what}", file=sys.stderr, flush=True)


def print_result(result: Result) -> None:
    """The table, what the paper says, and why ours differs."""
    console = Console(width=160 if not sys.stdout.isatty() else None)
    table = Table(title=result.title)
    for i, column in enumerate(result.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"paper: {result.paper}")
    for line in result.notes:
        console.print(f"- {line}")
    for line in result.why:
        console.print(f"why: {line}")


def main(run: Callable[[], Result], keys: Iterable[Key] = ()) -> None:
    """What an experiment file does as a program."""
    prepare(keys)
    print_result(run())
