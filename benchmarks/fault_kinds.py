"""What can go wrong with a run, done to it from outside, and what it is expected to make of it.

A run pays for none of this: processes are signalled, frozen thread by thread (ptrace), and lose
their sockets (pidfd_getfd) as root may do to them; files are filled and flipped on disk. Only the
gradient that is not finite is in the experiment's own file.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from observed_job import Job, state_of

STEP, EXCHANGE, SAVE = "step", "exchange", "save"
SCHEDULE, START, COMPILE = "schedule", "start", "compile"
EVALUATION, REDECISION, END, RECOVERY = "evaluation", "re-decision", "end", "recovery"
MOMENTS = (STEP, EXCHANGE, SAVE, SCHEDULE, START, COMPILE, EVALUATION, REDECISION, END,
           RECOVERY)  # fmt: skip
_PIDFD_GETFD = 438  # system call
_SEIZE, _INTERRUPT = 0x4206, 0x4207  # of ptrace
_ALL = 0x40000000  # __WALL: threads as well
SLOW_S, FULL_S = 5.0, 3.0  # at most
DAMAGED_PROGRAMS = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Target:
    """What a fault is done to: a job, one of its trainers, and the folder of what is cached."""

    job: Job
    victim: int
    pid: int
    cache: Path
    rng: random.Random


# Does it; gives what undoes it, to be called until that says True, or None where nothing is held.
Fault = Callable[[Target], Callable[[], bool] | None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
      does: it.
      expected: what becomes of the run, in words.
      restarts: whether the launcher starts the run again; None: it may.
      says: what the run's output then has (a regular expression).
      moments: when it is done.
    """

    does: Fault
    expected: str
    restarts: bool | None = True
    says: str = ""
    moments: tuple[str, ...] = MOMENTS


def killed(signum: int) -> Fault:
    def does(target: Target) -> None:
        os.kill(target.pid, signum)

    return does


def frozen(target: Target) -> Callable[[], bool] | None:
    """Stop the main thread, and no other, where it waits for something: signs of life go on."""
    deadline = time.monotonic() + 2.0
    while state_of(target.pid) != "S" and time.monotonic() < deadline:
        time.sleep(0.001)
    if _libc.ptrace(_SEIZE, target.pid, None, None) != 0:
        return None  # it has ended
    _libc.ptrace(_INTERRUPT, target.pid, None, None)

    def reap() -> bool:
        # Its end is told to who traces it first, and to its parent only then.
        try:
            pid, status = os.waitpid(target.pid, os.WNOHANG | _ALL)
        except ChildProcessError:
            return True
        return pid != 0 and not os.WIFSTOPPED(status)

    return reap


def cut(target: Target) -> None:
    """Shut a socket down between two processes of the run: one of those of its trainers."""
    fds = []
    for link in Path(f"/proc/{target.pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                fds.append(int(link.name))
    target.rng.shuffle(fds)
    pidfd = os.pidfd_open(target.pid)
    try:
        for fd in fds:
            if (own := _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)) < 0:
                continue
            with socket.socket(fileno=own) as sock, suppress(OSError):
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and sock.getpeername():
                    sock.shutdown(socket.SHUT_RDWR)
                    return
    finally:
        os.close(pidfd)


def full_disk(target: Target) -> Callable[[], bool]:
    """Fill the run folder's file system, for a while."""
    ballast = target.job.run_dir / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(b"x")
    until_s = time.monotonic() + target.rng.uniform(0.5, FULL_S)

    def free() -> bool:
        if time.monotonic() < until_s and not target.job.ended():
            return False
        ballast.unlink(missing_ok=True)
        return True

    return free


def flipped(files: Callable[[Target], list[Path]], most: int = 3) -> Fault:
    """Kill, and flip a bit in files before the next start reads them."""

    def does(target: Target) -> None:
        os.kill(target.pid, signal.SIGKILL)
        there = files(target)
        for file in target.rng.sample(there, min(most, len(there))):
            with suppress(OSError):
                data = bytearray(file.read_bytes())
                data[target.rng.randrange(len(data))] ^= 1 << target.rng.randrange(8)
                file.write_bytes(data)

    return does


