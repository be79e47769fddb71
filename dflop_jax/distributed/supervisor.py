"""The supervisor of a run's processes on this host: it starts them, and restarts them on failure.

Process 0 inherits standard output and error, for its progress bar and `--json`. Lines of the others
get a prefix, `[1] `. When a process fails, the supervisor prints how it ended, ends the others and,
while restarts are left, starts all again.
"""

from __future__ import annotations

import ctypes
import io
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

from dflop_jax.distributed import processes
from dflop_jax.distributed.process_exit import (
    ABORTED,
    BAD_INPUT,
    END_TIMEOUT_S,
    PREEMPTED,
    TRANSIENT_FAILURE,
    describe_exit,
    on_signal,
    run_with_timeout,
    shell_exit_code,
    signal_name,
)

STOP_GRACE_S = 10.0  # from SIGTERM after a failure to SIGKILL, and from SIGKILL to giving up
# The same before a restart: a process that computes with a dead one ends at once or hangs.
RESTART_GRACE_S = STOP_GRACE_S / 5
SAVE_GRACE_S = 120.0  # the same after a signal to the supervisor, since processes save then
# Delay of a restart: 0 after a start that did a step, and after the first start without a step;
# then the minimum, doubled after each further start without a step.
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
MAX_EARLY_ERRORS = 3  # consecutive failures before the first step after which an error ends the run
_PR_SET_PDEATHSIG = 1  # of prctl
# XLA sizes its thread pool by the usable cores, or by NPROC. Transfers use the same pool: with one
# thread they wait until a computation has ended (43 ms instead of 8 ms, measured).
_TWO_XLA_THREADS = {"NPROC": "2"}
STDOUT, STDERR = 1, 2  # file descriptors
SHOW_CURSOR = b"\x1b[?25h"
_output_lock = threading.Lock()  # one line at a time


@dataclass(frozen=True)
class LaunchResult:
    """The exit codes of a launch."""

    exit_code: int  # of the first process that failed; TRANSIENT_FAILURE if it was killed
    exit_codes: tuple[int, ...]  # of every process at the last start; 128+s when signal s killed it


@dataclass(frozen=True)
class _ProcessExit:
    rank: int
    exit_code: int  # as `subprocess` returns it


_EventQueue = queue.SimpleQueue[int | _ProcessExit]  # signal numbers, process exits


def supervise(
    program: Sequence[str],
    environment: Mapping[str, str],
    cores: Sequence[set[int] | None],
    max_restarts: int,
) -> LaunchResult:
    """Run a program in one process per entry of `cores`, until all have ended. After a failure,
    restart all, at most `max_restarts` times. ValueError if the program cannot be started."""
    launch_name, events = uuid.uuid4().hex, _EventQueue()
    n_restarts = n_early_failures = 0  # early: consecutive ones before a first step
    with on_signal(events.put), tempfile.TemporaryDirectory(prefix="dflop-") as folder:
        step_file = Path(folder, "step")
        try:
            while True:
                job_environment = {
                    **environment,
                    processes.COORDINATOR_ENV: str(
                        processes.Address(processes.LOOPBACK, processes.free_port())
                    ),
                    processes.RESTARTS_ENV: str(n_restarts),
                    processes.STEP_FILE_ENV: str(step_file),
                    processes.LAUNCH_ENV: launch_name if max_restarts else "",
                }
                is_last = n_restarts == max_restarts
                grace_s = STOP_GRACE_S if is_last else RESTART_GRACE_S
                attempt = _Attempt(program, job_environment, cores, events, grace_s)
                attempt.run()
                n_early_failures = 0 if step_file.exists() else n_early_failures + 1
                step_file.unlink(missing_ok=True)
                result = LaunchResult(attempt.exit_code, attempt.exit_codes)
                if attempt.is_signalled or result.exit_code in (0, BAD_INPUT, PREEMPTED):
                    return result
                if is_last:
                    if max_restarts:
                        _print_message(f"all --max-restarts {max_restarts} are used")
                    return result
                is_error = result.exit_code != TRANSIENT_FAILURE
                if is_error and n_early_failures >= MAX_EARLY_ERRORS:
                    count = f"{n_early_failures} failures"
                    _print_message(f"{count} before the first step; the run ends")
                    return result
                doubled_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (n_early_failures - 2))
                backoff_s = doubled_s if n_early_failures > 1 else 0.0
                delay_text = f" in {backoff_s:g} s" if backoff_s else ""
                n_restarts += 1
                _print_message(f"restart {n_restarts} of {max_restarts}{delay_text}")
                if signum := _next_event(events, time.monotonic() + backoff_s):
                    assert isinstance(signum, int), "no process runs"
                    return LaunchResult(shell_exit_code(-signum), attempt.exit_codes)
        finally:
            if os.isatty(STDERR):  # a killed progress bar leaves the cursor hidden
                run_with_timeout(END_TIMEOUT_S, _write, STDERR, SHOW_CURSOR)


