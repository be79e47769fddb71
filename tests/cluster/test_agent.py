"""`dflop launch --max-restarts`: made-up trainers without jax that fail, and are started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dflop_jax.cli import main
from dflop_jax.cluster import group
from dflop_jax.cluster.addresses import free_port
from dflop_jax.cluster.ending import BAD_INPUT, PREEMPTED, TRY_AGAIN
from dflop_jax.cluster.group import can_wait
from dflop_jax.cluster.restarts import Count
from tests.processes import ROOT

from .launched import LIMIT_S, launcher, run, run_code, wait_for

# What each start of each process does, by its number in the run: "0:kill 1:exit4,run" has process 0
# killed at its first start, process 1 end with exit code 4 at its first and stay at its second.
TRAINER = """
import os, signal, subprocess, sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from dflop_jax.cluster import told
folder, words = sys.argv[1:]
index = os.environ["DFLOP_PROCESS_ID"]
begun = int(os.environ.get("DFLOP_RESTARTS") or 0)
does = dict(word.split(":") for word in words.split()).get(index, "").split(",")
what = does[begun] if begun < len(does) else "end"
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
seen = Path(folder, "starts-" + index)
with seen.open("a") as file:
    names = ("COORDINATOR", "NUM_PROCESSES", "LOCAL_PROCESSES", "LOCAL_ID", "SECRET")
    told_of = [os.environ["DFLOP_" + name] for name in names]
    file.write(" ".join([str(begun), *told_of, str(os.getpid())]) + chr(10))
def noted(i):
    file = Path(folder, f"starts-{{i}}")
    return len(file.read_text().splitlines()) if file.exists() else 0

# Nobody fails before all have begun, or the others may be stopped before.
while not all(noted(i) > begun for i in range(int(os.environ["DFLOP_NUM_PROCESSES"]))):
    time.sleep(0.01)
if index == "0":
    told.tell_begun(Path(folder, "restarts.jsonl"))
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "kill-parent":  # while its helper still holds what its last words come through
    subprocess.Popen(["sleep", "1"])
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "follow":
    other = int(Path(folder, "starts-1").read_text().split()[-1])
    try:
        while True:
            os.kill(other, 0)
            time.sleep(0.01)
    except ProcessLookupError:
        sys.exit(4)
elif what.startswith("exit"):
    sys.exit(int(what[4:]))
elif what == "error":
    told.tell_failure(told.Failure(1, "a NaN", 7, ("row 3", "row 9")))
    sys.exit(1)
elif what == "ask":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
elif what == "run":
    time.sleep(60)
elif what == "deaf":
    time.sleep(600)
