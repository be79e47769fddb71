"""Figures of a step beside its loss (seconds by phase, imbalance, memory, FLOP/s), skipped updates,
and predictions of a run.

The devices skip an update (`runtime.update`) by a limit that is known when the step is dispatched.
The step before is in flight then, so norms count from the second step after theirs on, and a
resumed run sets the same limits.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from dflop_jax.config import Config
from dflop_jax.hardware import chip_peak_flops
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import (
    DataProfile,
    Hardware,
    Layout,
    Load,
    Plan,
    Schedule,
    Trace,
    piece_tokens,
)
from dflop_jax.report.metrics import DEVICE, DEVICE_PEAK, HOST, IDLE, SkippedUpdate
from dflop_jax.train.run_context import RunContext, with_step_count

# Steps whose norms make the running median: more follow a falling norm later, fewer are moved by
# a single batch.
NORM_WINDOW = 128
# Norms that are needed before one counts as a spike; in the first steps they change by themselves.
MIN_NORMS = NORM_WINDOW // 8
NOT_FINITE, SPIKE = "not finite", "spike"


@dataclass(frozen=True)
class SkippedSteps:
    """The skipped updates of a run so far."""

    count: int = 0
    in_a_row: int = 0  # since the last update
    norms: tuple[tuple[int, float], ...] = ()  # (step, global gradient norm) of the last updates

    def with_step(self, step: int, norm: float, applied: bool) -> SkippedSteps:
        if not applied:
            return replace(self, count=self.count + 1, in_a_row=self.in_a_row + 1)
        norms = (*self.norms, (step, norm))[-NORM_WINDOW:]
        return replace(self, in_a_row=0, norms=norms)

    def norm_limit(self, step: int, spike: float) -> float:
        """The norm above which a step is skipped: `spike` times the running median; infinite with
        `spike` 0 and while few norms are known."""
        past_norms = [norm for norm_step, norm in self.norms if norm_step < step - 1]
        if not spike or len(past_norms) < MIN_NORMS:
            return math.inf
        return spike * median(past_norms)


def describe_skip(skipped: SkippedUpdate) -> str:
    """Why a step is skipped, and what to do."""
    if skipped.why == SPIKE:
        return (
            "its gradient norm is above train.loss_spike times the usual one; raise "
            "train.loss_spike (0: off), or lower train.learning_rate"
        )
    modules = ", then of ".join(skipped.modules) or "all modules together"
    return (
        f"gradients of {modules} were not finite; lower train.learning_rate, or look at the "
        "samples that metrics.jsonl names there"
    )


_MAX_PROCESSES = 32  # processes in a row of metrics: more would fill disk and trackers


def phase_seconds(
    layout: Layout, trace: Trace, start_s: float, step_s: float, waits_s: Mapping[str, float]
) -> dict[str, float]:
    """Return what the mean device did in a step's seconds, which these add up to.

    Args:
      start_s: when the step's seconds begin, from the trace's start: before it where devices
        waited for its first task, after it where the step before was still under way.
      waits_s: what devices waited for before the trace's start, by name.
    """
    devices = {m.name: len(m.devices) for m in layout.submeshes}
    n_devices = max(m.devices.stop for m in layout.submeshes)
    phases: dict[str, float] = {}
    for e in trace.events:  # links between submeshes keep no device busy
        busy_s = devices.get(e.submesh, 0) * max(e.end_s - max(e.start_s, start_s), 0.0)
        if busy_s > 0:
            phases[e.direction] = phases.get(e.direction, 0.0) + busy_s / n_devices
    phases |= {name: s for name, s in waits_s.items() if s > 0}
    return phases | {IDLE: max(step_s - sum(phases.values()), 0.0)}


def measure_imbalance(
    layout: Layout, schedule: Schedule, loads: Sequence[Load]
) -> dict[str, float]:
    """Return by module how many more tokens the fullest data rank of a group has than the mean one,
    relative, over all groups of a batch; 0 where it has no token."""
    imbalance: dict[str, float] = {}
    for module in layout.modules:
        tokens, n_ranks = np.array(piece_tokens(loads, module), float), layout.data_ranks(module)
        pieces = [g.pieces for g in schedule.groups if g.module == module]
        rank_tokens = [np.bincount(p.rank, tokens[p.piece_id], n_ranks) for p in pieces]
        max_tokens = float(sum(t.max() for t in rank_tokens))
        mean_tokens = float(sum(t.mean() for t in rank_tokens))
        imbalance[module] = max_tokens / mean_tokens - 1 if mean_tokens else 0.0
    return imbalance


def slowest_processes(process_s: Mapping[int, float]) -> dict[str, float]:
    processes = sorted(process_s, key=lambda p: -process_s[p])[:_MAX_PROCESSES]
    return {str(p): process_s[p] for p in sorted(processes)}


def measure_memory(devices: Iterable[jax.Device]) -> dict[str, float]:
    """Return the bytes in use of this process: of its fullest device, now and at the peak, and of
    the host; without what the backend or the system does not report."""
    process = jax.process_index()
    stats = [d.memory_stats() or {} for d in devices if d.process_index == process]
    bytes_in_use: dict[str, float] = {}
    for name, key in {DEVICE: "bytes_in_use", DEVICE_PEAK: "peak_bytes_in_use"}.items():
        if any(key in s for s in stats):
            bytes_in_use[name] = float(max(s.get(key, 0) for s in stats))
    with suppress(OSError):
        n_pages = int(Path("/proc/self/statm").read_text().split()[1])
        bytes_in_use[HOST] = float(n_pages * os.sysconf("SC_PAGE_SIZE"))
    return bytes_in_use


def max_by_name(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    maxima: dict[str, Any] = {}
    for record in records:
        for name, value in record.items():
            maxima[name] = max(value, maxima.get(name, value))
    return maxima


def sum_by_name(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for record in records:
        sums.update(record)
    return dict(sums)


def peak_flops(
    config: Config, devices: Sequence[jax.Device], hardware: Hardware | None = None
) -> float | None:
    """Peak FLOP/s of a device: `train.peak_flops`, else by chip and dtype; None on CPU."""
    if config.train.peak_flops:
        return config.train.peak_flops
    if hardware:
        return None if hardware.name == "cpu" else hardware.peak_flops(config.model.dtype)
    return chip_peak_flops(devices[0].device_kind, config.model.dtype)


def measure_utilisation(
    flops: Mapping[str, float], step_s: float, layout: Layout, n_devices: int, peak: float | None
) -> dict[str, Any]:
    """Return the fields of `StepMetrics` about FLOPs; `peak` is the peak FLOP/s of a device."""
    per_s = {m: n / step_s if step_s > 0 else 0.0 for m, n in flops.items()}
    total_per_s = sum(per_s.values())
    fields: dict[str, Any] = {
        "model_flops": sum(flops.values()),
        "model_flops_by_module": dict(flops),
        "flops_per_s": total_per_s,
        "flops_per_s_by_module": per_s,
    }
    if peak:
        devices = {
            m: {d for s in layout.segments_of(m) for d in layout.submesh(s.submesh).devices}
            for m in layout.modules
        }
        fields["mfu"] = total_per_s / (peak * n_devices)
        fields["mfu_by_module"] = {m: rate / (peak * len(devices[m])) for m, rate in per_s.items()}
    return fields


def row_tokens(layout: Layout) -> dict[str, int]:
    """Tokens of the shortest rows that are compiled of each module."""
    return {m: min(s.tokens for s in layout.shapes(m)) for m in layout.modules if layout.shapes(m)}


@dataclass(frozen=True)
class PredictedRun:
    """Predictions of a whole run under a plan."""

    steps: int
    run_s: float
    tokens_per_s: float  # without padding, in the last module
    mfu: float | None  # None where no peak is known


def predict_run(context: RunContext, data: DataProfile, plan: Plan) -> PredictedRun:
    config, step_s = context.config, plan.predicted.makespan_s
    train = with_step_count(context, data.n_total).config.train
    batches_per_s = train.global_batch / len(data.loads) / step_s  # of loads such as all of these
    last, mfu = plan.layout.modules[-1], None
    tokens = sum(load.tokens(last) for load in data.loads)
    run_flops = context.n_devices * (peak_flops(config, context.devices, context.hardware) or 0.0)
    if run_flops:
        needed = needed_flops(context.model, row_tokens(plan.layout), context.trained.frozen)
        flops = sum(
            sum(map(piece_flops, load.lengths(module), load.content_of(module)))
            for module, piece_flops in needed.items()
            for load in data.loads
        )
        mfu = flops * batches_per_s / run_flops
    return PredictedRun(train.steps, train.steps * step_s, tokens * batches_per_s, mfu)
