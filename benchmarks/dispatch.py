"""Dispatching the pieces of a batch to data ranks: what a run calls against OrchMLLM's algorithms.

Command:  python benchmarks/dispatch.py --json dispatch.json
Minutes:  less than one; --quick takes seconds
Expected: the content of the busiest rank never above the paper's algorithm and, after a second of
          work, within 1% of the bound; rows at most 2% above it; nodes named so that less crosses
          them

Lengths are heavy-tailed. One microbatch of an encoder is placed on its data ranks as the scheduler
of a run does it (`content_balance.assign_pieces`, then `balance_content`). Two of the paper's four
costs of a rank are those of programs here (docs/scheduling.md):

- `rows`: all ranks run one packed shape. `over_bound` are the tokens of the least rows, a multiple
  of 128, that hold every rank's pieces, over the least that any dispatch needs; the paper's answer
  needs its longest rank;
- `content`: the kernel skips pairs of different pieces. `over_bound` is the busiest rank's sum of
  squared lengths, in rows of a fixed size, over the bound.

`cross_node_share` is the share of an encoder's features that leave the node in
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

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax.records import Bucket, Load, PackedPieces, Shape, crossing_traffic, rank_traffic
from dflop_jax.schedule import WORK_PER_S, Capacity
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bounds import busiest_rank_bound
from dflop_jax.schedule.content_balance import (
    GroupContents,
    assign_pieces,
    balance_content,
)
from dflop_jax.schedule.rank_permutation import best_permutation, local_tokens

COSTS = ("rows", "content")
SIZES = ((8, 128), (64, 1024), (512, 8192))
NODE = 8
WORK_S = {"dealt": 0.0, "evened": 1.0}  # methods, and how much work of the scheduler each may take
MULTIPLE = 128  # tokens of a row are a multiple of it
ROOM = 1.05  # of fixed rows, over the least that any dispatch needs
MODULE, READER = "encoder", "llm"  # samples are packed into rows of the last module, not dealt


@dataclass(frozen=True)
class Row:
    """One instance under one cost by one method; see the docstring of this file."""

    cost: str
    method: str
    ranks: int
    samples: int
    over_bound: float
    paper_over_bound: float
    elapsed_s: float
    cross_node_share: float
    cross_node_share_naive: float


def lengths_of(n: int, seed: int) -> np.ndarray:
    """Heavy-tailed lengths from 16 to 8,192 tokens."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6.0, 1.0, n), 16, 8192).astype(np.int64)


def paper_ranks(each: Sequence[int], n_ranks: int) -> list[int]:
    """The paper's algorithm: the dearest goes first to the lightest rank."""
    loads, ranks = np.zeros(n_ranks), [0] * len(each)
    for i in sorted(range(len(each)), key=lambda i: -each[i]):
        ranks[i] = int(np.argmin(loads))
        loads[ranks[i]] += each[i]
    return ranks


class Dispatched:
    """Pieces of one microbatch, placed as a run places them."""

    def __init__(self, lengths: np.ndarray, n_ranks: int):
        self.n_ranks = n_ranks
        loads = [Load({MODULE: (n,), READER: (n,)}) for n in lengths.tolist()]
        self.batch = Batch(loads, Capacity({MODULE: n_ranks, READER: n_ranks}))
        self.least = _up(busiest_rank_bound(lengths, n_ranks))

    def within(self, tokens: int, work: float) -> PackedPieces | None:
        """Places in a row of so many tokens on each rank; None where no way was found."""
        bucket = Bucket.from_shapes({MODULE: Shape(1, tokens)})
        microbatch = [list(range(self.batch.n_samples))]
        return assign_pieces(self.batch, bucket, [microbatch], MODULE, Budget(max(work, 1.0)))

    def in_least_rows(self, work: float) -> tuple[PackedPieces, int]:
        """(places, tokens) of the least rows in which they were found, by bisection."""
        low, high = self.least - MULTIPLE, self.least
        answer = self.within(high, work)
        while answer is None:
            low, high = high, _up(1.1 * high)
            answer = self.within(high, work)
        while high - low > MULTIPLE:
            middle = _up((low + high) / 2)
            middle = middle - MULTIPLE if middle == high else middle
            other = self.within(middle, work)
            low, high, answer = (low, middle, other) if other else (middle, high, answer)
        return answer, high

    def evened(self, work: float) -> tuple[PackedPieces, int]:
        """(places, content of the busiest rank) in rows of a fixed size."""
        tokens = _up(ROOM * self.least)
        answer = self.within(tokens, work)
        while answer is None:
            tokens = _up(ROOM * tokens)
            answer = self.within(tokens, work)
        length_P, content_P = self.batch.lengths[MODULE], self.batch.content[MODULE]
        content = GroupContents(length_P, content_P, self.n_ranks, 1, [Shape(1, tokens)], [answer])
        if work:
            balance_content(content, Budget(work), seed=0)
        return content.groups[0], int(content.content_GD().max())


def measured(cost: str, n_ranks: int, n: int, seed: int) -> list[Row]:
    """Rows of all methods on one instance."""
    lengths = lengths_of(n, seed)
    dispatched = Dispatched(lengths, n_ranks)
    each = lengths if cost == "rows" else dispatched.batch.content[MODULE]
    paper = np.bincount(paper_ranks(each.tolist(), n_ranks), each).max()
    bound = dispatched.least if cost == "rows" else busiest_rank_bound(each, n_ranks)
    rows = []
    for method, seconds in WORK_S.items():
        start_s = time.perf_counter()
        find = dispatched.in_least_rows if cost == "rows" else dispatched.evened
        places, most = find(seconds * WORK_PER_S)
        took_s = time.perf_counter() - start_s
        ranks = np.empty(n, np.int64)
        ranks[places.piece_id] = places.rank
        of_paper = _up(paper) if cost == "rows" else paper
        rows.append(
            Row(
                cost, method, n_ranks, n, most / bound, of_paper / bound, took_s,
                *shares_crossing(lengths, ranks, n_ranks, seed),
            )
        )  # fmt: skip
    return rows


def shares_crossing(
    lengths: np.ndarray, ranks: np.ndarray, n_ranks: int, seed: int
) -> tuple[float, float]:
    """Share of an encoder's features that leave their node with and without renaming, where the
    LLM's ranks are balanced by other lengths of the same samples."""
    rng = np.random.default_rng(seed + 1)
    text = lengths // 4 + rng.integers(16, 2048, len(lengths))
    where = np.array(paper_ranks(text.tolist(), n_ranks))
    sample = np.arange(len(lengths))
    moved = rank_traffic(sample, ranks, lengths, sample, where, (n_ranks, n_ranks))
    devices, total = np.arange(n_ranks), max(float(moved.sum()), 1.0)
    names = best_permutation(local_tokens(moved, devices, devices, NODE))
    node_V = devices // NODE
    near, naive = (crossing_traffic(m, node_V).inter_node_amount for m in (moved[names], moved))
    return near / total, naive / total


def _up(tokens: float) -> int:
    return math.ceil(tokens / MULTIPLE) * MULTIPLE


def table(rows: Sequence[Row]) -> Table:
    names = ("cost", "method", "ranks", "samples", "/ bound", "paper", "ms", "across", "naive")
    out = Table(*names)
    for r in rows:
        ratios = (f"{v:.4f}" for v in (r.over_bound, r.paper_over_bound))
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
        for cost in COSTS:
            for row in measured(cost, n_ranks, n, args.seed):
                rows.append(row)
    Console().print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
