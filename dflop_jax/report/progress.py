"""Progress of a run on the terminal, or as plain lines without a terminal (in a CI log)."""

from __future__ import annotations

from collections import deque
from typing import Self

from rich import progress as rich_progress
from rich.console import Console

from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.number_format import duration, flops_text, number

RECENT_STEPS = 20  # steps whose mean time predicts the remaining time


class Progress:
    """A progress bar with figures and time left; without a terminal, a plain line every
    `log_interval` steps (0: about 20 lines in all). `start` steps are already done. Writes to
    `console` (default: standard error), or nothing if `quiet`."""

    def __init__(
        self,
        total_steps: int,
        start: int = 0,
        *,
        log_interval: int = 0,
        console: Console | None = None,
        quiet: bool = False,
    ) -> None:
        self._total, self._n_done = total_steps, start
        self._log_interval = log_interval or max(1, total_steps // 20)
        self._console = console or Console(stderr=True, quiet=quiet)
        self._recent_step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        columns = (
            rich_progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            rich_progress.BarColumn(bar_width=None),
            rich_progress.TextColumn("{task.description}"),
        )
        self._bar = rich_progress.Progress(
            *columns, console=self._console, expand=True, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("", total=total_steps, completed=start)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def restart(self, start: int) -> None:
        """Set the number of finished steps."""
        self._n_done = start
        self._bar.update(self._task, completed=start)

    def update(self, row: StepMetrics) -> None:
        """Count one finished step and show its figures."""
        self._n_done += 1
        self._recent_step_s.append(row.step_s)
        mean_s = sum(self._recent_step_s) / len(self._recent_step_s)
        text = step_text(row, mean_s * max(0, self._total - self._n_done))
        self._bar.update(self._task, completed=self._n_done, description=text)
        last = self._n_done >= self._total
        if not self._console.is_terminal and (self._n_done % self._log_interval == 0 or last):
            self.log(f"step {self._n_done}/{self._total}  {text}")

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_text(row: StepMetrics, remaining_s: float) -> str:
    """Return one line of figures."""
    busy = row.busy_fraction
    texts = [f"loss {number(row.loss, digits=4)}", f"{number(row.tokens_per_s)} tok/s"]
    texts.append(f"{flops_text(row.flops_per_s)}/s")
    if row.mfu is not None:
        texts.append(f"MFU {row.mfu:.1%}")
    if len(busy) > 3:  # a range saves room
        texts.append(f"busy {min(busy.values()):.0%}-{max(busy.values()):.0%}")
    elif busy:
        texts.append(" ".join(["busy", *(f"{name} {share:.0%}" for name, share in busy.items())]))
    return "  ".join([*texts, f"left {duration(remaining_s)}"])
