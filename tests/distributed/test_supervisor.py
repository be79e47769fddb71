"""Restarts of `dflop launch`: when, how often, and what each start is told; without jax."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest

from dflop_jax.distributed import processes
from dflop_jax.distributed.process_exit import SIGNAL_DEBOUNCE_S, TRANSIENT_FAILURE
from dflop_jax.distributed.processes import LAUNCH_ENV, RESTARTS_ENV, STEP_FILE_ENV

from .launched import LIMIT_S, launcher, program, run, run_code, wait_for  # noqa: F401


def told_of(folder, start: int) -> list[list[str]]:
    """The launch's name and the coordinator, of both processes of a start."""
    files = [folder / f"start{start}.{i}" for i in range(2)]
    return [f.read_text().split() if f.exists() else [] for f in files]


def test_all_processes_start_again_under_a_new_port(program, tmp_path):
    done = run("-n", "2", "--max-restarts", "3", "--", *program("starts", "-9,134,0"))
    assert done.returncode == 0
    starts = [t for n in range(3) for t in told_of(tmp_path, n) if t]
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
        ("4,4,0", 1, TRANSIENT_FAILURE, "no restart is left of --max-restarts 1"),
        ("-6,0", 0, TRANSIENT_FAILURE, ""),  # by a signal that nobody here sent
        ("134,0", 0, TRANSIENT_FAILURE, ""),  # SIGABRT of jax, in the words of a shell between
        ("7,7,7,0", 9, 7, "3 failures before the first step; the run ends"),
        ("7,7,4,0", 9, 0, ""),  # the last of them may succeed when retried
    ],
)
def test_what_is_retried(program, codes, restarts, code, says):
    launch = f"l.launch({program('starts', codes)!r}, 2, max_restarts={restarts})"
    script = (
        "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch as l; "
        f"s.MIN_BACKOFF_S = 0.01; s.STOP_GRACE_S = 1.0; print({launch}.exit_code)"
    )
    done = run_code(script)
    assert done.stdout == f"{code}\n"
    assert done.stderr.count("restart") <= codes.count(",") + ("no restart" in says)
    assert says in done.stderr
    if says:
        assert done.stderr.splitlines()[-1] == f"dflop launch: {says}"


def test_the_wait_before_a_restart_doubles_until_a_step_is_done(program):
    """Failures after a step are restarted at once, however often they come."""
    doubled = ["", " in 0.1 s", " in 0.2 s", " in 0.3 s"]
    for more, waits in ((), doubled), (("step",), [""] * 4):
        launch = f"l.launch({program('starts', '4,4,4,4,0', *more)!r}, 2, max_restarts=9)"
        script = (
            "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch "
            "as l; "
            f"s.MIN_BACKOFF_S, s.MAX_BACKOFF_S, s.STOP_GRACE_S = 0.1, 0.3, 0.5; "
            f"print({launch}.exit_code)"
        )
        done = run_code(script)
        assert done.stdout == "0\n"
        assert re.findall(r"restart \d of 9(.*)", done.stderr) == waits


def test_a_signal_ends_the_wait_for_a_restart(program):
    launch = f"l.launch({program('starts', '4,4,0')!r}, 2, max_restarts=9)"
    script = (
        "from dflop_jax.distributed import supervisor as s; from dflop_jax.cli import launch as l; "
        "import sys; "
        f"s.MIN_BACKOFF_S, s.STOP_GRACE_S = 60.0, 0.5; sys.exit({launch}.exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if " in 60 s" in line:
            break
    start_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert time.monotonic() - start_s < 3.0
    process.stderr.close()


def test_a_run_that_is_signalled_is_not_started_again(program, tmp_path):
    command = launcher("-n", "2", "--max-restarts", "9", "--", *program("count"))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)))
    process.send_signal(signal.SIGTERM)
    time.sleep(SIGNAL_DEBOUNCE_S)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3  # all processes saved and ended so
    assert "restart" not in err


def test_what_a_process_knows_of_its_supervisor(monkeypatch, tmp_path):
    for name in (LAUNCH_ENV, RESTARTS_ENV, STEP_FILE_ENV):
        monkeypatch.delenv(name, raising=False)
    processes.report_step.cache_clear()
    processes.report_step()
    processes.report_step.cache_clear()
    assert (processes.is_restart(), processes.launch_name()) == (False, "")
    for restarts in ("", "0", "1"):
        monkeypatch.setenv(RESTARTS_ENV, restarts)
        assert processes.is_restart() == (restarts == "1")
    monkeypatch.setenv(LAUNCH_ENV, "a")
    monkeypatch.setenv(STEP_FILE_ENV, str(tmp_path / "step"))
    processes.report_step()
    assert processes.launch_name() == "a"
    assert (tmp_path / "step").exists()
