"""`dflop launch`: start processes of this host that train together, and again if they fail."""

from __future__ import annotations

import argparse

from dflop_jax.cluster.ending import PREEMPTED, TRY_AGAIN
from dflop_jax.cluster.launch import Hosts, LaunchResult, launch
from dflop_jax.cluster.restarts import Limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dflop launch -n N [--max-restarts R [--min-processes M]] [--devices-per-process D] "
        "[--pin] [--coordinator HOST:PORT --hosts H --host I] -- COMMAND [ARGUMENT ...]"
    )
    parser.epilog = (
        "Example: dflop launch -n 2 -- dflop train experiments/demo.py. In COMMAND, dflop and "
        "python mean those of this interpreter. The first failure stops all processes and is the "
        "exit code; a signal is passed on, a second one kills. The exit code is "
        f"{PREEMPTED} when the processes saved and ended so, {TRY_AGAIN} when another start may do."
    )
    limits, hosts = Limits(), Hosts()
    parser.add_argument("-n", type=int, required=True, help="processes to start on this host")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="default: plan.devices shared evenly"
    )
    parser.add_argument("--pin", action="store_true", help="give each process cores of its own")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=limits.restarts,
        metavar="R",
        help="start all again where one is killed, lost or fails, so often at most; the run goes "
        f"on from its newest checkpoint (default: {limits.restarts})",
    )
    parser.add_argument(
        "--restarts-an-hour",
        type=int,
        default=limits.an_hour,
        metavar="R",
        help=f"and so often in any hour (default: {limits.an_hour})",
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        default=limits.least,
        metavar="M",
        help="go on with as few where others are gone for good, under another plan, and with all "
        "again when they are back (default: 0, with all only)",
    )
    parser.add_argument(
        "--gone-after",
        type=float,
        default=limits.gone_after_s,
        metavar="S",
        help="seconds in which a host that was lost may come back before the others go on without "
        f"it (default: {limits.gone_after_s:g})",
    )
    parser.add_argument(
        "--coordinator",
        default=hosts.coordinator,
        metavar="HOST:PORT[,...]",
        help="where the launcher of host 0 listens, then of host 1 and others that may take its "
        "place; needed where neither Slurm nor Open MPI starts a launcher on each host",
    )
    parser.add_argument(
        "--hosts", type=int, default=hosts.number, metavar="H", help="launchers of the run, if so"
    )
    parser.add_argument(
        "--host", type=int, default=hosts.host, metavar="I", help="which one this is, from 0"
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
        limits=Limits(
            args.max_restarts, args.restarts_an_hour, args.min_processes, args.gone_after
        ),
        hosts=Hosts(args.coordinator, args.hosts, args.host),
    )
