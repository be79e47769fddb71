"""What a timeline shows of a trace, for pictures and pages: its rows, labels and colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REDUCE,
    RETURN,
    SEND,
    UPDATE,
    Event,
    Layout,
    Trace,
)
from dflop_jax.report.colours import (
    DIRECTION_COLOURS,
    IDLE,
    MODULE_COLOURS,
    Palette,
    palette,
)


@dataclass(frozen=True)
class Panel:
    """A trace to draw: its title, the module of each segment (default: from the segment's name)
    and submeshes that get a row even when they stay idle."""

    title: str
    trace: Trace
    modules: Mapping[str, str] = field(default_factory=dict)
    submeshes: Sequence[str] = ()


def panel_of(layout: Layout, trace: Trace, title: str) -> Panel:
    """The panel of a plan's trace."""
    modules = {s.name: s.module for s in layout.segments}
    return Panel(title, trace, modules, [m.name for m in layout.submeshes])


def rows_of(panel: Panel) -> list[str]:
    """Submeshes from top to bottom: in the order in which they first work, idle ones last."""
    first: dict[str, float] = dict.fromkeys(panel.submeshes, math.inf)
    for e in panel.trace.events:
        first[e.submesh] = min(first.get(e.submesh, math.inf), e.start_s)
    return sorted(first, key=lambda name: (first[name], name))


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
