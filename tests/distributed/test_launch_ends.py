"""How `dflop launch` ends and starts again: failures, signals, and what nobody can kill."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from dflop_jax.distributed.process_exit import (
    ENDING_SIGNALS,
    SIGNAL_DEBOUNCE_S,
    TRANSIENT_FAILURE,
)
from tests.processes import runs

from .launched import (  # noqa: F401
    LIMIT_S,
    launcher,
    patched,
    program,
    run,
    run_patched,
    wait_for,
    wait_for_files,
)


def test_the_first_failure_stops_the_others_and_leaves_nobody(program, tmp_path):
    done = run("-n", "2", "--", *program("fail"))
    assert done.returncode == 7
    pids = [int(pid) for i in range(2) for pid in (tmp_path / f"pids{i}").read_text().split()]
    wait_for(lambda: not any(map(runs, pids)))  # they were killed; the kernel takes its time
    assert done.stderr.splitlines() == [
        "[1] last words",
        "dflop launch: process 1 ended with exit code 7; ending the others",
    ]


@pytest.mark.parametrize("what, code", [("stubborn", 3), ("stop", 6)])
def test_a_process_that_does_not_end_is_killed(program, what, code):
    """With a grace of half a second instead of ten; a stopped process takes no SIGTERM."""
    out, err = run_patched(program(what), "s.STOP_GRACE_S = 0.5")
    assert out == f"LaunchResult(exit_code={code}, exit_codes=(137, {code}))"
    assert "process 0 did not end in time; killing" in err


def test_a_process_that_cannot_be_killed_is_left_behind(program):
    """As one is whose disk hangs; here SIGKILL does nothing until the launcher has ended."""
    patches = "s.STOP_GRACE_S = 0.5; s._Attempt._kill = lambda self: None"
    out, err = run_patched(program("stubborn"), patches)
    assert out == "LaunchResult(exit_code=3, exit_codes=(137, 3))"
    assert "process 0 cannot be killed and stays behind" in err


def test_a_launch_does_not_wait_for_who_reads_its_errors(program):
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


# ---- signals ----


def started(program, tmp_path, what: str) -> subprocess.Popen[str]:
    """A launch of two whose processes are ready for signals."""
    # A launch ignores what its parent does, and these tests may run under nohup or in background.
    kept = {s: signal.signal(s, signal.SIG_DFL) for s in ENDING_SIGNALS}
    process = subprocess.Popen(
        launcher("-n", "2", "--", *program(what)), stderr=subprocess.PIPE, text=True
    )
    for s, handler in kept.items():
        signal.signal(s, handler)
    wait_for_files(tmp_path, "ready")
    return process


@pytest.mark.parametrize("signum", ENDING_SIGNALS)
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
    wait_for_files(tmp_path, "heard")
    assert process.poll() is None
    time.sleep(SIGNAL_DEBOUNCE_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + 9
    assert "was killed by SIGKILL" in err


@pytest.mark.parametrize("twice", [False, True])
def test_a_ctrl_c_is_one_signal_for_each_process_and_no_restart(program, tmp_path, twice):
    """The terminal gives it to its foreground, a program between them may give it once more."""
    terminal, ours = pty.openpty()
    takes = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", takes]
    command += launcher("-n", "2", "--max-restarts", "9", "--", *program("count"))
    process = subprocess.Popen(
        command, stdin=ours, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    os.close(ours)
    wait_for_files(tmp_path, "ready")
    os.write(terminal, b"\x03")
    if twice:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    os.close(terminal)
    assert process.returncode == 3  # of a run that was preempted and has saved
    assert "process 0 ended with exit code 3; waiting for the others" in err
    assert "restart" not in err
    seen = [(tmp_path / f"seen{i}").read_text() for i in range(2)]
    assert seen == [str([signal.SIGINT.value])] * 2


# ---- restarts ----


def test_all_processes_start_again_under_a_new_port(program, tmp_path):
    done = run("-n", "2", "--max-restarts", "3", "--", *program("starts", "-9,134,0"))
    assert done.returncode == 0
    files = [tmp_path / f"start{n}.{i}" for n in range(3) for i in range(2)]
    starts = [f.read_text().split() for f in files if f.exists()]  # (launch, coordinator)
    assert len({name for name, _ in starts}) == 1
    assert len({at for _, at in starts}) == 3
    assert [line for line in done.stderr.splitlines() if "launch" in line] == [
        "dflop launch: process 1 was killed by SIGKILL; ending the others",
        "dflop launch: restart 1 of 3",
        "dflop launch: process 1 ended with exit code 134; ending the others",
        "dflop launch: restart 2 of 3 in 1 s",
    ]


@pytest.mark.parametrize(
    "codes, restarts, code, says",
    [
        ("2,0", 5, 2, ""),  # bad input
        ("3,0", 5, 3, ""),  # preempted, and saved
        ("4,4,0", 1, TRANSIENT_FAILURE, "all --max-restarts 1 are used"),
        ("-6,0", 0, TRANSIENT_FAILURE, ""),  # by a signal that nobody here sent
        ("134,0", 0, TRANSIENT_FAILURE, ""),  # SIGABRT of jax, in the words of a shell between
        ("7,7,7,0", 9, 7, "3 failures before the first step; the run ends"),
        ("7,7,4,0", 9, 0, ""),  # the last of them may succeed when retried
    ],
)
def test_what_is_retried(program, codes, restarts, code, says):
    patches = "s.MIN_BACKOFF_S = 0.01; s.STOP_GRACE_S = 1.0"
    out, err = run_patched(program("starts", codes), patches, max_restarts=restarts)
    assert out.startswith(f"LaunchResult(exit_code={code}, ")
    assert err.count("restart") <= codes.count(",") + ("no restart" in says)
    assert not says or err.splitlines()[-1] == f"dflop launch: {says}"


@pytest.mark.parametrize(
    "more, waits", [((), ["", " in 0.1 s", " in 0.2 s", " in 0.3 s"]), (("step",), [""] * 4)]
)
def test_the_wait_before_a_restart_doubles_until_a_step_is_done(program, more, waits):
    patches = "s.MIN_BACKOFF_S, s.MAX_BACKOFF_S, s.STOP_GRACE_S = 0.1, 0.3, 0.5"
    out, err = run_patched(program("starts", "4,4,4,4,0", *more), patches, max_restarts=9)
    assert out.startswith("LaunchResult(exit_code=0, ")
    assert re.findall(r"restart \d of 9(.*)", err) == waits


def test_a_signal_ends_the_wait_for_a_restart(program):
    patches = "s.MIN_BACKOFF_S, s.STOP_GRACE_S = 60.0, 0.5"
    command = patched(program("starts", "4,4,0"), patches, max_restarts=9)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        next(line for line in process.stderr if " in 60 s" in line)
        start_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert out.startswith(f"LaunchResult(exit_code={128 + signal.SIGTERM}, ")
    assert time.monotonic() - start_s < 3.0
