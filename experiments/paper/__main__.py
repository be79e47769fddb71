"""Simulate all results of the DFLOP, DIP and OrchMLLM papers and write a report.

Command:  python -m experiments.paper [--out DIR] [--only NAME ...]     (or `make paper`)
Minutes:  about 15 on 2 cores
Writes:   DIR/paper.md (tables, assumptions), a picture for each result, DIR/timelines.html
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from experiments.paper import correction, dflop, dip, headlines, orch, overheads
from experiments.paper.evaluation import Key, evaluate_all
from experiments.paper.report import draw_bars, write_report, write_timelines
from experiments.paper.results import Result, print_progress, print_result

# Result -> the function that makes it, and the evaluations that it needs.
EXPERIMENTS: dict[str, tuple[Callable[[], Result], Sequence[Key]]] = {
    "headlines": (headlines.compare_headlines, headlines.KEYS),
    "dflop": (dflop.compare_throughput, dflop.KEYS),
    "dip": (dip.compare_throughput, dip.KEYS),
    "orch": (orch.compare_throughput, orch.KEYS),
    "inputs": (headlines.compare_inputs, headlines.KEYS),
    "idle": (dflop.compare_idle, dflop.KEYS),
    "ablation": (dflop.run_ablation, dflop.ABLATION_KEYS),
    "scaling": (dflop.compare_nodes, dflop.SCALING_KEYS),
    "correction": (correction.compare_corrections, correction.KEYS),
    "overheads": (overheads.compare_overheads, overheads.KEYS),
    "nodes": (orch.compare_node_traffic, orch.KEYS),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", default="runs/paper", metavar="DIR", help="default: runs/paper")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", default=[])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # without devices a GPU plugin fails
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"error: cannot write {out} ({e.strerror}); choose another --out")
        return 2
    start_s = time.perf_counter()
    names = args.only or list(EXPERIMENTS)
    keys = [key for name in names for key in EXPERIMENTS[name][1]]
    evaluate_all(keys)
    results = []
    for i, name in enumerate(names):
        print_progress(f"{name} ({i + 1} of {len(names)})")
        result = EXPERIMENTS[name][0]()
        results.append(result)
        print_result(result)
        if result.bars:
            draw_bars(result, out / f"{result.name}.png")
    timed = {(dflop.SETUPS[0], system) for system in dflop.SHOWN_SYSTEMS} <= set(keys)
    page = write_timelines(dflop.SETUPS[0], out) if timed else None
    minutes = (time.perf_counter() - start_s) / 60
    report = write_report(results, out, page, minutes)
    timelines = f"; timelines: {page}" if page else ""
    print(f"{report}: {len(results)} results in {minutes:.1f} minutes{timelines}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
