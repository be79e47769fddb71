"""`dflop launch --min-processes`: made-up trainers without jax whose hosts go, come back, or are
cut off from each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from dflop_jax.cli import main
from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.ending import BAD_INPUT
from tests.processes import ROOT

from .launched import LIMIT_S, launcher, wait_for

# It tells its agent what a run tells and steps until process 0 is told to end, all together.
# Process 0 "commits", as long as nobody has claimed a later start. A file names a broken place.
TRAINER = """
import json, os, signal, sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from dflop_jax.cluster import told
from dflop_jax.cluster.claims import newest
folder = Path(sys.argv[1])
names = ("PROCESS_ID", "NUM_PROCESSES", "FULL_PROCESSES", "LOCAL_ID", "FEWER_PROCESSES")
index, number, full, place, fewer = (int(os.environ["DFLOP_" + n]) for n in names)
start, host = told.start_number(), int(os.environ.get("TEST_HOST", 0))
asked = folder / f"asked-{{start}}"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3) if index else asked.touch())
fact = dict(start=start, host=host, index=index, number=number, full=full, place=place, fewer=fewer)
with (folder / "starts").open("a") as file:
    file.write(json.dumps(fact) + chr(10))
told.tell_begun(folder / "restarts.jsonl")
while sum(json.loads(s)["start"] == start for s in (folder / "starts").open()) < number:
    if asked.exists():
        sys.exit(3)
    time.sleep(0.02)
if (folder / f"broken-{{place}}").exists():
    os.kill(os.getpid(), signal.SIGKILL)
while number == full and any(folder.glob("broken-*")):  # no step is done without that one
    if asked.exists():
        sys.exit(3)
    time.sleep(0.02)
told.tell_step()
while not (folder / "finish").exists():
    if asked.exists():
        sys.exit(3)
    if index == 0:
        if newest(folder, told.launch_name()) > start:
            sys.exit(4)
        with (folder / "commits").open("a") as file:
            file.write(f"{{start}} {{host}}" + chr(10))
    time.sleep(0.05)
