"""Copies with agents over real sockets: whole or absent, whoever is lost."""

from __future__ import annotations

import itertools

import pytest

from dflop_jax.checkpoint import copies as copies_module
from dflop_jax.checkpoint.copies import Copies, _Need, needed_bytes
from dflop_jax.checkpoint.format import CorruptCheckpoint
from dflop_jax.checkpoint.store import manifest_of
from dflop_jax.cluster.addresses import LOOPBACK
from dflop_jax.cluster.copy_client import CopyClient
from dflop_jax.cluster.copy_server import CopyServer, Room
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.shelf import LEAST_FREE_BYTES, CopyName, Shelf

from .store_cases import assert_holds, random_case

SECRET = b"the secret of these tests"


class Agents:
    """Agents of `n` hosts, and the copies of processes that are on hosts `hosts_of`."""

    def __init__(self, n: int, hosts_of: tuple[int, ...]):
        self.hosts_of = hosts_of
        self.shelves = [Shelf() for _ in range(n)]
        self.servers = [CopyServer(s, LOOPBACK, SECRET) for s in self.shelves]
        self.processes = self.of_start(1)

    def of_start(self, start: int) -> list[Copies]:
        made = []
        for p, host in enumerate(self.hosts_of):
            clients = [CopyClient(s.address, SECRET) for s in self.servers]
            first = self.hosts_of.index(host) == p
            made.append(Copies(clients, host, first=first, run="run", start=start, peers=Peers()))
        return made

    def copy(self, step: int, case, *, without: tuple[int, ...] = (), seal: bool = True) -> None:
        """All processes but some copy what they hold, as the checkpointer does."""
        parts = [
            copies.write(step, case.specs, case.pieces[p], p)
            for p, copies in enumerate(self.processes)
            if p not in without
        ]
        if seal and not without:
            manifest = manifest_of(step, case.specs, parts, {"step": step})
            for copies in self.processes:
                copies.seal(step, manifest)


@pytest.fixture
def agents():
    made: list[Agents] = []

    def make(n: int, hosts_of: tuple[int, ...]) -> Agents:
        made.append(Agents(n, hosts_of))
        return made[-1]

    yield make
    for each in made:
        for server in each.servers:
            server.close()


def steps(copies: Copies) -> list[int]:
    return [name.step for name in copies.whole()]


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("hosts_of", [(0,), (0, 0, 0), (0, 1), (0, 1, 2), (0, 0, 1, 1)])
def test_a_copy_is_whole_or_absent_whichever_hosts_are_lost(agents, hosts_of):
    """Every choice of lost hosts. A file is with its own host and the next, so that what is left is
    whole unless two neighbours are lost (around the ring, or the only one)."""
    n = 1 + max(hosts_of)
    made = agents(n, hosts_of)
    case = random_case(n, n_processes=len(hosts_of))
    made.copy(5, case)
    assert steps(made.processes[0]) == [5]
    for lost in itertools.chain.from_iterable(
        itertools.combinations(range(n), k) for k in range(n + 1)
    ):
        kept = [s for i, s in enumerate(made.servers) if i not in lost]
        clients = [CopyClient(s.address, SECRET) for s in kept]
        copies = Copies(clients, 0, first=True, run="run", start=2, peers=Peers())
        holds = all(not {h, (h + 1) % n} <= set(lost) for h in range(n))
        if not any(pieces for p, pieces in enumerate(case.pieces) if hosts_of[p] in lost):
            continue  # nothing was there to lose
        assert steps(copies) == ([5] if holds else []), lost
        if holds:
            reader = copies.open(CopyName("run", 1, 5))
            assert (reader.step, reader.meta) == (5, {"step": 5})
            assert_holds(reader, case)


def test_what_is_not_finished_is_not_there(agents):
    made = agents(2, (0, 1))
    case, later = random_case(1, n_processes=2), random_case(2, n_processes=2)
    assert steps(made.processes[1]) == []
    made.copy(5, case)
    made.copy(10, later, without=(1,))
    assert steps(made.processes[1]) == [5]
    made.copy(10, later, seal=False)
    assert steps(made.processes[1]) == [5]
    assert_holds(made.processes[1].open(CopyName("run", 1, 5)), case)
    made.copy(15, later)
    assert steps(made.processes[0]) == [15]


