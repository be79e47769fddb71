"""Where the seconds of a run go, from its first start to its end, with every restart in between.

A run folder's events.jsonl has a row for every interval of process 0's time that has ended, each
from where the row before it ends. Nothing is ever taken out of it: rows of steps that a later start
runs again are counted as lost. So its seconds add up to those on the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflop_jax.report.row_file import RowFile, read_rows

EVENTS = "events.jsonl"
START, TRAINING, LOST, STOPPED = "start", "training", "lost steps", "stopped"
# What else the seconds of a run go to; the order is that of a report.
CONNECT, PROFILE, PLAN, COMPILE = "connect", "profile", "plan", "compile"
DATA, SCHEDULE, SAVE = "wait for data", "wait for the schedule", "wait for a save"
EVALUATION, REDECISION, END = "evaluation", "re-decision", "end"
PARTS = (
    TRAINING, DATA, SCHEDULE, SAVE, EVALUATION, REDECISION, LOST,
    CONNECT, START, PROFILE, PLAN, COMPILE, END, STOPPED,
)  # fmt: skip
_LEAST_S = 1e-3  # of a row that tells nothing but seconds
_MOST_WAITING = 1_000  # rows: a run begins with dozens, and only process 0 has a file


class EventRow(msgspec.Struct):
    """What the seconds up to a moment went to.

    Attributes:
      until_s: the moment, in seconds since the epoch.
      seconds: by what they went to; their sum reaches back to the row before.
      step: the step that then ended; -1 for none.
      begun_s: the first row of a process: when its run began. What lies between the row before
        and then went to none of its work.
      resumed: the step that the process began with; later ones before it are lost.
    """

    until_s: float
    seconds: dict[str, float]
    step: int = -1
    begun_s: float | None = None
    resumed: int | None = None


class TimeLog:
    """Notes what a process's time goes to. Rows wait until there is a file (`write_to`), which only
    process 0 has; `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self.on_part: Callable[[str], None] = lambda name: None  # called when another one begins
        self._until_s = clock()
        self._begun_s: float | None = self._until_s
        self._part = START
        self._rows: RowFile | None = None
        self._waiting: deque[EventRow] = deque(maxlen=_MOST_WAITING)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done in here counts as `name`, but for parts inside of it."""
        before = self._part
        self.go_on_with(name)
        try:
            yield
        finally:
            self.go_on_with(before)

    def go_on_with(self, name: str) -> None:
        """From here on time counts as `name`."""
        self._note()
        self._part = name
        self.on_part(name)

    def step(self, step: int, waits_s: Mapping[str, float]) -> None:
        """A step has ended, in which devices waited so long for what is named."""
        self._note(step=step, waits_s=waits_s)

    def resumed(self, step: int) -> None:
        """Steps from `step` on are run (again)."""
        self._note(resumed=step)

    def write_to(self, rows: RowFile) -> None:
        """Write what is noted to a file, from now on."""
        rows.keep(lambda _: True)  # drops a row that a kill cut short
        self._rows = rows
        self._flush()

    def stop_writing(self) -> None:
        """Write what is left; the file may then be closed."""
        self._note()
        self._rows = None

    def _note(
        self,
        *,
        step: int = -1,
        resumed: int | None = None,
        waits_s: Mapping[str, float] | None = None,
    ) -> None:
        now_s = max(self._clock(), self._until_s)  # a clock that is set back
        says_more = step >= 0 or resumed is not None or self._begun_s is not None
        if now_s - self._until_s < _LEAST_S and not says_more:
            return  # goes to what comes next
        rest_s, seconds = now_s - self._until_s, {}
        for name, wait_s in (waits_s or {}).items():
            if (waited_s := min(wait_s, rest_s)) > 0:
                seconds[name] = waited_s
                rest_s -= waited_s
        row = EventRow(now_s, {self._part: rest_s, **seconds}, step, self._begun_s, resumed)
        self._begun_s, self._until_s = None, now_s
        self._waiting.append(row)
        self._flush()

    def _flush(self) -> None:
        if self._rows is not None:
            for row in self._waiting:
                self._rows.append(row)
            self._waiting.clear()


@dataclass(frozen=True)
class Spent:
    """Seconds of a run by what they went to, in the order of `PARTS`; `starts` counts the processes
    0 that it had."""

    seconds: dict[str, float]
    wall_s: float
    starts: int

    @property
    def goodput(self) -> float:
        """Share of the run's time in which devices ran steps that counted."""
        return self.seconds.get(TRAINING, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Of the run's time, what is at least a thousandth of it."""
        every = {k: s / self.wall_s for k, s in self.seconds.items() if self.wall_s > 0}
        return {k: share for k, share in every.items() if share >= 1e-3}


def read_spent(folder: str | Path) -> Spent | None:
    """What a run folder's events tell; None without any.

    Raises:
      ValueError: a broken row, named as file:line.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    of_steps: dict[int, float] = {}  # training seconds of every step that counts
    first_s = until_s = 0.0  # when the run began and when the last row was written, since the epoch
    starts = 0
    for row in read_rows(Path(folder) / EVENTS, EventRow, "a row of events"):
        if row.begun_s is not None:
            starts += 1
            first_s = first_s or row.begun_s
            seconds[STOPPED] += max(row.begun_s - until_s, 0.0) if until_s else 0.0
        for part, s in row.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + s
        if row.resumed is not None:
            lost_s = sum(of_steps.pop(step) for step in [*of_steps] if step >= row.resumed)
            seconds[TRAINING] -= lost_s
            seconds[LOST] += lost_s
        if row.step >= 0:
            of_steps[row.step] = row.seconds.get(TRAINING, 0.0)
        until_s = row.until_s
    if not starts:
        return None
    return Spent({k: s for k, s in seconds.items() if s > 0}, until_s - first_s, starts)
