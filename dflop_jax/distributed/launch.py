"""Start the processes of a run on this host, and again where they fail (`dflop launch`)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from dflop_jax.config import DistributedConfig
from dflop_jax.distributed.processes import DEVICES_ENV, LOCAL_PROCESSES_ENV, find_processes
from dflop_jax.distributed.supervisor import Job, LaunchResult, supervise

# XLA on the CPU takes fresh memory for every program's temporaries. Given back to the system after
# each program and taken in small pages, it makes a large backward take 1.7 times as long, and at
# times three times where a virtual machine's host takes it too. So it is kept, in huge pages and
# one arena: those of single threads give blocks above 64 MiB back at once (measured with glibc
# 2.36: 3 page faults a step for 480 to 1,000). Other allocators ignore it.
_MALLOC_TUNABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    f":glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
}


def launch(
    command: Sequence[str],
    n: int,
    *,
    devices_per_process: int | None = None,
    pin: bool = False,
    max_restarts: int = 0,
) -> LaunchResult:
    """Run `command` in `n` processes of this host that find each other, until all have ended.

    When one fails, the others are ended, and all are started again while restarts are left; when
    one ends as preempted, all have saved and end as well. SIGINT, SIGTERM and SIGHUP are passed on
    once; a second signal kills. If this process dies, so do they (on Linux). Call it from the main
    thread.

    Args:
      command: program and arguments; `dflop` and `python` mean those of this interpreter.
      devices_per_process: devices each process uses; None leaves it to the plan.
      pin: give each process its own share of this process's cores.
      max_restarts: how often all are started again after a failure.

    Raises:
      ValueError: too few processes or cores, no such command, or something else has started
        several processes already.
    """
    if n < 1:
        raise ValueError(f"-n {n}: start at least 1 process")
    if max_restarts < 0:
        raise ValueError(f"--max-restarts {max_restarts} must be at least 0")
    if devices_per_process is not None and devices_per_process < 1:
        raise ValueError(f"--devices-per-process {devices_per_process} must be at least 1")
    program, cores = resolve(command), core_shares(n) if pin else [None] * n
    if (
        LOCAL_PROCESSES_ENV not in os.environ
    ):  # inside another launch the variables mean its processes
        processes = find_processes(DistributedConfig())
        if processes.n_processes > 1:
            raise ValueError(
                f"{processes.source} has started {processes.n_processes} processes, and dflop "
                "launch starts "
                "those of one host; put the command itself in its place, one process a task"
            )
    environment = {**_MALLOC_TUNABLES, **os.environ, DEVICES_ENV: str(devices_per_process or "")}
    return supervise(Job(program, environment, cores), max_restarts)


def resolve(command: Sequence[str]) -> list[str]:
    """The program that a command line means, with its arguments; ValueError when there is none."""
    if not command:
        raise ValueError(
            "no command; give it after --, such as: dflop launch -n 2 -- dflop train EXPERIMENT"
        )
    name, *arguments = command
    interpreters = {"dflop": [sys.executable, "-m", "dflop_jax.cli"], "python": [sys.executable]}
    if name in interpreters:
        return [*interpreters[name], *arguments]
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