"""


class Hosts:
    """Launchers that play hosts, each with one process."""

    def __init__(self, folder: Path, n: int, *more: str):
        self.folder, self.n, self.more = folder, n, more
        (folder / "trainer.py").write_text(TRAINER.format(root=str(ROOT)))
        (folder / "secret").mkdir()
        self.addresses = [Address(LOOPBACK, free_port()) for _ in range(n)]
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int, addresses: list[Address] | None = None) -> None:
        at = ",".join(map(str, addresses or self.addresses))
        of_host = ["--coordinator", at, "--hosts", str(self.n), "--host", str(host)]
        program = ["--", "python", str(self.folder / "trainer.py"), str(self.folder)]
        secret = {"XDG_CONFIG_HOME": str(self.folder / "secret"), "TEST_HOST": str(host)}
        command = launcher("-n", "1", "--max-restarts", "99", *self.more, *of_host, *program)
        if self.peer_timeout_s:
            code = f"import dflop_jax.cluster.agent as a; a.PEER_TIMEOUT_S = {self.peer_timeout_s}"
            code += "; import sys; from dflop_jax.cli import main; sys.exit(main())"
            command = [command[0], "-c", code, *command[3:]]
        with (self.folder / f"log-{host}").open("a") as log:
            self.running[host] = subprocess.Popen(
                command, env=os.environ | secret, stderr=log, stdout=log, text=True
            )

    def kill(self, host: int) -> None:
        process = self.running.pop(host)
        process.kill()
        process.wait()

    def said(self, host: int) -> str:
        return (self.folder / f"log-{host}").read_text()

    def starts(self) -> dict[int, list[dict]]:
        """What the processes of each start were told, by process."""
        file, by_start = self.folder / "starts", dict[int, list[dict]]()
        for line in file.read_text().splitlines() if file.exists() else ():
            fact = json.loads(line)
            by_start.setdefault(fact["start"], []).append(fact)
        return {s: sorted(f, key=lambda fact: fact["index"]) for s, f in by_start.items()}

    def await_start(self, hosts: list[int]) -> int:
        """The start that these hosts, and no others, take part in."""

        def last() -> int:
            for start, facts in self.starts().items():
                if start > self.seen and [f["host"] for f in facts] == hosts:
                    return start if len(facts) == facts[0]["number"] else 0
            return 0

        try:
            wait_for(lambda: last() > 0 or self.broken())
        except AssertionError:
            raise AssertionError("\n".join(self.said(h) for h in range(self.n))) from None
        assert last(), {h: self.said(h) for h in range(self.n)}
        self.seen = last()
        return self.seen

    seen, peer_timeout_s = 0, 0.0
    wires: Mapping[int, Wire] = MappingProxyType({})

    def broken(self) -> bool:
        return any(p.poll() is not None for p in self.running.values())

    def finish(self) -> list[int]:
        (self.folder / "finish").touch()
        return [p.wait(LIMIT_S) for p in self.running.values()]


@pytest.fixture
def hosts(tmp_path):
    made: list[Hosts] = []

    def make(n: int, *more: str) -> Hosts:
        made.append(Hosts(tmp_path, n, *more))
        return made[-1]

    yield make
    for some in made:
        for process in some.running.values():
            process.kill()
            process.wait()
        for wire in some.wires.values():
            wire.close()


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 2])
def test_a_host_is_gone_for_good_and_comes_back_later(hosts, gone):
    run = hosts(3, "--min-processes", "2", "--gone-after", "1")
    for host in range(3):
        run.start(host)
    run.await_start([0, 1, 2])
    run.kill(gone)
    left = [h for h in range(3) if h != gone]
    shrunk = run.await_start(left)
    facts = run.starts()[shrunk]
    assert [(f["index"], f["number"], f["full"], f["fewer"]) for f in facts] == [
        (0, 2, 3, 0), (1, 2, 3, 0),
    ]  # fmt: skip
    assert "with 2 of 3 processes" in run.said(left[0])
    run.start(gone)
    grown = run.await_start([0, 1, 2])
    assert [f["fewer"] for f in run.starts()[grown]] == [2, 2, 2]
    assert f"host {gone} has come back; the processes save and end" in run.said(left[0])
    assert run.finish() == [0, 0, 0], [run.said(h) for h in range(3)]
    assert run.said(left[0]).count("; restart ") == 1  # to grow is no restart
    # Commits are of one start after the other: never two worlds.
    commits = [int(line.split()[0]) for line in (run.folder / "commits").read_text().splitlines()]
    assert commits == sorted(commits)


def test_a_place_that_is_broken_is_left_out_and_taken_in_by_a_signal(hosts, tmp_path):
    (tmp_path / "broken-0").touch()
    (tmp_path / "trainer.py").write_text(TRAINER.format(root=str(ROOT)))
    program = ["--", "python", str(tmp_path / "trainer.py"), str(tmp_path)]
    more = ["--max-restarts", "9", "--min-processes", "1"]
    with (tmp_path / "log").open("a") as log:
        process = subprocess.Popen(launcher("-n", "2", *more, *program), stderr=log, stdout=log)
    run = Hosts.__new__(Hosts)
    run.folder, run.n, run.running = tmp_path, 1, {0: process}
    run.said = lambda _: (tmp_path / "log").read_text()
    try:
        wait_for((tmp_path / "commits").exists)
        starts = run.starts()
        assert [[f["place"] for f in starts[s]] for s in (1, 2, 3)] == [[0, 1], [0, 1], [1]]
        assert [(f["index"], f["number"], f["full"]) for f in starts[3]] == [(0, 1, 2)]
        assert "without this process, which failed twice before a step: 1 are left" in run.said(0)
        (tmp_path / "broken-0").unlink()
        process.send_signal(10)  # SIGUSR1
        wait_for(lambda: len(run.starts().get(4, ())) == 2)
        assert run.finish() == [0], run.said(0)
    finally:
        process.kill()
        process.wait()


# ---- partitions ----


class Wire:
    """A way to an address that can be cut."""

    def __init__(self, to: Address):
        self._to, self._cut, self._open = to, False, list[socket.socket]()
        self._carries = threading.Event()
        self._carries.set()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.at = Address(LOOPBACK, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut = True
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Carry nothing, as a network that loses all packets."""
        self._carries.clear()

    def mend(self) -> None:
        self._cut = False
        self._carries.set()

    def close(self) -> None:
        self.cut()
        self._carries.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                if self._cut:
                    raise ConnectionRefusedError
                far = socket.create_connection((self._to.host, self._to.port))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._carries.wait()
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def halves(run: Hosts) -> None:
    """Start four hosts that reach those of the other half by wires only."""
    run.wires = {h: Wire(run.addresses[h]) for h in range(4)}
    for host in range(4):
        mine = {0, 1} if host < 2 else {2, 3}
        ways = [a if h in mine else run.wires[h].at for h, a in enumerate(run.addresses)]
        run.start(host, ways)


