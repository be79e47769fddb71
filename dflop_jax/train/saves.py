"""The checkpoints of a run, as its steps go on, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.config import CheckpointConfig
from dflop_jax.report.run_folder import HeldOutRow, RunFolder, read_evaluations
from dflop_jax.train.meta import Meta
from dflop_jax.train.skips import Skips


@dataclass(frozen=True)
class Best:
    """The evaluated checkpoint of the lowest held-out loss; at step None there is none."""

    step: int | None = None
    loss: float | None = None

    def is_beaten_by(self, loss: float) -> bool:
        """Whether a loss is lower; one that is not finite never is."""
        return math.isfinite(loss) and (self.loss is None or loss < self.loss)


def best_of(rows: Iterable[HeldOutRow], steps: Iterable[int]) -> Best:
    """The best of the evaluations of these steps; of equal ones the first."""
    best, saved = Best(), set(steps)
    for row in rows:
        if row.step in saved and row.loss is not None and best.is_beaten_by(row.loss):
            best = Best(row.step, row.loss)
    return best


def best_so_far(
    config: CheckpointConfig, folder: RunFolder | None, saver: Checkpointer, peers: ProcessGroup
) -> Best:
    """The best checkpoint of a run, on every process, where it is to be kept."""
    if not config.keep_best:
        return Best()
    best = best_of(read_evaluations(folder.path), saver.steps()) if folder else Best()
    return msgspec.json.decode(peers.broadcast("best", msgspec.json.encode(best)), type=Best)


class Saves:
    """Saves under way; `saved` is the step whose state is there or on its way, `best` the best so
    far, which stays."""

    def __init__(self, saver: Checkpointer, saved: int, best: Best = Best()):
        self._saver, self.saved = saver, saved
        self.keep_best(best)
        # Those whose steps are not all finished, and what they are to be told.
        self._untold: list[tuple[Meta, Future[Mapping[str, Any]]]] = []

    def begin(self, meta: Meta, finished: int, skips: Skips) -> None:
        """Begin to save the state after `meta.step` steps; `finished` and `skips` as for `tell`."""
        self.saved = meta.step
        told: Future[Mapping[str, Any]] = Future()
        self._untold.append((meta, told))
        self.tell(finished, skips)
        self._saver.save(meta.step, told)

    def keep_best(self, best: Best) -> None:
        """Keep this checkpoint, and no longer the one that was the best before."""
        self.best = best
        self._saver.keep_best(best.step)

    def tell(self, finished: int, skips: Skips) -> None:
        """Complete what the saves under way keep whose steps are among the `finished` ones: only
        then is known which updates were skipped."""
        while self._untold and self._untold[0][0].step <= finished:
            meta, told = self._untold.pop(0)
            told.set_result(msgspec.to_builtins(replace(meta, skips=skips)))
