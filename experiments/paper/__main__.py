"""All results of DFLOP's, DIP's and OrchMLLM's papers in simulation, with a report.

Command:  python -m experiments.paper [--out DIR] [--only NAME ...] [--costs compiled]
          (or `make paper`)
Minutes:  about 17 on 2 cores; `--only policies` 12 more; `--costs compiled` minutes for each model
          the first time, with the extra gpu-compile
Writes:   DIR/paper.md (tables, assumptions), a picture for each result, DIR/timelines.html
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax

from experiments.paper import (
    ablation,
    asymmetry,
    cases,
    correction,
    dip,
    idle,
    orch,
    overheads,
    phases,
    policies,
    scaling,
    stages,
    throughput,
)
from experiments.paper.common import prepare, print_result, say
from experiments.paper.compiled import compile_all
from experiments.paper.report import draw, write_report, write_timelines
from experiments.paper.systems import COSTS, take_costs

EXPERIMENTS = {
    "throughput": throughput.run,
    "idle": idle.run,
    "stages": stages.run,
    "ablation": ablation.run,
    "asymmetry": asymmetry.run,
    "scaling": scaling.run,
    "correction": correction.run,
    "overheads": overheads.run,
    "dip": dip.run,
    "dip-ablation": dip.ablation,
    "orch": orch.run,
    "nodes": orch.nodes,
    "phases": phases.run,
    "policies": policies.run,
}
LONG = ("policies",)  # run only where named
# What each needs of tuned systems, and of policies.
OUTCOMES = {
    "throughput": throughput.KEYS,
    "idle": throughput.KEYS,
    "stages": throughput.KEYS,
    "ablation": ablation.KEYS,
    "asymmetry": asymmetry.KEYS,
    "scaling": scaling.KEYS,
}
ANSWERS = {
    "dip": dip.KEYS,
    "dip-ablation": dip.KEYS,
    "orch": orch.KEYS,
    "nodes": orch.KEYS,
    "phases": orch.KEYS,
    "policies": policies.KEYS,
    "throughput": throughput.PLANNED,
    "correction": correction.PLANNED,
    "overheads": throughput.PLANNED,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", default="runs/paper", metavar="DIR", help="default: runs/paper")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", default=[])
    parser.add_argument(
        "--costs",
        choices=COSTS,
        default=COSTS[0],
        help="from traced kernels (default) or from programs compiled for the devices",
    )
    args = parser.parse_args()
    take_costs(args.costs)
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device; a GPU's plugin wants one
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"error: {out}: cannot be written ({e.strerror}); choose another --out")
        return 2
    start_s = time.perf_counter()
    names = args.only or [name for name in EXPERIMENTS if name not in LONG]
    results = []
    if args.costs == "compiled":
        asked = [key for name in names for key in (*OUTCOMES.get(name, ()), *ANSWERS.get(name, ()))]
        try:
            compile_all(key[0] for key in asked)
        except ValueError as e:
            print(f"error: {e}")
            return 2
    prepare(key for name in names for key in OUTCOMES.get(name, ()))
    cases.prepare(key for name in names for key in ANSWERS.get(name, ()))
    for i, name in enumerate(names):
        say(f"{name} ({i + 1} of {len(names)})")
        found = EXPERIMENTS[name]()
        results.append(found)
        print_result(found)
        draw(found, out / f"{found.name}.png")
    tuned = any(name in OUTCOMES for name in names)
    page = write_timelines(throughput.SETUPS[0], out) if tuned else None
    minutes = (time.perf_counter() - start_s) / 60
    report = write_report(results, out, page, minutes)
    timelines = f"; timelines: {page}" if page else ""
    print(f"{report}: {len(results)} results in {minutes:.1f} minutes{timelines}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
