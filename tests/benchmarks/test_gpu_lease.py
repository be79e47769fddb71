"""One command for a lent GPU: toy sizes on this CPU, ended and resumed; and tables of its rows."""

import argparse
import io
import json
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from .scripts import BENCHMARKS, module, run

gpu_lease = module("gpu_lease")


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A lease of `tmp_path` whose processes add the rows of `outcomes`, by task."""

    def lease(outcomes):
        args = argparse.Namespace(out=tmp_path, compile_only=None, tiny=False, seconds=None)
        new = gpu_lease.Lease(args)

        def process(task, seconds):
            code, rows = outcomes[task.name]
            for row in rows:
                new.add(task, row)
            return code

        monkeypatch.setattr(new, "_run_process", process)
        return new

    return lease


def test_what_is_done_is_not_done_again_and_what_failed_is(begin, tmp_path):
    good, bad, died = (gpu_lease.Task(2, name) for name in ("good", "bad", "died"))
    lease = begin({"good": (0, [{"name": "a"}]), "bad": (0, [{"name": "b", "error": "no time"}]),
                   "died": (1, [{"name": "c"}])})  # fmt: skip
    assert [lease.run(t, 100.0) for t in (good, bad, died)] == [False, True, True]
    file = tmp_path / "rows.jsonl"
    with file.open("a") as out:
        out.write('{"mode": "dev')  # ended while it was writing
    lease = begin({"bad": (0, [{"name": "b"}]), "died": (0, [{"name": "d"}])})
    assert [lease.run(t, 100.0) for t in (good, bad, died)] == [False, False, False]
    assert [lease.run(t, 100.0) for t in (good, bad, died)] == [False, False, False]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = [(r["task"], r["name"]) for r in rows if "error" not in r]
    assert names == [("good", "a"), ("good", "end"), ("died", "c"),
                     ("bad", "b"), ("bad", "end"), ("died", "d"), ("died", "end")]  # fmt: skip


def test_a_task_needs_its_seconds_and_its_flag(begin):
    lease = begin({})
    long = gpu_lease.Task(3, "long", needs_s=200.0)
    assert not lease.run(long, 199.0)  # it is left out, which is no failure
    assert lease.run(gpu_lease.Task(3, "short"), 0.5)
    assert [r["error"] for r in lease.rows] == ["199 s are left", "0 s are left"]
    flagged = gpu_lease.Task(1, "flagged", flag="xla_no_such_flag=1")
    assert not lease.run(flagged, 100.0)
    assert lease.rows[-1]["skipped"] == "this jax has no --xla_no_such_flag=1"


def test_what_was_compiled_and_what_was_measured_are_joined():
    rows = [
        {"mode": "device", "part": 2, "name": "p", "compile_s": 1.0, "ms": 4.0, "peak_bytes": 1.0},
        {"mode": "h100", "part": 2, "name": "p", "compile_s": 2.0, "predicted_ms": 5.0,
         "peak_bytes": 2.0**31},
        {"mode": "device", "part": 1, "name": "base", "slope": 2.0**21, "slope_error": 2.0**20,
         "arrays_slope": 0.0, "ms": 7.0, "peak_bytes_upper_bound": 3 * 2.0**30, "compile_s": 1.0},
        {"mode": "h100", "part": 3, "name": "run", "planned_s": 1.0, "planned_bytes": 2.0**30,
         "compiled_bytes": 2.0**31},
        {"mode": "device", "part": 3, "name": "run", "planned_s": 1.5, "planned_bytes": 2.0**30,
         "measured_s": 3.0, "mfu": 0.25, "peak_bytes": 3 * 2.0**30, "slope": None},
        {"mode": "device", "part": 3, "name": "lost", "error": "no time"},
    ]  # fmt: skip
    out = io.StringIO()
    for table in gpu_lease.summary(rows):
        Console(width=200, file=out).print(table)
    lines = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    assert ["base", "2", "1", "0", "<=", "3", "7"] in lines
    assert ["p", "5", "4", "1.25", "-", "-", "9.313e-10"] in lines
    assert [
        "run",
        "1.5",
        "3",
        "0.50",
        "25.0%",
        "-",
        "1",
        "2",
        "3",
        "(1.50x)",
        "-",
        "-",
        "-",
    ] in lines
    assert not any("lost" in line for line in lines)


@pytest.mark.slow
def test_the_leak_probe_runs_here_is_ended_and_goes_on(tmp_path):
    words = [str(tmp_path / "out"), "--tiny", "--part", "1"]
    file = tmp_path / "out" / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / "gpu_lease.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        while first.poll() is None and not (file.exists() and '"end"' in file.read_text()):
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 143
    before = file.read_text()
    done = run("gpu_lease", *words)
    assert done.returncode == 0, (tmp_path / "out" / "log.txt").read_text()[-3000:]
    assert file.read_text().startswith(before)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert not [r for r in rows if "error" in r]
    probes = {r["name"]: r for r in rows if "arrays_slope" in r}
    assert {"base", "every task awaited"} <= set(probes)
    assert [r["name"] for r in rows].count("base") == 1
    for r in probes.values():
        assert r["steps"] == [4, 9, 14, 19]
        assert r["arrays_slope"] == 0.0  # jax lists the same bytes after every step
    assert sum(r["task"] == "base" and r.get("ms", 0) > 0 for r in rows) == 8
    assert "every task awaited" in done.stdout.rpartition("Part 1")[2]
