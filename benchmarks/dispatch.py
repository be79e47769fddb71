"""Dispatching the pieces of a batch to data ranks: the solver against OrchMLLM's own algorithms.

Command:  python benchmarks/dispatch.py --json dispatch.json
Minutes:  about one; --quick takes seconds
Expected: never above the paper's algorithms; 2,560 ranks and 40,000 samples greedily in less than
          100 ms, within 1% of the bound in less than 2 s; nodes named so that less crosses them

Lengths are heavy-tailed. Costs are the paper's four: without padding, padded, of attention, padded
with attention. `cross_node_share` is the share of an encoder's features that leave the node in
which they were computed, where the ranks of the balanced encoder are named so that this is least;
`cross_node_share_naive` where they are not renamed. Ranks are 8 to a node.
"""

from __future__ import annotations

import argparse
import math
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
from dflop_jax.schedule.dispatch.cost import PhaseCost  # noqa: E402
from dflop_jax.schedule.dispatch.nodes import Devices, best_names, kept  # noqa: E402
from dflop_jax.schedule.dispatch.ranks import dispatch  # noqa: E402
from dflop_jax.schedule.solver.problem import make_problem  # noqa: E402

COSTS = {
    "no padding": PhaseCost(1.0),
    "padding": PhaseCost(1.0, padded=True),
    "attention": PhaseCost(1.0, 1 / 4096),
    "padded attention": PhaseCost(1.0, 1 / 4096, padded=True),
}
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


def paper_ranks(lengths: Sequence[float], n_ranks: int, cost: PhaseCost) -> list[int]:
    """The paper's algorithm for a cost. Without padding the longest goes first to the lightest
    rank. With padding the shortest come first, as many in a row as a bound lets a rank take, and
    the least bound is found by bisection over whole numbers of the unit of costs."""
    each = [float(x) for x in cost.each(np.asarray(lengths, float))]
    ranks = [0] * len(each)
    if not cost.padded:
        loads = [0.0] * n_ranks
        for i in sorted(range(len(each)), key=lambda i: -each[i]):
            ranks[i] = min(range(n_ranks), key=loads.__getitem__) if n_ranks <= 64 else int(
                np.argmin(loads))  # fmt: skip
            loads[ranks[i]] += each[i]
        return ranks
    order = sorted(range(len(each)), key=each.__getitem__)

    def cut(bound: float) -> list[int] | None:
        out, rank, count = [0] * len(each), 0, 0
        for i in order:
            if (count + 1) * each[i] > bound:
                rank, count = rank + 1, 0
            if rank == n_ranks or each[i] > bound:
                return None
            out[i], count = rank, count + 1
        return out

    low, high = 0, math.ceil(len(each) * max(each, default=0.0))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(middle) is not None else (middle, high)
    return cut(high) or ranks


def bound_of(lengths: np.ndarray, n_ranks: int, cost: PhaseCost, best: float) -> float:
    """No assignment costs less: of added costs by the solver's bounds; padded ones are cut
    optimally."""
    if cost.padded:
        return best
    return lower_bound(make_problem(cost.each(lengths), n_ranks))


def measured(name: str, n_ranks: int, n: int, seed: int) -> list[Row]:
    """Rows of both methods on one instance."""
    cost, lengths = COSTS[name], lengths_of(n, seed)
    answers = []
    for method, work in METHODS.items():
        start = time.perf_counter()
        answer = dispatch(lengths, n_ranks, cost, work=work, time_limit_s=SOLVER_S, seed=seed)
        answers.append((method, answer, time.perf_counter() - start))
    paper = np.array(paper_ranks(lengths.tolist(), n_ranks, cost))
    best = min(a.makespan for _, a, _ in answers)
    bound = bound_of(lengths, n_ranks, cost, best)
    paper_makespan = float(cost.of_ranks(lengths, paper, n_ranks).max())
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


def shares_crossing(lengths: np.ndarray, bins: np.ndarray, n_ranks: int, seed: int) -> tuple[float, float]:
    """Share of an encoder's features that leave their node with and without renaming, where the
    LLM's ranks are balanced by other lengths of the same samples."""
    rng = np.random.default_rng(seed + 1)
    text = lengths // 4 + rng.integers(16, 2048, len(lengths))
    where = dispatch(text, n_ranks, COSTS["attention"]).bins
    sample = np.arange(len(lengths))
    moved = traffic(sample, bins, lengths, sample, where, (n_ranks, n_ranks))
    devices, total = Devices(np.arange(n_ranks), NODE), max(float(moved.sum()), 1.0)
    names, node_V = best_names(kept(moved, devices, devices)), devices.of_rank // NODE
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
