"""How a process of a run ends early: signals that ask for it, and an end that waits for nothing."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from dflop_jax.folders import FULL

# Exit codes beside 0 (done).
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 3  # a signal ended the run, and what it had reached is saved
ABORTED = 134  # SIGABRT in a shell's words: jax ends a process so when it misses another one
TRY_AGAIN = 4  # what ended the run lies outside of it and passes, so that another start may do
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may come twice, from the terminal and from a program that passes it on.
ONE_SIGNAL_S = 0.3
SAY_S = 1.0  # longest wait for standard error to take the last line

in_run = threading.Event()  # this process is one of several, and has not left them
leaving: list[Callable[[int], None]] = []  # told of an exit code other than 0, before the end
is_command = threading.Event()  # it runs a command of ours, and may end by itself


class RunFailed(RuntimeError):
    """The run cannot go on, through no mistake of the user; the message is one line."""


class TryAgain(RunFailed):
    """What ended the run lies outside of it and passes: a process that is gone or did not come, a
    port in use, a lock that is held."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends by an error."""
    if isinstance(error, TryAgain) or (isinstance(error, OSError) and error.errno in FULL):
        return TRY_AGAIN
    return BAD_INPUT if isinstance(error, ValueError) else FAILED


@contextmanager
def preemption(say: Callable[[str], None] = lambda line: None) -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM or SIGHUP sets, so that the run can save and end; a second
    signal ends this process at once. Only in the main thread, where signals are handled."""
    asked, has_come = threading.Event(), False

    def act(signum: int) -> None:
        nonlocal has_come
        if has_come:
            end_now(f"{signal_name(signum)} again: ended without saving", 128 + signum)
        has_come = True
        asked.set()
        words = f"{signal_name(signum)}: saving, then the run ends; another signal ends it now"
        threading.Thread(target=say, args=(words,), daemon=True).start()

    with on_signal(act, lambda *_: asked.set()):
        yield asked


@contextmanager
def on_signal(
    act: Callable[[int], None],
    handler: Callable[[int, FrameType | None], None] = lambda *_: None,
) -> Iterator[None]:
    """Call `act` with each SIGINT, SIGTERM and SIGHUP that comes meanwhile, in a thread of its own:
    the main thread, which runs `handler`, may be inside a library that never returns. What is
    ignored (nohup, a shell's background job) stays so, here and in what is started. Does nothing
    outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        last_s = float("-inf")
        with open(reading, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in taken and time.monotonic() - last_s > ONE_SIGNAL_S:
                    last_s = time.monotonic()
                    act(number[0])

    former = {s: signal.getsignal(s) or signal.SIG_DFL for s in ENDING_SIGNALS}
    taken = [s for s in ENDING_SIGNALS if former[s] is not signal.SIG_IGN]
    watcher = threading.Thread(target=watch, daemon=True, name="signals")
    watcher.start()
    former_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for s in taken:
        signal.signal(s, handler)
    try:
        yield
    finally:
        for s in taken:
            signal.signal(s, former[s])
        signal.set_wakeup_fd(former_wakeup)
        os.close(writing)  # which ends the thread
        # What `act` refers to is freed here: a daemon thread that frees arrays while the
        # interpreter ends is stopped inside of jax, which aborts the process.
        watcher.join(SAY_S)


def how_ended(process: int, code: int) -> str:
    """How a process of a run ended, in words; its exit code as `subprocess` says it."""
    if code < 0:
        return f"process {process} was killed by {signal_name(-code)}"
    return f"process {process} ended with exit code {code}"


def shell_code(code: int) -> int:
    """What a shell calls the exit code that `subprocess` says."""
    return code if code >= 0 else 128 - code


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def end_now(why: str, exit_code: int) -> NoReturn:
    """Say why and end this process at once: its other threads may wait for ever for a process that
    is gone, or hold standard error."""

    def say() -> None:
        with suppress(OSError, ValueError):  # nobody is there to read it
            print(f"dflop: {why}", file=sys.stderr, flush=True)

    within(SAY_S, say)
    os._exit(exit_code)


def within(seconds: float, do: Callable[..., object], *args: Any, **named: Any) -> bool:
    """Call `do` in a thread of its own and wait for it so long: nothing interrupts what waits for a
    process that is gone, a disk, or a reader. Whether it has returned; raises what it raised."""
    future = Future[object]()

    def run() -> None:
        try:
            future.set_result(do(*args, **named))
        except Exception as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    with suppress(TimeoutError):
        future.result(seconds)
    return future.done()


def ends_in_time(seconds: float) -> None:
    """Give this process so long once Python ends: jax then waits for the others of a run, some of
    which may be gone, longer than launchers wait for who is left. What is late leaves its stacks
    and ends with exit code 1."""
    atexit.register(faulthandler.dump_traceback_later, seconds, exit=True)


def ended(exit_code: int) -> int:
    """Return a program's exit code; one that is in a run still ends here and now, since jax would
    wait for others, which may be busy or gone."""
    if in_run.is_set():
        leave(exit_code)
    return exit_code


def leave(exit_code: int) -> NoReturn:
    """End this process now, with its output written; the others of a run are told of a failure,
    and nothing else is awaited."""
    for tell in leaving if exit_code else ():
        tell(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
