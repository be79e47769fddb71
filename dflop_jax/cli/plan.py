"""What `dflop plan` prints: the ranking, and with --explain why the others lost and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dflop_jax.plan.explain import why_it_lost
from dflop_jax.plan.search import SearchResult
from dflop_jax.train.planning import WhatIf

_GIB = 2**30


def ranking(result: SearchResult, explain: bool) -> Table:
    """The best placements, simulated with one bucket each."""
    table = Table(
        "placement (stage x data x model @ device)",
        "micro-\nbatches",
        "step ms",
        "GiB",
        title=f"{result.n_evaluated} of {result.n_candidates} candidates simulated "
        f"({result.n_placements} placements; {result.n_fit} candidates fit into memory)",
        title_justify="left",
    )
    if explain:
        table.add_column("remat")
        table.add_column("against the first")
    best = result.candidates[0]
    for c in result.candidates:
        row = [f"{c.policy}: {c.name}", str(c.microbatches), f"{1e3 * c.makespan_s:.1f}"]
        row.append(f"{c.peak_bytes / _GIB:.2f}")
        table.add_row(*row, *([c.remat, why_it_lost(c, best)] if explain else []))
    return table


def chosen(result: SearchResult) -> str:
    """The plan in a line, with the buckets that it got at last."""
    plan = result.plan
    meshes = ", ".join(
        f"{m.name} {m.stage}x{m.data}x{m.model} on devices {m.first}-{m.devices.stop - 1}"
        for m in plan.submeshes
    )
    buckets = ", ".join(b.name for b in plan.buckets)
    return (
        f"{plan.policy}: {meshes}; buckets {buckets}: {1e3 * plan.predicted['makespan_s']:.1f} ms "
        "a step"
    )


def what_ifs(found: Sequence[WhatIf]) -> Table:
    """Seconds for the same samples after each change, every time with the best plan for it."""
    table = Table("what if", "step ms", "times as fast", title="What would help (one bucket each)",
                  title_justify="left")  # fmt: skip
    now = found[0].makespan_s
    for w in found:
        if w.makespan_s is None or now is None:
            table.add_row(w.change, "-", "nothing fits")
        else:
            table.add_row(w.change, f"{1e3 * w.makespan_s:.1f}", f"{now / w.makespan_s:.2f}")
    return table
