"""Exit codes, signals that end a run, and exits that do not wait for other processes."""

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

from dflop_jax.folders import DISK_FULL_ERRNOS

# Exit codes beside 0 (done).
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 3  # a signal ended the run, and its progress is saved
TRANSIENT_FAILURE = 4  # another start may succeed
ABORTED = 128 + signal.SIGABRT  # the shell's code if jax aborts, as after losing a process
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may arrive twice: from the terminal, and from a program that passes it on.
SIGNAL_DEBOUNCE_S = 0.3
END_TIMEOUT_S = 3.0  # longest wait at exit for a reader, disk or process that may be gone

has_joined_run = threading.Event()  # set while this process is one of several in a run
exit_callbacks: list[Callable[[int], None]] = []  # called before an exit with a code other than 0
is_cli_process = threading.Event()  # set in processes of `dflop`, which may exit by themselves


class RunFailed(RuntimeError):
    """The run cannot continue, but not by a mistake of the user; the message is one line."""


class TransientError(RunFailed):
    """A failure that may succeed when retried: a process is gone, a port or a folder is in use."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that fails with an error."""
    if isinstance(error, TransientError) or getattr(error, "errno", 0) in DISK_FULL_ERRNOS:
        return TRANSIENT_FAILURE
    return BAD_INPUT if isinstance(error, ValueError) else FAILED


@contextmanager
def preemption(log: Callable[[str], None] = lambda line: None) -> Iterator[threading.Event]:
    """Yield an event that is set at SIGINT, SIGTERM or SIGHUP, so that the run can save and end. A
    second signal ends this process at once."""
    preempted, is_second = threading.Event(), False

    def handle_signal(signum: int) -> None:
        nonlocal is_second
        if is_second:
            exit_with_message(f"{signal_name(signum)} again: ended without saving", 128 + signum)
        is_second = True
        preempted.set()
        message = f"{signal_name(signum)}: saving, then the run ends; another signal ends it now"
        threading.Thread(target=log, args=(message,), daemon=True).start()

    with on_signal(handle_signal, lambda *_: preempted.set()):
        yield preempted


@contextmanager
def on_signal(
    callback: Callable[[int], None],
    handler: Callable[[int, FrameType | None], None] = lambda *_: None,
) -> Iterator[None]:
    """Call `callback` with each SIGINT, SIGTERM and SIGHUP that arrives in the context, in its own
    thread, since the main thread, which runs `handler`, may be inside a library that never returns.
    Ignored signals (nohup, background jobs of a shell) stay ignored. Does nothing if called outside
    the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)

    def forward_signals() -> None:
        last_s = float("-inf")
        with open(read_fd, "rb", buffering=0) as signal_bytes:
            while signal_byte := signal_bytes.read(1):
                if signal_byte[0] in handled and time.monotonic() - last_s > SIGNAL_DEBOUNCE_S:
                    last_s = time.monotonic()
                    callback(signal_byte[0])

    former_handlers = {s: signal.getsignal(s) or signal.SIG_DFL for s in ENDING_SIGNALS}
    handled = [s for s in ENDING_SIGNALS if former_handlers[s] is not signal.SIG_IGN]
    watcher = threading.Thread(target=forward_signals, daemon=True, name="signals")
    watcher.start()
    former_wakeup = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for s in handled:
        signal.signal(s, handler)
    try:
        yield
    finally:
        for s in handled:
            signal.signal(s, former_handlers[s])
        signal.set_wakeup_fd(former_wakeup)
        os.close(write_fd)  # ends the thread
        # Join the thread, so that it does not free the callback's arrays while the interpreter
        # ends: a daemon thread that is stopped inside jax aborts the process.
        watcher.join(END_TIMEOUT_S)


def describe_exit(process: int, code: int) -> str:
    """Return a description of how a process ended; `code` is its exit code from `subprocess`."""
    if code < 0:
        return f"process {process} was killed by {signal_name(-code)}"
    return f"process {process} ended with exit code {code}"


def shell_exit_code(code: int) -> int:
    """Return the shell's exit code for an exit code from `subprocess`."""
    return code if code >= 0 else 128 - code


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def exit_with_message(reason: str, exit_code: int) -> NoReturn:
    """Print the reason and end this process at once, since its threads may wait forever."""

    def print_reason() -> None:
        with suppress(OSError, ValueError):  # stderr is closed
            print(f"dflop: {reason}", file=sys.stderr, flush=True)

    run_with_timeout(END_TIMEOUT_S, print_reason)
    os._exit(exit_code)


def run_with_timeout(
    seconds: float, function: Callable[..., object], *args: Any, **kwargs: Any
) -> bool:
    """Call a function in its own thread, wait at most `seconds`, and return whether it has
    finished. Raises the function's error."""
    future = Future[object]()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    with suppress(TimeoutError):
        future.result(seconds)
    return future.done()


def limit_exit_time(seconds: float) -> None:
    """Make this process write its stacks and end with exit code 1 if Python's exit takes longer
    than `seconds`; jax waits there for other processes, longer than launchers do."""
    atexit.register(faulthandler.dump_traceback_later, seconds, exit=True)


def exit_if_joined(exit_code: int) -> int:
    """Return the exit code; a process that is still in a run exits, as jax would wait for all."""
    if has_joined_run.is_set():
        exit_process(exit_code)
    return exit_code


def exit_process(exit_code: int) -> NoReturn:
    """End this process now; flush its output and, for a failure, call `exit_callbacks` before."""
    for callback in exit_callbacks if exit_code else ():
        callback(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
