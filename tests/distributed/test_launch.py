"""`dflop launch` from the outside, by programs without jax: output, orphans, mistakes."""

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
from dflop_jax.distributed import processes as module
from tests.processes import descendants, runs

from .launched import (  # noqa: F401
    LIMIT_S,
    launcher,
    program,
    run,
    wait_for,
    wait_for_files,
)

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
N_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def test_lines_of_the_others_are_prefixed(program):
    done = run("-n", "3", "--", *program("speak"))
    assert done.returncode == 0
    of_others = [f"[{i}] {text}" for i in (1, 2) for text in (f"out {i}", "no newline")]
    assert sorted(done.stdout.splitlines()) == sorted(["out 0", *of_others])
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[2] err 2", "err 0"]


def test_a_terminal_is_process_0s_own():
    """Its bar works as usual; a line of another first clears the line that the bar is on."""
    ours, theirs = pty.openpty()
    speaks = "import os; os.write(2, f'{os.isatty(2)}\\n'.encode())"  # a line at once
    command = launcher("-n", "2", "--", "python", "-c", speaks)
    subprocess.run(command, stderr=theirs, timeout=LIMIT_S, check=True)
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


@pytest.mark.parametrize("pin", [False, pytest.param(True, marks=pytest.mark.skipif(
    N_CORES < 2, reason="needs two cores"))])  # fmt: skip
def test_processes_are_told_who_they_are_and_their_cores(program, tmp_path, pin):
    options = ["--devices-per-process", "3", *["--pin"] * pin]
    done = run("-n", "2", "--json", *options, "--", *program("speak"))
    assert json.loads(done.stdout[done.stdout.index("{") :]) == {
        "exit_code": 0,
        "exit_codes": [0, 0],
    }
    told = [
        dict(line.partition("=")[::2] for line in (tmp_path / f"env{i}").read_text().splitlines())
        for i in range(2)
    ]
    assert [t[module.PROCESS_ID_ENV] for t in told] == ["0", "1"]
    assert {t[module.NUM_PROCESSES_ENV] for t in told} == {"2"}
    assert {t[module.DEVICES_ENV] for t in told} == {"3"}
    (coordinator,) = {t[module.COORDINATOR_ENV] for t in told}
    assert coordinator.startswith("127.0.0.1:")
    cores = [set(map(int, (tmp_path / f"cores{i}").read_text().split())) for i in range(2)]
    assert cores[0] | cores[1] == os.sched_getaffinity(0)
    assert cores[0].isdisjoint(cores[1]) == pin


def test_the_launcher_needs_no_jax():
    code = "import sys, dflop_jax.cli.launch; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


# ---- orphans ----


@needs_proc
def test_no_process_outlives_a_killed_launcher(program, tmp_path):
    """Neither of its own nor of a launch inside it."""
    inner = ["dflop", "launch", "-n", "2", "--", *program("save")]
    process = subprocess.Popen(launcher("-n", "1", "--", *inner))
    wait_for_files(tmp_path, "ready")
    pids = [p for p in descendants(process.pid) if runs(p)]
    assert len(pids) == 3  # the inner launcher and its processes
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(runs, pids)))


# ---- mistakes ----


@pytest.mark.parametrize(
    "args, says",
    [
        ("-n 0 -- true", "argument -n: 0 must be at least 1"),
        ("-n many -- true", "argument -n: invalid positive_int value: 'many'"),
        ("-- true", "required: -n"),
        ("-n 2", "no command; give it after --, such as: dflop launch -n 2 -- dflop train"),
        ("-n 2 -- no-such-program", "no such command; check its spelling"),
        ("-n 2 -- ./run.py", "./run.py: no such command; did you mean: python ./run.py"),
        ("-n 2 -- ./odd", "odd: cannot be started: Exec format error; check its name"),
        ("-n 2 --max-restarts -1 -- true", "--max-restarts -1 must be at least 0"),
        ("-n 99999 --pin -- true", "--pin: 99999 processes need 99999 cores"),
    ],
)
@pytest.mark.filterwarnings("ignore:os.fork")  # dflop launch itself does not import jax
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, args, says):
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("print()")
    Path("odd").write_bytes(b"\x00not a program")
    Path("odd").chmod(0o755)
    try:
        code = main(["launch", *args.split()])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.filterwarnings("ignore:os.fork")
def test_processes_that_others_have_started_are_refused(capsys, monkeypatch):
    told = {"COORDINATOR": "node1:29400", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    for name, value in told.items():
        monkeypatch.setenv(f"DFLOP_{name}", value)
    monkeypatch.delenv(module.LOCAL_PROCESSES_ENV, raising=False)
    assert main(["launch", "-n", "2", "--", "python", "-c", "0"]) == 2
    assert "DFLOP_* variables has already started 2 processes" in capsys.readouterr().err
