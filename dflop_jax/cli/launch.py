"""`dflop launch`: start local processes that train together."""

from __future__ import annotations

import argparse

from dflop_jax.cluster.ending import PREEMPTED
from dflop_jax.cluster.launch import LaunchResult, launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dflop launch -n N [--devices-per-process D] [--pin] -- COMMAND [ARGUMENT ...]"
    parser.epilog = (
        "Example: dflop launch -n 2 -- dflop train experiments/demo.py. In COMMAND, dflop and "
        "python mean those of this interpreter. The first failure stops all processes and is the "
        "exit code; a signal is passed on, a second one kills. The exit code is "
        f"{PREEMPTED} when the processes saved and ended so."
    )
    parser.add_argument("-n", type=int, required=True, help="processes to start")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="default: plan.devices shared evenly"
    )
    parser.add_argument("--pin", action="store_true", help="give each process cores of its own")
    parser.add_argument("process", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(args: argparse.Namespace) -> LaunchResult:
    """Start the processes and wait for them; the result holds the exit code."""
    command = args.process[1:] if args.process[:1] == ["--"] else args.process
    return launch(command, args.n, devices_per_process=args.devices_per_process, pin=args.pin)