def newest_checkpoint(target: Target) -> list[Path]:
    """Files of the newest checkpoint, where an older one is there as well."""
    saved = target.job.saved()
    if len(saved) < 2:
        return []
    folder = target.job.run_dir / "checkpoints" / f"{max(saved):08d}"
    files = [f for f in folder.iterdir() if f.stat().st_size]
    return [target.rng.choice(sorted(files))]


def cached_programs(target: Target) -> list[Path]:
    """All that tells how programs are called, of which every start reads some, and a few programs:
    a start reads a sixth of those in the cache, the rest are other plans' and of the profile."""
    programs = sorted(target.cache.glob("xla/*-checked"))
    few = target.rng.sample(programs, min(DAMAGED_PROGRAMS, len(programs)))
    return [*target.cache.glob("programs/*-checked"), *few]


def slow(target: Target) -> Callable[[], bool]:
    """Let a process run a fifth of the time, for some seconds."""
    until_s, over = time.monotonic() + SLOW_S, threading.Event()

    def hold() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(target.pid, signal.SIGSTOP)
                time.sleep(0.008)
                os.kill(target.pid, signal.SIGCONT)
                time.sleep(0.002)

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()

    def stop() -> bool:
        if not (time.monotonic() > until_s or target.job.ended()):
            return False
        over.set()
        holding.join()
        return True

    return stop


def helper_killed(module: str) -> Fault:
    def does(target: Target) -> None:
        if pids := target.job.helpers(module):
            with suppress(ProcessLookupError):
                os.kill(target.rng.choice(pids), signal.SIGKILL)

    return does


_TRAINING = (STEP, EXCHANGE, SAVE, SCHEDULE, EVALUATION, REDECISION)
_AGAIN = "started again from the newest whole checkpoint"

KINDS = {
    "SIGKILL": Kind(killed(signal.SIGKILL), _AGAIN, says="was killed by SIGKILL"),
    "segfault": Kind(killed(signal.SIGSEGV), _AGAIN, says="was killed by SIGSEGV"),
    "SIGSTOP": Kind(
        killed(signal.SIGSTOP),
        f"named as silent within peer_timeout_s, {_AGAIN}",
        says="is silent for|did not|still waits",
    ),
    "hang": Kind(
        frozen,
        f"named with its task within its deadline, {_AGAIN}",
        says=r"hangs? in (first )?step|hangs? in|is silent for",
        moments=(STEP, EXCHANGE, SAVE, SCHEDULE, RECOVERY),
    ),
    "cut": Kind(
        cut,
        f"{_AGAIN}; nothing, where the connection was not needed any more",
        restarts=None,
    ),
    "full disk": Kind(
        full_disk,
        "goes on: rows wait in memory, a checkpoint is left out with a warning",
        restarts=None,
        moments=_TRAINING,
    ),
    "checkpoint": Kind(
        flipped(newest_checkpoint),
        "started again from the checkpoint before; the damaged one is set aside",
        moments=(STEP, SAVE, RECOVERY),
    ),
    "compile cache": Kind(
        flipped(cached_programs, sys.maxsize),
        f"{_AGAIN}; what is damaged is named, made again and kept",
        says="is damaged; it is compiled again",
        moments=(*_TRAINING, END, RECOVERY),
    ),
    "index": Kind(
        flipped(lambda t: [*t.cache.glob("index-*.npz")], 1),
        f"{_AGAIN}; the index is made anew",
        moments=(*_TRAINING, END, RECOVERY),
    ),
    "slow": Kind(slow, "goes on", restarts=False, moments=(STEP,)),
    "schedule worker": Kind(
        helper_killed("worker_main"),
        "goes on: another worker solves the same batches again",
        restarts=False,
        moments=_TRAINING,
    ),
    "decoder": Kind(
        helper_killed("fork_server_main"),
        "goes on: the samples are decoded again",
        restarts=False,
        moments=_TRAINING,
    ),
}
NOT_FINITE = "not finite"  # in every run, the undisturbed one as well: its update is left out
