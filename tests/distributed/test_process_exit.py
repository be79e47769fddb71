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
    with preemption(lambda line: (said.append(line), heard.set())) as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), signum)  # from the terminal
        os.kill(os.getpid(), signum)  # and from a program that passes it on
        assert asked.wait(LIMIT_S)
        assert heard.wait(LIMIT_S)
    assert said == [f"{signum.name}: saving, then the run ends; another signal ends it now"]


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
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (1, True)


def test_a_script_of_a_run_ends_in_time_and_leaves_its_stacks():
    done = ends("from dflop_jax.distributed import process_exit as e; e.limit_exit_time(0.5)")
    assert (done.returncode, "Timeout" in done.stderr) == (1, True)


@pytest.mark.parametrize("exit_code", [0, PREEMPTED])
def test_who_leaves_alone_says_so(monkeypatch, exit_code):
    """A process was lost while all left."""
    ends = []
    monkeypatch.setattr(initialize, "shutdown", lambda: False)
    monkeypatch.setattr(process_exit, "exit_with_message", lambda *words: ends.append(words))
    finish_run(ProcessGroup(), exit_code)
    reason = "the run is over, but not all of its processes ended within 10 s"
    assert ends == [(reason, exit_code or TRANSIENT_FAILURE)]
