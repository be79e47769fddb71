"""Pictures of traces and losses, drawn without any global matplotlib state.

A timeline has one panel per trace, all with the same time axis: a row per submesh, a bar per task
coloured by module and direction with the group's number, and the busy share of each submesh at the
right. Import this module only to draw: matplotlib takes a second to load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from dflop_jax.report.number_format import number
from dflop_jax.report.panels import FAINT, IDLE, INK, Panel, ink_on, legend_entries, line_colour

WIDTH_IN, DPI = 14.0, 100
# Heights in inches: a row of bars, the title above, the gap below, axis and legend at the foot,
# loss curves. Widths in inches: names at the left, busy shares at the right.
ROW_IN, HEAD_IN, GAP_IN, FOOT_IN, LOSS_IN = 0.40, 0.34, 0.10, 0.75, 2.9
LEFT_IN, RIGHT_IN = 1.35, 0.85
LEGEND_COLUMNS = int(WIDTH_IN / 1.75)  # an entry takes 1.75 inches
BAR = 0.80  # height of a bar in a row of height 1
Curve = tuple[Sequence[float], Sequence[float]]  # steps, losses


def draw(panels: Sequence[Panel], curves: Mapping[str, Curve], picture_path: str | Path) -> None:
    """Draw panels with one time axis, and loss curves by run below them, to a PNG."""
    legend = legend_entries(panels) if panels else {}
    foot_in = FOOT_IN + 0.2 * math.ceil(len(legend) / LEGEND_COLUMNS)
    losses_in = LOSS_IN if curves else 0.0
    rows_in = [ROW_IN * len(p.rows) + HEAD_IN + GAP_IN for p in panels]
    fig = Figure((WIDTH_IN, losses_in + sum(rows_in) + foot_in * bool(panels)), facecolor="white")
    longest_s = max((p.trace.makespan_s for p in panels), default=0.0)
    bottom_in = losses_in + foot_in
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, per_s = next(((u, k) for u, k in units if longest_s * k >= 1), units[-1])
    for panel, height in zip(reversed(panels), reversed(rows_in)):
        ax = _axes(fig, bottom_in, height - HEAD_IN - GAP_IN)
        ax.set_xlim(0, longest_s * per_s)
        _draw_panel(ax, panel, legend, per_s, unit)
        if panel is panels[-1]:
            ax.set_xlabel(f"time from the start of the step ({unit})", color=FAINT, fontsize=9)
        else:
            ax.tick_params(axis="x", bottom=False, labelbottom=False)
        bottom_in += height
    if legend:
        fig.legend(
            handles=[Patch(facecolor=c, edgecolor="#cbd2d9", label=k) for k, c in legend.items()],
            loc="lower center",
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            bbox_to_anchor=(0.5, (losses_in + 0.08) / fig.get_size_inches()[1]),
            ncols=min(len(legend), LEGEND_COLUMNS),
        )
    if curves:
        _draw_losses(_axes(fig, 0.6, LOSS_IN - 1.0), curves)
    fig.savefig(picture_path, dpi=DPI)


def _axes(fig: Figure, bottom_in: float, height_in: float) -> Axes:
    height = fig.get_size_inches()[1]
    inner = 1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN
    ax = fig.add_axes((LEFT_IN / WIDTH_IN, bottom_in / height, inner, height_in / height))
    ax.spines[:].set_visible(False)
    ax.tick_params(colors=FAINT, labelsize=9)
    return ax


def _draw_panel(
    ax: Axes, panel: Panel, colours: Mapping[str, str], per_s: float, unit: str
) -> None:
    trace, names = panel.trace, panel.rows
    makespan, busy = trace.makespan_s * per_s, trace.busy_fraction()
    px_per_unit = (WIDTH_IN - LEFT_IN - RIGHT_IN) * DPI / ax.get_xlim()[1]
    ax.barh(range(len(names)), makespan, BAR, color=IDLE, zorder=0)
    boxes, shades, edges = [], [], []
    for e in trace.events:
        x, width, row = e.start_s * per_s, (e.end_s - e.start_s) * per_s, names.index(e.submesh)
        colour, label = colours[panel.label(e)], str(e.group) if e.group >= 0 else ""
        boxes.append(Rectangle((x, row - BAR / 2), width, BAR))
        shades.append(colour)
        # A white edge separates bars, but would cover a narrow bar.
        edges.append(0.8 if width * px_per_unit >= 4 else 0.0)
        if label and width * px_per_unit >= 7 * len(label) + 4:
            ink, middle = ink_on(colour), x + width / 2
            ax.text(middle, row, label, color=ink, fontsize=8.5, ha="center", va="center")
    ax.add_collection(
        PatchCollection(boxes, facecolors=shades, edgecolors="white", linewidths=edges, zorder=2)
    )
    for row, name in enumerate(names):
        busy_text, transform = f"{busy.get(name, 0.0):.0%}", ax.get_yaxis_transform()
        ax.text(1.008, row, busy_text, transform=transform, va="center", color=INK, weight="bold")
    ax.set_ylim(len(names) - 0.5, -0.5)
    short = [name if len(name) <= 17 else name[:16] + "…" for name in names]
    ax.set_yticks(range(len(names)), short, fontsize=10, color=INK)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="white", linewidth=0.8)
    ax.set_axisbelow(True)  # above the idle band, below the bars
    ax.axvline(makespan, color=INK, linewidth=1.0, linestyle=(0, (3, 2)), clip_on=False, zorder=4)
    _draw_heading(ax, 0.0, f"{panel.title}, makespan {number(makespan)} {unit}", weight="bold")
    _draw_heading(ax, 1.008, "busy")


def _draw_heading(ax: Axes, x: float, text: str, **style: Any) -> None:
    """Write text just above the axes, at the fraction `x` of their width."""
    ax.annotate(text, (x, 1), (0, 5), "axes fraction", "offset points", color=INK, **style)


def _draw_losses(ax: Axes, curves: Mapping[str, Curve]) -> None:
    for i, (name, (steps, losses)) in enumerate(curves.items()):
        marker = "o" if len(steps) == 1 else ""
        dashes = "-" if i == 0 else (0, (5, 1 + 0.5 * i))  # equal curves stay visible
        style: Any = {"linewidth": 1.8, "ls": dashes, "marker": marker}
        ax.plot(steps, losses, color=line_colour(i), label=name, **style)
    _draw_heading(ax, 0.0, "loss", weight="bold")
    ax.set_xlabel("step", color=FAINT, fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.grid(color=IDLE, linewidth=1.0)
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)
