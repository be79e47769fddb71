"""Pictures of traces and losses, drawn without any global matplotlib state.

A timeline has one panel per trace, all under one time axis: a row per submesh, a bar per task
coloured by module and direction, the group's number inside, idle time left light, and the busy
share of each submesh at the right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, RETURN, SEND, UPDATE, Event, Plan, Trace
from dflop_jax.report.colours import (
    DIRECTION_COLOURS,
    FAINT,
    IDLE,
    INK,
    MODULE_COLOURS,
    Palette,
    luminance,
    palette,
)

WIDTH_PX, DPI = 1400, 100
ROW_IN, HEAD_IN, GAP_IN, FOOT_IN, LOSS_IN = 0.40, 0.34, 0.10, 0.75, 2.9
LEFT_IN, RIGHT_IN = 1.35, 0.85
LEGEND_COLUMNS = 8
BAR = 0.80  # height of a bar in a row of height 1
LINE_COLOURS = ("#c2455f", "#2b6cb0", "#1b8a7a", "#d98324", "#8e44ad", "#52606d")


@dataclass(frozen=True)
class Panel:
    """A trace to draw: its title, the module of each segment (default: from the segment's name)
    and submeshes that get a row even when they stay idle."""

    title: str
    trace: Trace
    modules: Mapping[str, str] = field(default_factory=dict)
    submeshes: Sequence[str] = ()


def segment_modules(plan: Plan) -> dict[str, str]:
    """Module of each segment, for `Panel.modules`."""
    return {s.name: s.module for s in plan.segments}


def draw_timeline(panels: Sequence[Panel], out: str | Path) -> None:
    """Draw panels under one common time axis to a PNG.

    Raises:
      ValueError: no panel, or none that holds an event.
    """
    foot = _foot_height(panels)
    fig = _figure(_panels_height(panels) + foot)
    _draw_panels(fig, panels, bottom_in=foot)
    _legend(fig, panels)
    fig.savefig(out, dpi=DPI)


def draw_losses(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], out: Path) -> None:
    """Draw loss over step, one named (steps, losses) curve per run, to a PNG."""
    fig = _figure(LOSS_IN + 0.6)
    _draw_loss_axes(fig, curves, bottom_in=0.0, height_in=LOSS_IN + 0.6)
    fig.savefig(out, dpi=DPI)


def draw_comparison(
    panels: Sequence[Panel],
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    out: str | Path,
) -> None:
    """Timelines under one time axis and, below, the loss curves; either part may be empty."""
    foot = _foot_height(panels)
    above = _panels_height(panels) + foot if panels else 0.0
    fig = _figure(above + LOSS_IN)
    if panels:
        _draw_panels(fig, panels, bottom_in=LOSS_IN + foot)
        _legend(fig, panels, bottom_in=LOSS_IN)
    _draw_loss_axes(fig, curves, bottom_in=0.0, height_in=LOSS_IN)
    fig.savefig(out, dpi=DPI)


def _figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_PX / DPI, height_in), facecolor="white")


def rows_of(panel: Panel) -> list[str]:
    """Submeshes from top to bottom: in the order in which they first work, idle ones last."""
    first: dict[str, float] = dict.fromkeys(panel.submeshes, math.inf)
    for e in panel.trace.events:
        first[e.submesh] = min(first.get(e.submesh, math.inf), e.start_s)
    return sorted(first, key=lambda name: (first[name], name))


def _panels_height(panels: Sequence[Panel]) -> float:
    rows = sum(len(rows_of(p)) for p in panels)
    return rows * ROW_IN + len(panels) * (HEAD_IN + GAP_IN)


def _axes(fig: Figure, bottom_in: float, height_in: float) -> Axes:
    width, height = fig.get_size_inches()
    inner = 1 - (LEFT_IN + RIGHT_IN) / width
    return fig.add_axes((LEFT_IN / width, bottom_in / height, inner, height_in / height))


def _draw_panels(fig: Figure, panels: Sequence[Panel], bottom_in: float) -> None:
    span = max((p.trace.makespan_s for p in panels), default=0.0)
    if span <= 0:
        raise ValueError("no trace with events to draw; train with a traced step first")
    unit, per_s = next(((u, k) for u, k in (("s", 1.0), ("ms", 1e3)) if span * k >= 1), ("µs", 1e6))
    colours = palette(modules_of(panels))
    for i, panel in enumerate(reversed(panels)):
        height = len(rows_of(panel)) * ROW_IN
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
    ax: Axes, panel: Panel, colours: Palette, per_s: float, unit: str, px_per_unit: float
) -> None:
    trace, names = panel.trace, rows_of(panel)
    makespan, busy = trace.makespan_s * per_s, trace.busy_fraction()
    for row, name in enumerate(names):
        top = row - BAR / 2
        ax.add_patch(Rectangle((0, top), makespan, BAR, facecolor=IDLE, edgecolor="none", zorder=0))
        mine = [e for e in trace.events if e.submesh == name]
        shades = {e: colour_of(e, panel.modules, colours) for e in mine}
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
    total = f"makespan {_number(makespan)} {unit}"
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
            ink = "white" if luminance(colour) < 0.55 else INK
            ax.text(x + width / 2, row, label, ha="center", va="center", color=ink, fontsize=8.5)
    # A white edge parts neighbours, but would eat the colour of a narrow bar.
    edges = [0.8 if b.get_width() * px_per_unit >= 4 else 0.0 for b in boxes]
    bars = PatchCollection(
        boxes, facecolors=colours, edgecolors="white", linewidths=edges, zorder=2
    )
    ax.add_collection(bars)


def module_of(segment: str, modules: Mapping[str, str]) -> str:
    """Return the segment's module; without a plan, the known module its name starts with."""
    if segment in modules:
        return modules[segment]
    return next((m for m in MODULE_COLOURS if segment.startswith(m)), segment)


def modules_of(panels: Sequence[Panel]) -> list[str]:
    """Modules of all panels in the order of their plans, then those that only traces name."""
    planned = [m for p in panels for m in p.modules.values()]
    traced = [module_of(e.segment, p.modules) for p in panels for e in p.trace.events]
    return list(dict.fromkeys([*planned, *traced]))


def colour_of(e: Event, modules: Mapping[str, str], colours: Palette) -> str:
    """Return the colour of a task's bar."""
    if e.direction in DIRECTION_COLOURS:
        return DIRECTION_COLOURS[e.direction]
    return colours[module_of(e.segment, modules)][e.direction == BACKWARD]


def _number(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def label_of(e: Event, modules: Mapping[str, str]) -> str:
    """Return what the legend calls a task."""
    if e.direction in DIRECTION_COLOURS:
        return e.direction
    return f"{module_of(e.segment, modules)} {e.direction}"


def legend_entries(panels: Sequence[Panel]) -> dict[str, str]:
    """Label -> colour of all that is drawn: modules in their order, sends and per-step tasks,
    idle."""
    colours = palette(modules_of(panels))
    labels = [f"{m} {direction}" for m in colours for direction in (FORWARD, BACKWARD)]
    rank = {label: i for i, label in enumerate([*labels, SEND, RETURN, REDUCE, UPDATE])}
    entries = {
        label_of(e, p.modules): colour_of(e, p.modules, colours)
        for p in panels
        for e in p.trace.events
    }
    return {label: entries[label] for label in sorted(entries, key=lambda x: rank.get(x, -1))} | {
        "idle": IDLE
    }


def _foot_height(panels: Sequence[Panel]) -> float:
    return FOOT_IN + 0.2 * math.ceil(len(legend_entries(panels)) / LEGEND_COLUMNS)


def _legend(fig: Figure, panels: Sequence[Panel], bottom_in: float = 0.0) -> None:
    entries = legend_entries(panels)
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


def _draw_loss_axes(
    fig: Figure,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    bottom_in: float,
    height_in: float,
) -> None:
    ax = _axes(fig, bottom_in + 0.6, height_in - 1.0)
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
