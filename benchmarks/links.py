"""What crosses links takes: collectives and sends, as a run measures them before it plans.

Command:  python benchmarks/links.py [--json FILE] [--pretended N]
Minutes:  under 1
Expected: a row for each collective and size: two processes pinned to a core each are two nodes,
          joined by gloo over this host's loopback; `--pretended N` devices of one process share
          memory and cores, and show the format only

`seconds` are those of one call among several that follow each other without being awaited, the
slower process counts; `gib_s` is bytes over seconds. `across`: between nodes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax import Config, ModelConfig, PlanConfig
from dflop_jax.cluster.launch import launch
from dflop_jax.hardware import GIB
from dflop_jax.profile.links import LinkTiming, node_size
from dflop_jax.train.prepare import set_up
from dflop_jax.train.profiling import timed_links


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    parser.add_argument("--pretended", type=int, default=0, help="devices of one process instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker or args.pretended:
        measure(args.json, args.pretended)
        return 0
    command = ["python", __file__, "--worker"]
    command += ["--json", str(args.json)] if args.json else []
    return launch(command, 2, devices_per_process=1, pin=True).exit_code


def measure(json_file: Path | None, pretended: int) -> None:
    """Time the links of this run's devices; process 0 shows and writes them."""
    place = set_up(Config(model=ModelConfig(size="nano"), plan=PlanConfig(devices=pretended)))
    timings: list[LinkTiming] = timed_links(place, node_size(place.devices, place.hosts))
    place.peers.close()
    if not place.peers.is_hub:
        return
    rows = Rows(json_file, as_rows)
    table = Table("collective", "bytes", "ranks", "across", "ms", "GiB/s")
    for t in timings:
        row = asdict(t) | {"gib_s": t.n_bytes / t.seconds / GIB}
        rows.append({"bytes": row.pop("n_bytes"), **row})
        table.add_row(t.collective, f"{t.n_bytes:,}", str(t.ranks), "yes" if t.across else "no",
                      f"{1e3 * t.seconds:.3f}", f"{t.n_bytes / t.seconds / GIB:.3f}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
