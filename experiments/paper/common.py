"""What the paper's experiments share: systems tuned once, steps simulated once, tables printed.

Every system is given the same predicted costs, cluster, memory and batches. All of them recompute a
stage's forward in backward (as the public DFLOP code does with activation checkpointing) and may
recompute each layer on top where memory needs it. Systems are tuned on batches of their own, and
what is reported is the mean over other batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from rich.console import Console
from rich.table import Table

from dflop_jax.hardware import Hardware
from dflop_jax.plan.baselines import megatron, pipelined, public_rule, pytorch
from dflop_jax.plan.exact import ExactStep, run_step
from dflop_jax.plan.exact_costs import ExactCosts
from dflop_jax.plan.exact_search import Tuned, tune
from dflop_jax.plan.placement import Placement, separate
from dflop_jax.records import SampleShape
from experiments.paper import data
from experiments.paper.systems import CLUSTER, Setup, profile_of

MAX_MODEL, MAX_STAGE = 8, 16
MEMORY_SHARE = 0.95  # of a device's memory; the rest is the framework's
TUNING, REPORTED = 2, 4  # global batches that a system is tuned on, and that are reported
BASELINES = ("pytorch", "megatron")


@dataclass(frozen=True)
class Outcome:
    """A tuned system and its steps."""

    system: str
    grouping: str
    tuned: Tuned
    costs: ExactCosts
    steps: tuple[ExactStep, ...]
    n_devices: int
    global_batch: int
    search_s: float

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

    @property
    def how(self) -> str:
        """Parallelism in short."""
        remat = ", layers recomputed" if self.tuned.variant else ""
        return f"{shown(self.tuned.placement)}, {self.tuned.n_microbatches} microbatches{remat}"


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


def spaces() -> dict[str, Callable[..., Iterator[Placement]]]:
    """System -> its placements of n devices and these layers."""
    return {"pytorch": pytorch, "megatron": megatron, "dflop": separate}


# System -> (its space, how samples meet microbatches).
SYSTEMS = {
    "pytorch": ("pytorch", "arrival"),
    "megatron": ("megatron", "arrival"),
    "dflop": ("dflop", "balanced"),
    "optimizer only": ("dflop", "arrival"),
    "scheduler only": ("megatron", "balanced"),
}


def placements(
    space: str, n_devices: int, n_layers: dict[str, int], hardware: Hardware
) -> Iterator[Placement]:
    """A space without what no one would run: tensor parallelism across nodes, and pipelines inside
    one program, which batch microbatches to groups. Beyond 64 devices DFLOP's split moves in steps
    of a 64th."""
    found = spaces()[space](
        n_devices, n_layers, max_model=MAX_MODEL, max_stage=MAX_STAGE, tied=False
    )
    step = max(1, n_devices // 64)
    for p in found:
        inside = all(
            m.model <= hardware.devices_per_node and m.first % m.model == 0 for m in p.submeshes
        )
        coarse = all(m.first % step == 0 for m in p.submeshes)
        if p.group_size == 1 and inside and coarse:
            yield p


def variants(setup: Setup, hardware: Hardware = CLUSTER) -> list[ExactCosts]:
    """Costs without and with recomputing layers."""
    return [ExactCosts(profile_of(setup, remat), hardware) for remat in (False, True)]


@cache
def outcome(
    setup: Setup,
    system: str,
    n_devices: int = 64,
    global_batch: int = 256,
    hardware: Hardware = CLUSTER,
    reported: int = REPORTED,
) -> Outcome:
    """A system tuned for a model, and simulated steps of it; ValueError where nothing fits."""
    say(f"{setup.name}: {system} on {n_devices} devices")
    known = variants(setup, hardware)
    memory = MEMORY_SHARE * hardware.memory_bytes
    tuning = list(seen_batches(setup, global_batch, TUNING, 100))
    start_s = time.perf_counter()
    if system == "dflop-public":
        grouping = "balanced"
        tuned = _public(setup, known, n_devices, global_batch, memory, hardware)
    else:
        space, grouping = SYSTEMS[system]
        tuned = tune(
            placements(space, n_devices, known[0].profile.n_layers, hardware),
            tuning,
            known,
            grouping=grouping,
            memory_bytes=memory,
        )
    search_s = time.perf_counter() - start_s
    costs = known[tuned.variant]
    steps = tuple(
        run_step(costs, tuned.placement, b, tuned.n_microbatches, grouping)
        for b in seen_batches(setup, global_batch, reported, 1)
    )
    return Outcome(system, grouping, tuned, costs, steps, n_devices, global_batch, search_s)


def _public(
    setup: Setup,
    known: Sequence[ExactCosts],
    n_devices: int,
    global_batch: int,
    memory: float,
    hardware: Hardware,
) -> Tuned:
    """The public optimizer's choice, with layers recomputed only if nothing fits without."""
    shapes = data.profile(setup.mixture, setup.layout).shapes
    for v, costs in enumerate(known):
        found = (
            p
            for p in pipelined(
                n_devices,
                costs.profile.n_layers,
                max_model=MAX_MODEL,
                max_stage=MAX_STAGE,
                tied=False,
            )
            if all(m.first % m.model == 0 for m in p.submeshes)
            and all(
                (s.module, p.mesh_of(s).model)
                in {(t.module, t.model) for t in costs.profile.timings}
                for s in p.segments
            )
        )
        try:
            p, m, t = public_rule(
                found, costs, shapes, global_batch=global_batch, memory_bytes=memory
            )
            return Tuned(p, m, v, t, 0.0, 0, 0)
        except ValueError:
            if v == len(known) - 1:
                raise
    raise AssertionError("no costs")


@cache
def seen_batches(
    setup: Setup, global_batch: int, n: int, seed: int
) -> tuple[tuple[SampleShape, ...], ...]:
    """Global batches in arrival order; the seed tells those of tuning from those reported."""
    found = data.batches(setup.mixture, setup.layout, global_batch, n, seed)
    return tuple(map(tuple, found))


def shown(placement: Placement) -> str:
    """Stages x data x tensor of each module: "vision 1x8x4, llm 4x2x4"."""
    parts = []
    for module in dict.fromkeys(s.module for s in placement.segments):
        segments = [s for s in placement.segments if s.module == module]
        mesh = placement.mesh_of(segments[0])
        parts.append(f"{module} {len(segments)}x{mesh.data}x{mesh.model}")
    meshes = {frozenset(m.devices) for m in placement.submeshes}
    used = [frozenset(placement.mesh_of(s).devices) for s in placement.segments]
    return ", ".join(parts) + (" (shared)" if len(used) > len(meshes) else "")


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


def main(run: Callable[[], Result]) -> None:
    """What an experiment file does as a program."""
    print_result(run())
