"""Join several processes to one run: find the others and let jax connect them.

Call `initialize` before anything that asks jax for devices; one process needs no connection. A
script may also have called `jax.distributed.initialize` itself.

If jax does not reach process 0, or waits for a process that does not start, it aborts the process
from C++ with a stack trace. So each process first checks that process 0 answers, and gives up with
one line before jax does.
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
    devices_per_process,
    is_jax_initialized,
    limit_devices,
    set_xla_environment,
    uses_cpu,
)
from dflop_jax.distributed.messages import (
    JAX_TIMEOUT_FACTOR,
    MESSAGE_TIMEOUT_S,
    ProcessGroup,
    State,
    connection,
)
from dflop_jax.distributed.process_exit import TransientError
from dflop_jax.distributed.processes import (
    LOOPBACK,
    Address,
    Processes,
    find_processes,
    free_port,
    ip_of_socket,
    is_loopback,
)
from dflop_jax.folders import is_standard_stream, lossy_stream, tolerate_lost_log_lines

SHUTDOWN_TIMEOUT_S = 10.0  # longest wait for the others at the end
# jax's own wait is longer: after it, jax ends processes that still work from C++.
JAX_SHUTDOWN_TIMEOUT_S = 30
CONNECT_RETRY_S = 0.2  # between two attempts to reach process 0
# Process 0 waits for the others longer than they do: jax aborts them when process 0 goes first.
COORDINATOR_EXTRA_S = 5.0
NO_PROXY = "no_grpc_proxy"
JAX_ABORT_DELAY_S = 60  # jax gives up, with a stack trace, so long after this process does
CONNECTED_BY_SCRIPT = (
    "jax.distributed.initialize"  # the source of processes that a script has connected
)


# The run that this process has joined, with the devices of each process; jax connects only once.
_joined: tuple[Processes, int, ProcessGroup] | None = None


def initialize(config: DistributedConfig, plan_devices: int = 0) -> ProcessGroup:
    """Join the run that flags, `dflop launch` or the cluster describe, or that a script has joined
    by `jax.distributed.initialize`; nothing for one process.

    Called again in the same process it returns the same group.

    Args:
      plan_devices: devices of the whole run (`plan.devices`), shared evenly; 0: all there are.

    Raises:
      ValueError: the description is incomplete or wrong, or differs between processes, devices
        cannot be shared, or jax has started already.
      TransientError: not all processes came within `connect_timeout_s`, or the port is in use.
    """
    global _joined
    set_xla_environment()
    state = connection()
    is_script_connected = (
        state is not None if _joined is None else _joined[0].source == CONNECTED_BY_SCRIPT
    )
    group = _make_group(state, config) if state and _joined is None else None
    try:
        processes = (
            _script_processes(state, config)
            if state and is_script_connected
            else find_processes(config)
        )
        n_devices = devices_per_process(processes, plan_devices)
        if processes.n_processes == 1:
            if n_devices and not (is_script_connected or is_jax_initialized()):
                limit_devices(processes, n_devices)
            return ProcessGroup()
        if _joined is not None:
            if _joined[:2] != (processes, n_devices):
                raise ValueError(
                    "this program has joined a run of other processes or devices already: start "
                    "another one"
                )
            return _joined[2]
        # CPUs exchange arrays over addresses that jax is told before it starts.
        if is_jax_initialized() and not (is_script_connected and not uses_cpu()):
            raise ValueError(
                "jax is in use already, so it cannot connect to other processes any more; call "
                "nothing of jax before, such as jax.devices()"
            )
        process_exit.has_joined_run.set()
        faulthandler.enable()  # jax ends a process that has lost another by SIGABRT
        tolerate_lost_log_lines()
        if group is None:
            limit_devices(processes, n_devices)
            _redirect_native_stdout()
            group = _make_group(_connect_jax(processes, config), config)
            process_exit.limit_exit_time(JAX_SHUTDOWN_TIMEOUT_S + SHUTDOWN_TIMEOUT_S)
        elif uses_cpu() and n_devices and not is_jax_initialized():
            jax.config.update("jax_num_cpu_devices", n_devices)
        _exchange_addresses(group, processes, config.connect_timeout_s)
    except ValueError as e:
        if group:
            group.fail(f"process {group.process_index} stopped: {e}", process_exit.BAD_INPUT)
        raise
    group.message_timeout_s = MESSAGE_TIMEOUT_S
    _joined = processes, n_devices, group
    return group


def _make_group(state: State, config: DistributedConfig) -> ProcessGroup:
    group = ProcessGroup(
        state.process_id,
        state.num_processes,
        state.client,
        peer_timeout_s=config.peer_timeout_s,
        message_timeout_s=config.connect_timeout_s,
    )
    describe = process_exit.describe_exit
    process_exit.exit_callbacks.append(
        lambda code: group.fail(describe(group.process_index, code), code)
    )
    return group


def run_devices(n_processes: int, n_requested: int) -> list[jax.Device]:
    """Return all devices of a run of several processes, process by process.

    Raises:
      ValueError: they are not as many as planned (0: all), or some processes have more than others.
    """
    with _batch_priority_for_gloo():
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    counts = Counter(d.process_index for d in devices)
    if n_requested not in (0, len(devices)):
        raise ValueError(
            f"plan.devices={n_requested}, but the {n_processes} processes have {len(devices)} "
            f"{devices[0].platform} devices; give --plan.devices {len(devices)}, or 0"
        )
    if len(counts) != n_processes or len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{counts[i]} on {i}" for i in range(n_processes))
        raise ValueError(
            f"processes have different numbers of devices ({counts_text}); give all the same"
        )
    return devices


def shutdown(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
    """Leave the run together with the others, and return whether all did so in time.

    After False (a peer is gone or busy) end with `process_exit.exit_process`: what is in flight may
    never come to an end. Does nothing for one process.
    """
    is_script_connected = _joined is None or _joined[0].source == CONNECTED_BY_SCRIPT
    if is_script_connected or not jax.distributed.is_initialized():
        return True
    with suppress(jax.errors.JaxRuntimeError):  # somebody did not come
        if process_exit.run_with_timeout(timeout_s, jax.distributed.shutdown):  # waits for all
            process_exit.has_joined_run.clear()
            return True
    return False


# ---- a script that has connected jax ----


def _script_processes(state: State, config: DistributedConfig) -> Processes:
    """Return the processes that a script has connected by `jax.distributed.initialize`.

    Raises:
      ValueError: flags contradict them.
    """
    for name, actual, unset in (("num_processes", state.num_processes, 0),
                             ("process_id", state.process_id, -1)):  # fmt: skip
        if (requested := getattr(config, name)) not in (unset, actual):
            raise ValueError(
                f"distributed.{name}={requested}, but this program has called "
                f"{CONNECTED_BY_SCRIPT}() as "
                f"process {state.process_id} of {state.num_processes}; leave the flag out"
            )
    address = Address.parse(state.coordinator_address or "")
    return Processes(state.num_processes, state.process_id, address, CONNECTED_BY_SCRIPT)


# ---- what jax is told ----


def _connect_jax(processes: Processes, config: DistributedConfig) -> State:
    """Have jax join the run.

    Raises:
      TransientError: process 0 is not there, not all came in time, or the port is in use.
    """
    service, timeout_s = processes.coordinator, config.connect_timeout_s
    assert service is not None
    interface = service.interface()
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    # gRPC would ask the proxy of `http_proxy` for process 0.
    no_proxy_hosts = os.environ.get(NO_PROXY) or os.environ.get("no_proxy", "")
    os.environ[NO_PROXY] = ",".join(filter(None, (no_proxy_hosts, service.host)))
    if processes.index:
        _connect_to_coordinator(service, processes, timeout_s).close()
    else:
        _check_port(service, interface)
    try:
        is_connected = process_exit.run_with_timeout(
            timeout_s + (COORDINATOR_EXTRA_S if processes.index == 0 else 0.0),
            jax.distributed.initialize,
            str(service),
            processes.n_processes,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(timeout_s + COORDINATOR_EXTRA_S + JAX_ABORT_DELAY_S),
            heartbeat_timeout_seconds=math.ceil(JAX_TIMEOUT_FACTOR * config.peer_timeout_s),
            shutdown_timeout_seconds=JAX_SHUTDOWN_TIMEOUT_S,
            coordinator_bind_address=str(Address(interface or "::", service.port)),
        )
    except jax.errors.JaxRuntimeError as e:
        reason = str(e).partition("\n")[0]
        raise TransientError(f"jax does not connect at {service} ({reason}): start again") from None
    if not (state := connection() if is_connected else None):
        raise TransientError(
            f"after {timeout_s:g} s, not all of the {processes.n_processes} processes had come to "
            f"{service}; see their logs, start all with the same number, or raise "
            "--distributed.connect_timeout_s"
        )
    return state


def _check_port(service: Address, interface: str) -> None:
    """Check that process 0 can listen at its address; jax 0.10 crashes if it cannot.

    Raises:
      TransientError: the port is in use.
      ValueError: it cannot for another reason.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    try:
        socket.create_server((interface, service.port), family=family).close()
    except OSError as e:
        reason = f"process 0 cannot listen at {service}: {os.strerror(e.errno or 0)}"
        if e.errno == errno.EADDRINUSE:
            raise TransientError(f"{reason}; end what holds the port, or name another") from None
        raise ValueError(
            f"{reason}; name a port that this user may use, at an address of this host"
        ) from None


