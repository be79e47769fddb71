"""Start the processes of a run on this host, and again where they fail (`dflop launch`)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.agent import Agent
from dflop_jax.cluster.job import Job, LaunchResult, Place
from dflop_jax.cluster.launch_keeper import MARK_ENV
from dflop_jax.cluster.processes import Processes, find_processes
from dflop_jax.cluster.restarts import Limits
from dflop_jax.cluster.secret import SECRET_ENV, find_secret, new_secret
from dflop_jax.cluster.variables import DEVICES_ENV
from dflop_jax.config import DistributedConfig

# XLA on the CPU takes fresh memory for every program's temporaries. Given back to the system after
# each program and taken in small pages, it makes a large backward take 1.7 times as long, and at
# times three times where a virtual machine's host takes it too. So it is kept, in huge pages and
# one arena: those of single threads give blocks above 64 MiB back at once (measured with glibc
# 2.36: 3 page faults a step for 480 to 1,000). Other allocators ignore it.
_KEEP_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    f":glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
}
# XLA sizes its thread pool by the cores it may use, or by NPROC. Transfers share that pool: with
# one thread they wait until what computes has ended (43 ms instead of 8, measured).
_POOL_OF_TWO = {"NPROC": "2"}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, each with a launcher of its own: where that of host 0 listens (and those
    of hosts 1, 2, ... that may take its place, with commas between), how many there are, and which
    this is. By default the cluster says, or there is one.

    Raises:
      ValueError: not all three are given, or none.
    """

    coordinator: str = ""
    number: int = 0
    host: int = -1

    def __post_init__(self) -> None:
        given = {"coordinator": self.coordinator != "", "hosts": self.number != 0}
        given["host"] = self.host != -1
        missing = [f"--{name}" for name, there in given.items() if not there]
        if missing and len(missing) < len(given):
            raise ValueError(f"{' and '.join(missing)} must be given too: all three, or none")


NO_RESTARTS, AS_FOUND = Limits(), Hosts()


def launch(
    command: Sequence[str],
    n: int,
    *,
    devices_per_process: int | None = None,
    pin: bool = False,
    limits: Limits = NO_RESTARTS,
    hosts: Hosts = AS_FOUND,
) -> LaunchResult:
    """Run `command` in `n` processes of this host that find each other, and those of other hosts,
    until all have ended.

    When one fails, the others are stopped, and all are started again where `limits` allow it; when
    one ends as preempted, they have saved with it and end as well. SIGINT, SIGTERM and SIGHUP are
    passed on once; a second signal kills. If this process dies, so do they. Call it from the main
    thread.

    Args:
      command: program and arguments; `dflop` and `python` mean those of this interpreter.
      devices_per_process: devices each process uses; None leaves it to the plan.
      pin: give each process its own share of this process's cores.

    Raises:
      ValueError: too few processes or cores, no such command, or the hosts do not fit together.
      TryAgain: the launchers of the other hosts did not come.
    """
    if n < 1:
        raise ValueError(f"-n {n}: start at least 1 process")
    if devices_per_process is not None and devices_per_process < 1:
        raise ValueError(f"--devices-per-process {devices_per_process} must be at least 1")
    program, cores = resolve(command), core_shares(n) if pin else [None] * n
    coordinators = [a.strip() for a in hosts.coordinator.split(",")]
    config = DistributedConfig(coordinators[0], hosts.number, hosts.host)
    # Inside another launch its processes are what the variables speak of.
    inside = MARK_ENV in os.environ and not hosts.coordinator
    found = Processes() if inside else find_processes(config)
    alone = found.number == 1
    addresses: list[Address] = []
    if not alone:
        assert found.coordinator is not None
        addresses = [found.coordinator, *map(_address, coordinators[1 : found.number])]
    if limits.least > n * found.number:
        raise ValueError(
            f"--min-processes {limits.least}, but {found.number} hosts of {n} processes have "
            f"{n * found.number}; give at most so many"
        )
    shared = {
        SECRET_ENV: new_secret() if alone else find_secret(config).decode(),
        DEVICES_ENV: str(devices_per_process or ""),
    }
    environments = []
    for share in cores:
        pool = _POOL_OF_TWO if len(share or ()) == 1 else {}
        environments.append({**_KEEP_MEMORY, **pool, **os.environ, **shared})
    place = Place(found.index, found.number, tuple(addresses))
    return Agent(Job(program, environments, cores), place, config.connect_timeout_s, limits).run()


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as e:
        raise ValueError(f"--coordinator: {e}") from None


def resolve(command: Sequence[str]) -> list[str]:
    """The program that a command line means, with its arguments; ValueError when there is none."""
    if not command:
        raise ValueError(
            "no command; give it after --, such as: dflop launch -n 2 -- dflop train EXPERIMENT"
        )
    name, *arguments = command
    known = {"dflop": [sys.executable, "-m", "dflop_jax.cli"], "python": [sys.executable]}
    if name in known:
        return [*known[name], *arguments]
    program = shutil.which(name)
    if program is None:
        is_file = os.path.isfile(name)
        hint = f"; did you mean: python {name}?" if is_file else "; check its spelling, or PATH"
        raise ValueError(f"{name}: no such command{hint}")
    return [program, *arguments]


def core_shares(n: int) -> list[set[int] | None]:
    """This process's cores in `n` equal parts (to one core); ValueError where it cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--pin: this platform does not tie processes to cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < n:
        raise ValueError(
            f"--pin: {n} processes need {n} cores, {len(cores)} are there; leave it out, or "
            "start fewer"
        )
    return [set(cores[i * len(cores) // n : (i + 1) * len(cores) // n]) for i in range(n)]
