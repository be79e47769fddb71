"""Device and host memory of a run: readings after each step, the peak since training began, and a
warning if live bytes grow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jax

from dflop_jax.report.memory_growth import fit_growth
from dflop_jax.report.metrics import HOST_BYTES, LIVE_BYTES, PEAK_BYTES, PEAK_UPPER_BOUND
from dflop_jax.report.number_format import number
from dflop_jax.train.step_figures import max_by_name

# Steps between two readings of live bytes in the first `LONG_INTERVAL` steps, and later. For a
# reading the next step's dispatch waits for the previous step, so devices are idle for the host's
# time between two steps: at most 43 ms on two loaded cores, 0.05% of 50 steps of 1.6 s.
SHORT_INTERVAL, LONG_INTERVAL = 5, 50
# Growth over a whole run that is reported, as a fraction of a device's memory.
MIN_GROWTH = 0.01
_PEAK_BEFORE = "peak_bytes_before"  # the process's peak when training began


class MemoryLog:
    """Reads the memory of this process; on process 0 it follows the live bytes of all.

    Args:
      devices: those of the run, also of other processes.
      start, stop: the steps that are run.
    """

    def __init__(self, devices: Iterable[jax.Device], start: int, stop: int):
        process = jax.process_index()
        self._devices = [d for d in devices if d.process_index == process]
        self._start, self._n_steps = start, stop - start
        self._peak_before = self._max_stat("peak_bytes_in_use")
        self._live: dict[int, float] = {}  # by step
        self._has_warned = False

    def is_reading_due(self, steps_done: int) -> bool:
        """Return whether to wait for step `steps_done` - 1 before the next one is dispatched."""
        n = steps_done - self._start
        is_due = n % (SHORT_INTERVAL if n <= LONG_INTERVAL else LONG_INTERVAL) == 0
        return is_due and self._peak_before is not None

    def read(self, *, is_drained: bool) -> dict[str, float]:
        """Return bytes of this process: on its fullest device (live ones only if `is_drained`:
        nothing is in flight), and on the host. Values that the backend or the system does not
        report are absent, as are those of devices on CPU."""
        stats = {
            PEAK_BYTES: self._max_stat("peak_bytes_in_use"),
            _PEAK_BEFORE: self._peak_before,
            LIVE_BYTES: self._max_stat("bytes_in_use") if is_drained else None,
        }
        with suppress(OSError):
            n_pages = int(Path("/proc/self/statm").read_text().split()[1])
            stats[HOST_BYTES] = float(n_pages * os.sysconf("SC_PAGE_SIZE"))
        return {name: value for name, value in stats.items() if value is not None}

    def add(self, step: int, readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the maximum over processes by name. jax cannot reset a device's peak: if training
        has not raised it, it is only an upper bound of the peak since training began."""
        row = max_by_name(readings)
        if LIVE_BYTES in row:
            self._live[step] = row[LIVE_BYTES]
        before = row.pop(_PEAK_BEFORE, None)
        if before is not None and row[PEAK_BYTES] <= before:
            row[PEAK_UPPER_BOUND] = row.pop(PEAK_BYTES)
        return row

    def warning(self) -> str:
        """Return once that live bytes grow, if by over 1% of a device's memory in a whole run."""
        if self._has_warned:
            return ""
        growth = fit_growth([*self._live], [*self._live.values()], self._start)
        limit = self._max_stat("bytes_limit")
        if not growth.is_significant or limit is None:
            return ""
        per_step = growth.bytes_per_step
        if per_step * self._n_steps <= MIN_GROWTH * limit:
            return ""
        self._has_warned = True
        slope, error = (number(n / 2**20) for n in (per_step, growth.standard_error))
        left = (limit - [*self._live.values()][-1]) / per_step
        return (
            f"live device memory grows by {slope} +- {error} MiB per step and lasts for at most "
            f"{left:,.0f} more steps; see docs/when_things_go_wrong.md, 'live device memory grows'"
        )

    def _max_stat(self, key: str) -> float | None:
        stats = [d.memory_stats() or {} for d in self._devices]
        return max((float(s[key]) for s in stats if key in s), default=None)
