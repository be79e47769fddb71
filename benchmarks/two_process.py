"""Two processes pinned to a core each: what the planner's choice brings.

Command:  python benchmarks/two_process.py [--json FILE] [--steps N] [--rows NAME ...]
Minutes:  about 12 on 2 cores with nothing else running
Expected: `auto` beats both blind variants.

Real wall time: each process computes on a core of its own. All runs train the same model on the
same batches, and plan as any run does: the programs of a few plans are timed. Policies:
  blind pipeline   encoder on one process, LLM on the other, arrival order, padded
  blind data       the whole model on both, arrival order, padded: what most would do
  dflop            encoder and LLM apart, balanced microbatches in searched buckets
  orch             both modules on both processes, each balanced over them
  dip              half of both modules on each process, several encoder groups a microbatch
The planner's choice (`auto`) is the one that it predicts to be the fastest of the last three.
`loop` is orch with the LLM in two stages over both processes, the shard_map loop. The LLM of the
usual model has three layers, which two stages cannot share: `--rows orch loop --size tiny --batch
96` shows it. `--rows dflop orch dip --factory models.qwen3_5:build --size qwen3.5-nano --batch 16`
are runs of layers of two kinds; their losses stand in the JSON file.

Efficiency is the useful compute time of a step over what two cores offer in it: of every program
that ran, its calibrated seconds times the share of its tokens that was not padding, divided by
twice the step time (median over steps).
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
    BLIND,
    FACTORY,
    LOOP,
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
from dflop_jax.cli.launch import launch
from dflop_jax.report.compare import compare
from dflop_jax.report.reader import read_runs
from dflop_jax.train.run_context import build_model


def main() -> int:
    args = arguments()
    options = Options(args.steps, args.batch, args.size, args.factory)
    if args.worker:
        measure(args.rows, options, lambda rows: write_json(args.worker, result(rows)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
        command += ["--batch", str(args.batch), "--factory", args.factory]
        command += ["--worker", str(args.json or out), "--rows", *args.rows]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        file = args.json or out
        rows: dict[str, Row] = json.loads(file.read_text())["rows"] if file.exists() else {}
    if rows:  # of a run that failed, those before it
        show(rows)
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
    """What is written of the rows so far."""
    named = ("step_s", "efficiency")
    figures: dict[str, Any] = {
        "rows": rows,
        "policies": {n: {k: rows[n].get(k) for k in named} for n in POLICIES if n in rows},
    }
    if set(SEARCHED) <= rows.keys():
        figures["policies"]["auto"] = figures["policies"][chosen(rows)]
    return figures


def chosen(rows: dict[str, Row]) -> str:
    """The planner's choice."""
    return min(SEARCHED, key=lambda n: rows[n]["predicted_s"])


def show(rows: dict[str, Row]) -> None:
    console = Console(width=140)
    table = Table("row", "plan", "step ms (min - max)", "planned", "as scheduled",
                  "padded tokens %", "efficiency",
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
        )
    console.print(table)
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
        compare(read_runs([run_folder(n) for n in POLICIES]), picture)
        console.print(f"timelines under one time axis: {picture}")


if __name__ == "__main__":
    sys.exit(main())
