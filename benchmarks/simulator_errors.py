"""What `benchmarks/simulator.py` reports of its rows: errors by source, set-up and run."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

TARGETS = {"median_abs_error": 0.05, "worst_abs_error": 0.12}


def errors(rows: list[dict[str, Any]], source: str = "calibrated_s") -> dict[str, float]:
    """Median and worst error of predictions."""
    each = [abs(error(r, source)) for r in rows]
    return {"median_abs_error": statistics.median(each), "worst_abs_error": max(each)}


def by_run(rows: list[dict[str, Any]], source: str = "calibrated_s") -> list[dict[str, float]]:
    """Errors of every run alone."""
    runs = sorted({r.get("run", 0) for r in rows})
    return [errors([r for r in rows if r.get("run", 0) == i], source) for i in runs]


def by_set_up(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of every set-up that was measured."""
    return {
        k: [r for r in rows if r["set_up"] == k] for k in dict.fromkeys(r["set_up"] for r in rows)
    }


def error(row: dict[str, Any], source: str = "calibrated_s") -> float:
    """Predicted over measured, less 1."""
    return row[source] / row["measured_s"] - 1


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `--json` writes: errors over all schedules, per set-up, and the rows."""
    parts = by_set_up(rows)
    return {
        **errors(rows),
        "calibrated": errors(rows) | {"runs": by_run(rows)},
        "chosen_by": errors(rows, "chosen_by_s") | {"runs": by_run(rows, "chosen_by_s")},
        "layers": errors(rows, "layers_s") | {"runs": by_run(rows, "layers_s")},
        "targets": TARGETS,
        "set_ups": {
            k: errors(part)
            | {"chosen_by": errors(part, "chosen_by_s"), "layers": errors(part, "layers_s")}
            for k, part in parts.items()
        },
        "rows": rows,
    }


def show(rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Print a table of every set-up, by its name, and the errors."""
    console = Console(width=150)
    for key, mine in by_set_up(rows).items():
        table = Table("plan", "submeshes", "batch", "groups", "measured ms (min - max)",
                      "calibrated ms", "error", "chosen by ms", "error", "layers ms", "error",
                      "others",
                      title=f"{names[key]}, concurrency {mine[0]['concurrency']:.2f}")  # fmt: skip
        for r in mine:
            low, high = min(r["steps_s"]), max(r["steps_s"])
            table.add_row(
                r["plan"],
                r["submeshes"],
                str(r["batch"]),
                " ".join(f"{n} {label}" for label, n in r["groups"]),
                f"{1e3 * r['measured_s']:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f})",
                f"{1e3 * r['calibrated_s']:.0f}",
                f"{100 * error(r):+.1f}%",
                f"{1e3 * r['chosen_by_s']:.0f}",
                f"{100 * error(r, 'chosen_by_s'):+.1f}%",
                f"{1e3 * r['layers_s']:.0f}",
                f"{100 * error(r, 'layers_s'):+.1f}%",
                f"{100 * r['others_share']:.0f}% ({r['disturbed']})",
            )
        console.print(table)
        sources = {"calibrated": "calibrated_s", "chosen by": "chosen_by_s",
                   "layers alone": "layers_s"}  # fmt: skip
        for what, source in sources.items():
            e = errors(mine, source)
            console.print(
                f"{what}: median error {100 * e['median_abs_error']:.1f}%, worst "
                f"{100 * e['worst_abs_error']:.1f}%{spread(by_run(mine, source))}"
            )
    better = [r["chosen_by_s"] / r["textbook_s"] for r in rows]
    console.print(
        f"order by prices: simulated step over the textbook order's, median "
        f"{statistics.median(better):.3f}, largest {max(better):.3f}, smallest {min(better):.3f}"
    )
    e = errors(rows)
    console.print(
        f"all {len(rows)} schedules: median {100 * e['median_abs_error']:.1f}% (target 5%), worst "
        f"{100 * e['worst_abs_error']:.1f}% (target 12%)"
    )


def spread(runs: list[dict[str, float]]) -> str:
    """From which to which error several runs came."""
    if len(runs) < 2:
        return ""
    ranges = {
        k: f"{100 * min(r[k] for r in runs):.1f} - {100 * max(r[k] for r in runs):.1f}%"
        for k in runs[0]
    }
    return (
        f"; over {len(runs)} runs median {ranges['median_abs_error']}, worst "
        f"{ranges['worst_abs_error']}"
    )
