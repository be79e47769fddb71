"""What an agent does on its host: what its processes are told, their spares, and what it ends by.
Nothing is started but one spare, which trains nothing."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dflop_jax.cluster import agent as agent_module
from dflop_jax.cluster import distributed, group, launch
from dflop_jax.cluster.addresses import LOOPBACK, Address
from dflop_jax.cluster.agent import Agent
from dflop_jax.cluster.decide import Order
from dflop_jax.cluster.ending import TRY_AGAIN
from dflop_jax.cluster.events import Regroup
from dflop_jax.cluster.group import Group, Start
from dflop_jax.cluster.host_run import SPARES_AFTER_S, HostRun, _Begun
from dflop_jax.cluster.job import Job, LaunchResult, Place, claimed, start_of
from dflop_jax.cluster.launch_keeper import MARK_ENV
from dflop_jax.cluster.processes import Processes
from dflop_jax.cluster.rendezvous import Meeting
from dflop_jax.cluster.restarts import Limits
from dflop_jax.cluster.secret import SECRET_ENV
from dflop_jax.cluster.variables import FEWER_ENV
from dflop_jax.config import DistributedConfig
from tests.processes import ROOT

AT = Address("node1", 29400)
PAIR = Job(["python", "a.py"], [{SECRET_ENV: "a secret"}] * 2, [None, None])


# ---- spares ----


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Make the processes of a host at its second start, whose spares are only counted, by lists of
    their numbers in the run."""

    def make(restarts: int):
        spares: list[list[str]] = []
        stepped: list[float] = []

        def new_group(first: int):
            spares.append([])
            add = spares[-1].append
            return SimpleNamespace(add_spare=lambda s: add(s.environment["DFLOP_PROCESS_ID"]))

        said: list[str] = []
        run = HostRun(PAIR, Place(), Limits(restarts), SimpleNamespace(say=said.append))
        monkeypatch.setattr(run, "_new_group", new_group)
        tell = SimpleNamespace(stepped_s=lambda folder: stepped[0] if stepped else None)
        monkeypatch.setattr("dflop_jax.cluster.host_run.told", tell)
        order = Order(start=2, numbers=(2,), full=2, port=29401)
        begun = _Begun(order, tmp_path, queue.SimpleQueue(), lambda: (1,))
        return SimpleNamespace(run=run, begun=begun, spares=spares, said=said, stepped=stepped)

    return make


def test_spares_begin_once_a_step_is_done_and_who_is_back_is_taken_in_then(host):
    one = host(restarts=1)
    one.run.failed_s = 1000.0
    one.run._tick(one.begun)
    assert (one.spares, one.said, one.begun.events.empty()) == ([], [], True)
    one.stepped.append(1002.5)
    for _ in range(3):
        one.run._tick(one.begun)
    assert one.spares == [["0", "1"]]  # one for each, once
    assert one.said == ["restart 1 has done a step, 2.5 s after the failure"]
    assert one.begun.events.get_nowait() == Regroup("host 1 has come back")


def test_a_program_that_tells_of_no_step_gets_spares_later(host):
    one = host(restarts=1)
    one.begun.since_s -= SPARES_AFTER_S + 1.0
    one.run._tick(one.begun)
    assert one.spares == [["0", "1"]]
    assert one.begun.events.empty()


def test_who_starts_nothing_again_has_no_spares(host):
    one = host(restarts=0)
    one.stepped.append(1002.5)
    one.run._tick(one.begun)
    assert (one.spares, one.said) == ([], [])


def test_a_spare_takes_the_place_of_a_process(monkeypatch, tmp_path):
    code = "import dflop_jax.cli.spare as s; s.MODULES = ('json',); s.main()"
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {code}"
    monkeypatch.setattr(group, "command", lambda module: [sys.executable, "-c", code])
    notes = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    start = Start([sys.executable, "-c", notes], {})
    one = Group(SimpleNamespace(show=lambda *_: None, say=lambda *_: None))
    try:
        one.add_spare(start)
        waiting = one._spares[0].process.pid
        assert one.run([start], queue.SimpleQueue()) == 0
    finally:
        one.close()
    assert (tmp_path / "pid").read_text() == str(waiting)


@pytest.mark.slow
def test_a_spare_has_opened_no_device_when_all_is_imported():
    code = (
        "import importlib; from dflop_jax.cli.spare import MODULES; "
        "[importlib.import_module(name) for name in MODULES]; "
        "from dflop_jax.cluster.devices import jax_has_started; assert not jax_has_started(); "
        "import jax; jax.devices(); assert jax_has_started()"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60.0)


# ---- what processes are told ----


@pytest.mark.parametrize(
    "hosts, numbers, least, fewer",
    [
        ((0,), (4,), 2, 3),  # of a single host one process less
        ((0, 1, 2), (2, 2, 2), 2, 4),  # else a host
        ((0, 1), (2, 1), 2, 2),
        ((0, 1), (2, 2), 3, 0),  # so few are not allowed for
        ((0,), (1,), 1, 0),
    ],
)
def test_with_how_many_the_run_would_go_on(hosts, numbers, least, fewer):
    order = Order(start=1, hosts=hosts, numbers=numbers, full=sum(numbers), port=29401)
    addresses = (AT,) * len(hosts) if len(hosts) > 1 else ()
    place, limits = Place(0, len(hosts), addresses), Limits(restarts=9, least=least)
    job = replace(PAIR, environments=[{}] * numbers[0], cores=[None] * numbers[0])
    active = range(numbers[0])
    told = start_of(job, place, order, active, 0, Path("/nowhere"), limits).environment
    assert told[FEWER_ENV] == str(fewer)


