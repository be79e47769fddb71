"""What `benchmarks/kills.py` does to a process, done to one that trains nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from .scripts import module

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
LIMIT_S = 20.0


@pytest.fixture
def kinds():
    return module("fault_kinds")


def target(kinds, pid: int, folder: Path, said: str = ""):
    job = SimpleNamespace(run_dir=folder, said=lambda: said, ended=lambda: False, saved=lambda: ())
    return kinds.Target(job, 0, pid, folder, random.Random(0))


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_every_kind_comes_as_often_and_moments_do(kinds):
    kills = module("kills")
    every = [*kinds.KINDS, kills.LAUNCHER_KILLED]
    for n in (0, 1, 8 * len(every)):
        drawn = list(kills.draws(every, n, random.Random(1)))
        assert len(drawn) == n
        counts = Counter(k for k, _ in drawn)
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
        for kind, moment in drawn:
            allowed = kinds.KINDS[kind].moments if kind in kinds.KINDS else kinds.MOMENTS
            assert moment in allowed
    moments = Counter(m for _, m in drawn)
    assert set(moments) == set(kinds.MOMENTS)
    assert 0.02 < moments[kinds.RECOVERY] / n < 0.3


def test_a_kind_has_its_expected_end(kinds):
    """As docs/clusters.md has it, which may say more of when."""
    docs = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| ([a-zA-Z ]+) \| (.*) \|$", docs.partition("| fault |")[2], re.M)
    table = dict(rows[: len(kinds.KINDS) + 2])
    assert table.keys() == kinds.KINDS.keys() | {"launcher", "not finite"}
    for name, kind in kinds.KINDS.items():
        assert kind.expected
        assert table[name].startswith(kind.expected)
        assert set(kind.moments) <= set(kinds.MOMENTS)


PROGRAM = """
import socket, sys, threading, time
def beat():
    n = 0
    while True:
        n += 1
        print(n, flush=True)
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
s = socket.create_connection(("127.0.0.1", int(sys.argv[1]))) if len(sys.argv) > 1 else None
print("end", s.recv(1) if s else time.sleep(600), flush=True)
"""


@pytest.fixture
def process():
    started = []

    def start(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline()
        return started[-1]

    yield start
    for p in started:
        p.kill()
        p.communicate()


def test_a_frozen_process_goes_on_giving_signs_of_life(kinds, process, tmp_path):
    p = process()
    wait_for(lambda: kinds.state_of(p.pid) == "S")
    reap = kinds.frozen(target(kinds, p.pid, tmp_path))
    if reap is None:
        pytest.skip("no process may be traced here")
    wait_for(lambda: kinds.state_of(p.pid) == "t")
    first = [int(p.stdout.readline()) for _ in range(5)]
    assert first == sorted(first)
    assert not reap()
    p.kill()
    wait_for(reap)


def test_a_cut_socket_ends_at_both_ends(kinds, process, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        p = process(server.getsockname()[1])
        here, _ = server.accept()
        with here:
            kinds.cut(target(kinds, p.pid, tmp_path))
            here.settimeout(LIMIT_S)
            assert here.recv(1) == b""
    assert "end b''" in p.communicate(timeout=LIMIT_S)[0]


def test_one_bit_is_flipped_after_the_kill(kinds, process, tmp_path):
    p = process()
    file = tmp_path / "index-a.npz"
    file.write_bytes(bytes(100))
    kinds.KINDS["index"].does(target(kinds, p.pid, tmp_path))
    assert sum(b.bit_count() for b in file.read_bytes()) == 1
    assert p.wait(LIMIT_S) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(p.pid, 0)


def test_it_is_the_newest_of_several_checkpoints_that_is_damaged(kinds, tmp_path):
    for step in (5, 10, 15):
        folder = tmp_path / "checkpoints" / f"{step:08d}"
        folder.mkdir(parents=True)
        (folder / "process-00000").write_bytes(b"x")
    hit = target(kinds, os.getpid(), tmp_path)
    for saved, there in (
        ((), []),
        ((5,), []),
        ((15, 10, 5), ["00000015"]),
        ((5, 10), ["00000010"]),
    ):
        hit.job.saved = lambda saved=saved: saved
        assert [f.parent.name for f in kinds.newest_checkpoint(hit)] == there


def test_a_slow_process_is_let_go_after_some_seconds(kinds, process, tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "SLOW_S", 0.5)
    p = process()
    stop = kinds.slow(target(kinds, p.pid, tmp_path))
    assert not stop()
    wait_for(lambda: kinds.state_of(p.pid) == "T")
    wait_for(stop)
    wait_for(lambda: kinds.state_of(p.pid) != "T")


def test_three_of_what_hosts_tries_is_tried_in_ci():
    """As docs/clusters.md says of the rest that it names."""
    hosts = module("hosts")
    assert len(hosts.QUICK) == 3
    assert {*hosts.QUICK} < {tried.__name__ for tried in hosts.TRIED}
    assert "hosts.py --quick" in (Path(__file__).parents[2] / ".ci" / "hosts").read_text()


def test_bytes_on_their_way_are_an_exchange():
    observed = module("observed_job")
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there:
            here.sendall(bytes(observed.EXCHANGED_BYTES // 2))
            assert not observed._has_unread_bytes(os.getpid())
            here.sendall(bytes(observed.EXCHANGED_BYTES))
            wait_for(lambda: observed._has_unread_bytes(os.getpid()))
            there.recv(10 * observed.EXCHANGED_BYTES)
            wait_for(lambda: not observed._has_unread_bytes(os.getpid()))
