"""Deadlines for the sections of a run, and the end of a run that hangs.

A run goes through sections: profiling, planning, compiling, steps, waits for data or a save,
evaluations. Each has a deadline, a multiple of its longest measured duration. A process whose
devices wait forever inside a collective still sends heartbeats. So a thread of each process sends
its status with them (`messages`), and process 0 compares the statuses. The run counts as hung only
if the process that is behind all others exceeds its own deadline, so waiting for a process that
compiles or saves in time is allowed. If the run hangs, or a process stops sending heartbeats, every
process writes its stacks and last tasks, and all end with exit code 4.
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
from dflop_jax.distributed.process_exit import END_TIMEOUT_S, run_with_timeout

CHECKS_PER_DEADLINE = 20  # number of checks during the shortest deadline
# The longest of this number of last durations sets a section's deadline, so that a slow one (the
# first step, a busy disk) has no lasting effect.
MEASUREMENT_WINDOW = 64
# Sections that were never measured or are not repeated have this times the shortest deadline.
UNMEASURED_FACTOR = 30
MAX_FRAMES = 5  # of the main thread's stack in a message
log = logging.getLogger("dflop_jax")


class TaskProgress(msgspec.Struct, frozen=True):
    """Numbers of tasks that a process has started and done in a run."""

    n_calls: int = 0  # steps and evaluations that were dispatched
    n_done: int = 0  # tasks in the process's order before the first that is not done
    n_started: int = 0  # tasks that were dispatched or skipped
    lines: tuple[str, ...] = ()  # descriptions of the last tasks done and started


class ProcessStatus(msgspec.Struct, frozen=True):
    """The current section and tasks of a process."""

    process: int
    name: str  # host and pid
    section: str
    step: int
    seconds: float  # spent in the section
    deadline_s: float
    n_sections: int  # sections begun so far
    tasks: TaskProgress = TaskProgress()
    stack: str = ""

    @property
    def is_overdue(self) -> bool:
        return self.seconds > self.deadline_s

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Return counters of sections and tasks; the process with the smallest is behind."""
        return self.n_sections, self.tasks.n_calls, self.tasks.n_done, self.tasks.n_started

    @property
    def position(self) -> str:
        return f"step {self.step}, {self.section}" if self.step >= 0 else self.section

    def __str__(self) -> str:
        return f"process {self.process} ({self.name}): {self.seconds:.0f} s in {self.position}"


