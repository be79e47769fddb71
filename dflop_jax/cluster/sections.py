"""Where a process of a run is, and how long it may be there.

A run goes through sections: it profiles, plans, compiles, takes steps, waits for data or a save,
evaluates. The main thread says when one begins; each has a deadline, a multiple of the longest that
was measured of it. Whoever is behind of several processes, the others wait for.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

# Sections of a kind whose longest counts: a slow one (the first step, a disk that was busy) is
# forgotten after so many.
REMEMBERED = 64
# Times the least deadline: what a section has that was never measured, or is not repeated.
UNMEASURED = 30
MOST_FRAMES = 5  # of the main thread in a line, the innermost first


class TaskPlace(msgspec.Struct, frozen=True):
    """How far a process is in the tasks of a run.

    Attributes:
      call: counts the steps and evaluations that were dispatched.
      ended: tasks at the head of this one's order that have all ended.
      begun: those that were dispatched or passed over.
      lines: the last ones ended and begun, in words.
    """

    call: int = 0
    ended: int = 0
    begun: int = 0
    lines: tuple[str, ...] = ()


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a process is; `name` says its host and pid, `seconds` for how long it is in its
    section, of which `limit_s` are allowed, `moves` counts the sections that it has begun."""

    process: int
    name: str
    section: str
    step: int
    seconds: float
    limit_s: float
    moves: int
    tasks: TaskPlace = TaskPlace()
    stack: str = ""

    @property
    def is_late(self) -> bool:
        return self.seconds > self.limit_s

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Whoever has the least is behind: all go through the same sections and tasks."""
        return self.moves, self.tasks.call, self.tasks.ended, self.tasks.begun

    def __str__(self) -> str:
        where = f"step {self.step}, {self.section}" if self.step >= 0 else self.section
        return f"process {self.process} ({self.name}): {self.seconds:.0f} s in {where}"


class Sections:
    """The sections of this process's run, begun by its main thread and read by others.

    Args:
      factor: of a section's deadline over the longest measured; 0: there are no deadlines.
      least_s: the shortest deadline.
      repeated: what is gone through as a whole, again and again. Of other sections, which a run has
        once or in pieces, nothing that was measured says how long the next takes.
    """

    def __init__(
        self,
        factor: float = 0.0,
        least_s: float = 120.0,
        repeated: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._factor, self._least_s, self._clock = factor, least_s, clock
        self._repeated = repeated
        self._measured: dict[str, deque[float]] = {}
        self.name, self.step, self.is_step, self.moves = "", -1, False, 0
        self._since_s = self._renewed_s = clock()
        self.tasks: Callable[[], TaskPlace] = TaskPlace

    def begin(self, name: str, step: int | None = None) -> None:
        """This section begins, which ends the one before: a step where its number is given; "":
        nothing is watched from here on."""
        self.moves += 1
        self.is_step = step is not None
        self.step = self.step if step is None else step
        self._go_to(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A section inside of another, which begins again after it; other processes may go without
        it."""
        before, was_step, self.is_step = self.name, self.is_step, False
        self._go_to(name)
        try:
            yield
        finally:
            self.is_step = was_step
            self._go_to(before)

    def _go_to(self, name: str) -> None:
        now_s = self._clock()
        if self.name in self._repeated:
            of_kind = self._measured.setdefault(self.name, deque(maxlen=REMEMBERED))
            of_kind.append(now_s - self._since_s)
        self.name, self._since_s, self._renewed_s = name, now_s, now_s

    def renew(self) -> None:
        """The section gets on: its deadline counts from here."""
        self._renewed_s = self._clock()

    def limit_s(self, name: str) -> float:
        """Seconds that a section may take."""
        if not (self._factor and name):
            return float("inf")
        longest_s = max(tuple(self._measured.get(name, ())), default=None)
        if longest_s is None:
            return UNMEASURED * self._least_s
        return max(self._least_s, self._factor * longest_s)

    @property
    def is_late(self) -> bool:
        return self._clock() - self._renewed_s > self.limit_s(self.name)

    def whereabouts(self, process: int, name: str) -> Whereabouts:
        """Where this process is."""
        seconds, section = self._clock() - self._renewed_s, self.name
        return Whereabouts(
            process,
            name,
            section,
            self.step,
            seconds,
            min(self.limit_s(section), sys.float_info.max),  # JSON has no infinity
            self.moves,
            self.tasks(),
            main_stack(),
        )


def main_stack() -> str:
    """Where the main thread of this process is, the innermost frame first."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-MOST_FRAMES:]
    return " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames))


def who_hangs(everywhere: Sequence[Whereabouts]) -> tuple[Whereabouts, ...]:
    """The processes that are behind all others, where these have passed their deadline; () where
    they have not, so that whoever waits for them is to be patient."""
    least = min(w.progress for w in everywhere)
    behind = tuple(w for w in everywhere if w.progress == least)
    return behind if any(w.is_late for w in behind) else ()


def says(behind: Sequence[Whereabouts], count: int) -> str:
    """What is said of a run of `count` processes in which these hang."""
    first = behind[0]
    where = f"step {first.step}, {first.section}" if first.step >= 0 else first.section
    at = f" ({first.tasks.lines[-1]})" if first.tasks.lines else ""
    allowed = f"more than the {first.limit_s:.0f} s that it may take"
    if len(behind) < count or count == 1:
        who = ", ".join(f"process {w.process} ({w.name})" for w in behind)
        wait = ", and all others wait for it" if len(behind) == 1 < count else ""
        hangs = f"{who} hang{'s' if len(behind) == 1 else ''} in {where}{at}{wait}"
    else:
        hangs = f"all {count} processes hang in {where}{at}, none behind the others"
    return f"{hangs}: {first.seconds:.0f} s, {allowed}; its main thread: {first.stack}"
