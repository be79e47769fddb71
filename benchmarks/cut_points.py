"""Where a module with layers of two kinds is cut: by the number of layers, and by their seconds.

Command:  python benchmarks/cut_points.py [--json FILE]
Minutes:  none to speak of
Expected: by seconds the slowest of 5 segments is never further above their mean than by number

32 layers, three of one kind and one of another in turn, with an exit that costs what some layers
do. What the layer of the second kind costs is in layers of the first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from dflop_jax.plan.placement import RunCosts, split_layers  # noqa: E402

LAYERS, PERIOD, PARTS = 32, 4, 5
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 6.0)
EXITS = (0.0, 2.0)


def over_mean(runs: list[tuple[int, int]], costs: RunCosts) -> float:
    """Cost of the dearest run over the mean one's."""
    each = [sum(costs.layers[a:b]) for a, b in runs]
    each[0] += costs.entry
    each[-1] += costs.exit
    return max(each) * len(each) / sum(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    rows = Rows(parser.parse_args().json)
    table = Table("second kind / first", "exit", "layers by seconds", "by number", "by seconds")
    for exit_cost in EXITS:
        for ratio in RATIOS:
            layers = [ratio if (i + 1) % PERIOD == 0 else 1.0 for i in range(LAYERS)]
            mean = sum(layers) / LAYERS
            costs = RunCosts(0.0, exit_cost / mean, tuple(c / mean for c in layers))
            by_number = split_layers(LAYERS, PARTS, RunCosts(0.0, costs.exit))
            by_seconds = split_layers(LAYERS, PARTS, costs)
            row = {
                "ratio": ratio,
                "exit": exit_cost,
                "cuts_by_seconds": [b for _, b in by_seconds],
                "number_slowest_over_mean": over_mean(by_number, costs),
                "seconds_slowest_over_mean": over_mean(by_seconds, costs),
            }
            rows.append(row)
            sizes = " ".join(str(b - a) for a, b in by_seconds)
            shown = (f"{row[k]:.3f}" for k in list(row)[3:])
            table.add_row(f"{ratio:g}", f"{exit_cost:g}", sizes, *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
