"""Start the processes of a run on this machine, show their output, and leave none behind.

Process 0 inherits standard output and error: on a terminal its progress bar keeps working, and what
it prints for programs (`--json`) stays as it is. The lines of the others get a prefix, `[1] `.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from dflop_jax.cluster import launch_keeper
from dflop_jax.cluster.addresses import LOOPBACK, free_port
from dflop_jax.cluster.ending import (
    ENDING_SIGNALS,
    ONE_SIGNAL_S,
    PREEMPTED,
    SAY_S,
    signal_name,
)
from dflop_jax.cluster.secret import SECRET_ENV, new_secret

# What a process is told; `distributed.find_processes` reads it, and scripts may set it themselves.
COORDINATOR_ENV = "DFLOP_COORDINATOR"
NUM_PROCESSES_ENV = "DFLOP_NUM_PROCESSES"
PROCESS_ID_ENV = "DFLOP_PROCESS_ID"
DEVICES_ENV = "DFLOP_DEVICES_PER_PROCESS"
# XLA on the CPU takes fresh memory for every program's temporaries. Given back to the system after
# each program and taken in small pages, it makes a large backward take 1.7 times as long, and at
# times three times where a virtual machine's host takes it too. So it is kept, in huge pages and
# one arena: those of single threads give blocks above 64 MiB back at once (measured with glibc
# 2.36: 3 page faults a step for 480 to 1,000). Other allocators ignore it.
_KEEP_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    f":glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
}
# XLA sizes its thread pool by the cores it may use, or by NPROC. Transfers share that pool: with
# one thread they wait until what computes has ended (43 ms instead of 8, measured).
_POOL_OF_TWO = {"NPROC": "2"}

STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL, after one has failed
SAVE_GRACE_S = 120.0  # the same after a signal to the launcher: the others may be saving
KILLED_S = 10.0  # after SIGKILL; a process that the system does not let go is left behind
DRAIN_S = 0.5  # longest wait for the last lines of a process that has ended
LINE_BYTES = 1 << 16  # longer lines are shown in parts
STDOUT, STDERR = 1, 2  # file descriptors


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
      exit_code: of the first process that failed, 0 when none did; 128+s when signal s killed it.
      exit_codes: of every process.
    """

    exit_code: int
    exit_codes: tuple[int, ...]


def launch(
    command: Sequence[str], n: int, *, devices_per_process: int | None = None, pin: bool = False
) -> LaunchResult:
    """Run `command` in `n` processes that find each other, until all have ended.

    When one fails, the others are stopped; when one ends as preempted, they have saved with it and
    end as well. SIGINT, SIGTERM and SIGHUP are passed on once; a second signal kills. If this
    process dies, so do they. Call it from the main thread.

    Args:
      command: program and arguments; `dflop` and `python` mean those of this interpreter.
      devices_per_process: devices each process uses; None leaves it to the plan.
      pin: give each process its own share of this process's cores.

    Raises:
      ValueError: too few processes or cores, or no such command.
    """
    if n < 1:
        raise ValueError(f"-n {n}: start at least 1 process")
    if devices_per_process is not None and devices_per_process < 1:
        raise ValueError(f"--devices-per-process {devices_per_process} must be at least 1")
    program, cores = resolve(command), core_shares(n) if pin else [None] * n
    mark = uuid.uuid4().hex
    shared = {
        COORDINATOR_ENV: f"{LOOPBACK}:{free_port()}",
        NUM_PROCESSES_ENV: str(n),
        SECRET_ENV: new_secret(),
        DEVICES_ENV: str(devices_per_process or ""),
        launch_keeper.MARK_ENV: f"{os.environ.get(launch_keeper.MARK_ENV, '')} {mark}".strip(),
    }
    with _Group(mark) as group:
        for i in range(n):
            one_core = len(cores[i] or ()) == 1
            defaults = {**_KEEP_MEMORY, **(_POOL_OF_TWO if one_core else {})}
            environment = {**defaults, **os.environ, **shared, PROCESS_ID_ENV: str(i)}
            if i:  # a pipe is no terminal: lines would come in blocks, the last ones never
                environment["PYTHONUNBUFFERED"] = "1"
            with _on_cores(cores[i]):
                group.start(program, environment)
        return group.wait()


def resolve(command: Sequence[str]) -> list[str]:
    """The program that a command line means, with its arguments; ValueError when there is none."""
    if not command:
        raise ValueError(
            "no command; give it after --, such as: dflop launch -n 2 -- dflop train EXPERIMENT"
        )
    name, *arguments = command
    known = {"dflop": [sys.executable, "-m", "dflop_jax.cli"], "python": [sys.executable]}
    if name in known:
        return [*known[name], *arguments]
    program = shutil.which(name)
    if program is None:
        hint = f"; did you mean: python {name}?" if os.path.isfile(name) else ""
        raise ValueError(f"{name}: no such command{hint}")
    return [program, *arguments]


