"""Callbacks that run a user's code, and the records that they get."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dflop_jax.report.metrics import StepMetrics
from dflop_jax.train.run_context import import_object


@dataclass(frozen=True)
class HeldOutResult:
    """Loss and token accuracy of held-out samples."""

    loss: float  # nan if no token is supervised
    accuracy: float | None  # of the last module with a loss; None if it predicts no tokens

    def __str__(self) -> str:
        correct = "" if self.accuracy is None else f", token accuracy {self.accuracy:.3f}"
        return f"held-out loss {self.loss:.4f}{correct}"


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss after `step` steps; `by_source`: by name of a mixture's dataset."""

    step: int
    loss: float
    accuracy: float | None
    by_source: dict[str, HeldOutResult] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(HeldOutResult(self.loss, self.accuracy))


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    run_dir: Path
    losses: tuple[float, ...]  # of the steps that this call ran
    evaluation: Evaluation | None  # after the last step; None without held-out samples
    compiles_after_warmup: int
    steps_done: int  # of the whole run
    preempted: bool  # whether a signal ended the run before its last step
    stopped_by: str = ""  # the reason if a callback ended the run before its last step


@dataclass(frozen=True)
class StepDone:
    """A step that is done on all processes."""

    step: int
    loss: float  # per supervised token of the global batch, summed over modules with a loss
    losses: Mapping[str, float]  # by module, without the module's weight in that sum
    grad_norm: float
    updated: bool  # whether the parameters were updated; otherwise the step was skipped
    row: StepMetrics | None  # all metrics of the step, on process 0


class Callback:
    """Base class of callbacks; override some of its methods. They run in the thread that dispatches
    steps: a slow one makes the devices wait, and an error ends the run."""

    everywhere: ClassVar[bool] = False  # whether to call it on every process, not only on process 0
    _stop_reason = ""

    def before_step(self, step: int) -> None:
        """Called before a step is dispatched."""

    def after_step(self, done: StepDone) -> Mapping[str, float] | None:
        """Called when a step is done, while devices work on the next one. The metrics that process
        0 returns are added as `own` to metrics.jsonl, the summary and the trackers."""

    def after_evaluation(self, step: int, row: Evaluation) -> None:
        """Called after the held-out samples were evaluated after `step` steps."""

    def after_save(self, step: int, folder: Path) -> None:
        """Called when `folder` has the complete checkpoint after `step` steps."""

    def at_end(self, result: FitResult) -> None:
        """Called when the run is over."""

    def stop(self, why: str) -> None:
        """End the run after the pending steps, saved and evaluated as at its regular end."""
        self._stop_reason = why or type(self).__name__


class Callbacks:
    """The callbacks of a run that this process calls."""

    def __init__(self, callbacks: Sequence[Callback] = (), *, is_process_0: bool = True) -> None:
        self.active = [c for c in callbacks if is_process_0 or c.everywhere]
        for c in self.active:
            c._stop_reason = ""  # of an earlier run

    @property
    def stop_reason(self) -> str:
        return next((c._stop_reason for c in self.active if c._stop_reason), "")

    def after_step(self, done: StepDone) -> dict[str, float]:
        """Return the metrics that callbacks add; ValueError unless numbers of unique names."""
        user_metrics: dict[str, float] = {}
        for c in self.active:
            for name, value in (c.after_step(done) or {}).items():
                if name in user_metrics or not hasattr(value, "__float__"):
                    raise ValueError(
                        f"{type(c).__name__}.after_step: {name!r} is {value!r}; return numbers, "
                        "each under a unique name"
                    )
                user_metrics[name] = float(value)
        return user_metrics


def import_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Import the callbacks that command-line flags name: an object, or a class or function without
    arguments that returns one; ValueError for anything else."""
    callbacks: list[Callback] = []
    for path in paths:
        candidate: Any = import_object("--callbacks", path)
        problem = f"it is a {type(candidate).__name__}"
        if inspect.isclass(candidate) or inspect.isfunction(candidate):
            try:
                candidate = candidate()
            except TypeError as e:
                problem = str(e)
        if not isinstance(candidate, Callback):
            raise ValueError(
                f"--callbacks={path!r}: {problem}; give a subclass of dflop_jax.Callback, or a "
                "function without arguments that returns one"
            )
        callbacks.append(candidate)
    return callbacks
