"""Programs for `dflop launch` that need no jax, and ways to start them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

LIMIT_S = 60.0  # nothing here takes more than a few seconds

# What the launched programs do, by their first argument.
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

def on_signals(does):
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, does)
    note(f"ready{index}")

if what == "speak":
    # A line is one write: process 0 has the launcher's own output, and writes as it likes.
    note(f"env{index}", "\\n".join(f"{k}={v}" for k, v in os.environ.items()))
    note(f"cores{index}", " ".join(map(str, sorted(os.sched_getaffinity(0)))))
    sys.stdout.write(f"out {index}\\n")
    sys.stderr.write(f"err {index}\\n")
    sys.stdout.write("no newline" if index else "")
elif what == "fail":
    own = subprocess.Popen(["sleep", "600"])
    note(f"pids{index}", f"{os.getpid()} {own.pid}")
    if index == 1:
        wait_for("pids0")
        print("last words", file=sys.stderr)
        sys.exit(7)
    forever()
elif what == "stop":
    note(f"pid{index}", os.getpid())
    if index == 1:
        wait_for("pid0")
        os.kill(int(open(os.path.join(folder, "pid0")).read()), signal.SIGSTOP)
        sys.exit(6)
    forever()
elif what == "starts":  # process 1 ends each start as the next of the codes says, below 0: a signal
    restarts, codes = int(os.environ["DFLOP_RESTARTS"]), [*map(int, sys.argv[3].split(","))]
    told = [os.environ.get(n, "") for n in ("DFLOP_RUN", "DFLOP_COORDINATOR")]
    note(f"start{restarts}.{index}", " ".join(told))
    if index == 1 and len(sys.argv) > 4:
        open(os.environ["DFLOP_STEP_FILE"], "w").close()
    if index == 1 and codes[restarts] < 0:
        os.kill(os.getpid(), -codes[restarts])
    if index == 1 or not codes[restarts]:
        sys.exit(codes[restarts])
    forever()
elif what == "stubborn":
    on_signals(signal.SIG_IGN)
    if index == 1:
        wait_for("ready0")
        sys.exit(3)
    forever()
elif what == "save":
    on_signals(lambda signum, _: (note(f"saved{index}", signum), sys.exit(0)))
    forever()
elif what == "deaf":
    on_signals(lambda *_: note(f"heard{index}"))
    forever()
elif what == "count":
    seen = []
    on_signals(lambda signum, _: seen.append(signum))
    while not seen:
        time.sleep(0.02)
    time.sleep(0.5 * index)  # process 0 ends before the other has saved
    note(f"seen{index}", seen)
    sys.exit(3)
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


def run(*args: str):
    """A finished launch, with what it wrote."""
    return subprocess.run(
        launcher(*args), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def patched(command: list[str], patches: str, **options) -> list[str]:
    """Command line of a launch of two with other constants of the supervisor."""
    code = (
        "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch as l; "
        f"{patches}; print(l.launch({command!r}, 2, **{options!r}))"
    )
    return [sys.executable, "-c", code]


def run_patched(command: list[str], patches: str, **options):
    """The printed result of a `patched` launch, and its standard error."""
    done = subprocess.run(
        patched(command, patches, **options),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wait_for_files(folder, name: str) -> None:
    """Wait until both processes have made their file."""
    wait_for(lambda: all((folder / f"{name}{i}").exists() for i in range(2)))
