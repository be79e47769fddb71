"""`dflop launch`: start processes that train together on this host; restart them if they fail."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from dflop_jax.cli.terminal import positive_int
from dflop_jax.config import DistributedConfig
from dflop_jax.distributed.process_exit import BAD_INPUT, PREEMPTED, TRANSIENT_FAILURE
from dflop_jax.distributed.processes import DEVICES_ENV, LOCAL_PROCESSES_ENV, find_processes
from dflop_jax.distributed.supervisor import LaunchResult, supervise

# XLA on the CPU allocates new memory for the temporaries of every program. If glibc returns it to
# the system after each program and takes it again in small pages, a large backward takes 1.7 times
# as long, and up to three times on a virtual machine. These settings keep the memory, in huge pages
# and one arena: other arenas return blocks above 64 MiB at once (measured with glibc 2.36).
_MALLOC_TUNABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    f":glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dflop launch -n N [--max-restarts R] [--devices-per-process D] [--pin] "
        "-- COMMAND [ARGUMENT ...]"
    )
    parser.epilog = (
        "Example: dflop launch -n 2 -- dflop train experiments/demo.py. In COMMAND, dflop and "
        "python mean those of this interpreter. The first failure ends all processes and sets the "
        "exit code. The first signal is passed on, a second one kills. The exit code is "
        f"{PREEMPTED} if the processes saved after a signal, {TRANSIENT_FAILURE} if another start "
        "may succeed, such as after a process was killed."
    )
    help_text = "processes to start on this host"
    parser.add_argument("-n", type=positive_int, required=True, metavar="N", help=help_text)
    help_text = "devices of each process (default: plan.devices shared evenly)"
    parser.add_argument("--devices-per-process", type=positive_int, metavar="D", help=help_text)
    parser.add_argument("--pin", action="store_true", help="pin each process to cores of its own")
    help_text = (
        "start all processes again after a failure, R times at most; the run resumes from its "
        f"newest checkpoint (default: 0); bad input (exit code {BAD_INPUT}) is not retried"
    )
    parser.add_argument("--max-restarts", type=int, default=0, metavar="R", help=help_text)
    parser.add_argument("process", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(args: argparse.Namespace) -> LaunchResult:
    command = args.process[args.process[:1] == ["--"] :]
    n_devices, n_restarts = args.devices_per_process, args.max_restarts
    return launch(
        command, args.n, devices_per_process=n_devices, pin=args.pin, max_restarts=n_restarts
    )


def launch(
    command: Sequence[str],
    n: int,
    *,
    devices_per_process: int | None = None,
    pin: bool = False,
    max_restarts: int = 0,
) -> LaunchResult:
    """Run a command in `n` connected processes on this host, until all have ended.

    If one process fails, the supervisor ends the others, and restarts all while restarts are left.
    SIGINT, SIGTERM and SIGHUP are passed on once; a second signal kills. If this process dies, so
    do the others (on Linux). Call this function from the main thread.

    Args:
      command: program and arguments; `dflop` and `python` mean those of this interpreter.
      devices_per_process: devices that each process uses; None leaves it to the plan.
      pin: give each process its own share of this process's cores.

    Raises:
      ValueError: too few cores, no such command, or a cluster has started several processes.
    """
    if max_restarts < 0:
        raise ValueError(f"--max-restarts {max_restarts} must be at least 0")
    program, cores = resolve(command), core_shares(n) if pin else [None] * n
    if LOCAL_PROCESSES_ENV not in os.environ:  # the variables are not those of another launch
        found = find_processes(DistributedConfig())
        if found.n_processes > 1:
            raise ValueError(
                f"{found.source} has already started {found.n_processes} processes; dflop launch "
                "starts those of one host: run the command without it, one process per task"
            )
    environment = {**_MALLOC_TUNABLES, **os.environ, DEVICES_ENV: str(devices_per_process or "")}
    return supervise(program, environment, cores, max_restarts)


def resolve(command: Sequence[str]) -> list[str]:
    """Return the program of a command line with its arguments; ValueError if it is not found."""
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
    """Return this process's cores in `n` parts whose sizes differ by at most one; ValueError if
    there are too few, or if the platform cannot pin processes."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--pin: this platform cannot pin processes to cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < n:
        raise ValueError(
            f"--pin: {n} processes need {n} cores, but there are {len(cores)}; leave it out, or "
            "start fewer"
        )
    return [set(cores[i * len(cores) // n : (i + 1) * len(cores) // n]) for i in range(n)]