class Sections:
    """The sections of this process's run, with deadlines of `factor` times the longest measured
    duration (0: no deadlines). Only durations of `repeated_sections` are used, since other sections
    occur once or vary."""

    def __init__(
        self,
        factor: float = 0.0,
        min_deadline_s: float = 120.0,
        repeated_sections: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._factor, self.min_deadline_s, self._clock = factor, min_deadline_s, clock
        self._repeated_sections = repeated_sections
        self._measured_s: dict[str, deque[float]] = {}
        self.name, self.step, self.is_step, self.n_sections = "", -1, False, 0
        self._started_s = self._renewed_s = clock()
        self.tasks: Callable[[], TaskProgress] = TaskProgress

    def begin(self, name: str, step: int | None = None) -> None:
        """End the section and begin another, a step if `step` is given; name "": no deadline."""
        self.n_sections += 1
        self.is_step = step is not None
        self.step = self.step if step is None else step
        self._switch_to(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Run a section inside the current one, which then restarts; processes may skip it."""
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
        """Restart the section's deadline after progress."""
        self._renewed_s = self._clock()

    def deadline_s(self, name: str) -> float:
        """Return the maximum duration of a section in seconds."""
        if not (self._factor and name):
            return float("inf")
        max_measured_s = max(tuple(self._measured_s.get(name, ())), default=None)
        if max_measured_s is None:
            return UNMEASURED_FACTOR * self.min_deadline_s
        return max(self.min_deadline_s, self._factor * max_measured_s)

    def status(self, process: int, name: str) -> ProcessStatus:
        """Return the status of this process."""
        seconds, section = self._clock() - self._renewed_s, self.name
        deadline_s = min(self.deadline_s(section), sys.float_info.max)  # JSON has no infinity
        position = section, self.step, seconds, deadline_s, self.n_sections
        return ProcessStatus(process, name, *position, self.tasks(), main_thread_stack())


def main_thread_stack() -> str:
    """Return the stack of this process's main thread in one line, the innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)[-MAX_FRAMES:] if frame else []
    return " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames))


def find_hung_processes(statuses: Sequence[ProcessStatus]) -> tuple[ProcessStatus, ...]:
    """Return the processes that are behind all others, if one of them is overdue; else ()."""
    min_progress = min(w.progress for w in statuses)
    behind = tuple(w for w in statuses if w.progress == min_progress)
    return behind if any(w.is_overdue for w in behind) else ()


def describe_hang(behind: Sequence[ProcessStatus], n_processes: int) -> str:
    """Return a sentence about the processes that hang in a run of `n_processes`."""
    first = behind[0]
    position = first.position + (f" ({first.tasks.lines[-1]})" if first.tasks.lines else "")
    if len(behind) == n_processes > 1:
        sentence = f"all {n_processes} processes hang in {position}, none is behind the others"
    else:
        names = ", ".join(f"process {w.process} ({w.name})" for w in behind)
        waiting_text = ", and all others wait for it" if len(behind) == 1 < n_processes else ""
        sentence = f"{names} hang{'s' * (len(behind) == 1)} in {position}{waiting_text}"
    return (
        f"{sentence}: {first.seconds:.0f} s, more than its deadline of {first.deadline_s:.0f} s; "
        f"its main thread: {first.stack}"
    )


class HangWatch:
    """A context manager that ends the run if a process hangs. Processes write stacks and tasks to
    `folder`, then process 0 calls `end_run` (default: `peers.end_hung_run`)."""

    def __init__(
        self,
        sections: Sections,
        peers: ProcessGroup,
        folder: Path,
        end_run: Callable[[str], None] | None = None,
    ):
        self._sections, self._peers, self._folder = sections, peers, folder
        self._end = end_run or peers.end_hung_run
        self._interval_s = sections.min_deadline_s / CHECKS_PER_DEADLINE
        self._closing = threading.Event()
        self._has_written = False
        self._hung_before: list[tuple[int, tuple[int, ...]]] = []  # (process, its progress)
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
        self._thread.join(END_TIMEOUT_S)
        self._peers.status, self._peers.on_hang = bytes, lambda why: None

    def _watch(self) -> None:
        tasks, checked_s = self._sections.tasks(), time.monotonic()
        while not self._closing.wait(self._interval_s):
            previous_s, checked_s = checked_s, time.monotonic()
            if checked_s - previous_s > self._interval_s + self._sections.min_deadline_s / 2:
                self._sections.renew()  # the whole process was paused, as by Ctrl-Z
            if (progress := self._sections.tasks()) != tasks:
                tasks = progress
                if not self._sections.is_step:  # such as an evaluation that makes progress
                    self._sections.renew()
            self._latest_status = self._own_status()
            if self._peers.is_primary and (hung := self._find_hung_processes()):
                reason = describe_hang(hung, self._peers.n_processes)
                self._write_stacks(reason)
                self._end(f"{reason}; stacks and last tasks of all are in {self._folder}")
                return

    def _find_hung_processes(self) -> tuple[ProcessStatus, ...]:
        """Return the processes that hang in two successive checks (statuses may be out of date)."""
        messages = [s for p, s in self._peers.statuses().items() if p and s]
        if len(messages) < self._peers.n_processes - 1:
            return ()  # a status is missing
        peer_statuses = (msgspec.json.decode(s, type=ProcessStatus) for s in messages)
        hung = find_hung_processes([self._latest_status, *peer_statuses])
        previous, self._hung_before = self._hung_before, [(w.process, w.progress) for w in hung]
        return hung if self._hung_before == previous else ()

    def _write_stacks(self, reason: str) -> None:
        """Write this process's stacks, once, with a timeout, since the disk may hang."""
        if not self._has_written:
            self._has_written = True
            run_with_timeout(END_TIMEOUT_S, write_stacks, self._folder, self._own_status(), reason)

    def _own_status(self) -> ProcessStatus:
        return self._sections.status(self._peers.process_index, self._peers.host_and_pid)


def write_stacks(folder: Path, status: ProcessStatus, reason: str) -> None:
    """Log a process's stacks and last tasks, and append them to its file if it is writable."""
    for text in (str(status), *status.tasks.lines, f"main thread: {status.stack}"):
        log.warning("%s", text)
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), reason, str(status), *status.tasks.lines, ""]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"process-{status.process:05d}.txt").open("a") as file:
            print(*lines, sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
