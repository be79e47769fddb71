"""`dflop launch` from the outside, with programs that need no jax: output, ends, orphans, mistakes.

Waits have long limits and are left as soon as they can be: a loaded machine only makes them slower.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflop_jax.cli import main
from dflop_jax.cluster import launch as module
from dflop_jax.cluster.ending import ENDING_SIGNALS, ONE_SIGNAL_S
from dflop_jax.cluster.launch import core_shares, resolve
from tests.processes import descendants, runs

LIMIT_S = 60.0  # nothing here takes more than a few seconds

# What the launched programs do, by their first argument; they know their number.
CHILD = """
import os, signal, subprocess, sys, time
index, what, folder = int(os.environ["DFLOP_PROCESS_ID"]), sys.argv[1], sys.argv[2]

def note(name, text=""):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as f:
        f.write(str(text))
    os.rename(path + ".part", path)

def forever():
    while True:
        time.sleep(60)

def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.02)

if what == "speak":
    # A line is one write: process 0 has the launcher's own output, and writes as it likes.
    sys.stdout.write(f"out {index}\\n")
    sys.stderr.write(f"err {index}\\n")
    sys.stdout.write("no newline" if index else "")
elif what == "environment":
    note(f"env{index}", "\\n".join(f"{k}={v}" for k, v in os.environ.items()))
elif what == "fail":
    if index == 1:
        print("last words", file=sys.stderr)
        sys.exit(7)
    forever()
elif what == "die":
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forever()
elif what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"ready{index}")
    if index == 1:
        wait_for("ready0")
        sys.exit(3)
    forever()
elif what == "save":
    def save(signum, _):
        note(f"saved{index}", signum)
        sys.exit(0)
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, save)
    note(f"ready{index}")
    forever()
elif what == "deaf":
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda *_: note(f"heard{index}"))
    note(f"ready{index}")
    forever()
elif what == "count":
    seen = []
    signal.signal(signal.SIGINT, lambda signum, _: seen.append(signum))
    signal.signal(signal.SIGTERM, lambda signum, _: seen.append(signum))
    note(f"ready{index}")
    while not seen:
        time.sleep(0.02)
    time.sleep(0.5 * index)  # process 0 ends before the other has saved
    note(f"seen{index}", seen)
    sys.exit(3)
elif what == "family":
    own = subprocess.Popen(["sleep", "600"])
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note(f"pids{index}", f"{os.getpid()} {own.pid} {away.pid}")
    if len(sys.argv) > 3 and index == 1:
        wait_for("pids0")
        sys.exit(5)
    forever()
elif what == "cores":
    note(f"cores{index}", " ".join(map(str, sorted(os.sched_getaffinity(0)))))
elif what == "flood":
    if index == 1:
        for _ in range(5000):
            print("x" * 100)
        note("flooded")
"""


@pytest.fixture
def program(tmp_path):
    """Command line of a child that does what it is told, in tmp_path."""
    (tmp_path / "child.py").write_text(CHILD)

    def command(what: str, *more: str) -> list[str]:
        return ["python", str(tmp_path / "child.py"), what, str(tmp_path), *more]

    return command


def launcher(*args: str) -> list[str]:
    return [sys.executable, "-m", "dflop_jax.cli", "launch", *args]


def run(*args: str, **named):
    """A finished launch, with what it wrote."""
    return subprocess.run(
        launcher(*args), capture_output=True, text=True, timeout=LIMIT_S, check=False, **named
    )


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


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


def test_dflop_itself_can_be_launched():
    done = run("-n", "2", "--", "dflop", "--help")
    assert done.returncode == 0
    assert done.stdout.count("Data-aware training") == 2


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
        "dflop launch: process 1 ended with exit code 7; stopping the others",
    ]


def test_a_killed_process_gives_its_signals_exit_code(program):
    done = run("-n", "2", "--", *program("die"))
    assert done.returncode == 128 + 9
    assert done.stderr == ("dflop launch: process 1 was killed by SIGKILL; stopping the others\n")


def test_a_process_that_does_not_stop_is_killed(program):
    """With a grace of half a second instead of ten."""
    code = (
        "from dflop_jax.cluster import launch as l; l.STOP_GRACE_S = 0.5; "
        f"print(l.launch({program('stubborn')!r}, 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "LaunchResult(exit_code=3, exit_codes=(137, 3))\n"
    assert "process 0 did not stop in time; killing" in done.stderr


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
    time.sleep(ONE_SIGNAL_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + 9
    assert "was killed by SIGKILL" in err


@pytest.mark.parametrize("twice", [False, True])
def test_a_ctrl_c_is_one_signal_for_each_process(program, tmp_path, twice):
    """The terminal gives it to its foreground, a program between them may give it once more."""
    terminal, ours = pty.openpty()
    takes = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    command = [sys.executable, "-c", takes + "os.execv(sys.argv[1], sys.argv[1:])"]
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
    assert "process 0 ended with exit code 3; awaiting the others" in err
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


# ---- orphans ----


def family(tmp_path) -> list[int]:
    """Of each process: itself, its child, its child in another session."""
    files = [tmp_path / f"pids{i}" for i in range(2)]
    wait_for(lambda: all(f.exists() for f in files))
    return [int(pid) for f in files for pid in f.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT])
def test_nobody_outlives_a_killed_launcher(program, tmp_path, signum):
    process = subprocess.Popen(launcher("-n", "2", "--", *program("family")))
    pids = family(tmp_path)
    assert len(pids) == 6
    assert all(map(runs, pids))
    process.send_signal(signum)
    assert process.wait(LIMIT_S) == -signum
    wait_for(lambda: not any(map(runs, pids)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_failure_leaves_nobody(program, tmp_path):
    done = run("-n", "2", "--", *program("family", "then fail"))
    assert done.returncode == 5
    pids = family(tmp_path)
    wait_for(lambda: not any(map(runs, pids)))  # they were killed; the kernel takes its time


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_launch_inside_a_launch_ends_with_it(program, tmp_path):
    inner = ["dflop", "launch", "-n", "2", "--", *program("family")]
    process = subprocess.Popen(launcher("-n", "1", "--", *inner))
    pids = family(tmp_path)
    assert all(map(runs, pids))
    others = descendants(process.pid) - set(pids)
    assert others  # the inner launcher, at least
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(runs, [*others, *pids])))


# ---- cores ----


def test_core_shares_are_even_and_disjoint(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7, 9}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    assert core_shares(1) == [{1, 3, 5, 7, 9}]
    assert core_shares(2) == [{1, 3}, {5, 7, 9}]
    assert core_shares(5) == [{1}, {3}, {5}, {7}, {9}]
    with pytest.raises(ValueError, match="6 processes need 6 cores, 5 are there"):
        core_shares(6)


def test_pin_needs_a_platform_that_can(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ValueError, match="does not tie processes to cores; leave it out"):
        core_shares(1)


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
        (["-n", "2", "--", "no-such-program"], "no-such-program: no such command"),
        (["-n", "2", "--", "./run.py"], "./run.py: no such command; did you mean: python ./run.py"),
        (
            ["-n", "2", "--devices-per-process", "0", "--", "true"],
            "--devices-per-process 0 must be",
        ),
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
