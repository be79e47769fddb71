"""Join the processes of a run: find the other processes and let jax connect to them.

Call `initialize` before anything that uses jax's devices. A script may also have called
`jax.distributed.initialize` itself. If jax does not reach another process, it aborts this one from
C++ with a stack trace. So each process gives up with a one-line error before jax does.
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
from contextlib import suppress
from pathlib import Path

import jax
import msgspec

from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import devices, process_exit
from dflop_jax.distributed.devices import is_jax_initialized, uses_cpu
from dflop_jax.distributed.messages import (
    JAX_TIMEOUT_FACTOR,
    MESSAGE_TIMEOUT_S,
    ProcessGroup,
    State,
    connection,
)
from dflop_jax.distributed.process_exit import END_TIMEOUT_S, TransientError
from dflop_jax.distributed.processes import (
    LOOPBACK,
    Address,
    Processes,
    find_processes,
    free_port,
    ip_of_socket,
    is_loopback,
    parse_address,
)
from dflop_jax.folders import is_standard_stream, lossy_stream, tolerate_lost_log_lines

SHUTDOWN_TIMEOUT_S = 10.0  # longest wait for the other processes at the end
# jax's own wait is longer, since after it jax aborts processes from C++.
JAX_SHUTDOWN_TIMEOUT_S = 3 * round(SHUTDOWN_TIMEOUT_S)
CONNECT_RETRY_S = 0.2  # between two attempts to reach process 0
NO_PROXY = "no_grpc_proxy"
CONNECTED_BY_SCRIPT = "jax.distributed.initialize"  # the source of processes of such a script

# The run that this process has joined, with the devices of each process; jax connects only once.
_joined: tuple[Processes, int, ProcessGroup] | None = None


def initialize(config: DistributedConfig, plan_devices: int = 0) -> ProcessGroup:
    """Join the run that flags, `dflop launch` or the cluster describe, or that a script has joined
    by `jax.distributed.initialize`. Its processes share `plan_devices` evenly (0: all devices).
    Returns the process group; a second call in a process returns the same one.

    Raises:
      ValueError: the description is incomplete or wrong or differs between processes, devices
        cannot be shared evenly, or jax is initialized already.
      TransientError: not all processes connect within `connect_timeout_s`, or the port is in use.
    """
    global _joined
    devices.set_xla_environment()
    state = connection()
    source = None if _joined is None else _joined[0].source
    is_script_connected = source == CONNECTED_BY_SCRIPT if source else state is not None
    group = _make_group(state, config) if state and _joined is None else None
    try:
        if state and is_script_connected:
            processes = _script_processes(state, config)
        else:
            processes = find_processes(config)
        n_devices = devices.devices_per_process(processes, plan_devices)
        if processes.n_processes == 1:
            if n_devices and not (is_script_connected or is_jax_initialized()):
                devices.limit_devices(processes, n_devices)
            return ProcessGroup()
        if _joined is not None:
            if _joined[:2] != (processes, n_devices):
                raise ValueError(
                    "this program has already joined a run with other processes or devices: start "
                    "a new program"
                )
            return _joined[2]
        # jax needs the addresses for transfers between CPUs before it is initialized.
        if is_jax_initialized() and not (is_script_connected and not uses_cpu()):
            raise ValueError(
                "jax is in use already, so it cannot connect to other processes any more; do not "
                "use jax before, such as by jax.devices()"
            )
        process_exit.has_joined_run.set()
        faulthandler.enable()  # jax ends a process that has lost another by SIGABRT
        tolerate_lost_log_lines()
        if group is None:
            devices.limit_devices(processes, n_devices)
            if is_standard_stream(sys.stdout, 1):  # output of C++ code would spoil --json
                sys.stdout = lossy_stream(sys.stdout, os.dup(1))
                os.dup2(2, 1)
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
    index, timeout_s = state.process_id, config.peer_timeout_s
    group = ProcessGroup(index, state.num_processes, state.client, peer_timeout_s=timeout_s)
    group.message_timeout_s = config.connect_timeout_s
    process_exit.exit_callbacks.append(
        lambda code: group.fail(process_exit.describe_exit(index, code), code)
    )
    return group


def run_devices(n_processes: int, n_requested: int) -> list[jax.Device]:
    """Return all devices of a run of several processes, ordered by process; ValueError if their
    number is not `n_requested` (0: any), or differs between processes."""
    tasks = Path("/proc/self/task")
    former_threads = {t.name for t in tasks.glob("*")}
    all_devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    # Gloo's thread, which `jax.devices` has started, gets the priority of a batch job, since it
    # polls without pause. On a busy core the thread that needs its bytes would wait for a time
    # slice: 4 ms per collective instead of 0.2 ms (measured, Linux 6.18).
    new_threads = [int(t.name) for t in tasks.glob("*") if t.name not in former_threads]
    if new_threads and hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # not allowed here
            os.sched_setscheduler(min(new_threads), os.SCHED_BATCH, os.sched_param(0))
    counts = Counter(d.process_index for d in all_devices)
    if n_requested not in (0, len(all_devices)):
        raise ValueError(
            f"plan.devices={n_requested}, but the {n_processes} processes have {len(all_devices)} "
            f"{all_devices[0].platform} devices; give --plan.devices {len(all_devices)}, or 0"
        )
    if len(counts) != n_processes or len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{counts[i]} on {i}" for i in range(n_processes))
        raise ValueError(
            f"processes have different numbers of devices ({counts_text}); give all the same"
        )
    return all_devices


def shutdown(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
    """Leave the run together with the other processes, and return whether all did so in time. After
    False call `process_exit.exit_process`, since pending transfers may never end."""
    is_ours = _joined is not None and _joined[0].source != CONNECTED_BY_SCRIPT
    if not (is_ours and jax.distributed.is_initialized()):
        return True
    with suppress(jax.errors.JaxRuntimeError):  # a process is missing
        if process_exit.run_with_timeout(timeout_s, jax.distributed.shutdown):  # waits for all
            process_exit.has_joined_run.clear()
            return True
    return False


def _script_processes(state: State, config: DistributedConfig) -> Processes:
    """Return the processes that a script has connected; ValueError if flags contradict them."""
    facts = {"num_processes": (state.num_processes, 0), "process_id": (state.process_id, -1)}
    for name, (actual, unset) in facts.items():
        if (requested := getattr(config, name)) not in (unset, actual):
            raise ValueError(
                f"distributed.{name}={requested}, but this program has called "
                f"{CONNECTED_BY_SCRIPT}() as process {state.process_id} of {state.num_processes}; "
                "leave the flag out"
            )
    address = parse_address(CONNECTED_BY_SCRIPT, state.coordinator_address or "")
    return Processes(state.num_processes, state.process_id, address, CONNECTED_BY_SCRIPT)


def _connect_jax(processes: Processes, config: DistributedConfig) -> State:
    """Connect jax to the run's processes; raises the errors of `initialize`."""
    service, timeout_s = processes.coordinator, config.connect_timeout_s
    assert service is not None
    # If process 0 ends first, jax aborts the others, so process 0 waits longer than they do.
    wait_s = timeout_s + 2 * END_TIMEOUT_S * (processes.index == 0)
    interface = service.interface()
    # The service's handler for SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    # gRPC would ask the proxy of `http_proxy` for process 0.
    no_proxy_hosts = os.environ.get(NO_PROXY) or os.environ.get("no_proxy", "")
    os.environ[NO_PROXY] = ",".join(filter(None, (no_proxy_hosts, service.host)))
    if processes.index:
        _connect_to_coordinator(processes, timeout_s).close()
    else:
        _check_port(service, interface)
    try:
        is_connected = process_exit.run_with_timeout(
            wait_s,
            jax.distributed.initialize,
            str(service),
            processes.n_processes,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(JAX_TIMEOUT_FACTOR * wait_s),
            heartbeat_timeout_seconds=math.ceil(JAX_TIMEOUT_FACTOR * config.peer_timeout_s),
            shutdown_timeout_seconds=JAX_SHUTDOWN_TIMEOUT_S,
            coordinator_bind_address=str(Address(interface or "::", service.port)),
        )
    except jax.errors.JaxRuntimeError as e:
        reason = str(e).partition("\n")[0]
        raise TransientError(f"jax cannot connect to {service} ({reason}): start again") from None
    if not (state := connection() if is_connected else None):
        raise TransientError(
            f"after {timeout_s:g} s, not all of the {processes.n_processes} processes have "
            f"connected to {service}; see their logs, start all with the same number, or raise "
            "--distributed.connect_timeout_s"
        )
    return state


