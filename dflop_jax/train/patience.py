"""When a run ends early: its held-out loss falls no more."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from dflop_jax.cluster.peers import Peers
from dflop_jax.config import TrainConfig
from dflop_jax.report.evaluation_rows import read_evaluations
from dflop_jax.report.run_folder import RunFolder


class Patience:
    """The held-out losses of a run, those of earlier starts up to step `start` among them.

    Made on all processes together, which then come to the same.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder | None, peers: Peers, start: int):
        self._most, self._steps = config.early_stop, config.steps
        self._losses: dict[int, float | None] = {}  # by the steps after which they were evaluated
        if not self._most:
            return
        if folder:
            rows = read_evaluations(folder.path)
            self._losses = {row.step: row.loss for row in rows if row.step <= start}
        shared = peers.share("evaluated", msgspec.json.encode(self._losses))
        self._losses = msgspec.json.decode(shared, type=dict[int, float | None])

    def ends(self, step: int, loss: float) -> str:
        """Why the run ends after an evaluation, before its last step; "": it goes on."""
        self._losses[step] = loss
        if not self._most or step >= self._steps:
            return ""
        if evaluations_since_lowest(self._losses) < self._most:
            return ""
        return f"no lower held-out loss in {self._most} evaluations (train.early_stop)"


def evaluations_since_lowest(losses: Mapping[int, float | None]) -> int:
    """How many evaluations came after that of the lowest loss, of equal ones the first; all, where
    none is a finite number."""
    in_order = [losses[step] for step in sorted(losses)]
    finite = [loss for loss in in_order if loss is not None and math.isfinite(loss)]
    return len(in_order) - 1 - in_order.index(min(finite)) if finite else len(in_order)
