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
from dflop_jax.distributed.process_exit import run_with_timeout

CHECKS_PER_DEADLINE = 10  # at least
MAX_CHECK_INTERVAL_S = 5.0  # between two looks
SUSPENDED_S = (
    10.0  # later than it should: a look that comes so late says nothing of the main thread
)
WRITE_TIMEOUT_S = 3.0  # longest wait for the disk
# Sections of a kind whose longest counts: a slow one (the first step, a disk that was busy) is
# forgotten after so many.
MEASUREMENT_WINDOW = 64
# Times the least deadline: what a section has that was never measured, or is not repeated.
UNMEASURED_FACTOR = 30
MAX_FRAMES = 5  # of the main thread in a line, the innermost first
log = logging.getLogger("dflop_jax")


class TaskProgress(msgspec.Struct, frozen=True):
    """How far a process is in the tasks of a run.

    Attributes:
      call: counts the steps and evaluations that were dispatched.
      ended: tasks at the head of this one's order that have all ended.
      begun: those that were dispatched or passed over.
      lines: the last ones ended and begun, in words.
    """

    n_calls: int = 0
    n_done: int = 0
    n_started: int = 0
    lines: tuple[str, ...] = ()


class ProcessStatus(msgspec.Struct, frozen=True):
    """Where a process is; `name` says its host and pid, `seconds` for how long it is in its
    section, of which `limit_s` are allowed, `moves` counts the sections that it has begun."""

    process: int
    name: str
    section: str
    step: int
    seconds: float
    deadline_s: float
    n_sections: int
    tasks: TaskProgress = TaskProgress()
    stack: str = ""

    @property
    def is_overdue(self) -> bool:
        return self.seconds > self.deadline_s

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Whoever has the least is behind: all go through the same sections and tasks."""
        return self.n_sections, self.tasks.n_calls, self.tasks.n_done, self.tasks.n_started

    @property
    def position(self) -> str:
        return f"step {self.step}, {self.section}" if self.step >= 0 else self.section

    def __str__(self) -> str:
        return f"process {self.process} ({self.name}): {self.seconds:.0f} s in {self.position}"


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
        min_deadline_s: float = 120.0,
        repeated_sections: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._factor, self._min_deadline_s, self._clock = factor, min_deadline_s, clock
        self._repeated_sections = repeated_sections
        self._measured_s: dict[str, deque[float]] = {}
        self.name, self.step, self.is_step, self.n_sections = "", -1, False, 0
        self._started_s = self._renewed_s = clock()
        self.tasks: Callable[[], TaskProgress] = TaskProgress

    def begin(self, name: str, step: int | None = None) -> None:
        """This section begins, which ends the one before: a step where its number is given; "":
        nothing is watched from here on."""
        self.n_sections += 1
        self.is_step = step is not None
        self.step = self.step if step is None else step
        self._switch_to(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A section inside of another, which begins again after it; other processes may go without
        it."""
        outer, was_step, self.is_step = self.name, self.is_step, False
        self._switch_to(name)
        try:
            yield
        finally:
            self.is_step = was_step
            self._switch_to(outer)

    def _switch_to(self, name: str) -> None:
        now_s = self._clock()
        if self.name in self._repeated_sections:
            durations_s = self._measured_s.setdefault(self.name, deque(maxlen=MEASUREMENT_WINDOW))
            durations_s.append(now_s - self._started_s)
        self.name, self._started_s, self._renewed_s = name, now_s, now_s

    def renew(self) -> None:
        """The section gets on: its deadline counts from here."""
        self._renewed_s = self._clock()

    def deadline_s(self, name: str) -> float:
        """Seconds that a section may take."""
        if not (self._factor and name):
            return float("inf")
        max_measured_s = max(tuple(self._measured_s.get(name, ())), default=None)
        if max_measured_s is None:
            return UNMEASURED_FACTOR * self._min_deadline_s
        return max(self._min_deadline_s, self._factor * max_measured_s)

    @property
    def is_overdue(self) -> bool:
        return self._clock() - self._renewed_s > self.deadline_s(self.name)

    def status(self, process: int, name: str) -> ProcessStatus:
        """Where this process is."""
        seconds, section = self._clock() - self._renewed_s, self.name
        return ProcessStatus(
            process,
            name,
            section,
            self.step,
            seconds,
            min(self.deadline_s(section), sys.float_info.max),  # JSON has no infinity
            self.n_sections,
            self.tasks(),
            main_thread_stack(),
        )


