"""The processes of one start of a run on this host: started, stopped, none left behind.

They are in a process group of their own with their keeper, which ends them when the launcher
cannot. A group may hold spares: Python processes that have imported what training needs and wait to
be told what to run. Those of the next start are in the next start's group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dflop_jax.children import command
from dflop_jax.cluster import launch_keeper
from dflop_jax.cluster.ending import PREEMPTED, how_ended, shell_code, signal_name
from dflop_jax.cluster.events import Ended, Events, Regroup, Stop, next_event
from dflop_jax.cluster.output import STDERR, STDOUT, Output

STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL, after one has failed
# The same where they are started again: who computes with a process that is gone ends within
# milliseconds, and who does not hangs. What was saved is whole or absent.
RESTART_GRACE_S = 2.0
SAVE_GRACE_S = 120.0  # the same after a signal to the launcher: the others may be saving
KILLED_S = 10.0  # after SIGKILL; a process that the system does not let go is left behind
DRAIN_S = 0.5  # longest wait for the last lines of a process that has ended
_SPARE = "dflop_jax.cli.spare"  # what a spare runs


@dataclass(frozen=True)
class Start:
    """How a process is started: its program with arguments, variables, cores (None: any)."""

    program: Sequence[str]
    environment: Mapping[str, str]
    cores: set[int] | None = None


@dataclass(frozen=True)
class _Spare:
    process: subprocess.Popen[bytes]
    pipe: int  # its writing end
    environment: Mapping[str, str]


class Group:
    """Processes of this host, numbered in the run from `first`; call `run` once, `close` always.

    Args:
      marks: those of launches that this one is part of, in the processes' environment.
      again: they are started again after a failure, so that nothing is worth a long wait.

    Attributes:
      ends: (place, exit code, by itself) of the processes that have ended, as they did.
      signalled: a signal that came to the launcher was passed on.
      stopped_by: the failure elsewhere that they were stopped for; "" for none.
      regroups: they were asked to save and end, so that more can take part.
    """

    def __init__(self, output: Output, first: int = 0, marks: str = "", *, again: bool = False):
        self.ends: list[tuple[int, int, bool]] = []
        self.signalled, self.stopped_by, self.regroups = False, "", False
        self._output, self._first = output, first
        self._grace_s = RESTART_GRACE_S if again else STOP_GRACE_S
        self._asked = False  # the processes to end
        self._mark = uuid.uuid4().hex
        self._marks = f"{marks} {self._mark}".strip()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._spares: list[_Spare] = []
        keeper = [sys.executable, "-I", "-S", launch_keeper.__file__, self._mark]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, process_group=0, **quiet)

    def run(
        self,
        starts: Sequence[Start],
        events: Events,
        failed: Callable[[str], None] = lambda why: None,
        tick: Callable[[], None] = lambda: None,
    ) -> int:
        """Start processes and wait until all have ended, stopping them where it is time to.

        Args:
          events: where signals and failures elsewhere are put.
          failed: called with the first failure, in words, before the others are stopped.
          tick: called a few times a second.

        Returns:
          The exit code of the first process that failed, 0 when none did; 128+s when signal s
          killed it.
        """
        for start in starts:
            self._start(start, events)
        return self._wait(events, failed, tick)

    def close(self) -> None:
        """End all that still runs."""
        self._kill()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        for spare in self._spares:
            os.close(spare.pipe)
        waiting = [spare.process for spare in self._spares]
        for process in (self._keeper, *self._processes, *waiting):
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)

    # ---- starting ----

    def number_from(self, first: int) -> bool:
        """Number the processes so, since others have gone or come after the spares began; False
        where process 0, which alone writes to the terminal itself, would be another one."""
        fits = (first == 0) == (self._first == 0)
        self._first = first
        return fits

    def add_spare(self, start: Start) -> None:
        """Prepare for a start to come, if a spare can run it; its variables may then be others."""
        if not can_wait(start.program):
            return
        reading, writing = os.pipe()
        try:
            waits = [*command(_SPARE), str(reading)]
            process = self._popen(len(self._spares), start, waits, pass_fds=(reading,))
        finally:
            os.close(reading)
        self._spares.append(_Spare(process, writing, start.environment))

    def _start(self, start: Start, events: Events) -> None:
        """Start the next process, in its spare where that is alive."""
        place = len(self._processes)
        spare = self._spares.pop(0) if self._spares else None
        if spare is not None and spare.process.poll() is None:
            process, before = spare.process, spare.environment
            changed = {k: v for k, v in start.environment.items() if before.get(k) != v}
            job = {"arguments": start.program[1:], "environment": changed}
            with suppress(BrokenPipeError), os.fdopen(spare.pipe, "wb") as orders:
                orders.write(json.dumps(job).encode() + b"\n")
        else:
            if spare is not None:
                os.close(spare.pipe)
            process = self._popen(place, start, start.program)
        self._processes.append(process)
        ends = ((process.stdout, STDOUT), (process.stderr, STDERR))
        show, number = self._output.show, self._first + place
        printers = [_thread(show, number, end, fd) for end, fd in ends if end is not None]
        _thread(self._await_end, place, process, printers, events)

    def _popen(
        self, place: int, start: Start, program: Sequence[str], **more: Any
    ) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE if self._first + place else None
        environment = {**start.environment, launch_keeper.MARK_ENV: self._marks}
        if pipe:  # no terminal: lines would come in blocks, the last ones never
            environment["PYTHONUNBUFFERED"] = "1"
        try:
            with _on_cores(start.cores):
                return subprocess.Popen(
                    program,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    process_group=self._keeper.pid,
                    **more,
                )
        except OSError as e:
            raise ValueError(
                f"{program[0]}: cannot be started: {e.strerror}; check its name"
            ) from None

    def _await_end(
        self,
        place: int,
        process: subprocess.Popen[bytes],
        printers: Sequence[threading.Thread],
        events: Events,
    ) -> None:
        code = process.wait()
        by_itself = not self._asked  # by now: another's end may be told before its last words are
        deadline = time.monotonic() + DRAIN_S
        for printer in printers:  # its last words come before its end is told
            printer.join(max(0.0, deadline - time.monotonic()))
        events.put(Ended(place, code, by_itself))

    # ---- waiting ----

    def _wait(self, events: Events, failed: Callable[[str], None], tick: Callable[[], None]) -> int:
        first_failure: int | None = None
        told, killed, stopping, patience_ends_s = False, False, False, float("inf")
        while len(self.ends) < len(self._processes):
            event = next_event(events, patience_ends_s, tick)
            now_s = time.monotonic()
            if event is None and killed:
                self._output.say(f"{self._names_running()} cannot be killed and stays behind")
                break
            if event is None or (isinstance(event, int) and told):
                if event is None:
                    self._output.say(f"{self._names_running()} did not stop in time; killing")
                self._kill()
                killed, patience_ends_s = True, now_s + KILLED_S
            elif isinstance(event, int):
                self._signal(event)
                said = f"{signal_name(event)} passed on; waiting for the processes to end"
                self._output.say(said)
                told = self.signalled = True
                patience_ends_s = now_s + SAVE_GRACE_S
            elif isinstance(event, Regroup):
                if not (told or stopping or self.regroups):
                    self._signal(signal.SIGTERM)
                    self._output.say(f"{event.why}; the processes save and end, to start anew")
                    self.regroups, patience_ends_s = True, now_s + SAVE_GRACE_S
            elif isinstance(event, Stop):
                self.stopped_by = self.stopped_by or event.why
                if not stopping:
                    self._signal(signal.SIGTERM)
                    self._output.say(f"{event.why}; stopping the processes of this host")
                    stopping, patience_ends_s = True, min(patience_ends_s, now_s + self._grace_s)
            elif isinstance(event, Ended):
                code = shell_code(event.exit_code)
                self.ends.append((event.place, event.exit_code, event.by_itself))
                if code != 0 and first_failure is None:
                    first_failure = code
                    if not stopping:
                        how = how_ended(self._first + event.place, event.exit_code)
                        if code != PREEMPTED:
                            failed(how)
                            self._signal(signal.SIGTERM)
                            stopping = True
                        self._output.say(how + self._what_follows(code))
                    grace_s = STOP_GRACE_S if code == PREEMPTED else self._grace_s
                    patience_ends_s = min(patience_ends_s, now_s + grace_s)
        return first_failure or max(self.exit_codes, default=0)

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Of every process, by place."""
        codes = {place: shell_code(code) for place, code, _ in self.ends}
        return tuple(codes.get(i, 128 + signal.SIGKILL) for i in range(len(self._processes)))

    def _what_follows(self, code: int) -> str:
        if len(self.ends) == len(self._processes):
            return ""
        return f"; {'awaiting' if code == PREEMPTED else 'stopping'} the others"

    def _signal(self, signum: int) -> None:
        """Tell each process, not what it started itself: a helper must not die before it."""
        self._asked = True
        for process in self._processes:
            process.send_signal(signum)  # does nothing when it has ended

    def _kill(self) -> None:
        """End all, and all they started; no process of the group is left after this."""
        self._asked = True
        if self._keeper.poll() is None:  # so its group's number is still ours
            os.killpg(self._keeper.pid, signal.SIGKILL)
        for process in (*self._processes, *(spare.process for spare in self._spares)):
            process.kill()
        launch_keeper.kill_marked(self._mark)

    def _names_running(self) -> str:
        ended = {place for place, _, _ in self.ends}
        running = [self._first + i for i in range(len(self._processes)) if i not in ended]
        return f"process{'es' if len(running) > 1 else ''} {', '.join(map(str, running))}"


def can_wait(program: Sequence[str]) -> bool:
    """Whether a spare can run a program: this Python, without options of its own."""
    python, *arguments = program
    first = arguments[0] if arguments else "-"
    return python == sys.executable and (first in ("-m", "-c") or not first.startswith("-"))


@contextmanager
def _on_cores(cores: set[int] | None) -> Iterator[None]:
    """What starts in here runs on these cores from its first instruction."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _thread(run: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, daemon=True)
    thread.start()
    return thread
