"""What a row of metrics says of a step beside its loss: seconds by phase, imbalance, memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np

from dflop_jax.records import Layout, Load, Schedule, Trace, piece_tokens
from dflop_jax.report.metrics import DEVICE, DEVICE_PEAK, HOST, IDLE

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
            of_rank = np.bincount(pieces.rank, tokens[pieces.piece], n_ranks)
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


def most_of(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the most of all processes, by name."""
    most: dict[str, float] = {}
    for part in parts:
        for name, n_bytes in part.items():
            most[name] = max(most.get(name, 0.0), n_bytes)
    return most
