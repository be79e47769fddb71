"""The placement that runs execute, against simpler ones, on traces of real samples.

Command:  python benchmarks/schedule_run.py --json schedule_run.json
Minutes:  about 15; --quick takes one
Expected: `run` is best or equal in every row; its content alone is within 1.05 of the bound
          (median) where plain first fit stands at 1.25 and more; its busiest rank is at most 1.01
          of the mean one (median; one sample that is more than a rank's share forbids it);
          8,192 samples over 256 ranks take it less than a second of a core

Global batches of 128 to 512 samples over 8 to 64 data ranks, and of 8,192 over 256, of a 7B LLM
with rows of up to 8,192 tokens, with images and text, and with clips as well. Shapes are chosen by
the project. A group costs what its static shape costs and, on each rank, what attention adds for
its pieces. Columns:

- static: seconds of all executed shapes over those of the tokens at the best price of a shape
  (the fractional volume bound);
- busiest: static and content of the data rank with most, over the sum of both bounds;
- content: the content of that column alone, over the largest of the mean and the largest sample;
- rank / mean: static and content of the busiest data rank over those of the mean one;
- longest: the same, if it held no more than its share or the longest sample alone: no less is
  possible;
- step: what the simulator sees, where every group waits for its own busiest rank;
- CPU: processor seconds of the method.

The methods are described in `schedule_methods.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table
from schedule_methods import (
    METHODS,
    PAIR_S,
    TRACES,
    Case,
    plan_of,
    problem_of,
    seconds_of,
    step_seconds,
    trace_loads,
    whole_modules,
)

from dflop_jax.records import Load, Plan, token_pairs
from dflop_jax.schedule import choose_buckets

SIZES = ((128, 8), (128, 16), (256, 16), (256, 32), (512, 32), (512, 64), (8192, 256))
QUICK_SIZES = ((128, 8), (256, 32))
ROW_TOKENS = 8192
SEEDS = 3


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
    busiest_over_mean: float
    longest_over_mean: float
    step_s: float
    started: bool
    won: bool
    gap: float
    work: int
    elapsed_s: float
    cpu_s: float


def measured(case: Case, data: str, seed: int, method: str) -> Row:
    """The columns of one method, read off the groups that it would execute."""
    begun_s = time.process_time()
    schedule = METHODS[method](case)
    cpu_s = time.process_time() - begun_s
    tokens, ranks, shapes = case.tokens, case.ranks, case.plan.layout.shapes("llm")
    held = sorted(p for g in schedule.groups for p in g.pieces.piece_id.tolist())
    assert held == list(range(len(tokens))), f"{method} loses or repeats samples"
    static_s = sum(seconds_of(g.shape) for g in schedule.groups)
    content_D = np.zeros(ranks)
    for g in schedule.groups:
        length_P = np.array(tokens)[g.pieces.piece_id]
        assert (g.pieces.row_offsets(length_P) + length_P <= g.shape.tokens).all()
        np.add.at(content_D, g.pieces.rank, token_pairs(length_P))
    static_bound_s = sum(tokens) * min(seconds_of(s) / (s.size * ranks) for s in shapes)
    content = token_pairs(np.array(tokens, float))
    content_bound = max(content.sum() / ranks, content.max())
    busiest_s = static_s + PAIR_S * float(content_D.max())
    return Row(
        data,
        len(tokens),
        ranks,
        seed,
        method,
        static_s / static_bound_s,
        busiest_s / (static_bound_s + PAIR_S * content_bound),
        float(content_D.max()) / content_bound,
        (static_s + PAIR_S * content_D.max()) / (static_s + PAIR_S * content_D.mean()),
        (static_s + PAIR_S * content_bound) / (static_s + PAIR_S * content.sum() / ranks),
        step_seconds(schedule.groups),
        schedule.integer_bound_s > 0,
        schedule.made_by == "integer",
        schedule.gap,
        schedule.work,
        schedule.elapsed_s,
        cpu_s,
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


COLUMNS = {
    "static": "static_over_bound",
    "busiest": "busiest_over_bound",
    "content": "content_over_bound",
    "rank / mean": "busiest_over_mean",
    "longest": "longest_over_mean",
    "step s": "step_s",
    "CPU s": "cpu_s",
}


def table(rows: Sequence[Row]) -> Table:
    """Medians over the seeds."""
    out = Table("data", "samples x ranks", "method", *COLUMNS, title="schedules of a batch")
    for data, samples, ranks in dict.fromkeys((r.data, r.samples, r.ranks) for r in rows):
        for name in METHODS:
            some = [
                [getattr(r, column) for column in COLUMNS.values()]
                for r in rows
                if (r.data, r.samples, r.ranks, r.method) == (data, samples, ranks, name)
            ]
            cells = [f"{value:.3f}" for value in np.median(some, axis=0)]
            out.add_row(data, f"{samples} x {ranks}", name, *cells)
        out.add_section()
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
        some = [r for r in rows if r.method == name]
        figures = {
            "busiest over mean": [r.busiest_over_mean for r in some],
            "over what the longest sample forces": [
                r.busiest_over_mean / r.longest_over_mean for r in some
            ],
        }
        shown = [f"{k} {np.median(v):.4f} (worst {max(v):.4f})" for k, v in figures.items()]
        print(f"{name}: {', '.join(shown)}")
    for name in METHODS:
        same = {(r.data, r.samples, r.ranks, r.seed): r for r in rows if r.method == name}
        runs = {(r.data, r.samples, r.ranks, r.seed): r for r in rows if r.method == "run"}
        better = sum(runs[k].busiest_over_bound <= r.busiest_over_bound * (1 + 1e-9)
                     for k, r in same.items())  # fmt: skip
        print(f"`run` best or equal to {name} (busiest rank): {better} of {len(same)}")


if __name__ == "__main__":
    main()
