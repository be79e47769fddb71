"""When the held-out samples of a run are evaluated, what is kept of it and what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflop_jax.report.spent import EVALUATION
from dflop_jax.train.evaluate import Evaluation, HeldOut
from dflop_jax.train.feed import Packer
from dflop_jax.train.ready import ReadyRun
from dflop_jax.train.saves import Best, Saves

# Makes the checkpoint after so many steps whole; None where that fails.
Checkpoint = Callable[[int], "Path | None"]


class Evaluations:
    """Of the run that is ready; made on all processes together. `row` is the newest."""

    def __init__(self, ready: ReadyRun, packer: Packer) -> None:
        assert ready.held_out is not None
        self._ready, self._train = ready, ready.config.train
        self._held_out = HeldOut(ready.config, ready.held_out, ready.ex, ready.prices, packer)
        self.row: Evaluation | None = None

    def is_due(self, done: int) -> bool:
        """Whether they are evaluated after so many steps."""
        every = self._train.eval_every
        return bool(every and done % every == 0)

    def at_end(self, done: int, saves: Saves, checkpoint: Checkpoint) -> Evaluation:
        """The evaluation of the run's end after `done` steps, made now unless it was."""
        if self.row and self.row.step == done:
            return self.row
        return self.run(done, saves, checkpoint)

    def run(self, done: int, saves: Saves, checkpoint: Checkpoint) -> Evaluation:
        """Evaluate the state after `done` steps, all of them finished."""
        time, say = self._ready.place.time, self._ready.progress.log
        with time.part(EVALUATION):
            row = self._held_out.run(done)
        say(f"after step {done}: {row}")
        for name, loss in row.by_source.items():
            say(f"  {name}: {loss}")
        if self._ready.folder:
            self._ready.folder.append_evaluation(row)
        self._ready.callbacks.after_evaluation(done, row)
        self.row = row
        beats = self._ready.config.checkpoint.keep_best and saves.best.is_beaten_by(row.loss)
        if beats and checkpoint(done) is not None:
            saves.keep_best(Best(done, row.loss))
            say("  the best so far: its checkpoint is kept")
        return row
