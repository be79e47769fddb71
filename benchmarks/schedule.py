"""Balancing and bucket choice against the alternatives.

Command:  python benchmarks/schedule.py --json schedule.json
Minutes:  about 50 with 10 seeds and CP-SAT (10 s a time); --quick takes one
Expected: `ours` within 1.01 of the bound at 0.1 s where there are 8 or more samples a bin, never
          above CP-SAT; chosen buckets pad a few per cent where powers of two pad tens

Prints one table of makespan over lower bound (median and worst over seeds) and milliseconds, one of
padding per set of buckets, and draws the first. CP-SAT needs `pip install 'dflop_jax[bench]'` here,
or an interpreter that has OR-Tools (--cpsat-python); without it that method is left out.

A long run can be cut: --sizes, --seeds and --methods choose parts, and --merge joins their files
(each instance's ratios then refer to the best bound that any part proved):

    python benchmarks/schedule.py --sizes 64x8 --seeds 0:5 --methods ours CP-SAT --json a.json
    python benchmarks/schedule.py --merge a.json b.json --json schedule.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bucket_table import bucket_table  # noqa: E402
from schedule_data import TRACES, instance  # noqa: E402
from schedule_rows import Row, merged, plot, table, versus, with_ratios  # noqa: E402

from dflop_jax.schedule import balance  # noqa: E402

SIZES = ((64, 8), (128, 16), (512, 32), (512, 64), (4096, 256))
QUICK_SIZES = ((64, 8), (512, 32))
OURS_S = (0.1, 1.0, 2.0)
CPSAT_S = 10.0
CPSAT_MOST = 100_000  # samples x bins; building a larger model alone takes longer than its limit
CPSAT = f"CP-SAT {CPSAT_S:g} s"
BUCKETS = "buckets"  # among the methods: the table of padding


@dataclass(frozen=True)
class Answer:
    """Bins of the samples (None: none found), and the bound that was proved along the way."""

    bins: np.ndarray | None
    status: str = ""
    bound: float = 0.0


Method = Callable[[np.ndarray, int, int], Answer]


def shuffled(costs: np.ndarray, n_bins: int, seed: int) -> Answer:
    """Random microbatches of equal sample counts."""
    return Answer(np.random.default_rng(seed).permutation(len(costs)) % n_bins)


def round_robin(costs: np.ndarray, n_bins: int, seed: int) -> Answer:
    """Longest first, dealt out in turn."""
    bins = np.empty(len(costs), int)
    bins[np.argsort(-costs.sum(axis=1), kind="stable")] = np.arange(len(costs)) % n_bins
    return Answer(bins)


def lpt(costs: np.ndarray, n_bins: int, seed: int) -> Answer:
    from dflop_jax.schedule.solver.greedy import lpt
    from dflop_jax.schedule.solver.problem import make_problem

    return Answer(lpt(make_problem(costs, n_bins)))


def ours(limit_s: float) -> Method:
    def solve(costs: np.ndarray, n_bins: int, seed: int) -> Answer:
        found = balance(costs, n_bins, time_limit_s=limit_s, seed=seed)
        return Answer(found.bins, found.status, found.lower_bound)

    return solve


def cpsat(python: str, limit_s: float) -> Method:
    def solve(costs: np.ndarray, n_bins: int, seed: int) -> Answer:
        task = {"costs": costs.tolist(), "n_bins": n_bins, "time_limit_s": limit_s}
        done = subprocess.run(
            [python, str(HERE / "cpsat.py")],
            input=json.dumps(task | {"workers": os.cpu_count() or 1}),
            capture_output=True,
            text=True,
            check=True,
        )
        bins = json.loads(done.stdout)["bins"]
        return Answer(None if bins is None else np.array(bins))

    return solve


def makespan(costs: np.ndarray, bins: np.ndarray, n_bins: int) -> float:
    loads = [np.bincount(bins, column, n_bins).max() for column in costs.T]
    return float(max(loads, default=0.0))


def methods(args: argparse.Namespace, console: Console) -> dict[str, Method]:
    """The chosen methods by name, without CP-SAT where no interpreter has it."""
    every: dict[str, Method] = {"random": shuffled, "round-robin": round_robin, "LPT": lpt}
    every |= {f"ours {s:g} s": ours(s) for s in OURS_S[: 1 if args.quick else None]}
    every |= {} if args.quick else {CPSAT: cpsat(args.cpsat_python, CPSAT_S)}
    found = {name: solve for name, solve in every.items() if chosen(args, name)}
    if CPSAT in found:
        probe = [args.cpsat_python, "-c", "import ortools, numpy"]
        try:
            subprocess.run(probe, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            del found[CPSAT]
            console.print(
                f"CP-SAT left out: {args.cpsat_python} has no OR-Tools "
                "(pip install 'dflop_jax\\[bench]', or name an interpreter that has it with "
                "--cpsat-python)"
            )
    return found


def chosen(args: argparse.Namespace, name: str) -> bool:
    return not args.methods or any(name.startswith(start) for start in args.methods)


def measure(args: argparse.Namespace, console: Console) -> Iterator[list[Row]]:
    """Rows of all methods on one instance after another."""
    names = ["shapes", "lognormal", "pareto"]
    solvers = methods(args, console)
    for n, n_bins in args.sizes if solvers else ():
        for name in names:
            for seed in args.seeds:
                yield measure_one((n, n_bins, name, seed), args, solvers)


def measure_one(
    case: tuple[int, int, str, int], args: argparse.Namespace, solvers: dict[str, Method]
) -> list[Row]:
    """Rows of one instance; the bound is the best that any run of ours proved."""
    n, n_bins, name, seed = case
    costs = instance(name, n, n_bins, seed, args.shapes)
    rows = []
    for method, solve in solvers.items():
        if method == CPSAT and n * n_bins > CPSAT_MOST:
            continue
        start = time.perf_counter()
        found = solve(costs, n_bins, seed)
        ms = (time.perf_counter() - start) * 1e3
        span = None if found.bins is None else makespan(costs, found.bins, n_bins)
        rows.append(Row(n, n_bins, name, method, None, ms, seed, found.status, span, found.bound))
    if not any(r.method.startswith("ours") for r in rows):
        bound = balance(costs, n_bins, time_limit_s=0.1 if args.quick else 1.0).lower_bound
        rows = [replace(r, bound=bound) for r in rows]
    return with_ratios(rows)


def size(text: str) -> tuple[int, int]:
    """Samples and bins of "512x32"."""
    n, _, n_bins = text.partition("x")
    if not (n.isdecimal() and n_bins.isdecimal() and int(n) > 0 and int(n_bins) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not samples x bins, as 512x32")
    return int(n), int(n_bins)


def seed_range(text: str) -> range:
    """The first ten seeds of "10", seeds 5 to 9 of "5:10"."""
    start, _, stop = text.rpartition(":")
    start = start or "0"
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a count of 1 or more nor FIRST:END")
    return range(int(start), int(stop))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=Path, default=TRACES, help="folder of traces (*.jsonl)")
    add_json(parser)
    parser.add_argument("--plot", type=Path, default=Path("schedule.png"), help="draw here")
    parser.add_argument(
        "--seeds", type=seed_range, default=range(10), help="how many, or FIRST:END"
    )
    parser.add_argument("--sizes", type=size, nargs="+", help="samples x bins, as 512x32")
    parser.add_argument(
        "--methods", nargs="+", help="names or their starts, as ours LPT CP-SAT buckets"
    )
    parser.add_argument("--merge", type=Path, nargs="+", help="show rows of earlier runs instead")
    parser.add_argument("--quick", action="store_true", help="two sizes, 0.1 s, no CP-SAT")
    parser.add_argument("--cpsat-python", default=sys.executable, help="interpreter with OR-Tools")
    args = parser.parse_args()
    args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    known = ["random", "round-robin", "LPT", *(f"ours {s:g} s" for s in OURS_S), CPSAT, BUCKETS]
    for start in args.methods or []:
        if not any(name.startswith(start) for name in known):
            parser.error(f"--methods {start!r} is the start of none of: {', '.join(known)}")
    try:
        args.merge = merged(args.merge or [])
    except (OSError, ValueError) as error:
        parser.error(f"--merge: {error}")
    return args


def main() -> None:
    args = parsed()
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = Rows(args.json, rows=args.merge)
    rows.write()
    for more in () if args.merge else measure(args, console):
        for row in more:
            rows.append(row)
    if rows:
        console.print(table(rows))
        for line in versus(rows, CPSAT):
            console.print(line)
        plot(rows, args.plot)
        console.print(f"picture: {args.plot}")
    if not args.merge and chosen(args, BUCKETS):
        console.print(bucket_table(args.shapes, args.seeds, quick=args.quick))


if __name__ == "__main__":
    main()
