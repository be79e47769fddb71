"""Where a process of a run is, how long it may be there, and the end of a run that hangs.

A run goes through sections: it profiles, plans, compiles, takes steps, waits for data or a save,
evaluates. The main thread says when one begins; each has a deadline, a multiple of the longest that
was measured of it. Whoever is behind of several processes, the others wait for.

A process whose devices wait for ever, inside a collective in C++, still gives signs of life. So
each has a thread that looks whether its main thread has passed its section's deadline, and sends
where it is with its signs of life (`messages`). Process 0 compares: only where the process that is
behind is late itself does the run hang; who waits for one that compiles or saves, in time, waits.
Then every process writes its stacks and last tasks, and all end with exit code 4. So they do where
a process gives no sign of life, before jax's heartbeat time-out aborts them.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import within

LOOKS_A_DEADLINE = 10  # at least
LONGEST_LOOK_S = 5.0  # between two looks
STOPPED_S = 10.0  # later than it should: a look that comes so late says nothing of the main thread
WRITE_S = 3.0  # longest wait for the disk
# Sections of a kind whose longest counts: a slow one (the first step, a disk that was busy) is
# forgotten after so many.
REMEMBERED = 64
# Times the least deadline: what a section has that was never measured, or is not repeated.
UNMEASURED = 30
MOST_FRAMES = 5  # of the main thread in a line, the innermost first
log = logging.getLogger("dflop_jax")


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

    @property
    def where(self) -> str:
        return f"step {self.step}, {self.section}" if self.step >= 0 else self.section

    def __str__(self) -> str:
        return f"process {self.process} ({self.name}): {self.seconds:.0f} s in {self.where}"


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
    first, where = behind[0], behind[0].where
    at = f" ({first.tasks.lines[-1]})" if first.tasks.lines else ""
    allowed = f"more than the {first.limit_s:.0f} s that it may take"
    if len(behind) < count or count == 1:
        who = ", ".join(f"process {w.process} ({w.name})" for w in behind)
        wait = ", and all others wait for it" if len(behind) == 1 < count else ""
        hangs = f"{who} hang{'s' if len(behind) == 1 else ''} in {where}{at}{wait}"
    else:
        hangs = f"all {count} processes hang in {where}{at}, none behind the others"
    return f"{hangs}: {first.seconds:.0f} s, {allowed}; its main thread: {first.stack}"


class HangWatch:
    """Watches over the sections of a process, with the others', as a context manager; afterwards
    nothing is a section.

    Args:
      folder: where stacks and tasks are written.
      end: called with the line that says what hangs, where all end by it; by default as `peers` end
        when one of them is lost.
    """

    def __init__(
        self,
        sections: Sections,
        peers: ProcessGroup,
        folder: Path,
        *,
        least_s: float,
        end: Callable[[str], None] | None = None,
    ):
        self._sections, self._peers, self._folder = sections, peers, folder
        self._end = end or peers.give_up
        self._every_s = min(LONGEST_LOOK_S, least_s / LOOKS_A_DEADLINE)
        self._closing = threading.Event()
        self._hung = False
        self._behind: list[tuple[int, tuple[int, ...]]] = []  # at the last look, and how far
        self._here = self._whereabouts()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")

    def __enter__(self) -> Self:
        self._peers.status = lambda: msgspec.json.encode(self._here)
        self._peers.on_hang = self._leave
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sections.begin("")
        self._closing.set()
        self._thread.join(WRITE_S)
        self._peers.status, self._peers.on_hang = bytes, lambda why: None

    def _watch(self) -> None:
        tasks, looked_s = self._sections.tasks(), time.monotonic()
        while not self._closing.wait(self._every_s):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > self._every_s + STOPPED_S:
                self._sections.renew()  # all of this process was stopped, as by Ctrl-Z
            if (now := self._sections.tasks()) != tasks:
                tasks = now
                if not self._sections.is_step:  # as an evaluation, which gets on with its tasks
                    self._sections.renew()
            self._here = self._whereabouts()
            if self._peers.is_hub and (hangs := self._who_hangs()):
                why = says(hangs, self._peers.count)
                self._leave(why)
                self._end(f"{why}; stacks and last tasks of all are in {self._folder}")
                return

    def _who_hangs(self) -> tuple[Whereabouts, ...]:
        """The processes that hang, at two looks: what others send of them is some seconds old."""
        others = [s for p, s in self._peers.statuses().items() if p and s]
        if len(others) < self._peers.count - 1:
            return ()  # nobody knows who is behind
        everywhere = [self._here, *(msgspec.json.decode(s, type=Whereabouts) for s in others)]
        hangs = who_hangs(everywhere)
        before, self._behind = self._behind, [(w.process, w.progress) for w in hangs]
        return hangs if self._behind == before else ()

    def _leave(self, why: str) -> None:
        """Write where this process is."""
        if self._hung:
            return
        self._hung = True
        # The run's disk may be what hangs.
        within(WRITE_S, write_stacks, self._folder, self._whereabouts(), why)

    def _whereabouts(self) -> Whereabouts:
        return self._sections.whereabouts(self._peers.process, self._peers.name)


def write_stacks(folder: Path, here: Whereabouts, why: str) -> None:
    """Add a process's stacks and last tasks to its file in a folder, and say them in the log; what
    cannot be written is said only."""
    for line in (str(here), *here.tasks.lines, f"main thread: {here.stack}"):
        log.warning("%s", line)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"process-{here.process:05d}.txt").open("a") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(when, why, str(here), *here.tasks.lines, "", sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
