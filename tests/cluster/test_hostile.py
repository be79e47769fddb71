"""A real run of two processes under attack: where it listens, and that its losses stay the same.

The full attack, 1,000 connections to every port, is benchmarks/hostile.py.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dflop_jax.report.run_folder import METRICS
from tests.train.many import FOUR, LIMIT_S, Jobs, losses

from .attackers import KINDS, attackers, listening_ports, trainers

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc/net")

STEPS = 150
ROUNDS = 4  # of every kind of attack, at every port


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs.make(tmp_path_factory.mktemp("jobs"), FOUR, steps=STEPS, every=1000)


@pytest.fixture(scope="module")
def quiet(jobs):
    """The losses of a run that nobody disturbs."""
    code, output = jobs.run(2, jobs.folder / "quiet")
    assert code == 0, output
    assert "turned away" not in output
    assert "strangers" not in output
    return losses(jobs.folder / "quiet")


def wait_for(condition, job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)


def test_an_attacked_run_has_the_same_losses(jobs, quiet, tmp_path):
    run_dir = tmp_path / "run"
    metrics = run_dir / METRICS
    with jobs.started(2, run_dir) as job:
        wait_for(lambda: len(trainers(job.pid)) == 2, job)
        first = next(iter(trainers(job.pid).values()))
        coordinator = int(first["DFLOP_COORDINATOR"].rpartition(":")[2])
        with attackers(first["DFLOP_SECRET"].encode()) as strangers:
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
                assert job.poll() is None, job.communicate()[0]
                if strangers.connected < 50:  # while the processes meet, at the only port
                    strangers.attack(coordinator, KINDS)
                time.sleep(0.005)
            ports = listening_ports(iter(trainers(job.pid)))
            assert {p.host for p in ports} == {"127.0.0.1"}
            assert coordinator not in {p.port for p in ports}
            before = metrics.read_bytes().count(b"\n")
            for _ in range(ROUNDS):
                for p in ports:
                    strangers.attack(p.port, KINDS)
            assert before < STEPS - 1, "the attack came too late"
            output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert losses(run_dir) == quiet
    said = " ".join(output.split())
    assert len(re.findall("turned away", said)) <= 1, output  # none where they met at once
    assert len(re.findall("strangers tried to connect", said)) <= 2, output  # one of each process
    assert first["DFLOP_SECRET"] not in output