"""


@pytest.fixture
def trainer(tmp_path):
    """Command line of a trainer that does as it is told."""
    (tmp_path / "trainer.py").write_text(TRAINER.format(root=str(ROOT)))
    return lambda does: ["--", "python", str(tmp_path / "trainer.py"), str(tmp_path), does]


def starts(tmp_path, process: int) -> list[list[str]]:
    """What a process was told at each of its starts."""
    return [line.split() for line in (tmp_path / f"starts-{process}").read_text().splitlines()]


def test_a_killed_process_and_a_failed_meeting_are_tried_again(trainer, tmp_path):
    done = run("-n", "2", "--max-restarts", "5", *trainer("0:run,exit4,end 1:kill,run,end"))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "restart" in line] == [
        "dflop launch: process 1 was killed by SIGKILL; restart 1 of 5",
        "dflop launch: process 0 ended with exit code 4; restart 2 of 5 in 1 s",
    ]
    told = [starts(tmp_path, i) for i in range(2)]
    assert [[t[0] for t in of] for of in told] == [["0", "1", "2"]] * 2
    ports = [t[1] for t in told[0]]
    assert len(set(ports)) == 3  # of a port that may still be taken nothing is asked
    assert ports == [t[1] for t in told[1]]
    assert setbacks_in(tmp_path) == 0  # it is done, so that later failures are counted anew


def test_who_was_killed_is_named_though_others_that_miss_it_end_first(trainer):
    done = run("-n", "2", "--max-restarts", "5", *trainer("0:follow,end 1:kill-parent,end"))
    assert done.returncode == 0, done.stderr
    assert "process 1 was killed by SIGKILL; restart 1 of 5" in done.stderr


def setbacks_in(folder) -> int:
    count = Count()
    count.keep_in(folder / "restarts.jsonl")
    return len(count.setbacks)


@pytest.mark.parametrize(
    "does, limits, code, n_starts, says",
    [
        ("0:exit2 1:run", ["5"], BAD_INPUT, 1, "process 0 ended with exit code 2"),
        ("0:kill,kill,kill", ["1"], 137, 2, "no restart is left of --max-restarts 1"),
        ("0:kill,kill", ["9", "--restarts-an-hour", "1"], 137, 2, "an-hour 1 is reached"),
        ("0:exit4 1:run", ["0"], TRY_AGAIN, 1, "process 0 ended with exit code 4; stopping"),
    ],
)  # fmt: skip
def test_what_ends_a_run(trainer, tmp_path, does, limits, code, n_starts, says):
    done = run("-n", "2" if "1:" in does else "1", "--max-restarts", *limits, *trainer(does))
    assert done.returncode == code, done.stderr
    assert len(starts(tmp_path, 0)) == n_starts
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_three_errors_at_one_step_name_the_samples(trainer, tmp_path):
    """Counted over a requeue: the first two came to a launch that was killed."""
    rows = [
        {"time_s": 0.0, "why": "", "exit_code": 1, "error": True, "step": 7, "gained": True}
    ] * 2
    (tmp_path / "restarts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = run("-n", "1", "--max-restarts", "9", *trainer("0:error,error"))
    assert done.returncode == 1
    assert len(starts(tmp_path, 0)) == 1
    assert (
        "3 errors of its own at step 7 stop the run; the last: process 0 ended with exit code 1 "
        "(a NaN); the samples of its batch: row 3, row 9"
    ) in done.stderr


def test_a_signal_to_the_launcher_restarts_nothing(trainer, tmp_path):
    done = run("-n", "1", "--max-restarts", "9", *trainer("0:ask"))
    assert done.returncode == PREEMPTED, done.stderr
    assert len(starts(tmp_path, 0)) == 1


def test_who_does_not_stop_for_a_restart_is_killed_soon(trainer, tmp_path):
    """After two seconds, which are half of one here, and not after the ten that precede an end."""
    assert group.RESTART_GRACE_S == 2.0
    code = (
        "from dflop_jax.cluster import group as g, launch as l, restarts as r; "
        f"g.RESTART_GRACE_S, g.STOP_GRACE_S = 0.5, {10 * LIMIT_S}; "
        f"print(l.launch({trainer('0:deaf,end 1:kill,end')[1:]!r}, 2, limits=r.Limits(1)))"
    )
    done = run_code(code)
    assert done.stdout == "LaunchResult(exit_code=0, exit_codes=(0, 0))\n"
    assert "process 0 did not stop in time; killing" in done.stderr


# ---- several hosts ----


def test_launchers_of_two_hosts_start_again_together(trainer, tmp_path):
    at = f"127.0.0.1:{free_port()}"
    (tmp_path / "secret").mkdir()
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "secret")}
    more = ["--max-restarts", "3", "--coordinator", at, "--hosts", "2", "--host"]
    pair = [
        subprocess.Popen(
            launcher("-n", n, *more, host, *trainer("0:run 2:kill")),
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for host, n in (("0", "2"), ("1", "1"))
    ]  # fmt: skip
    said = [p.communicate(timeout=LIMIT_S)[1] for p in pair]
    assert [p.returncode for p in pair] == [0, 0], said
    assert all("process 2 was killed by SIGKILL; restart 1 of 3" in s for s in said)
    told = [starts(tmp_path, i) for i in range(3)]
    assert [len(t) for t in told] == [2, 2, 2]
    for begun in range(2):
        coordinators, numbers, local, places, secrets = zip(
            *(t[begun][1:6] for t in told), strict=True
        )
        assert len(set(coordinators)) == 1
        assert coordinators[0] != at
        assert set(numbers) == {"3"}
        assert local == ("2", "2", "1")
        assert places == ("0", "1", "0")
        assert len(set(secrets)) == 1


def test_a_launcher_that_dies_comes_back_to_the_others(trainer, tmp_path):
    at = f"127.0.0.1:{free_port()}"
    (tmp_path / "secret").mkdir()
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "secret")}

    def start(host: str, does: str) -> subprocess.Popen[str]:
        more = ["--max-restarts", "3", "--coordinator", at, "--hosts", "2", "--host", host]
        command = launcher("-n", "1", *more, *trainer(does))
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    stays, goes = start("0", "0:run,end"), start("1", "1:run,end")
    wait_for(lambda: all((tmp_path / f"starts-{i}").exists() for i in range(2)))
    goes.kill()
    goes.communicate()
    back = start("1", "1:run,end")
    said = [p.communicate(timeout=LIMIT_S)[1] for p in (stays, back)]
    assert (stays.returncode, back.returncode) == (0, 0), said
    assert "the launcher of host 1 was lost; restart 1 of 3" in said[0]
    assert [t[0] for t in starts(tmp_path, 1)] == ["0", "1"]  # it is told that this is a restart


# A launcher that is patient until its processes have begun.
PATIENT_ONCE = """
import sys
from dflop_jax.cli import main
from dflop_jax.cluster import launch

