"""Signals that ask a run to end: the first lets it save, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflop_jax.cli.experiment import finish_run
from dflop_jax.distributed import initialize, process_exit
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import (
    ENDING_SIGNALS,
    PREEMPTED,
    SIGNAL_DEBOUNCE_S,
    TRANSIENT_FAILURE,
    preemption,
)

LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def handlers():
    """Whatever starts the tests may have had signals ignored."""
    former = {s: signal.signal(s, signal.default_int_handler) for s in ENDING_SIGNALS}
    yield
    for signum, handler in former.items():
        assert signal.getsignal(signum) is signal.default_int_handler
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", ENDING_SIGNALS)
def test_a_signal_asks_and_one_that_comes_twice_is_one(signum):
    said, heard = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with preemption(say) as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), signum)  # from the terminal
        os.kill(os.getpid(), signum)  # and from a program that passes it on
        assert asked.wait(LIMIT_S)
        assert heard.wait(LIMIT_S)
    assert said == [f"{signum.name}: saving, then the run ends; another signal ends it now"]


def test_signals_are_ours_only_inside_and_only_in_the_main_thread():
    with preemption():
        assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler
    with pytest.raises(KeyError), preemption():
        raise KeyError
    seen = []

    def elsewhere():
        with preemption() as asked:
            seen.append((asked.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(False, signal.default_int_handler)]


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with preemption() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert not asked.is_set()
    signal.signal(signal.SIGHUP, signal.default_int_handler)


# Its main thread takes a lock of C twice, which no signal interrupts.
STUCK = """
import ctypes
from dflop_jax.distributed.process_exit import preemption

with preemption(lambda line: print(line, flush=True)):
    print("ready", flush=True)
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a lock of zeros is Linux's")
def test_a_second_signal_ends_a_process_whose_main_thread_hangs():
    command = [sys.executable, "-c", STUCK]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline().startswith("SIGINT: saving, then the run ends")
            time.sleep(2 * SIGNAL_DEBOUNCE_S)
            assert process.poll() is None
            process.send_signal(signal.SIGHUP)
            _, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert err == "dflop: SIGHUP again: ended without saving\n"


# ---- an end that others keep waiting ----

# What jax does at the end of Python: it waits for the others of a run.
WAITS = "import atexit, time; atexit.register(time.sleep, 600); "
FAILS = """
import importlib
from dflop_jax.distributed import process_exit
module = importlib.import_module("dflop_jax.cli.main")
process_exit.has_joined_run.set()
module._run = lambda argv: 1 // 0
module.main([])
"""


def ends(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WAITS + code]
    return subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)


def test_a_command_that_fails_in_a_run_waits_for_nobody():
    done = ends(FAILS)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_script_of_a_run_ends_in_time_and_leaves_its_stacks():
    done = ends(
        "from dflop_jax.distributed.process_exit import limit_exit_time; limit_exit_time(0.5)"
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr


@pytest.mark.parametrize(
    ("exit_code", "ends_with"), [(0, TRANSIENT_FAILURE), (PREEMPTED, PREEMPTED)]
)
def test_who_leaves_alone_says_so(monkeypatch, exit_code, ends_with):
    """A process was lost while all left."""
    ends = []
    monkeypatch.setattr(initialize, "shutdown", lambda: False)
    monkeypatch.setattr(
        process_exit, "exit_with_message", lambda why, code: ends.append((why, code))
    )
    finish_run(ProcessGroup(), exit_code)
    ((why, code),) = ends
    assert "not all of its processes came to its end in 10 s" in why
    assert code == ends_with
