"""Decides how much a run measures and searches before its first step.

A run always gets one timed shape per module, a quick search, and a plan of one bucket. Buckets,
trials of other plans, shapes, and a full search are added while the estimated seconds stay within a
share of the run's expected seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dflop_jax.config import PlanConfig
from dflop_jax.report.number_format import duration, percent
from dflop_jax.report.wall_time import COMPILE, PLAN, PROFILE

# Start-up may take this share of a run (DFLOP reports 2.1%, arXiv 2603.25120), and in any case
# these seconds: a first plan of a tiny model on two cores takes about as long.
MAX_START_SHARE, MIN_START_S = 0.03, 60.0
# Share of the measured peak that training reaches, to estimate a run before anything is timed.
EXPECTED_MFU = 0.4
# Seconds of a search by effort, on one core (docs/results.md).
SEARCH_S = {"quick": 20.0, "full": 60.0}


@dataclass(frozen=True)
class StartBudget:
    """What a run measures before its first step, and the seconds that this is expected to take."""

    run_s: float  # expected seconds of all steps
    limit_s: float  # seconds that the start may take
    seconds: Mapping[str, float]  # estimated seconds by category of wall time
    n_shapes: int  # shapes of every module that are timed
    effort: Literal["quick", "full"]  # of the search
    n_buckets: int  # maximum of a module in a plan
    n_plans: int  # plans that are compiled; more than 1: trials choose one

    def __str__(self) -> str:
        """Return a line for the log."""
        estimates = ", ".join(f"{name} {duration(s)}" for name, s in self.seconds.items())
        trials = f"trials of up to {self.n_plans} plans" if self.n_plans > 1 else "no trials"
        return (
            f"start-up may take {duration(self.limit_s)} (the steps are expected to take "
            f"{duration(self.run_s)}): shapes timed per module {self.n_shapes}, search "
            f"{self.effort}, up to {self.n_buckets} buckets, {trials}; estimate {estimates}"
        )


def describe_start(start_up_s: Mapping[str, float], steps_s: float) -> str:
    """Return a line about a start's seconds by category, and their share of the run."""
    total_s = sum(start_up_s.values())
    texts = ", ".join(f"{name} {duration(s)}" for name, s in start_up_s.items())
    run_share = percent(total_s / (total_s + steps_s))
    return f"start-up: {duration(total_s)}, {run_share} of the run ({texts})"


def plan_start(
    config: PlanConfig, *, run_s: float, shape_s: float, max_shapes: int, n_plans: int
) -> StartBudget:
    """Return what to measure before a run.

    Args:
      config: `effort` quick or full is followed whatever it takes; auto keeps to the limit.
      run_s: expected seconds of all steps.
      shape_s: seconds of timing one shape of every module: two depths, forward and backward.
      max_shapes: the largest number of shapes that a module has.
      n_plans: plans that are compiled if the run has trials, which `config.trials` may require.
    """
    limit_s = max(MIN_START_S, MAX_START_SHARE * run_s)

    def budget(
        n_shapes: int, effort: Literal["quick", "full"], n_buckets: int, n_plans: int
    ) -> StartBudget:
        seconds = {
            PROFILE: n_shapes * shape_s,
            PLAN: SEARCH_S[effort],
            # A bucket has one depth, half the programs of a timed shape; as many join segments.
            COMPILE: n_plans * n_buckets * shape_s,
        }
        return StartBudget(run_s, limit_s, seconds, n_shapes, effort, n_buckets, n_plans)

    n_buckets = config.buckets
    if config.effort != "auto":
        n_shapes = max_shapes if config.effort == "full" else 1
        return budget(n_shapes, config.effort, n_buckets, n_plans)
    min_plans = n_plans if config.trials > 0 else 1
    larger = [
        *(budget(1, "quick", k, min_plans) for k in range(1, n_buckets + 1)),
        *(budget(k, "quick", n_buckets, n_plans) for k in range(1, max_shapes + 1)),
        budget(max_shapes, "full", n_buckets, n_plans),
    ]
    fitting = [b for b in larger if sum(b.seconds.values()) <= limit_s]
    return fitting[-1] if fitting else larger[0]
