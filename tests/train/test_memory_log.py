"""Readings of memory, the peak since training began, and the warning of growth."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest

from dflop_jax.report.metrics import HOST_BYTES, LIVE_BYTES, PEAK_BYTES, PEAK_UPPER_BOUND
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.memory_log import MemoryLog
from tests.report.runs import cells_of

from .resume_cases import CONFIG, fit

MIB = 2**20


def device(stats, process=0):
    return SimpleNamespace(process_index=process, memory_stats=lambda: stats)


def stats(live, peak, limit=2**30):
    return {"bytes_in_use": live, "peak_bytes_in_use": peak, "bytes_limit": limit}


def test_memory_is_that_of_the_fullest_device_of_this_process():
    devices = [device(stats(5, 9)), device(stats(7, 8)), device(stats(99, 99), 1), device(None)]
    log = MemoryLog(devices, 0, 10)
    row = log.add(0, [log.read(is_drained=True)])
    assert (row[LIVE_BYTES], row[PEAK_UPPER_BOUND]) == (7.0, 9.0)
    assert row.pop(HOST_BYTES) > 1e6
    assert set(row) == {LIVE_BYTES, PEAK_UPPER_BOUND}
    assert LIVE_BYTES not in log.read(is_drained=False)
    for without in ([], jax.devices()):  # the CPU reports none
        log = MemoryLog(without, 0, 10)
        assert set(log.read(is_drained=True)) == {HOST_BYTES}
        assert not any(map(log.is_reading_due, range(1, 200)))
        assert log.warning() == ""


def test_a_peak_counts_from_the_start_of_training():
    """Of two processes: the peak is known once the larger one is above both peaks before."""
    here, there = stats(5, 50), stats(5, 80)
    logs = [MemoryLog([device(s)], 0, 10) for s in (here, there)]

    def row():
        return logs[0].add(0, [log.read(is_drained=False) for log in logs])

    here["peak_bytes_in_use"] = 70
    assert row()[PEAK_UPPER_BOUND] == 80
    here["peak_bytes_in_use"] = 81
    found = row()
    assert found[PEAK_BYTES] == 81
    assert PEAK_UPPER_BOUND not in found


def test_readings_get_rare():
    log = MemoryLog([device(stats(1, 1))], 7, 1000)
    due = [n for n in range(7, 300) if log.is_reading_due(n)]
    assert due == [7, *range(12, 58, 5), *range(107, 300, 50)]


@pytest.mark.parametrize(
    ("slope", "steps", "is_warned"),
    [(0.0, 1000, False), (1.0, 1000, True), (1.0, 10, False), (-1.0, 1000, False)],
)
def test_a_run_warns_once_of_memory_that_grows(slope, steps, is_warned):
    """1% of 1 GiB is 10.2 MiB: 1 MiB a step reaches that in 1,000 steps and not in 10."""
    used = stats(0, 0)
    log = MemoryLog([device(used)], 0, steps)
    warnings = []
    for k in range(60):
        used["bytes_in_use"] = int((100 + slope * k) * MIB + (k // 5 % 2) * 100_000)
        log.add(k, [log.read(is_drained=log.is_reading_due(k + 1))])
        warnings.append(log.warning())
    found = [(k, text) for k, text in enumerate(warnings) if text]
    assert [k for k, _ in found] == ([24] if is_warned else [])  # readings of 5, 10, .. 25 steps
    if is_warned:
        assert re.search(r"grows by 1\.0\d \+- 0\.00\d+ MiB per step", found[0][1])
        assert re.search(r"at most (89\d|90\d) more steps", found[0][1])


@pytest.mark.usefixtures("quick", "_in_a_folder_of_its_own")
def test_live_bytes_are_read_while_nothing_is_in_flight(monkeypatch, tmp_path):
    in_flight, run_step, read = [], Executor.run_step, MemoryLog.read

    def run(ex, schedule, *args, **kwargs):
        handle = run_step(ex, schedule, *args, **kwargs)
        in_flight.extend(handle.observations.values())
        return handle

    def checked(log, *, is_drained):
        assert not is_drained or all(o.done.is_set() for o in in_flight)
        return read(log, is_drained=is_drained)

    monkeypatch.setattr(Executor, "run_step", run)
    monkeypatch.setattr(MemoryLog, "read", checked)
    monkeypatch.setattr(
        MemoryLog, "_max_stat", lambda *_: float(sum(a.nbytes for a in jax.live_arrays()))
    )
    fit(tmp_path / "run", train=dataclasses.replace(CONFIG.train, steps=12, eval_every=0))
    live = {r["step"]: r["memory"].get(LIVE_BYTES) for r in read_metrics(tmp_path / "run")}
    read_at = [step for step, n_bytes in live.items() if n_bytes]
    assert read_at == [4, 9, 11]
    assert live[4] == live[9]
    assert "memory, live, growth per step" in cells_of(tmp_path / "run")
