"""Make one run of several processes: find the others and let jax connect them.

`initialise` comes before anything that asks jax for devices. Alone, a process needs none of it. A
script that has called `jax.distributed.initialize` itself is taken as it is.

Where jax does not reach process 0, or waits for a process that does not come, it aborts the process
from C++ with a stack trace. So each process looks first whether process 0 is there, and gives up
with one line before jax does.
"""

from __future__ import annotations

import errno
import faulthandler
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import msgspec

from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import process_exit
from dflop_jax.distributed.devices import (
    devices_each,
    jax_has_started,
    limit_devices,
    on_cpu,
    prepare,
)
from dflop_jax.distributed.messages import HEARTBEATS, WAIT_S, ProcessGroup, State, connection
from dflop_jax.distributed.process_exit import TryAgain
from dflop_jax.distributed.processes import (
    LOOPBACK,
    Address,
    Processes,
    find_processes,
    free_port,
    host_of,
    is_loopback,
)
from dflop_jax.folders import dropping, is_standard, need_no_log

LEAVE_S = 10.0  # longest wait for the others at the end
# jax's own wait for them is longer: when it is over, it ends those from C++ that still work.
SHUTDOWN_S = 30
RETRY_S = 0.2  # between two attempts to reach process 0
# Process 0 waits for the others longer than they do: jax aborts them when process 0 goes first.
MORE_S = 5.0
NO_PROXY = "no_grpc_proxy"
ABORT_S = 60  # jax gives up, with a stack trace, so long after this process does
ADOPTED = "jax.distributed.initialize"  # the source of processes that a script has connected


# What this process is in, for the rest of its life: jax connects it only once. With the devices of
# each process.
_joined: tuple[Processes, int, ProcessGroup] | None = None


def initialise(config: DistributedConfig, plan_devices: int = 0) -> ProcessGroup:
    """Join the run that flags, `dflop launch` or the cluster describe, or that a script has joined
    by `jax.distributed.initialize`; nothing for one process.

    Called again in the same process it returns the same group.

    Args:
      plan_devices: devices of the whole run (`plan.devices`), shared evenly; 0: all there are.

    Raises:
      ValueError: the description is incomplete or wrong, or differs between processes, devices
        cannot be shared, or jax has started already.
      TryAgain: not all processes came within `connect_timeout_s`, or the port is in use.
    """
    global _joined
    prepare()
    made = connection()
    adopted = made is not None if _joined is None else _joined[0].source == ADOPTED
    group = _group(made, config) if made and _joined is None else None
    try:
        processes = _adopt(made, config) if made and adopted else find_processes(config)
        each = devices_each(processes, plan_devices)
        if processes.number == 1:
            if each and not (adopted or jax_has_started()):
                limit_devices(processes, each)
            return ProcessGroup()
        if _joined is not None:
            if _joined[:2] != (processes, each):
                raise ValueError(
                    "this program has joined a run of other processes or devices already: start "
                    "another one"
                )
            return _joined[2]
        # CPUs exchange arrays over addresses that jax is told before it starts.
        if jax_has_started() and not (adopted and not on_cpu()):
            raise ValueError(
                "jax is in use already, so it cannot connect to other processes any more; call "
                "nothing of jax before, such as jax.devices()"
            )
        process_exit.in_run.set()
        faulthandler.enable()  # jax ends a process that has lost another by SIGABRT
        need_no_log()
        if group is None:
            limit_devices(processes, each)
            _keep_stdout_clean()
            group = _group(_connect(processes, config), config)
            process_exit.ends_in_time(SHUTDOWN_S + LEAVE_S)
        elif on_cpu() and each and not jax_has_started():
            jax.config.update("jax_num_cpu_devices", each)
        _introduce(group, processes, config.connect_timeout_s)
    except ValueError as e:
        if group:
            group.fail(f"process {group.process} stopped: {e}", process_exit.BAD_INPUT)
        raise
    group.wait_s = WAIT_S
    _joined = processes, each, group
    return group


def _group(made: State, config: DistributedConfig) -> ProcessGroup:
    group = ProcessGroup(
        made.process_id,
        made.num_processes,
        made.client,
        timeout_s=config.peer_timeout_s,
        wait_s=config.connect_timeout_s,
    )
    how = process_exit.how_ended
    process_exit.leaving.append(lambda code: group.fail(how(group.process, code), code))
    return group


def run_devices(n_processes: int, planned: int) -> list[jax.Device]:
    """All devices of a run of several processes, process by process.

    Raises:
      ValueError: they are not as many as planned (0: all), or some processes have more than others.
    """
    with _patient_gloo():
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    counts = Counter(d.process_index for d in devices)
    if planned not in (0, len(devices)):
        raise ValueError(
            f"plan.devices={planned}, but the {n_processes} processes have {len(devices)} "
            f"{devices[0].platform} devices; give --plan.devices {len(devices)}, or 0"
        )
    if len(counts) != n_processes or len(set(counts.values())) > 1:
        each = ", ".join(f"{counts[i]} on {i}" for i in range(n_processes))
        raise ValueError(f"processes have different numbers of devices ({each}); give all the same")
    return devices


def shutdown(timeout_s: float = LEAVE_S) -> bool:
    """Leave the run with the others, and say whether all came to it in time.

    After False (a peer is gone or busy) end with `ending.leave`: what is in flight may never come
    to an end. Does nothing for one process.
    """
    adopted = _joined is None or _joined[0].source == ADOPTED
    if adopted or not jax.distributed.is_initialized():
        return True
    with suppress(jax.errors.JaxRuntimeError):  # somebody did not come
        if process_exit.within(timeout_s, jax.distributed.shutdown):  # waits for all
            process_exit.in_run.clear()
            return True
    return False


