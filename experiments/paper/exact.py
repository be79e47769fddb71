"""Steps of a placement at the true shapes of its microbatches, as systems with dynamic shapes run.

Here nothing is padded to a bucket: samples are dealt to microbatches and data ranks ("arrival":
in the order in which they come, which is random; "balanced": DFLOP's scheduler), samples of a
microbatch stand in one row, and attention costs the square of each sample, not of the row. Each
microbatch is a bucket of its own in a plan made for the batch, so the runtime's task lists and the
simulator are the same as everywhere.

Where encoders and LLM have equal data-parallel degrees, data ranks are replicas that meet only at
the end of a step. Otherwise all ranks exchange features at every microbatch, which then takes as
long as its slowest rank; an encoder's items are shared out evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.plan.links import send_seconds
from dflop_jax.plan.placement import Placement
from dflop_jax.records import FORWARD, REDUCE, Event, Plan, SampleShape, Task, Trace
from dflop_jax.schedule.solver.balance import balance
from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.problem import make_problem
from dflop_jax.sim.pipeline import simulate_step
from experiments.paper.exact_costs import (
    DIRECTIONS,
    Array,
    ExactCosts,
    Loads,
    Times,
    is_replicated,
    rank_seconds,
    ranks_of,
    replica_plan,
    resources_of,
    segment_seconds,
    step_end_s,
    sum_loads,
)

_ROUNDS = 5_000  # pairs of bins priced by the balanced rule


@dataclass(frozen=True)
class ExactStep:
    """One step. `idle_share`: of all devices' time; `busy_s`: seconds that each segment computes
    (the mean over its data ranks); `trace`: of the slowest replica and, where there are several,
    of the one that is done first."""

    makespan_s: float
    idle_share: float
    busy_s: Mapping[str, float]
    trace: Trace
    plan: Plan


def bins_of(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    n_microbatches: int,
    grouping: str,
) -> Array:
    """Bin of each sample, int [samples]: microbatch * LLM ranks + rank.

    Raises:
      ValueError: fewer samples than bins, or an unknown grouping.
    """
    ranks = ranks_of(placement)["llm"]
    n_bins = n_microbatches * ranks
    if n_microbatches < 1 or n_bins > len(batch):
        raise ValueError(
            f"{len(batch)} samples do not fill {n_microbatches} microbatches on {ranks} ranks; "
            "use fewer microbatches or a larger global batch"
        )
    if grouping == "arrival":
        return np.arange(len(batch)) % n_bins
    if grouping != "balanced":
        raise ValueError(f"grouping {grouping!r} is not arrival or balanced")
    prices = prices_of(costs, placement)
    found = balance(
        prices.columns(batch),
        n_bins,
        time_limit_s=30.0,
        bin_group=ranks if prices.grouped else 1,
        grouped=prices.grouped,
        max_rounds=_ROUNDS,
    )
    return found.bins


@dataclass(frozen=True)
class Prices:
    """What a unit of load of each module adds to the stages, relative to the dearest: a row for
    each kind of stage, to 2 digits, so that like placements deal alike. `grouped` are the rows of
    which all LLM ranks of a microbatch share one."""

    rates: tuple[tuple[tuple[str, float], ...], ...]
    grouped: tuple[int, ...]

    def columns(self, batch: Sequence[SampleShape]) -> Array:
        """[samples, rows]."""
        loads = {m: np.array([s.load(m) for s in batch]) for row in self.rates for m, _ in row}
        return np.stack([sum(rate * loads[m] for m, rate in row) for row in self.rates], axis=1)


def prices_of(costs: ExactCosts, placement: Placement) -> Prices:
    """Stages that no sample loads more than another stage are left out."""
    of, ranks = resources_of(placement), ranks_of(placement)
    coupled = not is_replicated(placement)
    rate: dict[int, dict[str, float]] = {}
    for s in placement.segments:
        sizes = np.array([1024.0, 5120.0] if s.module == "llm" else [8.0, 40.0])
        mesh = placement.mesh_of(s)
        both = sum(costs.segment_s(s, mesh, d, sizes, sizes * 1024) for d in DIRECTIONS)
        each = float(np.diff(both)[0] / np.diff(sizes)[0])
        at = rate.setdefault(of[s.submesh], {})
        spread = ranks[s.module] if s.module != "llm" and coupled else 1
        at[s.module] = at.get(s.module, 0.0) + each / spread
    dearest = max(v for at in rate.values() for v in at.values())
    rows = {tuple((m, float(f"{v / dearest:.1e}")) for m, v in at.items()) for at in rate.values()}
    kept = [a for a in sorted(rows) if not any(_exceeds(b, a) for b in rows)]
    encoders = (i for i, row in enumerate(kept) if "llm" not in dict(row))
    return Prices(tuple(kept), tuple(encoders) if coupled else ())


def _exceeds(b: tuple[tuple[str, float], ...], a: tuple[tuple[str, float], ...]) -> bool:
    return a != b and all(dict(b).get(m, 0.0) >= v for m, v in a)


def dealt_quickly(prices: Prices, batch: Sequence[SampleShape], n_bins: int, ranks: int) -> Array:
    """Bins as of "balanced", by the largest sample first alone."""
    width = ranks if prices.grouped else 1
    problem = make_problem(prices.columns(batch), n_bins, None, None, width, prices.grouped)
    return lpt(problem)


def run_step(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    n_microbatches: int,
    grouping: str,
) -> ExactStep:
    """Simulate one step of a batch; ValueError as for `bins_of`."""
    bins = bins_of(costs, placement, batch, n_microbatches, grouping)
    return run_bins(costs, placement, batch, bins, n_microbatches)


def run_bins(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[SampleShape],
    bins: Array,
    n_microbatches: int,
) -> ExactStep:
    """Simulate one step of a batch whose samples lie in given bins."""
    ranks = ranks_of(placement)
    loads = sum_loads(batch, bins, n_microbatches, ranks)
    times = segment_seconds(costs, placement, loads)
    n_replicas = ranks["llm"] if is_replicated(placement) else 1
    traces = [replica_trace(costs, placement, loads, times, r) for r in range(n_replicas)]
    ends = [trace.makespan_s for trace, _ in traces]
    reduced_s = step_end_s(costs, placement)
    makespan_s = max(ends) + reduced_s
    final = placement.segments[-1].name  # its forward is part of its backward
    busy: dict[str, float] = {}
    for (name, direction), each in rank_seconds(costs, placement, loads).items():
        if (name, direction) != (final, FORWARD):
            busy[name] = busy.get(name, 0.0) + float(each.sum(axis=0).mean())
    spent = sum(busy[s.name] * placement.mesh_of(s).n_devices for s in placement.segments)
    used = len({d for m in placement.submeshes for d in m.devices})
    slowest, first = int(np.argmax(ends)), int(np.argmin(ends))
    shown, own = traces[slowest]
    events = shown.events
    if n_replicas > 1:
        events += tuple(replace(e, submesh=f"{e.submesh} first") for e in traces[first][0].events)
    if reduced_s:
        last = {s.submesh: s.name for s in placement.segments}
        events += tuple(
            Event(m, name, -1, REDUCE, max(ends), makespan_s) for m, name in last.items()
        )
    return ExactStep(
        makespan_s,
        1.0 - spent / (used * makespan_s),
        busy,
        Trace(0, "simulated", events),
        own,
    )


def replica_trace(
    costs: ExactCosts,
    placement: Placement,
    loads: Loads,
    times: Times,
    r: int,
) -> tuple[Trace, Plan]:
    """One replica (or the coupled whole): its trace and its plan."""
    plan = replica_plan(placement, loads, r)
    seconds = {
        Task(s, g, d): float(x) for (s, d), each in times.items() for g, x in enumerate(each[r])
    }
    names = [s.name for s in plan.segments]
    sends = send_seconds(plan, costs.model, costs.hardware)
    trace = simulate_step(plan, range(len(plan.buckets)), seconds, names, sends=sends)
    return trace, plan