def assert_one_side_went_on(run: Hosts, whole: int) -> None:
    """Of the start after `whole` there is one, of one half, and the other says so."""
    wait_for(lambda: max(run.starts()) > whole and len(run.starts()[max(run.starts())]) == 2)
    side = [f["host"] for f in run.starts()[max(run.starts())]]
    assert side in ([0, 1], [2, 3])
    other = [h for h in range(4) if h not in side]
    try:
        wait_for(lambda: any("another part of this run goes on" in run.said(h) for h in other))
    except AssertionError:
        raise AssertionError("\n".join(run.said(h) for h in range(run.n))) from None
    assert all([f["host"] for f in facts] == side for s, facts in run.starts().items() if s > whole)


def assert_one_writer(run: Hosts) -> None:
    """Every start has one process that commits, and none after a later one's."""
    lines = [line.split() for line in (run.folder / "commits").read_text().splitlines()]
    assert [int(s) for s, _ in lines] == sorted(int(s) for s, _ in lines)
    assert len({(s, h) for s, h in lines}) == len({s for s, _ in lines})


@pytest.mark.slow
def test_of_a_partition_in_halves_one_side_goes_on(hosts):
    run = hosts(4, "--min-processes", "2", "--gone-after", "1")
    halves(run)
    whole = run.await_start([0, 1, 2, 3])
    for wire in run.wires.values():
        wire.cut()
    assert_one_side_went_on(run, whole)
    for wire in run.wires.values():
        wire.mend()
    run.await_start([0, 1, 2, 3])
    assert run.finish() == [0] * 4, [run.said(h) for h in range(4)]
    assert_one_writer(run)


@pytest.mark.slow
def test_a_short_silence_costs_no_restart_and_a_long_one_leaves_a_side(hosts):
    run = hosts(4, "--min-processes", "2", "--gone-after", "1")
    run.peer_timeout_s = 6.0
    halves(run)
    whole = run.await_start([0, 1, 2, 3])
    for wire in run.wires.values():
        wire.freeze()
    time.sleep(2.0)
    for wire in run.wires.values():
        wire.mend()
    time.sleep(6.0)
    assert max(run.starts()) == whole
    for wire in run.wires.values():
        wire.freeze()
    assert_one_side_went_on(run, whole)
    assert "silent for" in "".join(run.said(h) for h in range(4))
    for wire in run.wires.values():
        wire.mend()
    run.await_start([0, 1, 2, 3])
    assert run.finish() == [0] * 4, [run.said(h) for h in range(4)]
    assert_one_writer(run)


@pytest.mark.parametrize(
    "args, says",
    [
        (["--min-processes", "2"], "--min-processes 2 goes on with fewer by a restart"),
        (["--max-restarts", "3", "--min-processes", "3"], "1 hosts of 2 processes have 2"),
        (["--max-restarts", "3", "--gone-after", "nan"], "must be numbers from 0"),
        (
            ["--coordinator", "a:1,b", "--hosts", "2", "--host", "0"],
            "--coordinator: 'b' is no HOST:PORT",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, args, says):
    assert main(["launch", "-n", "2", *args, "--", "true"]) == BAD_INPUT
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert says in err