# ---- a script that has connected jax ----


def _adopt(made: State, config: DistributedConfig) -> Processes:
    """The processes that a script has connected by `jax.distributed.initialize`.

    Raises:
      ValueError: flags say otherwise.
    """
    for name, own, unset in (("num_processes", made.num_processes, 0),
                             ("process_id", made.process_id, -1)):  # fmt: skip
        if (requested := getattr(config, name)) not in (unset, own):
            raise ValueError(
                f"distributed.{name}={requested}, but this program has called {ADOPTED}() as "
                f"process {made.process_id} of {made.num_processes}; leave the flag out"
            )
    address = Address.parse(made.coordinator_address or "")
    return Processes(made.num_processes, made.process_id, address, ADOPTED)


# ---- what jax is told ----


def _connect(processes: Processes, config: DistributedConfig) -> State:
    """Have jax join the run.

    Raises:
      TryAgain: process 0 is not there, not all came in time, or the port is in use.
    """
    service, wait_s = processes.coordinator, config.connect_timeout_s
    assert service is not None
    interface = service.interface()
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    # gRPC would ask the proxy of `http_proxy` for process 0.
    direct = os.environ.get(NO_PROXY) or os.environ.get("no_proxy", "")
    os.environ[NO_PROXY] = ",".join(filter(None, (direct, service.host)))
    if processes.index:
        _reach(service, processes, wait_s).close()
    else:
        _check_port(service, interface)
    try:
        is_connected = process_exit.within(
            wait_s + (MORE_S if processes.index == 0 else 0.0),
            jax.distributed.initialize,
            str(service),
            processes.number,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(wait_s + MORE_S + ABORT_S),
            heartbeat_timeout_seconds=math.ceil(HEARTBEATS * config.peer_timeout_s),
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=str(Address(interface or "::", service.port)),
        )
    except jax.errors.JaxRuntimeError as e:
        why = str(e).partition("\n")[0]
        raise TryAgain(f"jax does not connect at {service} ({why}): start again") from None
    if not (made := connection() if is_connected else None):
        raise TryAgain(
            f"after {wait_s:g} s, not all of the {processes.number} processes had come to "
            f"{service}; see their logs, start all with the same number, or raise "
            "--distributed.connect_timeout_s"
        )
    return made


def _check_port(service: Address, interface: str) -> None:
    """Look whether process 0 can listen; jax 0.10 crashes where it cannot.

    Raises:
      TryAgain: the port is in use.
      ValueError: it cannot for another reason.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    try:
        socket.create_server((interface, service.port), family=family).close()
    except OSError as e:
        why = f"process 0 cannot listen at {service}: {os.strerror(e.errno or 0)}"
        if e.errno == errno.EADDRINUSE:
            raise TryAgain(f"{why}; end what holds the port, or name another") from None
        raise ValueError(
            f"{why}; name a port that this user may use, at an address of this host"
        ) from None


def _reach(service: Address, processes: Processes, wait_s: float) -> socket.socket:
    """A connection to where process 0 listens, or is about to."""
    deadline, why = time.monotonic() + wait_s, "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            link = socket.create_connection((service.host, service.port), timeout=left_s)
            # Without a listener, a connection to a port of one's own host may reach itself.
            if link.getsockname() != link.getpeername():
                return link
            link.close()
        except OSError as e:  # process 0, or its name, may not be there yet
            why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        time.sleep(min(RETRY_S, left_s))
    raise TryAgain(
        f"process {processes.index} did not reach process 0 at {service} within {wait_s:g} s "
        f"({why}); is it the address of process 0's host, and does process 0 run? check"
    )


class _Hello(msgspec.Struct, frozen=True):
    """What process 0 is told of a process: what it takes part in, the address of its host as
    process 0's host knows it, and process 0's as it knows that; "": the same host."""

    run: str
    host: str = ""
    hub: str = ""


def _introduce(group: ProcessGroup, processes: Processes, wait_s: float) -> None:
    """Check that all processes were started alike, and say where each receives arrays.

    Raises:
      ValueError: they were not.
      TryAgain: see `_reach`.
    """
    mine = _Hello(f"{processes.number} processes of jax {jax.__version__}")
    if processes.index:
        assert processes.coordinator is not None
        with _reach(processes.coordinator, processes, wait_s) as link:
            here, there = host_of(link.getsockname()), host_of(link.getpeername())
            if here != there and not is_loopback(there):
                mine = msgspec.structs.replace(mine, host=here, hub=there)
    hellos = group.all_gather("hello", mine, _Hello)
    for p, hello in enumerate(hellos):
        if hello.run != hellos[0].run:
            raise ValueError(
                f"process {p} is one of {hello.run}, process 0 of {hellos[0].run}; start all alike"
            )
    own_host = mine.host or next((h.hub for h in hellos if h.hub), LOOPBACK)
    if not on_cpu():  # GPUs move arrays between processes themselves
        if own_host == LOOPBACK:  # where nobody else reaches them
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif not jax_has_started():
        transfers = Address(own_host, free_port())
        jax.config.update("jax_cross_host_transfer_socket_address", str(transfers))
        any_port = f"{str(transfers).rpartition(':')[0]}:0"
        jax.config.update("jax_cross_host_transport_addresses", any_port)


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
