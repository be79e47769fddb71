"""Pictures of traces and losses, drawn without any global matplotlib state.

A timeline has one panel per trace, all under one time axis: a row per submesh, a bar per task
coloured by module and direction, the group's number inside, idle time left light, and the busy
share of each submesh at the right. Import this module where a picture is drawn: matplotlib takes
a second to load.
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
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dflop_jax.records import Event
from dflop_jax.report.colours import FAINT, IDLE, INK, LINE_COLOURS, ink_on
from dflop_jax.report.panels import Panel, legend_entries
from dflop_jax.report.wording import number

WIDTH_PX, DPI = 1400, 100  # of the picture: twice the second, and letters are twice as large
# Inches, which fit its letters: a row of bars, a title above and the gap below, axis and legend at
# the foot, the curve of losses; names at the left, seconds at the right.
ROW_IN, HEAD_IN, GAP_IN, FOOT_IN, LOSS_IN = 0.40, 0.34, 0.10, 0.75, 2.9
LEFT_IN, RIGHT_IN = 1.35, 0.85
LEGEND_COLUMNS = 8  # of entries, for which the width is enough
BAR = 0.80  # height of a bar in a row of height 1
Curve = tuple[Sequence[float], Sequence[float]]  # steps, losses


def draw(panels: Sequence[Panel], curves: Mapping[str, Curve], out: str | Path) -> None:
    """Draw panels under one time axis and, below them, the loss curves by run, to a PNG; either
    part may be empty.

    Raises:
      ValueError: neither a curve nor a panel, or panels without an event.
    """
    legend = legend_entries(panels)
    foot = FOOT_IN + 0.2 * math.ceil(len(legend) / LEGEND_COLUMNS)
    below = LOSS_IN if curves else 0.0
    rows_in = ROW_IN * sum(len(p.rows) for p in panels)
    above = rows_in + len(panels) * (HEAD_IN + GAP_IN) + foot if panels or not curves else 0.0
    fig = Figure(figsize=(WIDTH_PX / DPI, above + below), facecolor="white")
    if above:
        _draw_panels(fig, panels, legend, bottom_in=below + foot)
        _legend(fig, legend, bottom_in=below)
    if below:
        _draw_loss_axes(fig, curves)
    fig.savefig(out, dpi=DPI)


def _axes(fig: Figure, bottom_in: float, height_in: float) -> Axes:
    width, height = fig.get_size_inches()
    inner = 1 - (LEFT_IN + RIGHT_IN) / width
    return fig.add_axes((LEFT_IN / width, bottom_in / height, inner, height_in / height))


def _draw_panels(
    fig: Figure, panels: Sequence[Panel], colours: Mapping[str, str], bottom_in: float
) -> None:
    span = max((p.trace.makespan_s for p in panels), default=0.0)
    if span <= 0:
        raise ValueError("no trace with events to draw; train with a traced step first")
    unit, per_s = next(((u, k) for u, k in (("s", 1.0), ("ms", 1e3)) if span * k >= 1), ("µs", 1e6))
    for i, panel in enumerate(reversed(panels)):
        height = len(panel.rows) * ROW_IN
        ax = _axes(fig, bottom_in, height)
        ax.set_xlim(0, span * per_s)
        _draw_panel(ax, panel, colours, per_s, unit, px_per_unit=_inner_px() / (span * per_s))
        bottom = i == 0
        ax.tick_params(axis="x", bottom=bottom, labelbottom=bottom, colors=FAINT, labelsize=9)
        if bottom:
            ax.set_xlabel(f"time from the start of the step ({unit})", color=FAINT, fontsize=9)
        bottom_in += height + HEAD_IN + GAP_IN


def _inner_px() -> float:
    return WIDTH_PX - (LEFT_IN + RIGHT_IN) * DPI


def _draw_panel(
    ax: Axes, panel: Panel, colours: Mapping[str, str], per_s: float, unit: str, px_per_unit: float
) -> None:
    trace, names = panel.trace, panel.rows
    makespan, busy = trace.makespan_s * per_s, trace.busy_fraction()
    for row, name in enumerate(names):
        top = row - BAR / 2
        ax.add_patch(Rectangle((0, top), makespan, BAR, facecolor=IDLE, edgecolor="none", zorder=0))
        shades = {e: colours[panel.label(e)] for e in trace.events if e.submesh == name}
        _draw_bars(ax, shades, row, per_s, px_per_unit)
        share, side = f"{busy.get(name, 0.0):.0%}", ax.get_yaxis_transform()
        style: dict[str, Any] = {"color": INK, "fontsize": 11, "weight": "bold"}
        ax.text(1.008, row, share, transform=side, va="center", **style)
    ax.set_ylim(len(names) - 0.5, -0.5)
    short = [name if len(name) <= 17 else name[:16] + "…" for name in names]
    ax.set_yticks(range(len(names)), short, fontsize=10, color=INK)
    ax.tick_params(axis="y", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.grid(axis="x", color="white", linewidth=0.8)
    ax.set_axisbelow(True)  # above the idle band, below the bars
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.axvline(makespan, color=INK, linewidth=1.0, linestyle=(0, (3, 2)), clip_on=False, zorder=4)
    _head(ax, 0.0, panel.title, color=INK, fontsize=11, weight="bold")
    _head(ax, 1.008, "busy", color=FAINT, fontsize=9)
    total = f"makespan {number(makespan)} {unit}"
    right_px, title_px, total_px = makespan * px_per_unit, 9 * len(panel.title) + 20, 140
    fits = right_px - total_px >= title_px  # a short trace's figure stands after its title
    x_px = right_px if fits else max(right_px, title_px)
    _head(ax, x_px / _inner_px(), total, color=INK, fontsize=10, ha="right" if fits else "left")


def _head(ax: Axes, x: float, text: str, **style: Any) -> None:
    """Text just above an axes, at the fraction `x` of its width."""
    ax.annotate(text, (x, 1), (0, 5), "axes fraction", "offset points", **style)


def _draw_bars(
    ax: Axes,
    shades: Mapping[Event, str],
    row: int,
    per_s: float,
    px_per_unit: float,
) -> None:
    boxes, colours = [], []
    for e, colour in shades.items():
        x, width = e.start_s * per_s, (e.end_s - e.start_s) * per_s
        boxes.append(Rectangle((x, row - BAR / 2), width, BAR))
        colours.append(colour)
        label = str(e.group) if e.group >= 0 else ""
        if label and width * px_per_unit >= 7 * len(label) + 4:
            middle, ink = (x + width / 2, row), ink_on(colour)
            ax.text(*middle, label, ha="center", va="center", color=ink, fontsize=8.5)
    # A white edge parts neighbours, but would eat the colour of a narrow bar.
    edges = [0.8 if b.get_width() * px_per_unit >= 4 else 0.0 for b in boxes]
    bars = PatchCollection(
        boxes, facecolors=colours, edgecolors="white", linewidths=edges, zorder=2
    )
    ax.add_collection(bars)


def _legend(fig: Figure, entries: Mapping[str, str], bottom_in: float) -> None:
    edge = {"idle": "#cbd2d9"}
    fig.legend(
        handles=[Patch(facecolor=c, edgecolor=edge.get(k, c), label=k) for k, c in entries.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, (bottom_in + 0.08) / fig.get_size_inches()[1]),
        ncols=min(len(entries), LEGEND_COLUMNS),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.4,
    )


def _draw_loss_axes(fig: Figure, curves: Mapping[str, Curve]) -> None:
    ax = _axes(fig, 0.6, LOSS_IN - 1.0)
    for i, (name, (steps, losses)) in enumerate(curves.items()):
        colour = LINE_COLOURS[i % len(LINE_COLOURS)]
        marker = "o" if len(steps) == 1 else ""
        dashes = "-" if i == 0 else (0, (5, 1 + 0.5 * i))  # equal curves stay visible
        ax.plot(steps, losses, color=colour, label=name, linewidth=1.8, ls=dashes, marker=marker)
    _head(ax, 0.0, "loss", color=INK, fontsize=11, weight="bold")
    ax.set_xlabel("step", color=FAINT, fontsize=9)
    ax.tick_params(colors=FAINT, labelsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.grid(color=IDLE, linewidth=1.0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#cbd2d9")
    if curves:
        ax.legend(frameon=False, fontsize=9, labelcolor=INK)
