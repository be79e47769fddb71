"""Account for a run's wall time by category, from its first start to its end, over all restarts.

A run folder's events.jsonl has a row for every interval of process 0's time; each begins at the end
of the previous row. Steps that a later start repeats count as lost, so the seconds of all
categories sum to the wall time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from dflop_jax.report.row_file import RowFile, read_rows

EVENTS = "events.jsonl"
START, TRAINING, LOST, STOPPED = "start", "training", "lost steps", "stopped"
# Other categories; `CATEGORIES` is in the order of reports.
CONNECT, PROFILE, PLAN, COMPILE = "connect", "profile", "plan", "compile"
DATA, SCHEDULE, SAVE = "wait for data", "wait for the schedule", "wait for a save"
EVALUATION, REDECISION, END = "evaluation", "re-decision", "end"
CATEGORIES = (
    TRAINING,
    DATA,
    SCHEDULE,
    SAVE,
    EVALUATION,
    REDECISION,
    LOST,
    CONNECT,
    START,
    PROFILE,
    PLAN,
    COMPILE,
    END,
    STOPPED,
)
START_UP = (CONNECT, START, PROFILE, PLAN, COMPILE)  # before the first step
NO_WAITS: Mapping[str, float] = MappingProxyType({})
_MIN_ROW_S = 1e-3  # minimum seconds of a row without a step or another event
_MAX_PENDING_ROWS = 1_000  # for processes without a file; a run starts with dozens of rows


class EventRow(msgspec.Struct):
    """The seconds of an interval by category."""

    until_s: float  # end of the interval, in seconds since the epoch
    seconds: dict[str, float]  # by category; the sum is the length of the interval
    step: int = -1  # the step that ended with the interval; -1 for none
    begun_s: float | None = None  # in a process's first row: its start, in seconds since the epoch
    resumed: int | None = None  # the step at which the process resumed; steps from it on are lost


class TimeLog:
    """Records a process's time by category. Rows are pending until there is a file (`write_to`)."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self.on_category: Callable[[str], None] = lambda name: None  # called at each change
        self._until_s = clock()
        self._run_start_s: float | None = self._until_s
        self._category = START
        self._rows: RowFile | None = None
        self._pending_rows: deque[EventRow] = deque(maxlen=_MAX_PENDING_ROWS)
        self._seconds: Counter[str] = Counter()  # of this process, by category

    @contextmanager
    def track(self, name: str) -> Iterator[None]:
        """Count the time in this context as category `name`, except for contexts inside it."""
        outer = self._category
        self.switch_to(name)
        try:
            yield
        finally:
            self.switch_to(outer)

    def switch_to(self, name: str) -> None:
        """Count time as category `name` from now on."""
        self._add_row()
        self._category = name
        self.on_category(name)

    def step(self, step: int, waits_s: Mapping[str, float]) -> None:
        """Record the end of a step; `waits_s` are the seconds that devices waited by category."""
        self._add_row(step=step, waits_s=waits_s)

    def resumed(self, step: int) -> None:
        """Record that the process runs steps from `step` on."""
        self._add_row(resumed=step)

    def start_up_s(self) -> dict[str, float]:
        """Return the seconds so far by category of those before the first step."""
        self._add_row()
        return {name: self._seconds[name] for name in START_UP if self._seconds[name]}

    def write_to(self, rows: RowFile) -> None:
        """Write pending and later rows to a file."""
        rows.drop_except(lambda _: True)  # drops an incomplete row
        self._rows = rows
        self._flush()

    def finish_writing(self) -> None:
        """Write the last row; the file may then be closed."""
        self._add_row()
        self._rows = None

    def _add_row(
        self, step: int = -1, resumed: int | None = None, waits_s: Mapping[str, float] = NO_WAITS
    ) -> None:
        now_s = max(self._clock(), self._until_s)  # the clock may be set back
        is_needed = step >= 0 or resumed is not None or self._run_start_s is not None
        if now_s - self._until_s < _MIN_ROW_S and not is_needed:
            return  # the next row includes these seconds
        remaining_s, seconds = now_s - self._until_s, {}
        for name, wait_s in waits_s.items():
            if (waited_s := min(wait_s, remaining_s)) > 0:
                seconds[name] = waited_s
                remaining_s -= waited_s
        seconds = {self._category: remaining_s, **seconds}
        self._seconds.update(seconds)
        row = EventRow(now_s, seconds, step, self._run_start_s, resumed)
        self._run_start_s, self._until_s = None, now_s
        self._pending_rows.append(row)
        self._flush()

    def _flush(self) -> None:
        if self._rows is not None:
            for row in self._pending_rows:
                self._rows.append(row)
            self._pending_rows.clear()


@dataclass(frozen=True)
class WallTime:
    seconds: dict[str, float]  # by category, in the order of `CATEGORIES`
    wall_s: float
    starts: int  # of process 0
    first_step: int = 0  # of the last start, or of the last plan

    @property
    def goodput(self) -> float:
        """The fraction of wall time in which devices ran steps that were not lost."""
        return self.seconds.get(TRAINING, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def start_up_fraction(self) -> float:
        """The fraction of wall time before first steps, of all starts."""
        start_up_s = sum(self.seconds.get(name, 0.0) for name in START_UP)
        return start_up_s / self.wall_s if self.wall_s > 0 else 0.0

    def fractions(self) -> dict[str, float]:
        """Return the fraction of wall time by category, for fractions of at least 0.1%."""
        fractions = {k: s / self.wall_s for k, s in self.seconds.items() if self.wall_s > 0}
        return {k: fraction for k, fraction in fractions.items() if fraction >= 1e-3}


def read_wall_time(folder: str | Path) -> WallTime | None:
    """Return a run's wall time by category; None if the run has no events."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    training_s_by_step: dict[int, float] = {}  # training seconds of every step that is not lost
    first_s = until_s = 0.0  # start of the run and end of the last row, in seconds since the epoch
    n_starts = first_step = 0
    for row in read_rows(Path(folder) / EVENTS, EventRow, "a row of events"):
        if row.begun_s is not None:
            n_starts += 1
            first_s = first_s or row.begun_s
            seconds[STOPPED] += max(row.begun_s - until_s, 0.0) if until_s else 0.0
        for category, s in row.seconds.items():
            seconds[category] = seconds.get(category, 0.0) + s
        if row.resumed is not None:
            lost_steps = [step for step in training_s_by_step if step >= row.resumed]
            lost_s = sum(map(training_s_by_step.pop, lost_steps))
            seconds[TRAINING] -= lost_s
            seconds[LOST] += lost_s
            first_step = row.resumed
        if row.step >= 0:
            training_s_by_step[row.step] = row.seconds.get(TRAINING, 0.0)
        until_s = row.until_s
    if not n_starts:
        return None
    return WallTime(
        {k: s for k, s in seconds.items() if s > 0}, until_s - first_s, n_starts, first_step
    )
