"""What a user's own code is told of a run, and how it adds metrics and ends one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dflop_jax.report.metrics import StepMetrics
from dflop_jax.train.run_context import import_object


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of some held-out samples, nan where no token of theirs is supervised, and mean accuracy
    of the supervised tokens of the last module with a loss; None where that predicts no tokens."""

    loss: float
    accuracy: float | None

    def __str__(self) -> str:
        correct = "" if self.accuracy is None else f", token accuracy {self.accuracy:.3f}"
        return f"held-out loss {self.loss:.4f}{correct}"


@dataclass(frozen=True)
class Evaluation:
    """`HeldOutLoss` of the held-out samples after `step` steps; `by_source` that of each dataset of
    a mixture, by its name."""

    step: int
    loss: float
    accuracy: float | None
    by_source: dict[str, HeldOutLoss] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(HeldOutLoss(self.loss, self.accuracy))


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
      losses: of the steps that this call ran.
      evaluation: that of the last step, None without held-out samples.
      steps_done: steps of the whole run so far.
      preempted: a signal ended it before its last step; what was reached is saved, where
        checkpoints are.
      stopped_by: why a callback ended it before its last step; "" where none did.
    """

    run_dir: Path
    losses: tuple[float, ...]
    evaluation: Evaluation | None
    compiles_after_warmup: int
    steps_done: int
    preempted: bool
    stopped_by: str = ""


@dataclass(frozen=True)
class StepDone:
    """A step that is done on all processes.

    Attributes:
      loss: per supervised token of the global batch, added up over the modules that have one.
      losses: by module, each without its weight in that sum.
      updated: the parameters were; otherwise the step was skipped.
      row: all its figures, on process 0; None elsewhere.
    """

    step: int
    loss: float
    losses: Mapping[str, float]
    grad_norm: float
    updated: bool
    row: StepMetrics | None


class Callback:
    """Override what is of interest; all methods do nothing.

    They run in the thread that dispatches steps, so what takes long here holds the devices up, and
    an error ends the run. They see what was done and change nothing of it.

    Attributes:
      everywhere: whether it is called on every process, or on process 0 only.
    """

    everywhere: ClassVar[bool] = False
    _stop_reason = ""

    def before_step(self, step: int) -> None:
        """A step is about to be dispatched."""

    def after_step(self, done: StepDone) -> Mapping[str, float] | None:
        """A step is done, while devices work on the next one. What process 0 returns stands under
        `own` in metrics.jsonl, in the summary, and where runs are tracked."""

    def after_evaluation(self, step: int, row: Evaluation) -> None:
        """The held-out samples were evaluated after `step` steps."""

    def after_save(self, step: int, folder: Path) -> None:
        """The checkpoint after `step` steps is whole, in a folder."""

    def at_end(self, result: FitResult) -> None:
        """The run is over."""

    def stop(self, why: str) -> None:
        """End the run after the steps under way, saved and evaluated, as if it were done."""
        self._stop_reason = why or type(self).__name__


class Callbacks:
    """The callbacks of a run that this process calls."""

    def __init__(self, callbacks: Sequence[Callback] = (), *, is_process_0: bool = True) -> None:
        self.active = [c for c in callbacks if is_process_0 or c.everywhere]
        for c in self.active:
            c._stop_reason = ""  # another run's end is none of this one's

    @property
    def stop_reason(self) -> str:
        """Why one of them ends the run; "": none does."""
        return next((c._stop_reason for c in self.active if c._stop_reason), "")

    def after_step(self, done: StepDone) -> dict[str, float]:
        """What they add to the step's metrics.

        Raises:
          ValueError: something else than numbers by name, or a name of two of them.
        """
        user_metrics: dict[str, float] = {}
        for c in self.active:
            for name, value in (c.after_step(done) or {}).items():
                if (
                    not (isinstance(name, str) and hasattr(value, "__float__"))
                    or name in user_metrics
                ):
                    raise ValueError(
                        f"{type(c).__name__}.after_step: {name!r} is {value!r}; return numbers, "
                        "each under a name of its own"
                    )
                user_metrics[name] = float(value)
        return user_metrics


def import_callbacks(paths: Sequence[str]) -> list[Callback]:
    """The callbacks that command-line flags name: each an object, or a class or function without
    arguments that makes one.

    Raises:
      ValueError: nothing of the kind is there.
    """
    callbacks: list[Callback] = []
    for path in paths:
        candidate: Any = import_object("--callbacks", path)
        if inspect.isclass(candidate) or inspect.isfunction(candidate):
            try:
                candidate = candidate()
            except TypeError as e:
                raise ValueError(
                    f"--callbacks={path!r}: {e}; give what takes no arguments"
                ) from None
        if not isinstance(candidate, Callback):
            raise ValueError(
                f"--callbacks={path!r} is a {type(candidate).__name__}; give a subclass of "
                "dflop_jax.Callback, or a function that returns one"
            )
        callbacks.append(candidate)
    return callbacks