def test_every_launch_has_a_secret_of_its_own(monkeypatch):
    """And waits for the launchers of other hosts as long as their processes for each other."""
    made = []

    class Made:
        def __init__(self, job, place, connect_s, limits):
            assert connect_s == DistributedConfig().connect_timeout_s
            made.append([e[SECRET_ENV] for e in job.environments])

        def run(self):
            return LaunchResult(0, ())

    monkeypatch.setattr(launch, "Agent", Made)
    monkeypatch.setattr(launch, "find_processes", lambda config: Processes())
    monkeypatch.setenv(SECRET_ENV, "a secret of the user's own")
    for _ in range(2):
        launch.launch(["python"], 2)
    first, second = made
    assert len({*first}) == len({*second}) == 1
    assert len({*first, *second, "a secret of the user's own"}) == 3


def test_a_cluster_says_which_launchers_there_are(monkeypatch):
    """One on each node or in each pod, which then start processes of their own."""
    places: list[Place] = []

    class Made:
        def __init__(self, job, place, connect_s, limits):
            places.append(place)

        def run(self):
            return LaunchResult(0, ())

    monkeypatch.setattr(launch, "Agent", Made)
    monkeypatch.setattr(launch, "find_secret", lambda config: b"a secret")
    monkeypatch.delenv(MARK_ENV, raising=False)
    pod = {"COORDINATOR": "node1:29400", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    for name, value in pod.items():
        monkeypatch.setenv(f"DFLOP_{name}", value)
    launch.launch(["python"], 3)
    hosts = launch.Hosts("node1:29400, node2:29400", 3, 2)
    launch.launch(["python"], 1, hosts=hosts)
    monkeypatch.setenv(MARK_ENV, "x")  # inside another launch
    launch.launch(["python"], 1)
    two = (AT, Address("node2", 29400))
    assert places == [Place(1, 2, (AT,)), Place(2, 3, two), Place(0, 1, ())]


# ---- an agent ----


@pytest.mark.parametrize("n, code", [(1, TRY_AGAIN), (2, None)])
def test_a_host_that_has_no_process_left_ends(monkeypatch, tmp_path, n, code):
    job = replace(PAIR, environments=PAIR.environments[:n], cores=[None] * n)
    one = Agent(job, Place(), 1.0, Limits(restarts=9, least=1))
    parts = Order(leaves_out=(0, 0), meets=(0, 1), start=2, says="without this process")
    monkeypatch.setattr(agent_module.Agent, "_agree", lambda self, peers: parts)
    try:
        assert one._together(SimpleNamespace(close=lambda: None), tmp_path) == code
    finally:
        one._here.close()


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_start_that_cannot_be_claimed_is_not_begun(monkeypatch, tmp_path, is_sound):
    """As in a folder without hard links; before there is a folder all hosts are here."""

    def no_link(*_):
        raise PermissionError("no hard links here")

    if not is_sound:
        monkeypatch.setattr(os, "link", no_link)
    order = Order(start=3, name="a", hosts=(0, 1), count_file=str(tmp_path / "restarts.jsonl"))
    assert claimed(order) == (3 if is_sound else 0)
    assert claimed(msgspec.structs.replace(order, count_file="")) == 3


# ---- where jax listens ----


@pytest.mark.parametrize(
    "interface, own_host, service, transfers",
    [
        ("10.0.0.1", "10.0.0.2", "10.0.0.1:29400", "10.0.0.2"),
        ("", "10.0.0.2", "[::]:29400", "10.0.0.2"),
        (LOOPBACK, LOOPBACK, f"{LOOPBACK}:29400", LOOPBACK),
    ],
)
def test_where_jax_listens(monkeypatch, interface, own_host, service, transfers):
    set_to: dict[str, str] = {}
    told: dict[str, object] = {}
    monkeypatch.setattr(Address, "interface", lambda self: interface)
    for name, value in (
        ("on_cpu", lambda: True),
        ("need_no_log", lambda: None),
        ("_keep_stdout_clean", lambda: None),
        ("connect", lambda at: at),
        ("hold_open", lambda path, reach: None),
    ):
        monkeypatch.setattr(distributed, name, value)
    monkeypatch.setattr(distributed.jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(
        distributed.jax.distributed, "initialize", lambda *_, **named: told.update(named)
    )
    first = Processes(2, 0, AT)
    reach = distributed._connect(first, Meeting(own_host, {}), DistributedConfig())
    assert told["coordinator_bind_address"] == service
    assert set_to["jax_cross_host_transfer_socket_address"].rpartition(":")[0] == transfers
    assert set_to["jax_cross_host_transport_addresses"] == f"{transfers}:0"
    assert reach() == Address(interface or LOOPBACK, 29400)
