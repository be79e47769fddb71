"""The number, index and coordinator of a run's processes, from the first of these sources:

    flags         --distributed.coordinator, .num_processes and .process_id, all three
    variables     DFLOP_COORDINATOR, DFLOP_NUM_PROCESSES, DFLOP_PROCESS_ID (`dflop launch`, or you)
    Slurm         inside `srun`
    Open MPI      inside `mpirun`
    Kubernetes    an indexed Job whose pods may read it (needs the `kubernetes` package)

For the last three, JAX_COORDINATOR_ADDRESS sets the coordinator, JAX_COORDINATOR_PORT its port.
The module also reads and writes a process's state of its supervisor (`dflop launch`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dflop_jax.config import DistributedConfig

log = logging.getLogger("dflop_jax")
# Scripts may set these themselves.
COORDINATOR_ENV = "DFLOP_COORDINATOR"
NUM_PROCESSES_ENV = "DFLOP_NUM_PROCESSES"
PROCESS_ID_ENV = "DFLOP_PROCESS_ID"
DEVICES_ENV = "DFLOP_DEVICES_PER_PROCESS"
LOCAL_PROCESSES_ENV = "DFLOP_LOCAL_PROCESSES"  # processes of the run on this host
LOCAL_INDEX_ENV = "DFLOP_LOCAL_ID"  # index of this process on this host

LAUNCH_ENV = "DFLOP_RUN"  # name of a launch, equal at all its restarts
RESTARTS_ENV = "DFLOP_RESTARTS"  # number of restarts so far; 0: this is the first start
STEP_FILE_ENV = "DFLOP_STEP_FILE"  # file that is made after the first step of a start


def is_restart() -> bool:
    """Return whether the supervisor has restarted this run."""
    return os.environ.get(RESTARTS_ENV, "0") not in ("", "0")


def launch_name() -> str:
    """Return the name of the launch that started this process; "" if it has no restarts."""
    return os.environ.get(LAUNCH_ENV, "")


@cache  # once per process
def report_step() -> None:
    """Report a finished step; the supervisor waits longer after starts without one."""
    if file := os.environ.get(STEP_FILE_ENV):
        with suppress(OSError):  # the supervisor is gone, so this process will end, too
            Path(file).touch()


@dataclass(frozen=True)
class Processes:
    """The processes of a run; ValueError if the index does not fit their number."""

    n_processes: int = 1
    index: int = 0  # of this process
    coordinator: Address | None = None  # where process 0 listens; None for one process
    source: str = "one process"  # source of these values, for messages
    n_local: int = 0  # processes of the run on this host; 0 if unknown
    local_index: int = 0  # of this process on its host
    devices_per_process: int = 0  # 0 if not set

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.n_processes:
            raise ValueError(
                f"{self.source}: process {self.index} of {self.n_processes}; "
                f"the first is 0, the last {self.n_processes - 1}"
            )


def find_processes(config: DistributedConfig) -> Processes:
    """Return the processes of this run; ValueError for an incomplete or wrong description."""
    processes = (
        _from_flags(config)
        or _from_launcher()
        or _from_slurm()
        or _from_open_mpi()
        or _from_kubernetes()
        or Processes()
    )
    return replace(processes, devices_per_process=_environment_int(DEVICES_ENV, 0))


def _from_flags(config: DistributedConfig) -> Processes | None:
    unset = {"coordinator": "", "num_processes": 0, "process_id": -1}
    missing = [f"--distributed.{n}" for n, none in unset.items() if getattr(config, n) == none]
    if len(missing) == len(unset):
        return None
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given too: all three, or none")
    coordinator = parse_address("distributed.coordinator", config.coordinator)
    return Processes(config.num_processes, config.process_id, coordinator, "distributed")


def _from_launcher() -> Processes | None:
    names = (COORDINATOR_ENV, NUM_PROCESSES_ENV, PROCESS_ID_ENV)
    if not any(os.environ.get(n) for n in names):
        return None
    if missing := [n for n in names if not os.environ.get(n)]:
        raise ValueError(f"{' and '.join(missing)} must be set too: all of {', '.join(names)}")
    n_processes, index = _environment_int(NUM_PROCESSES_ENV), _environment_int(PROCESS_ID_ENV)
    coordinator = parse_address(COORDINATOR_ENV, os.environ[COORDINATOR_ENV])
    source = "dflop launch" if LOCAL_PROCESSES_ENV in os.environ else "DFLOP_* variables"
    local = _environment_int(LOCAL_PROCESSES_ENV, 0), _environment_int(LOCAL_INDEX_ENV, 0)
    return Processes(n_processes, index, coordinator, source, *local)


def _from_slurm() -> Processes | None:
    # The shell of salloc is one task, although SLURM_NTASKS is the number of tasks of its job.
    n_processes = _environment_int("SLURM_STEP_NUM_TASKS", _environment_int("SLURM_NTASKS", 1))
    if n_processes == 1 or "SLURM_STEP_NODELIST" not in os.environ:
        return None
    # Parsed here, since jax reads `rack[1-2]n[01-02]` as `rack1`. The first name ends at a comma
    # outside brackets. The port is derived from the job's number as in jax.
    nodes = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
    first_node, port = nodes.partition(",")[0], 61_440 + _environment_int("SLURM_JOB_ID") % 4096
    counts: list[int] = []  # tasks by node: `2(x3),1` is 2, 2, 2, 1
    text, node = (
        os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""),
        _environment_int("SLURM_NODEID", 0),
    )
    for tasks, n_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(n_nodes or 1)
    return Processes(
        n_processes,
        _environment_int("SLURM_PROCID"),
        _coordinator_address(lambda configured: f"{first_node}:{configured or port}"),
        "Slurm",
        counts[node] if node < len(counts) else 0,
        _environment_int("SLURM_LOCALID"),
    )


def _from_open_mpi() -> Processes | None:
    n_processes = _environment_int("OMPI_COMM_WORLD_SIZE", 1)
    if n_processes == 1:
        return None
    from jax._src.clusters import OmpiCluster

    has_launcher_address = "OMPI_MCA_orte_hnp_uri" in os.environ  # not set by Open MPI 5
    if not has_launcher_address and not os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise ValueError(
            "Open MPI 5 does not give the host of process 0; add to mpirun: "
            "-x JAX_COORDINATOR_ADDRESS=HOST:PORT, with the host of rank 0"
        )
    return Processes(
        n_processes,
        _environment_int("OMPI_COMM_WORLD_RANK"),
        _coordinator_address(lambda port: OmpiCluster.get_coordinator_address(None, port)),
        "Open MPI",
        _environment_int("OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        _environment_int("OMPI_COMM_WORLD_LOCAL_RANK", 0),
    )


def _from_kubernetes() -> Processes | None:
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys():
        return None
    if importlib.util.find_spec("kubernetes") is None:
        log.warning(
            "this pod of an indexed Job trains alone: to train with the others, set %s, %s and %s "
            "(docs/clusters.md), or install the kubernetes package",
            *(COORDINATOR_ENV, NUM_PROCESSES_ENV, PROCESS_ID_ENV),
        )
        return None
    from jax._src.clusters import K8sCluster

    try:
        K8sCluster.is_env_present()  # connects to the API server
        n_processes = K8sCluster.get_process_count()
        if n_processes == 1:
            return None
        address = _coordinator_address(lambda port: K8sCluster.get_coordinator_address(None, port))
    except Exception as e:  # the client of the API may raise anything
        raise ValueError(
            f"cannot read the pods of the Job from Kubernetes ({' '.join(str(e).split())[:200]}"
            f"); set {COORDINATOR_ENV}, {NUM_PROCESSES_ENV} and {PROCESS_ID_ENV} instead"
        ) from None
    index = _environment_int("JOB_COMPLETION_INDEX")
    return Processes(n_processes, index, address, "Kubernetes", 1)


def _coordinator_address(find_address: Callable[[str | None], str]) -> Address:
    configured = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if configured:
        return parse_address("JAX_COORDINATOR_ADDRESS", configured)
    text = find_address(os.environ.get("JAX_COORDINATOR_PORT"))
    host, _, port = text.rpartition(":")  # an IPv6 host comes without brackets
    return parse_address("the cluster's coordinator", f"[{host}]:{port}" if ":" in host else text)


def _environment_int(name: str, default: int | None = None) -> int:
    """Return the non-negative integer in an environment variable."""
    text = os.environ.get(name, "")
    if text == "" and default is not None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} is not a number from 0; set it to one")
    return int(text)


LISTEN_PORTS = range(20_000, 32_000)  # below the ports of outgoing connections on Linux and macOS
LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A host (name or IP) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def interface(self) -> str:
        """Return the IP of this host to listen on, so that others reach it at this address. "" (all
        interfaces) if the name resolves to loopback here, or if the address is translated."""
        if self.host == "localhost" or is_loopback(self.host):
            return "::1" if ":" in self.host else LOOPBACK
        try:
            family, _, _, _, name = socket.getaddrinfo(
                self.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family) as s:
                s.bind((str(name[0]), 0))
        except OSError:
            return ""
        return "" if is_loopback(str(name[0])) else str(name[0])


def parse_address(name: str, text: str) -> Address:
    """Return the address in `HOST:PORT` (`[HOST]:PORT` for IPv6). ValueError for other text; the
    message begins with `name`."""
    try:
        url = urlsplit(f"//{text.strip()}")
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not (host and port):
        raise ValueError(f"{name}: {text!r} is not HOST:PORT (such as node7:29400); give that")
    return Address(host, port)


def free_port() -> int:
    """Return a free port of this host, outside the range of outgoing connections, since one of them
    could take the port before we listen, even a connection to that port."""
    while True:
        port = random.SystemRandom().choice(LISTEN_PORTS)
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port


def ip_of_socket(name: Any) -> str:
    """Return the IP in a socket's name; converts IPv4 addresses inside IPv6 to IPv4."""
    return str(name[0]).split("%")[0].removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