def main_thread_stack() -> str:
    """Where the main thread of this process is, the innermost frame first."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-MAX_FRAMES:]
    return " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames))


def find_hung_processes(statuses: Sequence[ProcessStatus]) -> tuple[ProcessStatus, ...]:
    """The processes that are behind all others, where these have passed their deadline; () where
    they have not, so that whoever waits for them is to be patient."""
    min_progress = min(w.progress for w in statuses)
    behind = tuple(w for w in statuses if w.progress == min_progress)
    return behind if any(w.is_overdue for w in behind) else ()


def describe_hang(behind: Sequence[ProcessStatus], n_processes: int) -> str:
    """What is said of a run of `count` processes in which these hang."""
    first, position = behind[0], behind[0].position
    task_text = f" ({first.tasks.lines[-1]})" if first.tasks.lines else ""
    allowed = f"more than the {first.deadline_s:.0f} s that it may take"
    if len(behind) < n_processes or n_processes == 1:
        names = ", ".join(f"process {w.process} ({w.name})" for w in behind)
        waiting_text = ", and all others wait for it" if len(behind) == 1 < n_processes else ""
        sentence = (
            f"{names} hang{'s' if len(behind) == 1 else ''} in {position}{task_text}{waiting_text}"
        )
    else:
        sentence = (
            f"all {n_processes} processes hang in {position}{task_text}, none behind the others"
        )
    return f"{sentence}: {first.seconds:.0f} s, {allowed}; its main thread: {first.stack}"


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
        min_deadline_s: float,
        end_run: Callable[[str], None] | None = None,
    ):
        self._sections, self._peers, self._folder = sections, peers, folder
        self._end = end_run or peers.end_hung_run
        self._interval_s = min(MAX_CHECK_INTERVAL_S, min_deadline_s / CHECKS_PER_DEADLINE)
        self._closing = threading.Event()
        self._has_written = False
        self._hung_before: list[tuple[int, tuple[int, ...]]] = []  # at the last look, and how far
        self._latest_status = self._own_status()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")

    def __enter__(self) -> Self:
        self._peers.status = lambda: msgspec.json.encode(self._latest_status)
        self._peers.on_hang = self._write_stacks
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sections.begin("")
        self._closing.set()
        self._thread.join(WRITE_TIMEOUT_S)
        self._peers.status, self._peers.on_hang = bytes, lambda why: None

    def _watch(self) -> None:
        tasks, checked_s = self._sections.tasks(), time.monotonic()
        while not self._closing.wait(self._interval_s):
            previous_s, checked_s = checked_s, time.monotonic()
            if checked_s - previous_s > self._interval_s + SUSPENDED_S:
                self._sections.renew()  # all of this process was stopped, as by Ctrl-Z
            if (progress := self._sections.tasks()) != tasks:
                tasks = progress
                if not self._sections.is_step:  # as an evaluation, which gets on with its tasks
                    self._sections.renew()
            self._latest_status = self._own_status()
            if self._peers.is_primary and (hung := self._find_hung_processes()):
                reason = describe_hang(hung, self._peers.n_processes)
                self._write_stacks(reason)
                self._end(f"{reason}; stacks and last tasks of all are in {self._folder}")
                return

    def _find_hung_processes(self) -> tuple[ProcessStatus, ...]:
        """The processes that hang, at two looks: what others send of them is some seconds old."""
        messages = [s for p, s in self._peers.statuses().items() if p and s]
        if len(messages) < self._peers.n_processes - 1:
            return ()  # nobody knows who is behind
        statuses = [
            self._latest_status,
            *(msgspec.json.decode(s, type=ProcessStatus) for s in messages),
        ]
        hung = find_hung_processes(statuses)
        previous, self._hung_before = self._hung_before, [(w.process, w.progress) for w in hung]
        return hung if self._hung_before == previous else ()

    def _write_stacks(self, reason: str) -> None:
        """Write where this process is."""
        if self._has_written:
            return
        self._has_written = True
        # The run's disk may be what hangs.
        run_with_timeout(WRITE_TIMEOUT_S, write_stacks, self._folder, self._own_status(), reason)

    def _own_status(self) -> ProcessStatus:
        return self._sections.status(self._peers.process_index, self._peers.host_and_pid)


def write_stacks(folder: Path, status: ProcessStatus, reason: str) -> None:
    """Add a process's stacks and last tasks to its file in a folder, and say them in the log; what
    cannot be written is said only."""
    for text in (str(status), *status.tasks.lines, f"main thread: {status.stack}"):
        log.warning("%s", text)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"process-{status.process:05d}.txt").open("a") as file:
            time_text = time.strftime("%Y-%m-%d %H:%M:%S")
            print(
                time_text,
                reason,
                str(status),
                *status.tasks.lines,
                "",
                sep="\n",
                file=file,
                flush=True,
            )
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
