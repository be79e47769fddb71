"""The supervisor of a run's processes on this host: it starts them, and restarts them on failure.

The supervisor forwards the output of its processes and the signals that it receives. Process 0
inherits standard output and error, so its progress bar works on a terminal, and its output for
programs (`--json`) is unchanged. Lines of the others get a prefix, `[1] `. The first process that
fails is the cause of a failure: the supervisor prints its index and how it ended, ends the others
and, while restarts are left, starts all again. A restarted run resumes from its newest checkpoint.
Bad input (exit code 2) is not retried.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from dflop_jax.distributed.process_exit import (
    ABORTED,
    BAD_INPUT,
    PREEMPTED,
    STDERR_TIMEOUT_S,
    TRANSIENT_FAILURE,
    describe_exit,
    on_signal,
    run_with_timeout,
    shell_exit_code,
    signal_name,
)
from dflop_jax.distributed.processes import (
    COORDINATOR_ENV,
    LAUNCH_ENV,
    LOCAL_INDEX_ENV,
    LOCAL_PROCESSES_ENV,
    LOOPBACK,
    NUM_PROCESSES_ENV,
    PROCESS_ID_ENV,
    RESTARTS_ENV,
    STEP_FILE_ENV,
    Address,
    free_port,
)

STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL, after a process has failed
# The same where all are started again: a process that computes with a dead one ends at once or
# hangs, and a checkpoint is whole or absent.
RESTART_GRACE_S = 2.0
SAVE_GRACE_S = 120.0  # the same after a signal to the supervisor: processes save what they reached
KILL_TIMEOUT_S = 10.0  # longest wait after SIGKILL; a process whose disk hangs stays behind
OUTPUT_TIMEOUT_S = 0.5  # longest wait for the last lines of a process that has ended
# Between a failure and the next start: none after a start that did a step, or the first one that
# did none; then this, and twice as long each time.
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
MAX_EARLY_ERRORS = 3  # failures in a row before the first step, of which the last is an error
_PR_SET_PDEATHSIG = 1  # of prctl
# XLA sizes its thread pool by the cores it may use, or by NPROC. Transfers share that pool: with
# one thread they wait until what computes has ended (43 ms instead of 8, measured).
_TWO_XLA_THREADS = {"NPROC": "2"}
STDOUT, STDERR = 1, 2  # file descriptors
MAX_LINE_BYTES = 1 << 16  # longer lines are shown in parts
SHOW_CURSOR = b"\x1b[?25h"
_output_lock = threading.Lock()  # one line at a time


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
      exit_code: of the first process that failed, 0 when none did, TRANSIENT_FAILURE when a signal
      that
        nobody sent to the supervisor killed it.
      exit_codes: of every process, at the last start; 128+s when signal s killed it.
    """

    exit_code: int
    exit_codes: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A program with its arguments, its environment, and the cores of each process."""

    program: Sequence[str]
    environment: Mapping[str, str]
    cores: Sequence[set[int] | None]


@dataclass(frozen=True)
class _ProcessExit:
    """The end of the process of this rank; `exit_code` is the one that `subprocess` returns."""

    rank: int
    exit_code: int


# The number of a signal that came, or an end.
_EventQueue = queue.SimpleQueue[int | _ProcessExit]


def supervise(job: Job, max_restarts: int = 0) -> LaunchResult:
    """Run a job's processes until all have ended; call it from the main thread.

    Args:
      max_restarts: how many times all processes are started again after a failure.

    Raises:
      ValueError: the program cannot be started.
    """
    launch_name, n_restarts, n_early_failures = (
        uuid.uuid4().hex,
        0,
        0,
    )  # early: failures in a row without a step
    events = _EventQueue()
    with on_signal(events.put), tempfile.TemporaryDirectory(prefix="dflop-") as folder:
        step_file = Path(folder, "step")
        try:
            while True:
                environment = {
                    COORDINATOR_ENV: str(Address(LOOPBACK, free_port())),
                    RESTARTS_ENV: str(n_restarts),
                    STEP_FILE_ENV: str(step_file),
                    LAUNCH_ENV: launch_name if max_restarts else "",
                }
                is_last = n_restarts == max_restarts
                grace_s = STOP_GRACE_S if is_last else RESTART_GRACE_S
                attempt = _Attempt(job, environment, events, grace_s)
                attempt.run()
                n_early_failures = 0 if step_file.exists() else n_early_failures + 1
                step_file.unlink(missing_ok=True)
                result = LaunchResult(attempt.exit_code, attempt.exit_codes)
                if attempt.is_signalled or result.exit_code in (0, BAD_INPUT, PREEMPTED):
                    return result
                if (
                    n_early_failures >= MAX_EARLY_ERRORS
                    and result.exit_code != TRANSIENT_FAILURE
                    and not is_last
                ):
                    _print_message(
                        f"{n_early_failures} failures before the first step; the run ends"
                    )
                    return result
                if is_last:
                    if max_restarts:
                        _print_message(f"no restart is left of --max-restarts {max_restarts}")
                    return result
                n_restarts += 1
                backoff_s = (
                    min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (n_early_failures - 2))
                    if n_early_failures > 1
                    else 0.0
                )
                delay_text = f" in {backoff_s:g} s" if backoff_s else ""
                _print_message(f"restart {n_restarts} of {max_restarts}{delay_text}")
                if signum := _next_event(events, time.monotonic() + backoff_s):
                    assert isinstance(signum, int), "no process runs"
                    return LaunchResult(shell_exit_code(-signum), attempt.exit_codes)
        finally:
            if os.isatty(STDERR):  # a bar that was killed leaves no cursor
                run_with_timeout(STDERR_TIMEOUT_S, _write, STDERR, SHOW_CURSOR)


class _Attempt:
    """One start of all processes of a job.

    Attributes:
      is_signalled: whether a signal to the supervisor was passed on.
      exit_code: of the first process that failed; 0: none has.
    """

    def __init__(
        self, job: Job, environment: Mapping[str, str], events: _EventQueue, grace_s: float
    ):
        self.is_signalled, self.exit_code = False, 0
        self._job, self._environment = job, environment
        self._events, self._grace_s = events, grace_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exit_codes: dict[int, int] = {}  # by rank, of those that have ended

    def run(self) -> None:
        """Start the processes and wait until all have ended."""
        try:
            for rank in range(len(self._job.cores)):
                self._processes.append(self._start_process(rank))
            for rank, process in enumerate(self._processes):  # no thread runs while others fork
                self._watch(rank, process)
            self._wait()
        finally:
            self._kill()

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes by rank; a process that cannot be killed counts as killed by SIGKILL."""
        ranks = range(len(self._processes))
        return tuple(shell_exit_code(self._exit_codes.get(r, -signal.SIGKILL)) for r in ranks)

    # ---- starting ----

    def _start_process(self, rank: int) -> subprocess.Popen[bytes]:
        number, cores = str(len(self._job.cores)), self._job.cores[rank]
        environment = {
            **(_TWO_XLA_THREADS if len(cores or ()) == 1 else {}),
            **self._job.environment,
            **self._environment,
            NUM_PROCESSES_ENV: number,
            PROCESS_ID_ENV: str(rank),
            LOCAL_PROCESSES_ENV: number,
            LOCAL_INDEX_ENV: str(rank),
        }
        pipe = subprocess.PIPE if rank else None  # rank 0 has the terminal for its progress bar
        if pipe:  # no terminal: lines would come in blocks, the last ones never
            environment["PYTHONUNBUFFERED"] = "1"
        try:
            return subprocess.Popen(
                self._job.program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                process_group=0,  # so that Ctrl-C comes through the supervisor, once
                preexec_fn=partial(_prepare_child, cores),
            )
        except OSError as e:
            raise ValueError(
                f"{self._job.program[0]}: cannot be started: {e.strerror}; check its name"
            ) from None

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Forward the output of a process, and queue its exit after its last lines."""
        printers = [
            threading.Thread(target=_forward_output, args=(rank, pipe, fd), daemon=True)
            for pipe, fd in ((process.stdout, STDOUT), (process.stderr, STDERR))
            if pipe is not None
        ]

        def wait() -> None:
            code = process.wait()
            _kill_group(process)  # what it started goes with it
            deadline = time.monotonic() + OUTPUT_TIMEOUT_S
            for printer in printers:
                printer.join(max(0.0, deadline - time.monotonic()))
            self._events.put(_ProcessExit(rank, code))

        for thread in (*printers, threading.Thread(target=wait, daemon=True)):
            thread.start()

    # ---- waiting ----

    def _wait(self) -> None:
        deadline, has_killed = float("inf"), False
        while self._describe_running():
            event, now_s = _next_event(self._events, deadline), time.monotonic()
            if isinstance(event, _ProcessExit):
                self._exit_codes[event.rank] = event.exit_code
                if event.exit_code != 0 and not self.exit_code:
                    deadline = min(deadline, now_s + self._handle_failure(event))
            elif event is not None and not self.is_signalled:
                self.is_signalled, deadline = True, now_s + SAVE_GRACE_S
                self._send_signal(event)
                _print_message(f"{signal_name(event)} passed on; waiting for the processes to end")
            elif has_killed:
                _print_message(f"{self._describe_running()} cannot be killed and stays behind")
                return
            else:
                if event is None:
                    _print_message(f"{self._describe_running()} did not end in time; killing")
                self._kill()
                has_killed, deadline = True, now_s + KILL_TIMEOUT_S

    def _handle_failure(self, cause: _ProcessExit) -> float:
        """Ask the other processes to end after the first failure, and return the seconds that they
        have."""
        code = cause.exit_code
        # The supervisor did not send that signal: memory was short, jax lost a peer, or a device
        # failed.
        was_killed = code == ABORTED or (code < 0 and not self.is_signalled)
        self.exit_code = TRANSIENT_FAILURE if was_killed else shell_exit_code(code)
        # A process with such an exit code has informed the others, which end by themselves.
        peers_exit_alone = code in (PREEMPTED, BAD_INPUT, TRANSIENT_FAILURE)
        action = "waiting for" if peers_exit_alone else "ending"
        description = describe_exit(cause.rank, code)
        _print_message(
            f"{description}; {action} the others" if self._describe_running() else description
        )
        if peers_exit_alone or self.is_signalled:
            return STOP_GRACE_S
        self._send_signal(signal.SIGTERM)
        return self._grace_s

    def _describe_running(self) -> str:
        """Name the processes that run, such as "processes 0, 2"; "" if all have ended."""
        running = [str(r) for r in range(len(self._processes)) if r not in self._exit_codes]
        return f"process{'es' if len(running) > 1 else ''} {', '.join(running)}" if running else ""

    def _send_signal(self, signum: int) -> None:
        """Send a signal to each process, which ends its own child processes."""
        for process in self._processes:
            process.send_signal(signum)  # does nothing when it has ended

    def _kill(self) -> None:
        """Kill all processes with their children, also stopped ones."""
        for rank, process in enumerate(self._processes):
            if rank not in self._exit_codes:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # no process is left in its group
        os.killpg(process.pid, signal.SIGKILL)


def _next_event(events: _EventQueue, deadline: float) -> int | _ProcessExit | None:
    """Return the next event; None after the deadline."""
    timeout_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
    with suppress(queue.Empty):
        return events.get(timeout=timeout_s)
    return None


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _prepare_child(cores: set[int] | None) -> None:
    """Before a child's program starts: pin it to its cores, and let it end with the supervisor."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- output ----


def _forward_output(process: int, pipe: IO[bytes], fd: int) -> None:
    """Thread: forward what a process writes until it closes the pipe."""
    with pipe:
        while chunk := pipe.readline(MAX_LINE_BYTES):
            _write(fd, f"[{process}] ".encode() + chunk.rstrip(b"\n") + b"\n")


def _print_message(text: str) -> None:
    """Print a message of the supervisor."""
    run_with_timeout(STDERR_TIMEOUT_S, _write, STDERR, f"dflop launch: {text}\n".encode())


def _write(fd: int, data: bytes) -> None:
    """Write whole lines; on a terminal they replace process 0's progress bar, which is redrawn."""
    data = (b"\r\x1b[2K" if os.isatty(fd) else b"") + data
    with _output_lock, suppress(OSError):  # nobody reads it any more; the processes shall not hang
        while data:
            data = data[os.write(fd, data) :]
