"""Deadlines for the sections of a run, and the end of a run that hangs.

A run goes through sections: profiling, planning, compiling, steps, waits for data or a save,
evaluations. The main thread marks the begin of each section. A section has a deadline, a multiple
of its longest measured duration.

A process whose devices wait forever inside a collective in C++ still sends heartbeats. So a thread
of each process checks whether the main thread has passed its deadline, and sends the process's
status with its heartbeats (`messages`). Process 0 compares the statuses. The run hangs only if the
process that is behind all others is overdue itself; processes that wait for one that compiles or
saves in time keep waiting. If the run hangs, every process writes its stacks and last tasks, and
all end with exit code 4. The same happens if a process stops sending heartbeats, before jax's
heartbeat timeout aborts the others.
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
MAX_CHECK_INTERVAL_S = 5.0
SUSPENDED_S = 10.0  # a check later than this means that the whole process was suspended
WRITE_TIMEOUT_S = 3.0  # longest wait for the disk
# The last sections of a name whose longest sets the deadline, so that a slow one (the first step, a
# busy disk) is forgotten after as many.
MEASUREMENT_WINDOW = 64
# Deadline over the shortest deadline, of a section that was never measured or is not repeated.
UNMEASURED_FACTOR = 30
MAX_FRAMES = 5  # of the main thread's stack in a message
log = logging.getLogger("dflop_jax")


class TaskProgress(msgspec.Struct, frozen=True):
    """How many tasks of a run a process has started and done.

    Attributes:
      n_calls: steps and evaluations that were dispatched.
      n_done: tasks at the head of the process's order that are all done.
      n_started: tasks that were dispatched or passed over.
      lines: the last tasks done and started, in words.
    """

    n_calls: int = 0
    n_done: int = 0
    n_started: int = 0
    lines: tuple[str, ...] = ()


class ProcessStatus(msgspec.Struct, frozen=True):
    """The section and tasks that a process is in. `name` is its host and pid, `seconds` the time it
    has spent in the section, `n_sections` counts the sections that it has begun."""

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
        """All processes go through the same sections and tasks, so the smallest is behind."""
        return self.n_sections, self.tasks.n_calls, self.tasks.n_done, self.tasks.n_started

    @property
    def position(self) -> str:
        return f"step {self.step}, {self.section}" if self.step >= 0 else self.section

    def __str__(self) -> str:
        return f"process {self.process} ({self.name}): {self.seconds:.0f} s in {self.position}"


class Sections:
    """The sections of this process's run. The main thread begins them, other threads read them.

    Args:
      factor: a section's deadline over its longest measured duration; 0: no deadlines.
      min_deadline_s: the shortest deadline.
      repeated_sections: names of sections that recur as a whole. Durations of others, which a run
        has once or in pieces, do not predict the next one.
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
        """Begin a section, which ends the previous one; a step if `step` is given. The name "" has
        no deadline."""
        self.n_sections += 1
        self.is_step = step is not None
        self.step = self.step if step is None else step
        self._switch_to(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Run a section inside the current one, which begins anew after it. Other processes may
        skip it."""
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
        """Restart the deadline, since the section has made progress."""
        self._renewed_s = self._clock()

    def deadline_s(self, name: str) -> float:
        """Return the seconds that a section may take."""
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
        """Return the status of this process."""
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
    """Return the stack of this process's main thread in a line, the innermost frame first."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-MAX_FRAMES:]
    return " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames))


def find_hung_processes(statuses: Sequence[ProcessStatus]) -> tuple[ProcessStatus, ...]:
    """Return the processes that are behind all others, if one of them is overdue; () otherwise,
    since the others then wait for a process that is in time."""
    min_progress = min(w.progress for w in statuses)
    behind = tuple(w for w in statuses if w.progress == min_progress)
    return behind if any(w.is_overdue for w in behind) else ()


def describe_hang(behind: Sequence[ProcessStatus], n_processes: int) -> str:
    """Return a sentence about the processes that hang in a run of `n_processes`."""
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
    """Ends a run in which a process hangs; a context manager, after which no section is left.

    Args:
      folder: where stacks and tasks are written.
      end_run: called on process 0 with a sentence about the hang; by default
        `peers.end_hung_run`.
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
        """Return the processes that hang in two checks, since statuses are some seconds old."""
        messages = [s for p, s in self._peers.statuses().items() if p and s]
        if len(messages) < self._peers.n_processes - 1:
            return ()  # a status is missing
        statuses = [
            self._latest_status,
            *(msgspec.json.decode(s, type=ProcessStatus) for s in messages),
        ]
        hung = find_hung_processes(statuses)
        previous, self._hung_before = self._hung_before, [(w.process, w.progress) for w in hung]
        return hung if self._hung_before == previous else ()

    def _write_stacks(self, reason: str) -> None:
        """Write this process's stacks once."""
        if self._has_written:
            return
        self._has_written = True
        # The run's disk may be what hangs.
        run_with_timeout(WRITE_TIMEOUT_S, write_stacks, self._folder, self._own_status(), reason)

    def _own_status(self) -> ProcessStatus:
        return self._sections.status(self._peers.process_index, self._peers.host_and_pid)


def write_stacks(folder: Path, status: ProcessStatus, reason: str) -> None:
    """Append a process's stacks and last tasks to its file in a folder, and log them. A file that
    cannot be written is skipped."""
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
