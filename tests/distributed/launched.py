"""Programs for `dflop launch` that need no jax, and ways to start them.

Waits have long limits and are left as soon as they can be: a loaded machine only makes them slower.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

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
    note(f"pids{index}", f"{os.getpid()} {own.pid}")
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


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    """What Python prints that runs some code to its end."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
