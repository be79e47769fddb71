"""Make one run of several processes: find the others, meet them, and let jax connect.

`initialise` comes before anything that asks jax for devices. Alone, a process needs none of it.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import jax
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge

from dflop_jax.cluster import jax_ports
from dflop_jax.cluster.devices import devices_each, limit_devices, on_cpu
from dflop_jax.cluster.environment import prepare
from dflop_jax.cluster.jax_ports import ClosedPorts
from dflop_jax.cluster.processes import Processes, find_processes
from dflop_jax.cluster.relay import Relay, serve
from dflop_jax.cluster.rendezvous import Meeting, meet
from dflop_jax.cluster.secret import find_secret
from dflop_jax.config import DistributedConfig

# jax's own watch ends a process from C++; whoever watches the peers has to come before it.
HEARTBEATS_PER_PEER_TIMEOUT = 4
LEAST_HEARTBEAT_S = 100
LONGEST_FOLDER = 80  # characters; the name of a Unix socket has at most 103 everywhere
CONNECT_PAIRS_S = 120.0

log = logging.getLogger("dflop_jax")


@dataclass(frozen=True)
class Membership:
    """This process's place in its run.

    Attributes:
      number: processes of the run.
      index: which one this is.
      links: open sockets by process: to every other one on process 0, to process 0 elsewhere; none
        for one process. End of file on one: that process is gone.
    """

    number: int = 1
    index: int = 0
    links: Mapping[int, socket.socket] = field(default_factory=dict, repr=False, compare=False)


@dataclass
class _Joined:
    """What this process is in, for the rest of its life: jax connects it only once."""

    processes: Processes
    devices_each: int
    member: Membership
    relay: Relay | None  # none on process 0
    closed_ports: ClosedPorts | None = None  # once jax has started


_joined: _Joined | None = None


def initialise(config: DistributedConfig, plan_devices: int = 0) -> Membership:
    """Join the run that flags, `dflop launch` or the cluster describe; nothing for one process.

    Called again in the same process it returns the same membership.

    Args:
      plan_devices: devices of the whole run (`plan.devices`), shared evenly; 0: all there are.

    Raises:
      ValueError: the description is incomplete or wrong, not all processes came within
        `connect_timeout_s`, the run has no secret or not all have the same, devices cannot be
        shared, or jax has started already.
    """
    global _joined
    prepare()
    found = find_processes(config)
    each = devices_each(found, plan_devices)
    if found.number == 1:
        if found.devices_each and not xla_bridge.backends_are_initialized():
            limit_devices(found, each)
        return Membership()
    if _joined is not None:
        if (_joined.processes, _joined.devices_each) != (found, each):
            raise ValueError("this program has joined a run of other processes or devices already")
        return _joined.member
    if jax.distributed.is_initialized() or xla_bridge.backends_are_initialized():
        raise ValueError(
            "jax is in use already, so it cannot connect to other processes any more; call nothing "
            "of jax before (neither jax.devices() nor jax.distributed.initialize())"
        )
    at = found.coordinator
    assert at is not None
    limit_devices(found, each)
    versions = f"jax {jax.__version__}"
    secret = find_secret(config)
    meeting = meet(at, found.index, found.number, versions, secret, config.connect_timeout_s)
    relay = _connect(found, meeting, config)
    member = Membership(found.number, found.index, meeting.links)
    _joined = _Joined(found, each, member, relay)
    return member


def run_devices(plan_devices: int, member: Membership) -> list[jax.Device]:
    """All devices of a run of several processes, process by process.

    Raises:
      ValueError: they are not as many as the plan's, or some processes have more than others.
    """
    others = jax_ports.listening_ids()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if _joined is not None and _joined.closed_ports is None:
        _joined.closed_ports = _close_ports(devices, others)
    counts = Counter(d.process_index for d in devices)
    if plan_devices not in (0, len(devices)):
        raise ValueError(
            f"plan.devices={plan_devices}, but the {member.number} processes have {len(devices)} "
            f"{devices[0].platform} devices; give --plan.devices {len(devices)}, or 0"
        )
    if len(counts) != member.number or len(set(counts.values())) > 1:
        each = ", ".join(f"{counts[i]} on {i}" for i in range(member.number))
        raise ValueError(f"processes have different numbers of devices ({each}); give all the same")
    return devices


def _close_ports(devices: list[jax.Device], others: set[int]) -> ClosedPorts:
    """Let nobody else connect to the ports that jax opens with its first transfers."""
    if on_cpu():
        jax_ports.connect_pairs(devices, CONNECT_PAIRS_S)
    return ClosedPorts(list(jax_ports.listening(others).values()))


def shutdown(timeout_s: float = 10.0) -> bool:
    """Leave the run with the others, and say whether all came to it in time.

    After False (a peer is gone or busy) end with `leave`: what is in flight may never come to an
    end. Does nothing for one process.
    """
    if _joined is None or not jax.distributed.is_initialized():
        return True
    left = threading.Event()

    def together() -> None:
        client = jax_distributed.global_state.client
        assert client is not None
        try:
            client.wait_at_barrier("dflop_jax/leave", int(1000 * timeout_s))
            jax.distributed.shutdown()  # waits for all, which are here
        except jax.errors.JaxRuntimeError:  # somebody did not come
            return
        left.set()

    # In a thread, since a request to a process 0 that is gone returns only after minutes.
    waiting = threading.Thread(target=together, daemon=True)
    waiting.start()
    waiting.join(timeout_s + 1.0)
    if left.is_set():
        if _joined.relay is not None:
            _joined.relay.close()
        for link in _joined.member.links.values():
            link.close()
    if _joined.closed_ports is not None and (dropped := _joined.closed_ports.dropped()):
        log.warning("strangers tried to connect to jax's ports; %d packets were dropped", dropped)
    return left.is_set()


def _leak_jax() -> None:
    """At exit, let this process go at once: jax would wait for peers that may be busy or gone.

    Its distributed client waits for all to leave, its device clients for their open transfers.
    """
    state = jax_distributed.global_state
    for part in (state.client, state.service, *xla_bridge._backends.values()):
        if part is not None:  # one reference too many: what waits is the destructor
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = state.service = None
    xla_bridge._default_backend = None  # jax's own exit handler checks that the clients are gone


def leave(code: int) -> NoReturn:
    """End this process now, with its output written but nothing else awaited."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- what jax is told ----


