"""Traces chosen steps of a run with jax's profiler, on every process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from dflop_jax.report.run_folder import XPROF


class StepProfiler:
    """Writes one trace of consecutive steps, for XProf and Perfetto, below a run's folder. Nothing
    else runs on the devices meanwhile: the steps before and after wait.

    Args:
      steps: to trace; none for an empty range.
      drain: waits for every step that was dispatched.
      log: shows a line.
    """

    def __init__(
        self,
        steps: range,
        run_dir: str | Path,
        process: int,
        drain: Callable[[], None],
        log: Callable[[str], None],
    ):
        self._steps, self._drain, self._log = steps, drain, log
        # Of each process its own: jax names the files by host alone.
        self._folder = Path(run_dir) / XPROF / f"process-{process:05d}"
        self._on = False

    def dispatching(self, step: int) -> AbstractContextManager[Any]:
        """What surrounds the dispatch of a step; call `dispatched` once it can be waited for."""
        if self._steps and step == self._steps[0]:
            self._drain()
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of the host would drown the rest
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
            self._on = True
        return (
            jax.profiler.StepTraceAnnotation("step", step_num=step) if self._on else nullcontext()
        )

    def dispatched(self, step: int) -> None:
        """End the trace behind its last step."""
        if self._on and step == self._steps[-1]:
            self._drain()
            self.close()
            first, last = self._steps[0], self._steps[-1]
            self._log(f"traced steps {first} to {last}: {self._folder.parent}")

    def close(self) -> None:
        """End the trace if the run ends inside of it."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