def _check_port(service: Address, interface: str) -> None:
    """Check that process 0 can listen at its address; jax 0.10 crashes if it cannot."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    try:
        socket.create_server((interface, service.port), family=family).close()
    except OSError as e:
        reason = f"process 0 cannot listen at {service}: {os.strerror(e.errno or 0)}"
        if e.errno == errno.EADDRINUSE:
            raise TransientError(f"{reason}; end its user, or give another port") from None
        raise ValueError(
            f"{reason}; give a port that this user may use, at an address of this host"
        ) from None


def _connect_to_coordinator(processes: Processes, timeout_s: float) -> socket.socket:
    """Return a connection to process 0, which may not listen yet."""
    service, deadline, reason = processes.coordinator, time.monotonic() + timeout_s, "no answer"
    assert service is not None
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            stream = socket.create_connection(service, timeout=remaining_s)
            # Without a listener, a connection to a port of this host may connect to itself.
            if stream.getsockname() != stream.getpeername():
                return stream
            stream.close()
        except OSError as e:  # process 0, or its name, may not be there yet
            reason = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        time.sleep(min(CONNECT_RETRY_S, remaining_s))
    raise TransientError(
        f"process {processes.index} did not reach process 0 at {service} within {timeout_s:g} s "
        f"({reason}); check that it is the address of process 0's host, and that process 0 runs"
    )


class _Introduction(msgspec.Struct, frozen=True):
    """The first message of a process to the others."""

    run: str  # number of processes and jax version; must be equal in all processes
    host: str = ""  # IP of the process's host as seen by process 0's host; "": the same host
    coordinator_host: str = ""  # IP of process 0's host as seen by the process


def _exchange_addresses(group: ProcessGroup, processes: Processes, timeout_s: float) -> None:
    """Set this process's address for receiving arrays; ValueError if processes differ in `run`."""
    own = _Introduction(f"{processes.n_processes} processes of jax {jax.__version__}")
    if processes.index:
        with _connect_to_coordinator(processes, timeout_s) as stream:
            own_ip, coordinator_ip = map(ip_of_socket, (stream.getsockname(), stream.getpeername()))
        if own_ip != coordinator_ip and not is_loopback(coordinator_ip):
            own = msgspec.structs.replace(own, host=own_ip, coordinator_host=coordinator_ip)
    introductions = group.all_gather("hello", own, _Introduction)
    for p, introduction in enumerate(introductions):
        if introduction.run != introductions[0].run:
            raise ValueError(
                f"process {p} is one of {introduction.run}, process 0 of {introductions[0].run}; "
                "start all with the same number and version"
            )
    seen_hosts = (h.coordinator_host for h in introductions if h.coordinator_host)
    own_host = own.host or next(seen_hosts, LOOPBACK)
    if not uses_cpu():  # NCCL transfers arrays between GPUs
        if own_host == LOOPBACK:  # other hosts cannot reach it there
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif not is_jax_initialized():
        transfer_address = Address(own_host, free_port())
        jax.config.update("jax_cross_host_transfer_socket_address", str(transfer_address))
        any_port = f"{str(transfer_address).rpartition(':')[0]}:0"
        jax.config.update("jax_cross_host_transport_addresses", any_port)