def _connect(processes: Processes, meeting: Meeting, config: DistributedConfig) -> Relay | None:
    """Have jax join the run; the relay that carries its requests, which process 0 has no need of.

    jax meets on sockets in a folder of this process's own, which is gone afterwards: nobody else
    can ever connect to them.
    """
    own_host = meeting.own_host
    jax_ports.allow_many_descriptors()
    if on_cpu():  # GPUs move arrays between processes themselves
        jax_ports.bind_transfers(own_host)
    else:
        jax_ports.bind_nccl(own_host)
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # no proxy is asked for a Unix socket
    _keep_stdout_clean()
    atexit.register(_leak_jax)  # runs before jax's own handler, which came first
    heartbeat_s = max(LEAST_HEARTBEAT_S, HEARTBEATS_PER_PEER_TIMEOUT * config.peer_timeout_s)
    relay = None
    with _private_folder() as folder:
        service = folder / "jax"
        if processes.index == 0:
            for channel in meeting.channels.values():
                serve(service, channel)
        else:
            relay = Relay(service, meeting.channels[0])
            relay.wait(config.connect_timeout_s)
        jax.distributed.initialize(
            f"unix:{service}",
            processes.number,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(max(30.0, config.connect_timeout_s)),
            heartbeat_timeout_seconds=math.ceil(heartbeat_s),
            coordinator_bind_address=f"unix:{service}",
        )
    if on_cpu():
        with _patient_gloo():
            jax_ports.bind_gloo(own_host)
    return relay


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that only this user can enter, for as long as this lasts."""
    usual = tempfile.gettempdir()
    where = usual if len(usual) <= LONGEST_FOLDER else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="dflop-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _patient_gloo() -> Iterator[None]:
    """Make gloo's thread, which starts meanwhile, give way to the others of this process.

    While bytes arrive that nobody has asked for yet, it polls without pause; on a busy core whoever
    would ask waits for the end of its time slice. That costs 4 ms a collective (measured on pinned
    cores, Linux 6.18), as a batch thread it costs 0.2 ms.
    """
    tasks = Path("/proc/self/task")
    before = {t.name for t in tasks.glob("*")}
    yield
    started = [int(t.name) for t in tasks.glob("*") if t.name not in before]
    if started and hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # not allowed here
            os.sched_setscheduler(min(started), os.SCHED_BATCH, os.sched_param(0))


def _keep_stdout_clean() -> None:
    """Send what C++ prints (gloo greets every peer) to standard error, for the sake of `--json`."""
    out = sys.stdout
    if out is not sys.__stdout__ or not isinstance(out, io.TextIOWrapper):
        return  # somebody captures it
    out.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(own, "w", closefd=False)),
        encoding=out.encoding,
        errors=out.errors,
        line_buffering=out.line_buffering,
        write_through=out.write_through,
    )
