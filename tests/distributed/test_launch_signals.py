"""Signals to `dflop launch`, and what nobody reads or can kill: it ends all the same."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from dflop_jax.distributed.process_exit import ENDING_SIGNALS, SIGNAL_DEBOUNCE_S

from .launched import LIMIT_S, launcher, program, run_code, wait_for  # noqa: F401


def started(program, tmp_path, what: str) -> subprocess.Popen[str]:
    """A launch of two whose processes are ready for signals."""
    # A launch ignores what its parent does, and these tests may run under nohup or in background.
    kept = {s: signal.signal(s, signal.SIG_DFL) for s in ENDING_SIGNALS}
    process = subprocess.Popen(
        launcher("-n", "2", "--", *program(what)), stderr=subprocess.PIPE, text=True
    )
    for s, handler in kept.items():
        signal.signal(s, handler)
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)))
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_processes_save(program, tmp_path, signum):
    process = started(program, tmp_path, "save")
    process.send_signal(signum)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert [(tmp_path / f"saved{i}").read_text() for i in range(2)] == [str(signum.value)] * 2
    assert f"{signum.name} passed on; waiting for the processes to end" in err


def test_a_second_signal_kills(program, tmp_path):
    process = started(program, tmp_path, "deaf")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: all((tmp_path / f"heard{i}").exists() for i in range(2)))
    assert process.poll() is None
    time.sleep(SIGNAL_DEBOUNCE_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + 9
    assert "was killed by SIGKILL" in err


@pytest.mark.parametrize("twice", [False, True])
def test_a_ctrl_c_is_one_signal_for_each_process(program, tmp_path, twice):
    """The terminal gives it to its foreground, a program between them may give it once more."""
    terminal, ours = pty.openpty()
    takes = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", takes]
    command += launcher("-n", "2", "--", *program("count"))
    process = subprocess.Popen(
        command, stdin=ours, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    os.close(ours)
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)))
    os.write(terminal, b"\x03")
    if twice:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    os.close(terminal)
    assert process.returncode == 3  # of a run that was preempted and has saved
    assert "process 0 ended with exit code 3; waiting for the others" in err
    seen = [(tmp_path / f"seen{i}").read_text() for i in range(2)]
    assert seen == [str([signal.SIGINT.value])] * 2


def test_a_launch_does_not_wait_for_who_reads_its_errors(program, tmp_path):
    """With a pipe that is full before the first failure; process 1 speaks, process 0 is stopped."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    process = subprocess.Popen(launcher("-n", "2", "--", *program("fail")), stderr=writing)
    try:
        assert process.wait(LIMIT_S) == 7
    finally:
        process.kill()
        os.close(reading)
        os.close(writing)


def test_a_process_that_cannot_be_killed_is_left_behind(program):
    """As one is whose disk hangs; here SIGKILL does nothing until the launcher has ended."""
    code = (
        "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch as l; "
        "s.STOP_GRACE_S = s.KILL_TIMEOUT_S = 0.5; s._Attempt._kill = lambda self: None; "
        f"print(l.launch({program('stubborn')!r}, 2))"
    )
    done = run_code(code)
    assert done.stdout == "LaunchResult(exit_code=3, exit_codes=(137, 3))\n"
    assert "process 0 cannot be killed and stays behind" in done.stderr
