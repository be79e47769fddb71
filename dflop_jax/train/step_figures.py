"""Figures of a step besides its loss (seconds by phase, imbalance, FLOP/s), skipped updates, and
predictions of a run.

The devices skip an update (`runtime.update`) by a limit that is set when the step is dispatched.
The previous step is pending then, so a norm affects limits from the second step after its own on,
and a resumed run sets the same limits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from dflop_jax.report.metrics import IDLE, SkippedUpdate
from dflop_jax.train.run_context import RunContext, with_step_count

# Steps whose norms make up the running median: with more, it follows a falling norm more slowly;
# with fewer, a single batch affects it.
NORM_WINDOW = 128
# Minimum number of norms before one can count as a spike; norms change fast in the first steps.
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
        """Return the norm above which a step is skipped: `spike` times the running median; infinite
        if `spike` is 0 or few norms are known."""
        past_norms = [norm for norm_step, norm in self.norms if norm_step < step - 1]
        if not spike or len(past_norms) < MIN_NORMS:
            return math.inf
        return spike * median(past_norms)


def describe_skip(skipped: SkippedUpdate) -> str:
    """Return why a step is skipped, and how to avoid it."""
    if skipped.why == SPIKE:
        return (
            "its gradient norm is above train.loss_spike times the median; raise "
            "train.loss_spike (0: off), or lower train.learning_rate"
        )
    modules = ", then of ".join(skipped.modules) or "all modules together"
    return (
        f"gradients of {modules} were not finite; lower train.learning_rate, or check the "
        "samples that metrics.jsonl names there"
    )


_MAX_PROCESSES = 32  # processes in a row of metrics; more would fill disk and trackers


def phase_seconds(
    layout: Layout, trace: Trace, start_s: float, step_s: float, waits_s: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds per phase of a step on an average device; they sum to `step_s`.

    Args:
      start_s: when the step's seconds start, relative to the trace: before its start if devices
        waited for its first task, after it if the previous step was still running.
      waits_s: seconds that devices waited before the trace's start, by cause.
    """
    devices = {m.name: len(m.devices) for m in layout.submeshes}
    n_devices = max(m.devices.stop for m in layout.submeshes)
    phases: dict[str, float] = {}
    for e in trace.events:  # links between submeshes occupy no device
        busy_s = devices.get(e.submesh, 0) * max(e.end_s - max(e.start_s, start_s), 0.0)
        if busy_s > 0:
            phases[e.direction] = phases.get(e.direction, 0.0) + busy_s / n_devices
    phases |= {name: s for name, s in waits_s.items() if s > 0}
    return phases | {IDLE: max(step_s - sum(phases.values()), 0.0)}


def measure_imbalance(
    layout: Layout, schedule: Schedule, loads: Sequence[Load]
) -> dict[str, float]:
    """Return by module the relative excess of tokens on a group's fullest data rank over the mean,
    over all groups of a batch; 0 if the module has no token."""
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
    """Return a device's peak FLOP/s: `train.peak_flops`, or by chip and dtype; None on CPU."""
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
    """Return the tokens of the shortest compiled rows of each module."""
    return {m: min(s.tokens for s in layout.shapes(m)) for m in layout.modules if layout.shapes(m)}


@dataclass(frozen=True)
class PredictedRun:
    """Predictions of a whole run under a plan."""

    steps: int
    run_s: float
    tokens_per_s: float  # without padding, in the last module
    mfu: float | None = None  # None if the peak is unknown
    mfu_by_module: Mapping[str, float] = field(default_factory=dict)  # on each module's devices


def flops_by_module(
    context: RunContext, loads: Sequence[Load], row_tokens: Mapping[str, int]
) -> dict[str, float]:
    """Return the FLOPs of each module that training needs for the samples of `loads`, without
    padding."""
    needed = needed_flops(context.model, row_tokens, context.trained.frozen)
    return {
        module: sum(
            sum(map(piece_flops, load.lengths(module), load.content_of(module))) for load in loads
        )
        for module, piece_flops in needed.items()
    }


def predict_run(context: RunContext, data: DataProfile, plan: Plan) -> PredictedRun:
    config, step_s = context.config, plan.predicted.makespan_s
    train = with_step_count(context, data.n_total).config.train
    batches_per_s = train.global_batch / len(data.loads) / step_s  # batches of loads like these
    last = plan.layout.modules[-1]
    tokens = sum(load.tokens(last) for load in data.loads)
    flops = flops_by_module(context, data.loads, row_tokens(plan.layout))
    peak = peak_flops(config, context.devices, context.hardware)
    used = measure_utilisation(flops, 1 / batches_per_s, plan.layout, context.n_devices, peak)
    shares = {k: v for k, v in used.items() if k.startswith("mfu")}
    return PredictedRun(train.steps, train.steps * step_s, tokens * batches_per_s, **shares)
