"""All results of the paper in simulation, with a report.

Command:  python -m experiments.paper [--out DIR] [--only NAME ...]     (or `make paper`)
Minutes:  about 10 on 2 cores
Writes:   DIR/paper.md (tables, assumptions), a picture for each result, DIR/timelines.html
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.paper import (
    ablation,
    asymmetry,
    correction,
    idle,
    overheads,
    scaling,
    stages,
    throughput,
)
from experiments.paper.common import prepare, print_result, say
from experiments.paper.report import draw, write_report, write_timelines

EXPERIMENTS = {
    "throughput": throughput.run,
    "idle": idle.run,
    "stages": stages.run,
    "ablation": ablation.run,
    "asymmetry": asymmetry.run,
    "scaling": scaling.run,
    "correction": correction.run,
    "overheads": overheads.run,
}


def _needed(module: str, names: Sequence[str]) -> bool:
    """Whether the outcomes of an experiment's file are wanted by any of the named ones."""
    own = module.rpartition(".")[2]
    return own in names or (own == "throughput" and bool({"idle", "stages"} & set(names)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", default="runs/paper", metavar="DIR", help="default: runs/paper")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", default=[])
    args = parser.parse_args()
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"error: {out}: cannot be written ({e.strerror}); choose another --out")
        return 2
    start_s = time.perf_counter()
    names = args.only or list(EXPERIMENTS)
    results = []
    keys = {m: m.KEYS for m in (throughput, ablation, asymmetry, scaling)}
    prepare(k for m, each in keys.items() if _needed(m.__name__, names) for k in each)
    for i, name in enumerate(names):
        say(f"{name} ({i + 1} of {len(names)})")
        found = EXPERIMENTS[name]()
        results.append(found)
        print_result(found)
        draw(found, out / f"{found.name}.png")
    page = write_timelines(throughput.SETUPS[0], out)
    minutes = (time.perf_counter() - start_s) / 60
    report = write_report(results, out, page, minutes)
    print(f"{report}: {len(results)} results in {minutes:.1f} minutes; timelines: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
