"""What a timeline shows of a trace, for pictures and pages: its rows, labels and colours."""

from __future__ import annotations

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
from dflop_jax.report.colours import DIRECTION_COLOURS, IDLE, palette


@dataclass(frozen=True)
class Panel:
    """A trace to draw: its title, the module of each segment (default: the segment's name) and
    submeshes that get a row even when they stay idle."""

    title: str
    trace: Trace
    modules: Mapping[str, str] = field(default_factory=dict)
    submeshes: Sequence[str] = ()

    def module(self, e: Event) -> str:
        """The module that a task is of."""
        return self.modules.get(e.segment, e.segment)

    def label(self, e: Event) -> str:
        """What the legend calls a task."""
        if e.direction in DIRECTION_COLOURS:
            return e.direction
        return f"{self.module(e)} {e.direction}"

    @property
    def links(self) -> dict[str, str]:
        """Row of a link -> the submesh that sends over it."""
        names = {e.submesh for e in self.trace.events if e.direction in (SEND, RETURN)}
        return {name: name.split(" → ")[0] for name in names}

    @property
    def rows(self) -> list[str]:
        """Submeshes from top to bottom: in the plan's order, each with the links that leave it;
        others as they begin."""
        links, rows = self.links, list[str]()
        begun = dict.fromkeys(e.submesh for e in sorted(self.trace.events, key=lambda e: e.start_s))
        for name in dict.fromkeys([*self.submeshes, *begun]):
            if name not in links:
                rows += [name, *(row for row in begun if links.get(row) == name)]
        return rows + [row for row in links if row not in rows]


def panel_of(layout: Layout, trace: Trace, title: str) -> Panel:
    """The panel of a plan's trace."""
    modules = {s.name: s.module for s in layout.segments}
    return Panel(title, trace, modules, [m.name for m in layout.submeshes])


def modules_of(panels: Sequence[Panel]) -> list[str]:
    """Modules of all panels in the order of their plans, then those that only traces name."""
    planned = [m for p in panels for m in p.modules.values()]
    traced = [p.module(e) for p in panels for e in p.trace.events]
    return list(dict.fromkeys([*planned, *traced]))


def legend_entries(panels: Sequence[Panel]) -> dict[str, str]:
    """Label -> colour of all that is drawn: modules in their order, sends and per-step tasks,
    idle."""
    colours = palette(modules_of(panels))
    labels = [f"{m} {direction}" for m in colours for direction in (FORWARD, BACKWARD)]
    rank = {label: i for i, label in enumerate([*labels, SEND, RETURN, REDUCE, UPDATE])}
    entries = {
        p.label(e): DIRECTION_COLOURS.get(e.direction)
        or colours[p.module(e)][e.direction == BACKWARD]
        for p in panels
        for e in p.trace.events
    }
    return {label: entries[label] for label in sorted(entries, key=lambda x: rank.get(x, -1))} | {
        "idle": IDLE
    }
