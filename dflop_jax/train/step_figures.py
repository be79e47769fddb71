"""What a row of metrics says of a step beside its loss: seconds by phase, imbalance, memory and
FLOP/s; and what a plan promises of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
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
from dflop_jax.report.metrics import DEVICE, DEVICE_PEAK, HOST, IDLE
from dflop_jax.train.prepare import Workplace, in_steps

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_REPORTED = 32  # processes in a row of metrics: more would fill disk and trackers


def phase_seconds(
    layout: Layout, trace: Trace, begun_s: float, step_s: float, waits_s: Mapping[str, float]
) -> dict[str, float]:
    """Return what the mean device did in a step's seconds, which these add up to.

    Args:
      begun_s: when the step's seconds begin, from the trace's start: before it where devices
        waited for its first task, after it where the step before was still under way.
      waits_s: what devices waited for before the trace's start, by name.
    """
    devices = {m.name: len(m.devices) for m in layout.submeshes}
    n_devices = max(m.devices.stop for m in layout.submeshes)
    phases: dict[str, float] = {}
    for e in trace.events:  # links between submeshes keep no device busy
        busy_s = devices.get(e.submesh, 0) * max(e.end_s - max(e.start_s, begun_s), 0.0)
        if busy_s > 0:
            phases[e.direction] = phases.get(e.direction, 0.0) + busy_s / n_devices
    phases |= {name: s for name, s in waits_s.items() if s > 0}
    return phases | {IDLE: max(step_s - sum(phases.values()), 0.0)}


def imbalance(layout: Layout, schedule: Schedule, loads: Sequence[Load]) -> dict[str, float]:
    """Return by module how many more tokens the fullest data rank of a group has than the mean one,
    relative, over all groups of a batch; 0 where it has no token."""
    uneven: dict[str, float] = {}
    for module in layout.modules:
        tokens = np.array(piece_tokens(loads, module), np.float64)
        n_ranks, most, mean = layout.data_ranks(module), 0.0, 0.0
        for pieces in (g.pieces for g in schedule.groups if g.module == module):
            of_rank = np.bincount(pieces.rank, tokens[pieces.piece_id], n_ranks)
            most, mean = most + float(of_rank.max()), mean + float(of_rank.mean())
        uneven[module] = most / mean - 1 if mean else 0.0
    return uneven


def slowest(process_s: Mapping[int, float]) -> dict[str, float]:
    """Return the seconds of the slowest processes, by number."""
    longest = sorted(process_s, key=lambda p: -process_s[p])[:_REPORTED]
    return {str(p): process_s[p] for p in sorted(longest)}


def memory_in_use(devices: Iterable[jax.Device]) -> dict[str, float]:
    """Return bytes that this process holds: of its device that holds most, the most that it held
    so far, and of the host; without what the backend or the system does not tell."""
    here = jax.process_index()
    stats = [d.memory_stats() or {} for d in devices if d.process_index == here]
    told = {DEVICE: "bytes_in_use", DEVICE_PEAK: "peak_bytes_in_use"}
    held = {
        name: float(max(s.get(key, 0) for s in stats))
        for name, key in told.items()
        if any(key in s for s in stats)
    }
    with suppress(OSError, ValueError, IndexError):
        held[HOST] = float(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return held


def most_of(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the most of all processes, by name."""
    return _by_name(parts, max)


def added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum over all processes, by name."""
    return _by_name(parts, sum)


def _by_name(
    parts: Iterable[Mapping[str, Any]], reduce: Callable[[Iterable[Any]], Any]
) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: reduce(v) for name, v in values.items()}


def peak_flops(
    config: Config, devices: Sequence[jax.Device], hardware: Hardware | None = None
) -> float | None:
    """Peak FLOP/s of a device, or of hardware that is planned for, by `train.peak_flops`, else by
    the name of the chip and the compute dtype; None where neither says it, as of cores of a
    host."""
    dtype = config.model.dtype
    if config.train.peak_flops or not (devices or hardware):
        return config.train.peak_flops
    if hardware:
        return None if hardware.name == "cpu" else hardware.peak_flops(dtype)
    return chip_peak_flops(devices[0].device_kind, dtype)


def utilisation(
    flops: Mapping[str, float],
    step_s: float,
    layout: Layout,
    n_devices: int,
    peak: float | None,
) -> dict[str, Any]:
    """Return the fields of `StepMetrics` about FLOPs, from those needed by module; rates are 0
    where a step took no time.

    Args:
      peak: FLOP/s that a device reaches at most, if it is known.
    """
    per_s = {m: n / step_s if step_s > 0 else 0.0 for m, n in flops.items()}
    total_per_s = sum(per_s.values())
    fields: dict[str, Any] = {
        "model_flops": sum(flops.values()),
        "model_flops_by_module": dict(flops),
        "flops_per_s": total_per_s,
        "flops_per_s_by_module": per_s,
    }
    if peak:
        held = {
            m: {d for s in layout.segments_of(m) for d in layout.submesh(s.submesh).devices}
            for m in layout.modules
        }
        fields["mfu"] = total_per_s / (peak * n_devices)
        fields["mfu_by_module"] = {m: rate / (peak * len(held[m])) for m, rate in per_s.items()}
    return fields


def row_tokens(layout: Layout) -> dict[str, int]:
    """Tokens of the shortest rows that are compiled of each module."""
    return {m: min(s.tokens for s in layout.shapes(m)) for m in layout.modules if layout.shapes(m)}


@dataclass(frozen=True)
class ExpectedRun:
    """What a plan's predicted step comes to over a run.

    Attributes:
      steps, run_s: all steps, and their seconds.
      tokens_per_s: of samples, not padding, in the last module, as metrics have it.
      mfu: needed FLOP/s over the peak of all devices; None where no peak is known.
    """

    steps: int
    run_s: float
    tokens_per_s: float
    mfu: float | None


def expected_run(place: Workplace, data: DataProfile, plan: Plan) -> ExpectedRun:
    """Return what the steps of a run take under a plan, of samples such as the profile's."""
    config, step_s = place.config, plan.predicted.makespan_s
    train = in_steps(place, data.n_total).config.train
    batches_per_s = train.global_batch / len(data.loads) / step_s  # of loads such as all of these
    last, mfu = plan.layout.modules[-1], None
    tokens = sum(load.tokens(last) for load in data.loads)
    run_flops = place.n_devices * (peak_flops(config, place.devices, place.hardware) or 0.0)
    if run_flops:
        needed = needed_flops(place.model, row_tokens(plan.layout), place.trained.frozen)
        flops = sum(
            sum(map(of_piece, load.lengths(module), load.content_of(module)))
            for module, of_piece in needed.items()
            for load in data.loads
        )
        mfu = flops * batches_per_s / run_flops
    return ExpectedRun(train.steps, train.steps * step_s, tokens * batches_per_s, mfu)
