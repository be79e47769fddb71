"""Two processes pinned to a core each: what asynchronous dispatch and the planner's choice bring.

Command:  python benchmarks/two_process.py [--json FILE] [--steps N] [--rows NAME ...]
Minutes:  about 12 on 2 cores with nothing else running
Expected: dispatch without waiting beats awaiting every task; `auto` beats both blind variants; the
          order by prices is no slower than the textbook's; kept activations are at least 1.15 times
          as fast as recomputed ones.

Real wall time: each process computes on a core of its own. All runs train the same model on the
same batches, and plan as any run does: the programs of a few plans are timed. Policies:
  blind pipeline   encoder on one process, LLM on the other, arrival order, padded
  blind data       the whole model on both, arrival order, padded: what most would do
  dflop            encoder and LLM apart, balanced microbatches in searched buckets
  orch             both modules on both processes, each balanced over them
  dip              half of both modules on each process, several encoder groups a microbatch
The planner's choice (`auto`) is the one that it predicts to be the fastest of the last three.
`dflop` runs three times more: with every task awaited by both processes before the next is
dispatched, and with its schedules' tasks in either order that the scheduler chooses between: list
scheduling by textbook durations (a backward is two forwards), and by the prices.
`loop` is orch with the LLM in two stages over both processes, the shard_map loop. What its programs
take over those of orch, a token, stands beside its ticks over those that are needed. The LLM of the
usual model has three layers, which two stages cannot share: `--rows orch loop --size tiny --batch
96` shows it. `--rows dflop orch dip --factory models.qwen3_5:build --size qwen3.5-nano --batch 16`
are runs of layers of two kinds; their losses stand in the JSON file.
`kept` and `recomputed` train another model, whose encoder does half of the work, encoder and LLM
apart by one plan: backward is given what forward computed, or computes it again.

Efficiency is the useful compute time of a step over what two cores offer in it: of every program
that ran, its calibrated seconds times the share of its tokens that was not padding, divided by
twice the step time (median over steps). `best rate` is stricter: the batch's tokens of every module
at the least seconds of any policy's programs, so the same work for every policy, and attention over
long rows and programs of unfavourable size count as waste.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table
from two_process_runs import (
    AWAITED,
    BLIND,
    FACTORY,
    LOOP,
    ORDERS,
    PAIR,
    PAIR_SIZE,
    POLICIES,
    ROWS,
    RUNS,
    SEARCHED,
    WARMUP,
    Options,
    Row,
    measure,
    run_folder,
)

from dflop_jax import ModelConfig
from dflop_jax.cluster.launch import launch
from dflop_jax.report.compare import compare
from dflop_jax.train.prepare import build_model


def main() -> int:
    args = arguments()
    options = Options(args.steps, args.batch, args.size, args.pair_size, args.factory)
    if args.worker:
        measure(args.rows, options, lambda rows: write_json(args.worker, result(rows)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
        command += ["--pair-size", args.pair_size, "--batch", str(args.batch)]
        command += ["--factory", args.factory]
        command += ["--worker", str(args.json or out), "--rows", *args.rows]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        file = args.json or out
        rows: dict[str, Row] = json.loads(file.read_text())["rows"] if file.exists() else {}
    if rows:  # of a run that failed, those before it
        show(rows, result(rows))
    return code


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default 12)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument(
        "--size", default="tiny+tiny-short", help="of the model; nano for a quick look"
    )
    parser.add_argument(
        "--factory", default=FACTORY, help="of another model than LLaVA, at native resolution"
    )
    parser.add_argument(
        "--pair-size", default=PAIR_SIZE, help=f"of the model of {' and '.join(PAIR)}"
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", choices=ROWS, default=None,
        help=f"only some of: {', '.join(ROWS)}",
    )  # fmt: skip
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be above {WARMUP}, which only warm up")
    halves = build_model(ModelConfig(args.factory, args.size)).modules["llm"].n_layers % 2 == 0
    if not halves and LOOP in (args.rows or ()):
        why = "needs an LLM whose layers two stages can share, as --size tiny has"
        parser.error(f"--rows {LOOP} {why}")
    args.rows = args.rows or [row for row in ROWS if halves or row != LOOP]
    return args


def result(rows: dict[str, Row]) -> dict[str, Any]:
    """What is written of the rows so far; `best_rate` is there when all have run."""
    named = ("step_s", "efficiency", "best_rate")
    figures: dict[str, Any] = {
        "rows": rows,
        "policies": {n: {k: rows[n].get(k) for k in named} for n in POLICIES if n in rows},
        "orders": {n.split()[0]: {k: rows[n][k] for k in ("step_s", "spread_s")}
                   for n in ORDERS if n in rows},
    }  # fmt: skip
    if set(SEARCHED) <= rows.keys():
        figures["policies"]["auto"] = figures["policies"][chosen(rows)]
    for key, slow, fast in (
        ("async_over_awaited", AWAITED, "dflop"),
        ("kept_over_recomputed", "recomputed", "kept"),
    ):
        if {slow, fast} <= rows.keys():
            figures[key] = rows[slow]["step_s"] / rows[fast]["step_s"]
    return figures


def chosen(rows: dict[str, Row]) -> str:
    """The planner's choice."""
    return min(SEARCHED, key=lambda n: rows[n]["predicted_s"])


def show(rows: dict[str, Row], figures: dict[str, Any]) -> None:
    console = Console(width=140)
    table = Table("row", "plan", "step ms (min - max)", "planned", "as scheduled",
                  "padded tokens %", "efficiency", "best rate",
                  title="two processes, a core each")  # fmt: skip
    for name, r in rows.items():
        low, high = r["spread_s"]
        table.add_row(
            name,
            r["plan"],
            f"{1e3 * r['step_s']:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f})",
            f"{1e3 * r['predicted_s']:.0f}",
            f"{1e3 * r['scheduled_s']:.0f}",
            ", ".join(f"{100 * p:.1f}" for p in r["padding"].values()),
            f"{r['efficiency']:.3f}",
            f"{r['best_rate']:.3f}" if "best_rate" in r else "",
        )
    console.print(table)
    for key, words in (
        ("async_over_awaited", "asynchronous over awaited dispatch (dflop)"),
        ("kept_over_recomputed", "kept over recomputed activations (encoder half of the work)"),
    ):
        if key in figures:
            console.print(f"{words}: {figures[key]:.2f} x")
    if "over_needed" in rows.get(LOOP, {}):
        planned, seen = (rows[LOOP]["over_needed"][k] for k in ("planned", "measured"))
        console.print(f"loop: {planned:.3f} ticks for one that is needed, seconds {seen:.3f} times")
    if set(ORDERS) <= rows.keys():
        textbook_s, priced_s = (rows[n]["step_s"] for n in ORDERS)
        console.print(f"order by prices over the textbook's (dflop): {priced_s / textbook_s:.3f}")
    if set(POLICIES) <= rows.keys():
        name = chosen(rows)
        best_blind = min(BLIND, key=lambda n: rows[n]["step_s"])
        step_s = rows[name]["step_s"]
        console.print(
            f"the planner chooses {name}: {rows['blind pipeline']['step_s'] / step_s:.2f} x the "
            f"blind pipeline, {rows[best_blind]['step_s'] / step_s:.2f} x the best blind variant "
            f"({best_blind})"
        )
        picture = RUNS / "compare.png"
        compare([run_folder(n) for n in POLICIES], picture)
        console.print(f"timelines under one time axis: {picture}")


if __name__ == "__main__":
    sys.exit(main())