def core_shares(n: int) -> list[set[int] | None]:
    """This process's cores in `n` equal parts (to one core); ValueError where it cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--pin: this platform does not tie processes to cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < n:
        raise ValueError(f"--pin: {n} processes need {n} cores, {len(cores)} are there")
    return [set(cores[i * len(cores) // n : (i + 1) * len(cores) // n]) for i in range(n)]


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


class _Group:
    """The processes of a launch, in a process group of their own with their keeper."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        # Numbers of signals that came, and (process, exit code) of those that ended. A SimpleQueue
        # may be put to in a signal handler.
        self._events: queue.SimpleQueue[int | tuple[int, int]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # one line at a time
        self._exit_codes: dict[int, int] = {}
        self._signalled_s = float("-inf")

    def __enter__(self) -> _Group:
        def note(signum: int, _: FrameType | None) -> None:
            now_s = time.monotonic()
            if now_s - self._signalled_s > ONE_SIGNAL_S:
                self._signalled_s = now_s
                self._events.put(signum)

        # What is ignored (nohup, a shell's background job) stays so, here and below.
        handlers = {s: signal.getsignal(s) for s in ENDING_SIGNALS}
        self._handlers = {s: h for s, h in handlers.items() if h is not signal.SIG_IGN}
        for s in self._handlers:
            signal.signal(s, note)
        keeper = [sys.executable, "-I", "-S", launch_keeper.__file__, self._mark]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, process_group=0, **quiet)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for s, handler in self._handlers.items():
            signal.signal(s, handler)
        if os.isatty(STDERR):
            self._say_bytes(b"\x1b[?25h")  # a bar that was killed leaves no cursor
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        for process in (self._keeper, *self._processes):
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)

    def start(self, program: Sequence[str], environment: dict[str, str]) -> None:
        """Start the next process."""
        i = len(self._processes)
        pipe = subprocess.PIPE if i else None
        try:
            process = subprocess.Popen(
                program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                process_group=self._keeper.pid,
            )
        except OSError as e:
            raise ValueError(f"{program[0]}: cannot be started: {e.strerror}") from None
        self._processes.append(process)
        ends = ((process.stdout, STDOUT), (process.stderr, STDERR))
        printers = [_thread(self._print, i, end, fd) for end, fd in ends if end is not None]
        _thread(self._await_end, i, process, printers)

    def _await_end(
        self, i: int, process: subprocess.Popen[bytes], printers: Sequence[threading.Thread]
    ) -> None:
        code = process.wait()
        deadline = time.monotonic() + DRAIN_S
        for printer in printers:  # its last words come before its end is told
            printer.join(max(0.0, deadline - time.monotonic()))
        self._events.put((i, code))

    def wait(self) -> LaunchResult:
        """Wait until every process has ended, stopping them where it is time to."""
        first_failure: int | None = None
        told, killed, patience_ends_s = False, False, float("inf")
        while len(self._exit_codes) < len(self._processes):
            event = self._next_event(patience_ends_s)
            now_s = time.monotonic()
            if event is None and killed:
                self._say(f"{self._names_running()} cannot be killed and stays behind")
                break
            if event is None or (isinstance(event, int) and told):
                if event is None:
                    self._say(f"{self._names_running()} did not stop in time; killing")
                self._kill()
                killed, patience_ends_s = True, now_s + KILLED_S
            elif isinstance(event, int):
                self._signal(event)
                self._say(f"{signal_name(event)} passed on; waiting for the processes to end")
                told, patience_ends_s = True, now_s + SAVE_GRACE_S
            else:
                i, code = event
                self._exit_codes[i] = code if code >= 0 else 128 - code
                if code != 0 and first_failure is None:
                    first_failure = self._exit_codes[i]
                    if code != PREEMPTED:
                        self._signal(signal.SIGTERM)
                    self._say(self._how_ended(i, code))
                    patience_ends_s = min(patience_ends_s, now_s + STOP_GRACE_S)
        codes = tuple(self._exit_codes.get(i, 128 + 9) for i in range(len(self._processes)))
        return LaunchResult(first_failure or max(codes), codes)

    def _next_event(self, until_s: float) -> int | tuple[int, int] | None:
        """A signal's number, or (process, exit code) of one that has ended; None: too late."""
        while (left_s := until_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                return self._events.get(timeout=min(3600.0, left_s))
        return None

    def _how_ended(self, i: int, code: int) -> str:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal_name(-code)}"
        if len(self._exit_codes) == len(self._processes):
            return f"process {i} {how}"
        return f"process {i} {how}; {'awaiting' if code == PREEMPTED else 'stopping'} the others"

    def _signal(self, signum: int) -> None:
        """Tell each process, not what it started itself: a helper must not die before it."""
        for process in self._processes:
            process.send_signal(signum)  # does nothing when it has ended

    def _kill(self) -> None:
        """End all, and all they started; no process of the launch is left after this."""
        if self._keeper.poll() is None:  # so its group's number is still ours
            os.killpg(self._keeper.pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
        launch_keeper.kill_marked(self._mark)

    def _names_running(self) -> str:
        running = [str(i) for i in range(len(self._processes)) if i not in self._exit_codes]
        return f"process{'es' if len(running) > 1 else ''} {', '.join(running)}"

    # ---- output ----

    def _print(self, i: int, pipe: IO[bytes], fd: int) -> None:
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                self._write(fd, f"[{i}] ".encode() + line.rstrip(b"\n"))

    def _say(self, text: str) -> None:
        self._say_bytes(_line(STDERR, f"dflop launch: {text}".encode()))

    def _say_bytes(self, data: bytes) -> None:
        """Write to standard error unless nobody reads it: what is to be done waits for nothing."""
        if not self._lock.acquire(timeout=SAY_S):
            return
        try:
            room = select.poll()
            room.register(STDERR, select.POLLOUT)
            if room.poll(1000 * SAY_S):
                _write_all(STDERR, data)
        finally:
            self._lock.release()

    def _write(self, fd: int, line: bytes) -> None:
        with self._lock:
            _write_all(fd, _line(fd, line))


def _line(fd: int, line: bytes) -> bytes:
    """On a terminal a line takes the place of process 0's bar, which is drawn again."""
    return (b"\r\x1b[2K" if os.isatty(fd) else b"") + line + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:  # nobody reads it any more; the processes shall not hang on that
        return


def _thread(run: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, daemon=True)
    thread.start()
    return thread
