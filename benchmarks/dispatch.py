"""Dispatching the pieces of a batch to data ranks: the solver against OrchMLLM's own algorithms.

Command:  python benchmarks/dispatch.py --json dispatch.json
Minutes:  about one; --quick takes seconds
Expected: never above the paper's algorithms; 2,560 ranks and 40,000 samples greedily in less than
          100 ms, within 1% of the bound in less than 2 s; nodes named so that less crosses them

Lengths are heavy-tailed. Costs are the paper's without padding: of the tokens, and with attention.
`cross_node_share` is the share of an encoder's features that leave the node in
which they were computed, where the ranks of the balanced encoder are named so that this is least;
`cross_node_share_naive` where they are not renamed. Ranks are 8 to a node.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from dflop_jax.records import crossing, traffic  # noqa: E402
from dflop_jax.schedule.bounds.bins import lower_bound  # noqa: E402
from dflop_jax.schedule.dispatch.nodes import Devices, best_names, staying  # noqa: E402
from dflop_jax.schedule.solver.balance import balance  # noqa: E402
from dflop_jax.schedule.solver.problem import make_problem  # noqa: E402

COSTS = {"no padding": 0.0, "attention": 1 / 4096}  # of a pair of tokens; a token costs 1
SIZES = ((8, 128), (64, 1024), (512, 8192), (2560, 40_000))
NODE = 8
METHODS = {"greedy": 0.0, "solver": 10_000.0}
SOLVER_S = 1.5  # leaves room for what comes before the search, below two seconds


@dataclass(frozen=True)
class Row:
    """One instance under one cost by one method; see the docstring of this file."""

    cost: str
    method: str
    ranks: int
    samples: int
    makespan_over_bound: float
    paper_over_bound: float
    elapsed_s: float
    cross_node_share: float
    cross_node_share_naive: float


def lengths_of(n: int, seed: int) -> np.ndarray:
    """Heavy-tailed lengths from 16 to 8,192 tokens."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6.0, 1.0, n), 16, 8192).astype(np.int64)


def costs_of(lengths: np.ndarray, pair: float) -> np.ndarray:
    return lengths + pair * lengths.astype(float) ** 2


def paper_ranks(each: Sequence[float], n_ranks: int) -> list[int]:
    """The paper's algorithm: the dearest goes first to the lightest rank."""
    loads, ranks = np.zeros(n_ranks), [0] * len(each)
    for i in sorted(range(len(each)), key=lambda i: -each[i]):
        ranks[i] = int(np.argmin(loads))
        loads[ranks[i]] += each[i]
    return ranks


def measured(name: str, n_ranks: int, n: int, seed: int) -> list[Row]:
    """Rows of both methods on one instance."""
    lengths = lengths_of(n, seed)
    each = costs_of(lengths, COSTS[name])
    answers = []
    for method, work in METHODS.items():
        start = time.perf_counter()
        answer = balance(each, n_ranks, work=work, time_limit_s=SOLVER_S, seed=seed)
        answers.append((method, answer, time.perf_counter() - start))
    bound = lower_bound(make_problem(each, n_ranks))
    paper_makespan = float(np.bincount(paper_ranks(each.tolist(), n_ranks), each).max())
    rows = []
    for method, answer, took_s in answers:
        near, naive = shares_crossing(lengths, answer.bins, n_ranks, seed)
        rows.append(
            Row(
                name, method, n_ranks, n, answer.makespan / bound, paper_makespan / bound, took_s,
                near, naive,
            )
        )  # fmt: skip
    return rows


def shares_crossing(
    lengths: np.ndarray, bins: np.ndarray, n_ranks: int, seed: int
) -> tuple[float, float]:
    """Share of an encoder's features that leave their node with and without renaming, where the
    LLM's ranks are balanced by other lengths of the same samples."""
    rng = np.random.default_rng(seed + 1)
    text = lengths // 4 + rng.integers(16, 2048, len(lengths))
    where = balance(costs_of(text, COSTS["attention"]), n_ranks, time_limit_s=2.0, work=0).bins
    sample = np.arange(len(lengths))
    moved = traffic(sample, bins, lengths, sample, where, (n_ranks, n_ranks))
    devices, total = Devices(np.arange(n_ranks), NODE), max(float(moved.sum()), 1.0)
    names, node_V = best_names(staying(moved, devices, devices)), devices.of_rank // NODE
    near, naive = (crossing(m, node_V).across_nodes / total for m in (moved[names], moved))
    return near, naive


def table(rows: Sequence[Row]) -> Table:
    names = ("cost", "method", "ranks", "samples", "/ bound", "paper", "ms", "across", "naive")
    out = Table(*names)
    for r in rows:
        ratios = (f"{v:.4f}" for v in (r.makespan_over_bound, r.paper_over_bound))
        shares = (f"{v:.3f}" for v in (r.cross_node_share, r.cross_node_share_naive))
        out.add_row(r.cost, r.method, f"{r.ranks}", f"{r.samples}", *ratios,
                    f"{1e3 * r.elapsed_s:.0f}", *shares)  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser)
    parser.add_argument("--quick", action="store_true", help="the two smaller sizes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = Rows(args.json, as_rows)
    for n_ranks, n in SIZES[:2] if args.quick else SIZES:
        for name in COSTS:
            for row in measured(name, n_ranks, n, args.seed):
                rows.append(row)
    Console().print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
