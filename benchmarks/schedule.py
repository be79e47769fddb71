"""Balancing and bucket choice against the alternatives.

Command:  python benchmarks/schedule.py --shapes ../shared/data/shapes --json schedule.json
Minutes:  about 60 with 10 seeds and CP-SAT (10 s a time); --quick takes one
Expected: `ours` within 1.01 of the bound at 0.1 s where there are 8 or more samples a bin, never
          above CP-SAT; chosen buckets pad a few per cent where powers of two pad tens

Prints one table of makespan over lower bound (median and worst over seeds) and milliseconds, one of
padding per set of buckets, and draws the first. CP-SAT needs `pip install ortools` here, or an
interpreter that has it (--cpsat-python); without it that method is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bucket_table import bucket_table  # noqa: E402
from schedule_data import instance  # noqa: E402

from dflop_jax.schedule import balance  # noqa: E402

SIZES = ((64, 8), (128, 16), (512, 32), (512, 64), (4096, 256))
QUICK_SIZES = ((64, 8), (512, 32))
OURS_S = (0.1, 1.0, 2.0)
CPSAT_S = 10.0
CPSAT_MOST = 100_000  # samples x bins; building a larger model alone takes longer than its limit


@dataclass(frozen=True)
class Row:
    """One method on one instance."""

    n: int
    bins: int
    instance: str
    method: str
    makespan_over_bound: float
    ms: float
    seed: int
    status: str = ""


Method = Callable[[np.ndarray, int, int], tuple[np.ndarray | None, str]]


def shuffled(costs: np.ndarray, n_bins: int, seed: int) -> tuple[np.ndarray, str]:
    """Random microbatches of equal sample counts."""
    return np.random.default_rng(seed).permutation(len(costs)) % n_bins, ""


def round_robin(costs: np.ndarray, n_bins: int, seed: int) -> tuple[np.ndarray, str]:
    """Longest first, dealt out in turn."""
    bins = np.empty(len(costs), int)
    bins[np.argsort(-costs.sum(axis=1), kind="stable")] = np.arange(len(costs)) % n_bins
    return bins, ""


def lpt(costs: np.ndarray, n_bins: int, seed: int) -> tuple[np.ndarray, str]:
    from dflop_jax.schedule.greedy import lpt
    from dflop_jax.schedule.problem import make_problem

    return lpt(make_problem(costs, n_bins)), ""


def ours(limit_s: float) -> Method:
    def solve(costs: np.ndarray, n_bins: int, seed: int) -> tuple[np.ndarray, str]:
        found = balance(costs, n_bins, time_limit_s=limit_s, seed=seed)
        return found.bins, found.status

    return solve


def cpsat(python: str, limit_s: float) -> Method:
    def solve(costs: np.ndarray, n_bins: int, seed: int) -> tuple[np.ndarray | None, str]:
        task = {"costs": costs.tolist(), "n_bins": n_bins, "time_limit_s": limit_s}
        done = subprocess.run(
            [python, str(HERE / "cpsat.py")],
            input=json.dumps(task | {"workers": os.cpu_count() or 1}),
            capture_output=True,
            text=True,
            check=True,
        )
        bins = json.loads(done.stdout)["bins"]
        return (None if bins is None else np.array(bins)), ""

    return solve


def makespan(costs: np.ndarray, bins: np.ndarray, n_bins: int) -> float:
    loads = [np.bincount(bins, column, n_bins).max() for column in costs.T]
    return float(max(loads, default=0.0))


def methods(args: argparse.Namespace, console: Console) -> dict[str, Method]:
    found: dict[str, Method] = {"random": shuffled, "round-robin": round_robin, "LPT": lpt}
    found |= {f"ours {s:g} s": ours(s) for s in OURS_S[: 1 if args.quick else None]}
    if args.quick:
        return found
    probe = [args.cpsat_python, "-c", "import ortools, numpy"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        found[f"CP-SAT {CPSAT_S:g} s"] = cpsat(args.cpsat_python, CPSAT_S)
    else:
        console.print(
            f"CP-SAT left out: {args.cpsat_python} has no ortools (pip install 'ortools>=9.10', or "
            "name an interpreter that has it with --cpsat-python)"
        )
    return found


def measure(args: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Rows of all methods on all instances; the bound is the best that any run of ours proved."""
    names = ["embedded", *(["shapes"] if args.shapes else []), "lognormal", "pareto"]
    chosen = methods(args, console)
    for n, n_bins in QUICK_SIZES if args.quick else SIZES:
        for name in names:
            for seed in range(args.seeds):
                costs = instance(name, n, n_bins, seed, args.shapes)
                # a bound proved by MILP in a second is as good for every method
                bound = balance(costs, n_bins, time_limit_s=0.1 if args.quick else 1.0).lower_bound
                for method, solve in chosen.items():
                    if method.startswith("CP-SAT") and n * n_bins > CPSAT_MOST:
                        continue
                    start = time.perf_counter()
                    bins, status = solve(costs, n_bins, seed)
                    ms = (time.perf_counter() - start) * 1e3
                    ratio = np.inf if bins is None else makespan(costs, bins, n_bins) / bound
                    yield Row(n, n_bins, name, method, float(ratio), ms, seed, status)


def table(rows: list[Row]) -> Table:
    """One line per instance and size; a cell is median / worst ratio and median milliseconds."""
    found = list(dict.fromkeys(r.method for r in rows))
    out = Table("samples x bins", "instance", *found, title="makespan over lower bound (worst) ms")
    for key in dict.fromkeys((r.n, r.bins, r.instance) for r in rows):
        cells = []
        for method in found:
            some = [r for r in rows if (r.n, r.bins, r.instance) == key and r.method == method]
            ratios = [r.makespan_over_bound for r in some]
            cells.append(
                f"{np.median(ratios):.4f} ({max(ratios):.4f}) {np.median([r.ms for r in some]):.0f}"
                if some
                else "-"
            )
        out.add_row(f"{key[0]} x {key[1]}", key[2], *cells)
    return out


def plot(rows: list[Row], path: Path) -> None:
    """Excess over the bound by method, one panel per instance kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(r.instance for r in rows))
    sizes = list(dict.fromkeys((r.n, r.bins) for r in rows))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 3.2), sharey=True)
    for axis, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for method in dict.fromkeys(r.method for r in rows):
            excess = [
                [
                    r.makespan_over_bound - 1
                    for r in rows
                    if (r.instance, r.method, r.n, r.bins) == (kind, method, *size)
                ]
                for size in sizes
            ]
            median = [max(float(np.median(e)), 1e-5) if e else np.nan for e in excess]
            axis.plot(range(len(sizes)), median, "o-", label=method, markersize=4)
        axis.set_title(kind)
        axis.set_xticks(range(len(sizes)), [f"{n}x{b}" for n, b in sizes], rotation=40)
        axis.set_yscale("log")
    np.atleast_1d(axes)[0].set_ylabel("makespan over bound - 1 (median)")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=Path, help="folder of shape traces (*.jsonl)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, default=Path("schedule.png"), help="draw here")
    parser.add_argument("--seeds", type=int, default=10, help="instances of each kind and size")
    parser.add_argument("--quick", action="store_true", help="two sizes, 0.1 s, no CP-SAT")
    parser.add_argument("--cpsat-python", default=sys.executable, help="interpreter with ortools")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds} must be at least 1")
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = list(measure(args, console))
    console.print(table(rows))
    console.print(bucket_table(args.shapes, min(args.seeds, 3), quick=args.quick))
    plot(rows, args.plot)
    console.print(f"picture: {args.plot}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))


if __name__ == "__main__":
    main()
