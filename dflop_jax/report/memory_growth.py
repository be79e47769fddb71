"""Growth of a device's live bytes per step, for summaries, run logs and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# First steps that a growth leaves out: programs load and caches fill.
FIRST_STEPS = 3
# Minimum readings and standard errors of a growth that is told from chance.
MIN_READINGS, MIN_ERRORS = 5, 3.0


@dataclass(frozen=True)
class MemoryGrowth:
    """A least-squares line through live bytes over steps."""

    bytes_per_step: float  # nan for fewer than 2 readings
    standard_error: float  # of `bytes_per_step`; nan for fewer than 3 readings
    n_readings: int

    @property
    def is_significant(self) -> bool:
        """Whether memory grows by more than readings scatter: 3 standard errors, 5 readings."""
        enough = self.n_readings >= MIN_READINGS
        return enough and self.bytes_per_step > MIN_ERRORS * self.standard_error


def fit_growth(
    steps: Sequence[float] | np.ndarray, live_bytes: Sequence[float] | np.ndarray, start: float = 0
) -> MemoryGrowth:
    """Return the growth per step after the first `FIRST_STEPS` steps.

    Args:
      steps, live_bytes: readings while nothing was in flight, each at another step; those with nan
        bytes are left out.
      start: the first step of the process that was read.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(live_bytes, np.float64)
    is_used = np.isfinite(y) & (x >= start + FIRST_STEPS)
    x, y = x[is_used], y[is_used]
    n = len(x)
    if n < 2:
        return MemoryGrowth(math.nan, math.nan, n)
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    rest = y - slope * x
    error = math.sqrt(rest @ rest / (n - 2) / (x @ x)) if n > 2 else math.nan
    return MemoryGrowth(slope, error, n)
