"""The checkpoints of a run, as its steps go on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.train.meta import Meta
from dflop_jax.train.skips import Skips


class Saves:
    """Saves under way; `saved` is the step whose state is there or on its way."""

    def __init__(self, saver: Checkpointer, saved: int):
        self._saver, self.saved = saver, saved
        # Those whose steps are not all finished, and what they are to be told.
        self._untold: list[tuple[Meta, Future[Mapping[str, Any]]]] = []

    def begin(self, meta: Meta, finished: int, skips: Skips) -> None:
        """Begin to save the state after `meta.step` steps; `finished` and `skips` as for `tell`."""
        self.saved = meta.step
        told: Future[Mapping[str, Any]] = Future()
        self._untold.append((meta, told))
        self.tell(finished, skips)
        self._saver.save(meta.step, told)

    def tell(self, finished: int, skips: Skips) -> None:
        """Complete what the saves under way keep whose steps are among the `finished` ones: only
        then is known which updates were skipped."""
        while self._untold and self._untold[0][0].step <= finished:
            meta, told = self._untold.pop(0)
            told.set_result(msgspec.to_builtins(replace(meta, skips=skips)))
