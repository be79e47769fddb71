"""The placement that runs execute, against simpler ones, on traces of real samples.

Command:  python benchmarks/schedule_run.py --json schedule_run.json
Minutes:  about 10; --quick takes one
Expected: `run` is best or equal in every row; its content alone is within 1.05 of the bound
          (median) where plain first fit stands at 1.25 and more

Global batches of 128 to 512 samples over 8 to 64 data ranks of a 7B LLM with rows of up to 8,192
tokens, with images and text, and with clips as well. Shapes are chosen by the project. A group
costs what its static shape costs and, on each rank, what attention adds for its pieces. Columns:

- static: seconds of all executed shapes over those of the tokens at the best price of a shape
  (the fractional volume bound);
- busiest: static and content of the data rank with most, over the sum of both bounds;
- content: the content of that column alone, over the largest of the mean and the largest sample;
- step: what the simulator sees, where every group waits for its own busiest rank.

`run` is `schedule_batch`, which the worker calls, within the work that a step of 1 s hides;
`greedy` is its answer without work; `previous` packs as before 2026-11-22 (greedy and local search
for the cheapest buckets, content not looked at); LPT deals the samples, longest first, to the rank
of least content; `first fit` takes them as they arrive.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from schedule_data import TRACES, trace_loads  # noqa: E402
from shape_problems import problem_of, whole_modules  # noqa: E402

from dflop_jax.records import (  # noqa: E402
    BACKWARD,
    Bucket,
    Group,
    Load,
    PiecePlaces,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    Scheduling,
    Shape,
    pairs,
)
from dflop_jax.schedule import (  # noqa: E402
    WORK_PER_S,
    choose_buckets,
    schedule_batch,
)
from dflop_jax.sim.pipeline import with_order  # noqa: E402

SIZES = ((128, 8), (128, 16), (256, 16), (256, 32), (512, 32), (512, 64))
QUICK_SIZES = ((128, 8), (256, 32))
STEP_S = 1.0
ROW_TOKENS = 8192
SEEDS = 3

# Qwen2.5 7B: forward FLOPs of a token and of a pair of tokens of one piece (causal).
HIDDEN, LAYERS, KV_WIDTH, MLP, VOCABULARY = 3584, 28, 512, 18944, 152064
TOKEN_FLOPS = 2 * LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP)
TOKEN_FLOPS += 2 * HIDDEN * VOCABULARY
PAIR_FLOPS = 2 * LAYERS * HIDDEN
FLOPS_PER_S = 8 * 4e14  # of the tensor-parallel devices of a rank
CALL_S = 1e-3  # launching a group


@dataclass(frozen=True)
class Row:
    """One method on one global batch."""

    data: str
    samples: int
    ranks: int
    seed: int
    method: str
    static_over_bound: float
    busiest_over_bound: float
    content_over_bound: float
    step_s: float
    work: int
    elapsed_s: float


def seconds_of(shape: Shape) -> float:
    """Static seconds of a group, forward and backward."""
    return 3 * TOKEN_FLOPS * shape.size / FLOPS_PER_S + CALL_S


PAIR_S = 3.5 * PAIR_FLOPS / FLOPS_PER_S  # backward of a flash kernel takes 2.5 forwards


def plan_of(buckets: Sequence[Bucket], ranks: int) -> Plan:
    """The LLM alone on its data ranks, with the work that a step of 1 s hides."""
    layout = replace(whole_modules({"llm": ranks}), buckets=tuple(buckets))
    return Plan("dflop", layout, Scheduling(work_budget=int(STEP_S * WORK_PER_S)))


def prices_of(plan: Plan) -> Prices:
    return Prices(
        {
            ProgramId("llm", s, BACKWARD): Price(seconds_of(s), (PAIR_S,))
            for s in plan.layout.shapes("llm")
        }
    )


@dataclass(frozen=True)
class Case:
    """A global batch under a plan."""

    loads: tuple[Load, ...]
    plan: Plan

    @property
    def prices(self) -> Prices:
        return prices_of(self.plan)

    @property
    def ranks(self) -> int:
        return self.plan.layout.data_ranks("llm")

    @property
    def tokens(self) -> list[int]:
        return [load.tokens("llm") for load in self.loads]


def by_run(case: Case) -> Schedule:
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"])


def by_greedy(case: Case) -> Schedule:
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"], work=0)


def by_previous(case: Case) -> Schedule:
    """The cheapest buckets that hold the samples, without a look at their content."""
    blind = Prices({k: Price(p.static_s) for k, p in case.prices.programs.items()})
    return schedule_batch(case.loads, case.plan, blind, ["llm"])


def by_lpt(case: Case) -> Schedule:
    """Longest first to the rank of least content with room in one of its rows; a row of every rank
    is opened where none has."""
    return in_rows(case, np.argsort(-np.array(case.tokens), kind="stable").tolist(), lightest)


def by_first_fit(case: Case) -> Schedule:
    """Samples as they arrive to the first row with room."""
    return in_rows(case, range(len(case.loads)), lambda content_D: np.zeros_like(content_D))


def lightest(content_D: np.ndarray) -> np.ndarray:
    return content_D


def in_rows(case: Case, order: Sequence[int], key: Callable[[np.ndarray], np.ndarray]) -> Schedule:
    """Samples to rows of the longest bucket, the rank of least `key` first; every group then in the
    cheapest bucket that holds it."""
    tokens, ranks = case.tokens, case.ranks
    main = max(case.plan.layout.shapes("llm"), key=lambda s: (s.tokens, s.rows))
    rows: list[list[list[int]]] = [[] for _ in range(ranks)]  # of each rank, samples by row
    content_D = np.zeros(ranks)
    for i in order:
        fits = [
            (key(content_D)[d], r, d)
            for d in range(ranks)
            for r, row in enumerate(rows[d])
            if sum(tokens[k] for k in row) + tokens[i] <= main.tokens
        ]
        if not fits:
            for d in range(ranks):
                rows[d].append([])
            fits = [(key(content_D)[d], len(rows[d]) - 1, d) for d in range(ranks)]
        _, r, d = min(fits)
        rows[d][r].append(i)
        content_D[d] += pairs(tokens[i])
    groups = []
    for lo in range(0, len(rows[0]), main.rows):
        part = [[tuple(row) for row in rank[lo : lo + main.rows]] for rank in rows]
        longest = max(sum(tokens[i] for i in row) for rank in part for row in rank)
        n_rows = max(len(rank) for rank in part)
        able = [
            s for s in case.plan.layout.shapes("llm") if s.tokens >= longest and s.rows >= n_rows
        ]
        shape = min(able, key=lambda s: (s.size, s))
        places = [
            (i, 0, d, r) for d, rank in enumerate(part) for r, row in enumerate(rank) for i in row
        ]
        pieces = PiecePlaces(np.array(places, np.int64).reshape(-1, 4).T)
        content = max(sum(pairs(tokens[i]) for row in rank for i in row) for rank in part)
        groups.append(Group("llm", shape, (), (content,), pieces))
    return with_order(case.plan, Schedule(0, tuple(groups)), case.prices, ["llm"])[0]


METHODS: dict[str, Callable[[Case], Schedule]] = {
    "run": by_run,
    "greedy": by_greedy,
    "previous": by_previous,
    "LPT": by_lpt,
    "first fit": by_first_fit,
}


def measured(case: Case, data: str, seed: int, method: str) -> Row:
    """The columns of one method, read off the groups that it would execute."""
    schedule = METHODS[method](case)
    tokens, ranks, shapes = case.tokens, case.ranks, case.plan.layout.shapes("llm")
    held = sorted(p for g in schedule.groups for p in g.pieces.piece.tolist())
    assert held == list(range(len(tokens))), f"{method} loses or repeats samples"
    static_s = sum(seconds_of(g.shape) for g in schedule.groups)
    content_D = np.zeros(ranks)
    for g in schedule.groups:
        length_P = np.array(tokens)[g.pieces.piece]
        assert (g.pieces.before(length_P) + length_P <= g.shape.tokens).all()
        np.add.at(content_D, g.pieces.rank, pairs(length_P))
    static_bound_s = sum(tokens) * min(seconds_of(s) / (s.size * ranks) for s in shapes)
    content = pairs(np.array(tokens, float))
    content_bound = max(content.sum() / ranks, content.max())
    busiest_s = static_s + PAIR_S * float(content_D.max())
    step_s = static_s + PAIR_S * sum(g.content[0] for g in schedule.groups)
    return Row(
        data,
        len(tokens),
        ranks,
        seed,
        method,
        static_s / static_bound_s,
        busiest_s / (static_bound_s + PAIR_S * content_bound),
        float(content_D.max()) / content_bound,
        step_s,
        schedule.work,
        schedule.elapsed_s,
    )


def chosen_plan(loads: Sequence[Load], samples: int, ranks: int, effort: str) -> Plan:
    """The plan of the shapes that the project chooses for this data."""
    problem = problem_of(
        whole_modules({"llm": ranks}),
        lambda b: {m: seconds_of(s) for m, s in b.shapes},
        samples,
        max_tokens={"llm": ROW_TOKENS},
    )
    return plan_of(choose_buckets(loads, problem, effort=effort).buckets, ranks)


def rows_of(
    folder: Path, sizes: Sequence[tuple[int, int]], seeds: int, effort: str
) -> Iterator[Row]:
    for data in ("images and text", "with clips"):
        loads = trace_loads(folder, clips=data == "with clips", most_tokens=ROW_TOKENS)
        for samples, ranks in sizes:
            rng = np.random.default_rng(samples + ranks)
            seen = [loads[i] for i in rng.permutation(len(loads))[: len(loads) // 2]]
            plan = chosen_plan(seen, samples, ranks, effort)
            for seed in range(seeds):
                pick = np.random.default_rng(1000 + seed).choice(
                    len(seen), samples, replace=samples > len(seen)
                )
                case = Case(tuple(seen[i] for i in pick), plan)
                yield from (measured(case, data, seed, name) for name in METHODS)


def table(rows: Sequence[Row]) -> Table:
    """Medians over the seeds: static, busiest, content; and seconds of the simulated step."""
    out = Table("data", "samples x ranks", *METHODS, title="static / busiest / content, step s")
    for data, samples, ranks in dict.fromkeys((r.data, r.samples, r.ranks) for r in rows):
        cells = []
        for name in METHODS:
            some = [
                (r.static_over_bound, r.busiest_over_bound, r.content_over_bound, r.step_s)
                for r in rows
                if (r.data, r.samples, r.ranks, r.method) == (data, samples, ranks, name)
            ]
            static, busiest, content, step_s = np.median(some, axis=0)
            cells.append(f"{static:.3f} {busiest:.3f} {content:.3f}, {step_s:.3f}")
        out.add_row(data, f"{samples} x {ranks}", *cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", type=Path, default=TRACES, help="folder of traces (*.jsonl)")
    add_json(parser)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="batches of each size")
    parser.add_argument("--sizes", nargs="+", help="samples x ranks, as 512x32")
    parser.add_argument("--effort", choices=("quick", "full"), default="full", help="of the shapes")
    parser.add_argument("--quick", action="store_true", help="two sizes, one batch each")
    args = parser.parse_args()
    rows = Rows(args.json, as_rows)
    try:
        sizes: Sequence[tuple[int, int]] = QUICK_SIZES if args.quick else SIZES
        if args.sizes:
            sizes = [(int(n), int(d)) for n, d in (text.split("x") for text in args.sizes)]
        effort = "quick" if args.quick else args.effort
        for row in rows_of(args.shapes, sizes, 1 if args.quick else args.seeds, effort):
            rows.append(row)
    except ValueError as error:
        parser.error(str(error))
    Console(width=None if sys.stdout.isatty() else 200).print(table(rows))
    content = [r.content_over_bound for r in rows if r.method == "run"]
    print(f"content of `run` over its bound, median: {np.median(content):.4f}")
    for name in METHODS:
        same = {(r.data, r.samples, r.ranks, r.seed): r for r in rows if r.method == name}
        runs = {(r.data, r.samples, r.ranks, r.seed): r for r in rows if r.method == "run"}
        better = sum(runs[k].busiest_over_bound <= r.busiest_over_bound * (1 + 1e-9)
                     for k, r in same.items())  # fmt: skip
        print(f"`run` best or equal to {name} (busiest rank): {better} of {len(same)}")


if __name__ == "__main__":
    main()