def test_one_agent_with_the_manifest_is_enough(agents):
    """Killed while the agents were given it: every file was there by then."""
    made = agents(2, (0, 1))
    old, new = random_case(1, n_processes=2), random_case(2, n_processes=2)
    made.copy(5, old)
    parts = [c.write(10, new.specs, new.pieces[p], p) for p, c in enumerate(made.processes)]
    made.processes[1].seal(10, manifest_of(10, new.specs, parts, {}))
    copies = made.of_start(2)[0]
    assert copies.whole()[0] == CopyName("run", 1, 10)
    assert_holds(copies.open(CopyName("run", 1, 10)), new)


def test_a_flipped_bit_or_a_lost_file_is_noticed(agents):
    made = agents(1, (0,))
    case = random_case(3, n_processes=1, most=40, ranks=(2,))
    made.copy(5, case)
    name = CopyName("run", 1, 5)
    file = made.shelves[0].file(name, 0)
    for at in (0, len(file) // 2, len(file) - 1):
        file[at] ^= 1
        with pytest.raises(CorruptCheckpoint, match="copy of step 5, file of process 0: damaged"):
            assert_holds(made.processes[0].open(name), case)
        file[at] ^= 1
    reader = made.processes[0].open(name)
    made.processes[0].keep_only(None)
    with pytest.raises(CorruptCheckpoint, match="copy of step 5, file of process 0: missing"):
        assert_holds(reader, case)
    with pytest.raises(CorruptCheckpoint, match="no agent has its manifest"):
        made.processes[0].open(name)


def test_what_the_run_did_not_go_on_from_is_dropped(agents):
    made = agents(2, (0, 1))
    made.copy(5, random_case(1, n_processes=2))
    for copies in made.of_start(2):
        copies.begin(CopyName("run", 1, 5), 1)
    assert steps(made.processes[0]) == [5]
    for copies in made.of_start(3):
        copies.begin(None, 1)  # it went on from the disk
    assert steps(made.processes[0]) == []


# ---- what they take ----


def test_an_agent_that_is_gone_makes_no_copy(agents):
    made = agents(2, (0, 1))
    made.servers[1].close()
    case = random_case(1, n_processes=2)
    with pytest.raises(OSError, match=r"."):
        made.processes[0].write(5, case.specs, case.pieces[0], 0)
    assert steps(made.processes[0]) == []


def test_the_memory_that_copies_take(agents):
    """Played: two copies of what a host keeps, and what its own processes send."""
    needs = [_Need(0, 10), _Need(0, 1), _Need(1, 100), _Need(2, 0)]
    assert needed_bytes(needs, 3) == {
        0: 2 * (10 + 1 + 0) + 11, 1: 2 * (100 + 11) + 100, 2: 2 * (0 + 100) + 0,
    }  # fmt: skip
    assert needed_bytes(needs[:2], 1) == {0: 2 * 11 + 11}
    assert needed_bytes([], 1) == {0: 0}
    case = random_case(1, n_processes=3)
    made = agents(2, (0, 0, 1))
    made.copy(5, case)
    made.copy(10, case, seal=False)
    sent = [p.write(10, case.specs, case.pieces[i], i) for i, p in enumerate(made.processes)]
    sizes = [_Need(h, part.n_bytes) for h, part in zip((0, 0, 1), sent, strict=True)]
    own = {h: sum(n.n_bytes for n in sizes if n.host == h) for h in (0, 1)}
    held = {h: s.n_bytes for h, s in enumerate(made.shelves)}
    assert {h: held[h] + own[h] for h in held} == needed_bytes(sizes, 2)


def test_copies_that_do_not_fit_are_refused_in_one_line(agents, monkeypatch):
    copies = agents(1, (0,)).processes[0]
    free = LEAST_FREE_BYTES + 3 * 10**9
    monkeypatch.setattr(CopyClient, "room", lambda self: Room(0, free))
    assert copies.begin(None, 10**9) == (
        "copies take 1.00 GB each, 3.00 GB of a host's memory at most"
    )
    with pytest.raises(ValueError, match=r"copies take 3.00 GB of the memory of host 0, which"):
        copies.begin(None, 10**9 + 1)
    monkeypatch.setattr(CopyClient, "room", lambda self: Room(10, free - 10))
    copies.begin(None, 10**9)  # what is held now makes room
    monkeypatch.setattr(CopyClient, "room", lambda self: Room(0, None))
    copies.begin(None, 10**15)  # nobody knows
    assert copies_module.KEPT == 2
