"""When a run saves by time, as process 0 decides for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dflop_jax.config import AS_OFTEN_AS_PAYS, CheckpointConfig
from dflop_jax.report.spent import LOST, TRAINING, Spent

# Of one device between two failures of the run, before one is seen: 16,384 GPUs that trained
# Llama 3 405B were interrupted 419 times in 54 days (arXiv:2407.21783, table 5), once in 50,700.
DEVICE_HOURS_A_FAILURE = 50_000


def failure_s(prior_s: float, observed_s: float, n_failures: int) -> float:
    """Mean seconds between failures, of those that were seen in `observed_s` and of one in
    `prior_s` that stands for what was known before."""
    return (prior_s + observed_s) / (1 + n_failures)


def best_interval_s(save_s: float, between_failures_s: float) -> float:
    """Seconds from the begin of one save to that of the next by which a run loses least, where a
    save costs `save_s` and a failure all since the last save: Daly's refinement (Future Generation
    Computer Systems 22, 2006) of Young's sqrt(2 * save_s * between_failures_s)."""
    if save_s >= 2 * between_failures_s:
        return between_failures_s + save_s
    ratio = math.sqrt(save_s / (2 * between_failures_s))
    young_s = math.sqrt(2 * save_s * between_failures_s)
    return young_s * (1 + ratio / 3 + ratio**2 / 9)


class Cadence:
    """Says after each step of process 0 whether to save by time.

    It does not while a save is under way, which the next one would wait for: so no interval is
    shorter than a write. The first save that is as often as pays comes at once, to be measured.

    Args:
      n_devices: of the run.
      spent: what the time of the run's earlier starts went to, if there were any.
      is_busy: whether a save is under way.
      clock: seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        n_devices: int,
        spent: Spent | None,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._is_busy, self._clock = config, is_busy, clock
        self._prior_s = DEVICE_HOURS_A_FAILURE * 3600 / n_devices
        before = spent.seconds if spent else {}
        self._observed_s = before.get(TRAINING, 0.0) + before.get(LOST, 0.0)
        self._n_failures = spent.failures if spent else 0
        self._saves, self._waited_s = 0, 0.0
        self._started_s = self._saved_s = clock()

    def begin_save(self) -> None:
        """Count a save that begins now."""
        self._saves += 1
        self._saved_s = self._clock()

    def is_due(self, save_wait_s: float) -> bool:
        """Whether to save after one more step, in which training waited so long for a save."""
        self._waited_s += save_wait_s
        if self._is_busy():
            return False
        since_s, every_s = self._clock() - self._saved_s, self._config.every_s
        if every_s and since_s >= every_s:
            return True
        return self._config.every == AS_OFTEN_AS_PAYS and since_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between two saves that lose least, by what is known; 0 before the first."""
        if not self._saves:
            return 0.0
        observed_s = self._observed_s + self._clock() - self._started_s
        between_s = failure_s(self._prior_s, observed_s, self._n_failures)
        return best_interval_s(self._waited_s / self._saves, between_s)
