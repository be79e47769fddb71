"""`dflop launch` from the outside, by programs without jax: output, ends, orphans, mistakes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax.cli import main
from dflop_jax.cli.launch import core_shares, resolve
from dflop_jax.distributed import processes as module
from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from tests.processes import descendants, runs

from .launched import LIMIT_S, launcher, program, run, run_code, wait_for  # noqa: F401

# ---- output and environment ----


def test_lines_of_the_others_are_prefixed(program):
    done = run("-n", "3", "--", *program("speak"))
    assert done.returncode == 0
    of_others = [f"[{i}] {text}" for i in (1, 2) for text in (f"out {i}", "no newline")]
    assert sorted(done.stdout.splitlines()) == sorted(["out 0", *of_others])
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[2] err 2", "err 0"]


def test_a_terminal_is_process_0s_own(program):
    """Its bar works as usual; a line of another first clears the line that the bar is on."""
    ours, theirs = pty.openpty()
    speaks = "import os; os.write(2, f'{os.isatty(2)}\\n'.encode())"  # a line at once
    command = [*program("speak")[:1], "-c", speaks]
    subprocess.run(launcher("-n", "2", "--", *command), stderr=theirs, timeout=LIMIT_S, check=True)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # a terminal that nobody holds any more ends so
        pass
    os.close(ours)
    assert b"True\r\n" in shown
    assert b"\r\x1b[2K[1] False\r\n" in shown
    assert shown.endswith(b"\x1b[?25h")  # a killed bar leaves the cursor hidden


def test_processes_are_told_who_they_are(program, tmp_path):
    assert (
        run("-n", "2", "--devices-per-process", "3", "--", *program("environment")).returncode == 0
    )
    told = [
        dict(line.partition("=")[::2] for line in (tmp_path / f"env{i}").read_text().splitlines())
        for i in range(2)
    ]
    assert [t[module.PROCESS_ID_ENV] for t in told] == ["0", "1"]
    assert {t[module.NUM_PROCESSES_ENV] for t in told} == {"2"}
    assert {t[module.DEVICES_ENV] for t in told} == {"3"}
    (coordinator,) = {t[module.COORDINATOR_ENV] for t in told}
    host, _, port = coordinator.partition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def test_json_is_the_exit_codes(program):
    done = run("-n", "1", "--json", "--", *program("cores"))
    assert json.loads(done.stdout) == {"exit_code": 0, "exit_codes": [0]}
    done = run("-n", "2", "--json", "--", *program("fail"))
    assert done.returncode == 7
    assert json.loads(done.stdout) == {"exit_code": 7, "exit_codes": [128 + 15, 7]}


def test_output_that_nobody_reads_does_not_stop_the_processes(program, tmp_path):
    process = subprocess.Popen(launcher("-n", "2", "--", *program("flood")), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "flooded").exists()


def test_the_launcher_needs_no_jax():
    code = "import sys, dflop_jax.cli; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


# ---- failures ----


def test_the_first_failure_stops_the_others(program):
    done = run("-n", "3", "--", *program("fail"))
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        "[1] last words",
        "dflop launch: process 1 ended with exit code 7; ending the others",
    ]


def test_a_killed_process_may_succeed_when_retried(program):
    done = run("-n", "2", "--", *program("die"))
    assert done.returncode == TRANSIENT_FAILURE
    assert done.stderr == ("dflop launch: process 1 was killed by SIGKILL; ending the others\n")


@pytest.mark.parametrize("what, code", [("stubborn", 3), ("stop", 6)])
def test_a_process_that_does_not_end_is_killed(program, what, code):
    """With a grace of half a second instead of ten; a stopped process takes no SIGTERM."""
    script = (
        "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch as l; "
        "s.STOP_GRACE_S = 0.5; "
        f"print(l.launch({program(what)!r}, 2))"
    )
    done = run_code(script)
    assert done.stdout == f"LaunchResult(exit_code={code}, exit_codes=(137, {code}))\n"
    assert "process 0 did not end in time; killing" in done.stderr


# ---- orphans ----


def family(tmp_path) -> list[int]:
    """Of each process: itself, and its child."""
    files = [tmp_path / f"pids{i}" for i in range(2)]
    wait_for(lambda: all(f.exists() for f in files))
    return [int(pid) for f in files for pid in f.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_no_process_outlives_a_killed_launcher(program, tmp_path):
    """What a process started itself ends by its own means, as ours do by their closed stdin."""
    process = subprocess.Popen(launcher("-n", "2", "--", *program("save")))
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)))
    pids = [p for p in descendants(process.pid) if runs(p)]
    assert len(pids) == 2
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(runs, pids)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_failure_leaves_nobody(program, tmp_path):
    done = run("-n", "2", "--", *program("family", "then fail"))
    assert done.returncode == 5
    pids = family(tmp_path)
    wait_for(lambda: not any(map(runs, pids)))  # they were killed; the kernel takes its time


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_launch_inside_a_launch_ends_with_it(program, tmp_path):
    inner = ["dflop", "launch", "-n", "2", "--", *program("save")]
    process = subprocess.Popen(launcher("-n", "1", "--", *inner))
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)))
    pids = [p for p in descendants(process.pid) if runs(p)]
    assert len(pids) == 3  # the inner launcher and its processes
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(runs, pids)))


# ---- cores ----


def test_core_shares_are_even_and_disjoint(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7, 9}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    assert core_shares(1) == [{1, 3, 5, 7, 9}]
    assert core_shares(2) == [{1, 3}, {5, 7, 9}]
    assert core_shares(5) == [{1}, {3}, {5}, {7}, {9}]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores",
)
def test_pinned_processes_run_on_their_share(program, tmp_path):
    assert run("-n", "2", "--pin", "--", *program("cores")).returncode == 0
    cores = [set(map(int, (tmp_path / f"cores{i}").read_text().split())) for i in range(2)]
    assert cores[0].isdisjoint(cores[1])
    assert cores[0] | cores[1] == os.sched_getaffinity(0)


# ---- mistakes ----


@pytest.mark.parametrize(
    "args, says",
    [
        (["-n", "0", "--", "true"], "-n 0: start at least 1 process"),
        (["-n", "-2", "--", "true"], "-n -2: start at least 1 process"),
        (["-n", "many", "--", "true"], "argument -n: invalid int value: 'many'"),
        (["--", "true"], "required: -n"),
        (["-n", "2"], "no command; give it after --, such as: dflop launch -n 2 -- dflop train"),
        (["-n", "2", "--"], "no command; give it after --"),
        (["-n", "2", "--", "no-such-program"], "no such command; check its spelling"),
        (["-n", "2", "--", "./run.py"], "./run.py: no such command; did you mean: python ./run.py"),
        (
            ["-n", "2", "--devices-per-process", "0", "--", "true"],
            "--devices-per-process 0 must be",
        ),
        (["-n", "2", "--max-restarts", "-1", "--", "true"], "--max-restarts -1 must be at least 0"),
        (["-n", "99999", "--pin", "--", "true"], "--pin: 99999 processes need 99999 cores"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, args, says):
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("print()")
    try:
        code = main(["launch", *args])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.filterwarnings("ignore:os.fork")  # dflop launch itself does not import jax
def test_processes_that_others_have_started_are_refused(capsys, monkeypatch):
    for name, value in (
        ("COORDINATOR", "node1:29400"),
        ("NUM_PROCESSES", "2"),
        ("PROCESS_ID", "1"),
    ):
        monkeypatch.setenv(f"DFLOP_{name}", value)
    monkeypatch.delenv(module.LOCAL_PROCESSES_ENV, raising=False)
    assert main(["launch", "-n", "2", "--", "python", "-c", "0"]) == 2
    assert "DFLOP_* variables has started 2 processes" in capsys.readouterr().err
    monkeypatch.setenv(module.LOCAL_PROCESSES_ENV, "2")  # inside another launch
    assert main(["launch", "-n", "2", "--", "python", "-c", "0"]) == 0


def test_a_program_that_cannot_run_is_one_line(tmp_path):
    (tmp_path / "odd").write_bytes(b"\x00not a program")
    (tmp_path / "odd").chmod(0o755)
    done = run("-n", "2", "--", str(tmp_path / "odd"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "odd: cannot be started: Exec format error" in done.stderr


def test_dflop_and_python_mean_this_interpreters():
    assert resolve(["python", "a.py"]) == [sys.executable, "a.py"]
    assert resolve(["dflop", "train", "--json"]) == [
        sys.executable,
        "-m",
        "dflop_jax.cli",
        "train",
        "--json",
    ]
    assert resolve(["sh", "-c", "dflop"])[1:] == ["-c", "dflop"]
