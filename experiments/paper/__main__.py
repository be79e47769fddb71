"""All results of DFLOP's, DIP's and OrchMLLM's papers in simulation, with a report.

Command:  python -m experiments.paper [--out DIR] [--only NAME ...]     (or `make paper`)
Minutes:  about 15 on 2 cores; `--only policies` 12 more
Writes:   DIR/paper.md (tables, assumptions), a picture for each result, DIR/timelines.html
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from experiments.paper import correction, dflop, dip, orch, overheads, policies, throughput
from experiments.paper.answers import Key, prepare
from experiments.paper.report import draw, write_report, write_timelines
from experiments.paper.results import Result, print_result, say

# Each result, and the answers that it asks for.
EXPERIMENTS: dict[str, tuple[Callable[[], Result], Sequence[Key]]] = {
    "throughput": (throughput.throughput, throughput.KEYS),
    "hours": (throughput.epochs, throughput.KEYS),
    "idle": (dflop.idle, dflop.COMPARED),
    "stages": (dflop.stages, dflop.COMPARED),
    "ablation": (dflop.ablation, dflop.PARTS_KEYS),
    "asymmetry": (dflop.asymmetry, dflop.ASYMMETRY_KEYS),
    "scaling": (dflop.scaling, dflop.SCALING_KEYS),
    "correction": (correction.run, correction.KEYS),
    "overheads": (overheads.run, overheads.KEYS),
    "dip": (dip.run, dip.KEYS),
    "dip-ablation": (dip.ablation, dip.KEYS),
    "orch": (orch.run, orch.KEYS),
    "nodes": (orch.nodes, orch.KEYS),
    "policies": (policies.run, policies.KEYS),
}
LONG = ("policies",)  # run only where named


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", default="runs/paper", metavar="DIR", help="default: runs/paper")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", default=[])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device; a GPU's plugin wants one
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"error: {out}: cannot be written ({e.strerror}); choose another --out")
        return 2
    start_s = time.perf_counter()
    names = args.only or [name for name in EXPERIMENTS if name not in LONG]
    keys = [key for name in names for key in EXPERIMENTS[name][1]]
    prepare(keys)
    results = []
    for i, name in enumerate(names):
        say(f"{name} ({i + 1} of {len(names)})")
        result = EXPERIMENTS[name][0]()
        results.append(result)
        print_result(result)
        if result.bars:
            draw(result, out / f"{result.name}.png")
    timed = set(dflop.COMPARED[: len(dflop.SHOWN)]) <= set(keys)
    page = write_timelines(dflop.SETUPS[0], out) if timed else None
    minutes = (time.perf_counter() - start_s) / 60
    report = write_report(results, out, page, minutes)
    timelines = f"; timelines: {page}" if page else ""
    print(f"{report}: {len(results)} results in {minutes:.1f} minutes{timelines}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