def _connect_to_coordinator(
    service: Address, processes: Processes, timeout_s: float
) -> socket.socket:
    """Return a connection to process 0, which may not listen yet."""
    deadline, reason = time.monotonic() + timeout_s, "no answer"
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            connection_socket = socket.create_connection(
                (service.host, service.port), timeout=remaining_s
            )
            # Without a listener, a connection to a port of one's own host may reach itself.
            if connection_socket.getsockname() != connection_socket.getpeername():
                return connection_socket
            connection_socket.close()
        except OSError as e:  # process 0, or its name, may not be there yet
            reason = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        time.sleep(min(CONNECT_RETRY_S, remaining_s))
    raise TransientError(
        f"process {processes.index} did not reach process 0 at {service} within {timeout_s:g} s "
        f"({reason}); is it the address of process 0's host, and does process 0 run? check"
    )


class _Introduction(msgspec.Struct, frozen=True):
    """What a process sends to the others: the run that it takes part in, the IP of its host as
    process 0's host sees it, and the IP of process 0's host as it sees it; "" on the same host."""

    run: str
    host: str = ""
    coordinator_host: str = ""


def _exchange_addresses(group: ProcessGroup, processes: Processes, timeout_s: float) -> None:
    """Check that all processes were started alike, and set where this one receives arrays.

    Raises:
      ValueError: they were not.
      TransientError: see `_connect_to_coordinator`.
    """
    own = _Introduction(f"{processes.n_processes} processes of jax {jax.__version__}")
    if processes.index:
        assert processes.coordinator is not None
        with _connect_to_coordinator(
            processes.coordinator, processes, timeout_s
        ) as connection_socket:
            own_ip, coordinator_ip = (
                ip_of_socket(connection_socket.getsockname()),
                ip_of_socket(connection_socket.getpeername()),
            )
            if own_ip != coordinator_ip and not is_loopback(coordinator_ip):
                own = msgspec.structs.replace(own, host=own_ip, coordinator_host=coordinator_ip)
    introductions = group.all_gather("hello", own, _Introduction)
    for p, introduction in enumerate(introductions):
        if introduction.run != introductions[0].run:
            raise ValueError(
                f"process {p} is one of {introduction.run}, process 0 of {introductions[0].run}; "
                "start all alike"
            )
    own_host = own.host or next(
        (h.coordinator_host for h in introductions if h.coordinator_host), LOOPBACK
    )
    if not uses_cpu():  # GPUs move arrays between processes themselves
        if own_host == LOOPBACK:  # where nobody else reaches them
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif not is_jax_initialized():
        transfer_address = Address(own_host, free_port())
        jax.config.update("jax_cross_host_transfer_socket_address", str(transfer_address))
        any_port = f"{str(transfer_address).rpartition(':')[0]}:0"
        jax.config.update("jax_cross_host_transport_addresses", any_port)


@contextmanager
def _batch_priority_for_gloo() -> Iterator[None]:
    """Give gloo's thread, which starts in this context, the priority of a batch job.

    The thread polls without pause while bytes arrive that no thread has requested yet. On a busy
    core, the requesting thread then waits for the end of the time slice. This costs 4 ms per
    collective, and 0.2 ms as a batch thread (measured on pinned cores, Linux 6.18).
    """
    tasks = Path("/proc/self/task")
    former_threads = {t.name for t in tasks.glob("*")}
    yield
    new_threads = [int(t.name) for t in tasks.glob("*") if t.name not in former_threads]
    if new_threads and hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # not allowed here
            os.sched_setscheduler(min(new_threads), os.SCHED_BATCH, os.sched_param(0))


def _redirect_native_stdout() -> None:
    """Redirect what C++ prints to standard error (gloo greets every peer), so that the standard
    output of `--json` stays valid."""
    stdout = sys.stdout
    if not is_standard_stream(stdout, 1):
        return
    sys.stdout = lossy_stream(stdout, os.dup(1))
    os.dup2(2, 1)