class _Attempt:
    """One start of all processes of a job."""

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[set[int] | None],
        events: _EventQueue,
        grace_s: float,
    ):
        self.is_signalled = False  # a signal to the supervisor was passed on
        self.exit_code = 0  # of the first process that failed
        self._program, self._environment, self._cores = program, environment, cores
        self._events, self._grace_s = events, grace_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exit_codes: dict[int, int] = {}  # by rank, of those that have ended

    def run(self) -> None:
        try:
            for rank in range(len(self._cores)):
                self._processes.append(self._start_process(rank))
            for rank, process in enumerate(self._processes):  # threads start after all forks
                self._watch(rank, process)
            self._wait()
        finally:
            self._kill()

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes by rank; a process that cannot be killed counts as killed by SIGKILL."""
        ranks = range(len(self._processes))
        return tuple(shell_exit_code(self._exit_codes.get(r, -signal.SIGKILL)) for r in ranks)

    def _start_process(self, rank: int) -> subprocess.Popen[bytes]:
        number, cores = str(len(self._cores)), self._cores[rank]
        environment = {
            **(_TWO_XLA_THREADS if len(cores or ()) == 1 else {}),
            **self._environment,
            processes.NUM_PROCESSES_ENV: number,
            processes.PROCESS_ID_ENV: str(rank),
            processes.LOCAL_PROCESSES_ENV: number,
            processes.LOCAL_INDEX_ENV: str(rank),
        }
        pipe = subprocess.PIPE if rank else None  # rank 0 has the terminal for its progress bar
        if pipe:  # Python would write to a pipe in blocks, and could lose the last lines
            environment["PYTHONUNBUFFERED"] = "1"
        try:
            return subprocess.Popen(
                self._program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                process_group=0,  # so that Ctrl-C reaches it only from the supervisor
                preexec_fn=partial(_prepare_child, cores),
            )
        except OSError as e:
            raise ValueError(
                f"{self._program[0]}: cannot be started: {e.strerror}; check its name"
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
            _kill_group(process)  # also the processes that it started
            for printer in printers:
                printer.join(END_TIMEOUT_S)
            self._events.put(_ProcessExit(rank, code))

        for thread in (*printers, threading.Thread(target=wait, daemon=True)):
            thread.start()

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
                has_killed, deadline = True, now_s + STOP_GRACE_S

    def _handle_failure(self, cause: _ProcessExit) -> float:
        """Ask the other processes to end after the first failure; return their grace seconds."""
        code = cause.exit_code
        # Killed from outside: memory was short, jax lost a peer, or a device failed.
        was_killed = code == ABORTED or (code < 0 and not self.is_signalled)
        self.exit_code = TRANSIENT_FAILURE if was_killed else shell_exit_code(code)
        # A process with such an exit code has informed the others, which end by themselves.
        peers_exit_alone = code in (PREEMPTED, BAD_INPUT, TRANSIENT_FAILURE)
        action = "waiting for" if peers_exit_alone else "ending"
        description = describe_exit(cause.rank, code)
        _print_message(description + f"; {action} the others" * bool(self._describe_running()))
        if peers_exit_alone or self.is_signalled:
            return STOP_GRACE_S
        self._send_signal(signal.SIGTERM)
        return self._grace_s

    def _describe_running(self) -> str:
        """Return the running processes, such as "processes 0, 2"; "" if all have ended."""
        running = [str(r) for r in range(len(self._processes)) if r not in self._exit_codes]
        return f"process{'es' if len(running) > 1 else ''} {', '.join(running)}" if running else ""

    def _send_signal(self, signum: int) -> None:
        for process in self._processes:
            process.send_signal(signum)  # does nothing when it has ended

    def _kill(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._exit_codes:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # no process is left in its group
        os.killpg(process.pid, signal.SIGKILL)


def _next_event(events: _EventQueue, deadline: float) -> int | _ProcessExit | None:
    timeout_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
    with suppress(queue.Empty):
        return events.get(timeout=timeout_s)
    return None


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _prepare_child(cores: set[int] | None) -> None:
    """Pin the child to its cores, and let it end with the supervisor; runs before its program."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _forward_output(process: int, pipe: IO[bytes], fd: int) -> None:
    """Thread: forward a process's output until it closes the pipe."""
    with pipe:
        while chunk := pipe.readline(io.DEFAULT_BUFFER_SIZE):  # longer lines in parts
            _write(fd, f"[{process}] ".encode() + chunk.rstrip(b"\n") + b"\n")


def _print_message(text: str) -> None:
    run_with_timeout(END_TIMEOUT_S, _write, STDERR, f"dflop launch: {text}\n".encode())


def _write(fd: int, data: bytes) -> None:
    """Write whole lines; on a terminal they replace process 0's progress bar, which is redrawn."""
    data = (b"\r\x1b[2K" if os.isatty(fd) else b"") + data
    with _output_lock, suppress(OSError):  # ignore a closed reader, so that processes do not block
        while data:
            data = data[os.write(fd, data) :]