class Agent(launch.Agent):
    def _start(self, *told):
        self._connect_s = 0.5
        return super()._start(*told)

launch.Agent = Agent
sys.exit(main(["launch", *sys.argv[1:]]))
"""


def test_a_launcher_that_never_comes_back_ends_the_others(trainer, tmp_path):
    at = f"127.0.0.1:{free_port()}"
    (tmp_path / "secret").mkdir()
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "secret")}
    hosts = ["--coordinator", at, "--hosts", "2", "--host"]
    stays, goes = (
        subprocess.Popen(
            [sys.executable, "-c", PATIENT_ONCE, "-n", "1", "--max-restarts", "1", *hosts, host,
             *trainer(f"{host}:run,end")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for host in ("0", "1")
    )  # fmt: skip
    wait_for(lambda: all((tmp_path / f"starts-{i}").exists() for i in range(2)))
    goes.kill()
    goes.communicate()
    said = stays.communicate(timeout=LIMIT_S)[1]
    assert stays.returncode == TRY_AGAIN, said
    never = "host 0 met no others of the 2 hosts"
    assert [never in line for line in said.splitlines()][-2:] == [True, True]
    assert said.count(f"{at} within 0.5 s; see their logs; meeting again") == 1
    assert [t[0] for t in starts(tmp_path, 0)] == ["0"]


@pytest.mark.parametrize(
    "args, says",
    [
        (["--max-restarts", "-1"], "--max-restarts -1 must be at least 0"),
        (["--restarts-an-hour", "0"], "--restarts-an-hour 0 must be at least 1"),
        (["--hosts", "2"], "--coordinator and --host must be given too: all three, or none"),
        (["--coordinator", "a:1", "--hosts", "2", "--host", "2"], "process 2 of 2"),
        (["--coordinator", "node", "--hosts", "2", "--host", "0"], "'node' is no HOST:PORT"),
    ],
)
def test_mistakes_are_one_line(capsys, args, says):
    assert main(["launch", "-n", "1", *args, "--", "true"]) == BAD_INPUT
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert says in err


# ---- spares ----

SPARE = "import dflop_jax.cli.spare as s; s.MODULES = ('json',); s.main()"


def waiting(**more) -> tuple[subprocess.Popen[str], int]:
    """A spare that has imported next to nothing, and its pipe."""
    reading, writing = os.pipe()
    # As `children.command` has it: the folder of this package goes before all else.
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {SPARE}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(reading)],
        pass_fds=(reading,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip
    os.close(reading)
    return process, writing


SHOW = """
import os, sys
assert sys.modules["__main__"].__dict__ is globals() or sys.argv[0] == "-c"
print(__name__, sys.argv[1:], sys.path[0], os.environ["WHAT"])
sys.exit(5)
"""


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_spare_runs_what_python_would(tmp_path, how):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    arguments = {"script": ["sub/show.py"], "-m": ["-m", "sub.show"], "-c": ["-c", SHOW]}[how]
    environment = {**os.environ, "WHAT": "new"}
    expected = subprocess.run(
        [sys.executable, *arguments, "a", "--b"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    process, pipe = waiting(cwd=tmp_path, env={**os.environ, "WHAT": "old"})
    job = {"arguments": [*arguments, "a", "--b"], "environment": {"WHAT": "new"}}
    with os.fdopen(pipe, "wb") as orders:
        orders.write(json.dumps(job).encode() + b"\n")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (expected.returncode, expected.stdout), err
    assert expected.returncode == 5


@pytest.mark.parametrize("said", [b"", b'{"arguments"'])
def test_a_spare_that_is_told_nothing_ends(said):
    process, pipe = waiting()
    os.write(pipe, said)
    os.close(pipe)
    assert process.communicate(timeout=LIMIT_S) == ("", "")
    assert process.returncode == 0


def test_which_programs_a_spare_can_run():
    for arguments in (["a.py"], ["-m", "dflop_jax.cli", "train"], ["-c", "pass"]):
        assert can_wait([sys.executable, *arguments])
    for program in (["/bin/sh", "-c", "true"], [sys.executable], [sys.executable, "-O", "a.py"]):
        assert not can_wait(program)
