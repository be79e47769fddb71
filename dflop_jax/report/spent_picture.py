"""A picture of where the seconds of a run went: a bar whose parts are named below it. Import this
module where a picture is drawn: matplotlib takes a second to load."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflop_jax.report.colours import INK, spent_colours
from dflop_jax.report.spent import Spent
from dflop_jax.report.wording import duration

# Inches of the picture, the bar with its title and a row of the legend; entries in such a row.
_WIDTH_IN, _BAR_IN, _LEGEND_ROW_IN, _COLUMNS = 14.0, 1.3, 0.25, 5


def draw_spent(spent: Spent, out: str | Path) -> None:
    """Draw it to a PNG."""
    shares = spent.shares()
    legend_in = _LEGEND_ROW_IN * -(-len(shares) // _COLUMNS) + 0.2
    fig = Figure(figsize=(_WIDTH_IN, _BAR_IN + legend_in), facecolor="white")
    height = _BAR_IN + legend_in
    ax = fig.add_axes((0.02, (legend_in + 0.15) / height, 0.96, 0.7 / height))
    colours, left = spent_colours(), 0.0
    for part, share in shares.items():
        ax.barh(0, share, left=left, height=1, color=colours[part], edgecolor="white")
        left += share
    ax.set_xlim(0, max(left, 1e-9))
    ax.set_axis_off()
    starts = f", {spent.starts} starts" if spent.starts > 1 else ""
    title = f"{duration(spent.wall_s)}{starts}: goodput {spent.goodput:.1%}"
    ax.set_title(title, loc="left", color=INK, fontsize=11, weight="bold")
    fig.legend(
        handles=[Patch(color=colours[p], label=f"{p} {s:.1%}") for p, s in shares.items()],
        loc="lower left",
        bbox_to_anchor=(0.015, 0.0),
        ncols=_COLUMNS,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    fig.savefig(out, dpi=100)
