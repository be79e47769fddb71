"""Make one run of several processes: find the others, meet them, and let jax connect.

`initialise` comes before anything that asks jax for devices. Alone, a process needs none of it.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import jax

from dflop_jax.cluster import ending
from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.devices import devices_each, jax_has_started, limit_devices, on_cpu
from dflop_jax.cluster.environment import network_settings, prepare
from dflop_jax.cluster.hold import connect, hold_open
from dflop_jax.cluster.processes import Processes, find_processes
from dflop_jax.cluster.rendezvous import Meeting, meet
from dflop_jax.cluster.secret import find_secret
from dflop_jax.config import DistributedConfig
from dflop_jax.full_disk import dropping, is_standard, need_no_log

# jax's own watch ends a process from C++; whoever watches the peers has to come before it.
HEARTBEATS_PER_PEER_TIMEOUT = 4  # time-outs of ours in one of jax's
LEAST_HEARTBEAT_S = 100  # jax's own default
LEAVE_S = 10.0  # longest wait for the others at the end
# jax's own wait for them is longer: when it is over, it ends those from C++ that still work.
SHUTDOWN_S = 30
LONGEST_FOLDER = 80  # characters; the name of a Unix socket has at most 103 everywhere


@dataclass(frozen=True)
class Membership:
    """This process's place in its run.

    Attributes:
      number: processes of the run.
      index: which one this is.
      links: open sockets by process, to this one's parent and children (`tree`); none for one
        process. End of file on one: that process is gone.
      planned: devices of the run as configured; 0: all.
    """

    number: int = 1
    index: int = 0
    planned: int = 0
    links: Mapping[int, socket.socket] = field(default_factory=dict, repr=False, compare=False)


@dataclass
class _Joined:
    """What this process is in, for the rest of its life: jax connects it only once."""

    processes: Processes
    devices_each: int
    member: Membership
    line: Callable[[], socket.socket]  # gives the connection that carries what jax says


_joined: _Joined | None = None


def initialise(config: DistributedConfig, plan_devices: int = 0) -> Membership:
    """Join the run that flags, `dflop launch` or the cluster describe; nothing for one process.

    Called again in the same process it returns the same membership.

    Args:
      plan_devices: devices of the whole run (`plan.devices`), shared evenly; 0: all there are.

    Raises:
      ValueError: the description is incomplete or wrong, the run has no secret or not all have
        the same, devices cannot be shared, or jax has started or is connected already.
      TryAgain: not all processes came within `connect_timeout_s`, or the port is in use.
    """
    global _joined
    prepare()
    processes = find_processes(config)
    each = devices_each(processes, plan_devices)
    if _joined is None and jax.distributed.is_initialized():
        raise ValueError(
            "this program has called jax.distributed.initialize(), which dflop_jax does itself; "
            "leave the call out, and start its processes with dflop launch"
        )
    if processes.number == 1:
        if processes.devices_each and not jax_has_started():
            limit_devices(processes, each)
        return Membership(planned=plan_devices)
    if _joined is not None:
        if (_joined.processes, _joined.devices_each) != (processes, each):
            raise ValueError(
                "this program has joined a run of other processes or devices already: start "
                "another one"
            )
        return _joined.member
    if jax_has_started():
        raise ValueError(
            "jax is in use already, so it cannot connect to other processes any more; call nothing "
            "of jax before, such as jax.devices()"
        )
    coordinator = processes.coordinator
    assert coordinator is not None
    limit_devices(processes, each)
    versions = f"jax {jax.__version__}"
    secret = find_secret(config)
    meeting = meet(
        coordinator, processes.index, processes.number, versions, secret, config.connect_timeout_s
    )
    line = _connect(processes, meeting, config)
    member = Membership(processes.number, processes.index, plan_devices, meeting.links)
    _joined = _Joined(processes, each, member, line)
    ending.in_run.set()
    ending.ends_in_time(SHUTDOWN_S + LEAVE_S)
    return member


def run_devices(member: Membership) -> list[jax.Device]:
    """All devices of a run of several processes, process by process.

    Raises:
      ValueError: they are not as many as the plan's, or some processes have more than others.
    """
    with _patient_gloo():
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    counts = Counter(d.process_index for d in devices)
    if member.planned not in (0, len(devices)):
        raise ValueError(
            f"plan.devices={member.planned}, but the {member.number} processes have {len(devices)} "
            f"{devices[0].platform} devices; give --plan.devices {len(devices)}, or 0"
        )
    if len(counts) != member.number or len(set(counts.values())) > 1:
        each = ", ".join(f"{counts[i]} on {i}" for i in range(member.number))
        raise ValueError(f"processes have different numbers of devices ({each}); give all the same")
    return devices


def shutdown(timeout_s: float = LEAVE_S) -> bool:
    """Leave the run with the others, and say whether all came to it in time.

    After False (a peer is gone or busy) end with `ending.leave`: what is in flight may never come
    to an end. Does nothing for one process.
    """
    joined = _joined
    if joined is None or not jax.distributed.is_initialized():
        return True
    left = threading.Event()

    def together() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # somebody did not come
            jax.distributed.shutdown()  # waits for all
            # Process 0 waits until the others hang up, and a program that ends copies no more.
            with suppress(OSError):  # they have
                joined.line().shutdown(socket.SHUT_RDWR)
            left.set()

    # In a thread, since a request to a process 0 that is gone returns only after minutes.
    waiting = threading.Thread(target=together, daemon=True)
    waiting.start()
    waiting.join(timeout_s)
    if left.is_set():
        for link in joined.member.links.values():
            link.close()
        ending.in_run.clear()
    return left.is_set()


# ---- what jax is told ----


def _connect(
    processes: Processes, meeting: Meeting, config: DistributedConfig
) -> Callable[[], socket.socket]:
    """Have jax join the run; its coordination service takes over the port of the meeting.

    Returns what gives the connection to that service.
    """
    service, own_host = processes.coordinator, meeting.own_host
    assert service is not None
    interface = service.interface()
    if on_cpu():  # GPUs move arrays between processes themselves
        transfers = Address(own_host, free_port())
        jax.config.update("jax_cross_host_transfer_socket_address", str(transfers))
        any_port = f"{str(transfers).rpartition(':')[0]}:0"
        jax.config.update("jax_cross_host_transport_addresses", any_port)
    else:
        os.environ.update(network_settings(os.environ, one_host=own_host == LOOPBACK))
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # no proxy is asked for a Unix socket
    need_no_log()
    _keep_stdout_clean()
    here = Address(interface or LOOPBACK, service.port)
    reach = cache(partial(connect, service if processes.index else here))
    if processes.index:
        reach()  # before jax tries, which ends the process from C++ when it does not get there
    heartbeat_s = max(LEAST_HEARTBEAT_S, HEARTBEATS_PER_PEER_TIMEOUT * config.peer_timeout_s)
    usual = tempfile.gettempdir()
    where = usual if len(usual) <= LONGEST_FOLDER else "/tmp"
    with tempfile.TemporaryDirectory(prefix="dflop-", dir=where) as folder:
        hold_open(Path(folder, "jax"), reach)
        jax.distributed.initialize(
            f"unix:{folder}/jax",
            processes.number,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(max(30.0, config.connect_timeout_s)),
            heartbeat_timeout_seconds=math.ceil(heartbeat_s),
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=str(Address(interface or "::", service.port)),
        )
    return reach


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
    if not is_standard(out, 1):
        return
    sys.stdout = dropping(out, os.dup(1))
    os.dup2(2, 1)
