"""`dflop launch`: start processes of this host that train together, and again if they fail."""

from __future__ import annotations

import argparse

from dflop_jax.distributed.launch import LaunchResult, launch
from dflop_jax.distributed.process_exit import BAD_INPUT, PREEMPTED, TRANSIENT_FAILURE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dflop launch -n N [--max-restarts R] [--devices-per-process D] [--pin] "
        "-- COMMAND [ARGUMENT ...]"
    )
    parser.epilog = (
        "Example: dflop launch -n 2 -- dflop train experiments/demo.py. In COMMAND, dflop and "
        "python mean those of this interpreter. The first failure ends all processes and is the "
        "exit code; a signal is passed on, a second one kills. The exit code is "
        f"{PREEMPTED} when the processes saved and ended so, {TRANSIENT_FAILURE} when another "
        "start may "
        "succeed, as where a process was killed."
    )
    parser.add_argument("-n", type=int, required=True, help="processes to start on this host")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="default: plan.devices shared evenly"
    )
    parser.add_argument("--pin", action="store_true", help="give each process cores of its own")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="start all processes again after a failure, R times at most; the run resumes from its "
        f"newest checkpoint (default: 0); bad input (exit code {BAD_INPUT}) is not retried",
    )
    parser.add_argument("process", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(args: argparse.Namespace) -> LaunchResult:
    """Start the processes and wait for them; the result holds the exit code."""
    command = args.process[1:] if args.process[:1] == ["--"] else args.process
    return launch(
        command,
        args.n,
        devices_per_process=args.devices_per_process,
        pin=args.pin,
        max_restarts=args.max_restarts,
    )
