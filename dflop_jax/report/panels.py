"""Rows, labels and colours of timelines and curves, for pictures and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, RETURN, SEND, UPDATE, Event, Layout, Trace
from dflop_jax.report.metrics import IDLE as IDLE_PHASE
from dflop_jax.report.wall_time import DATA, SAVE, SCHEDULE

IDLE, INK, FAINT = "#eef0f3", "#1f2933", "#7b8794"
Palette = Mapping[str, tuple[str, str]]  # module -> (forward, backward)
# Colours of well-known modules, which colour-blind readers can distinguish.
MODULE_COLOURS = {
    "vision": ("#7fcdbb", "#1b8a7a"),
    "audio": ("#fdd49e", "#d98324"),
    "generator": ("#d4b9da", "#8e44ad"),
    "llm": ("#9ecae1", "#2b6cb0"),
}
# Colours of other modules, in the order of plans.
OTHER_COLOURS = (("#c7d59f", "#6b8e23"), ("#f4b6c2", "#c2455f"), ("#d9c7b0", "#8c6239"))
# Colours of tasks that do not depend on the module.
DIRECTION_COLOURS = {REDUCE: "#e0a100", UPDATE: "#52606d", SEND: "#b3bcc8", RETURN: "#8793a3"}
# Colours of runs and other curves, in turn.
LINE_COLOURS = ("#c2455f", "#2b6cb0", "#1b8a7a", "#d98324", "#8e44ad", "#52606d")
# Colours of the phases of a step.
PHASE_COLOURS = {
    FORWARD: "#7fcdbb",
    BACKWARD: "#1b8a7a",
    DATA: "#9ecae1",
    SCHEDULE: "#d4b9da",
    SAVE: "#fdd49e",
    IDLE_PHASE: "#b9c1ca",
    **DIRECTION_COLOURS,
}


def palette(modules: Sequence[str]) -> Palette:
    """Return the colours of modules: by `MODULE_COLOURS`, else in turn from `OTHER_COLOURS`."""
    others = cycle(OTHER_COLOURS)
    return {m: MODULE_COLOURS.get(m) or next(others) for m in modules}


def line_colour(i: int) -> str:
    return LINE_COLOURS[i % len(LINE_COLOURS)]


def ink_on(colour: str) -> str:
    """Return the colour of text on a background "#rrggbb": white on dark ones."""
    r, g, b = bytes.fromhex(colour[1:])
    return "#ffffff" if 0.299 * r + 0.587 * g + 0.114 * b < 0.55 * 255 else INK


@dataclass(frozen=True)
class Panel:
    """A trace to draw."""

    title: str
    trace: Trace
    modules: Mapping[str, str] = field(default_factory=dict)  # by segment; default: its name
    submeshes: Sequence[str] = ()  # submeshes that get a row even if idle

    def module(self, e: Event) -> str:
        return self.modules.get(e.segment, e.segment)

    def label(self, e: Event) -> str:
        if e.direction in DIRECTION_COLOURS:
            return e.direction
        return f"{self.module(e)} {e.direction}"

    @property
    def links(self) -> dict[str, str]:
        """Return the submesh that sends over each link, by the link's row."""
        names = {e.submesh for e in self.trace.events if e.direction in (SEND, RETURN)}
        return {name: name.split(" → ")[0] for name in names}

    @property
    def rows(self) -> list[str]:
        """Return rows: submeshes in the plan's order, each followed by the links that leave it."""
        links, rows = self.links, list[str]()
        events = sorted(self.trace.events, key=lambda e: e.start_s)
        first_order = dict.fromkeys(e.submesh for e in events)
        for name in dict.fromkeys([*self.submeshes, *first_order]):
            if name not in links:
                rows += [name, *(row for row in first_order if links.get(row) == name)]
        return rows + [row for row in links if row not in rows]


def panel_of(layout: Layout, trace: Trace, title: str) -> Panel:
    modules = {s.name: s.module for s in layout.segments}
    return Panel(title, trace, modules, [m.name for m in layout.submeshes])


def legend_entries(panels: Sequence[Panel]) -> dict[str, str]:
    """Return label -> colour of everything drawn: modules in the order of plans, other modules of
    traces, sends, tasks at the end of a step, and idle time."""
    events = [(p, e) for p in panels for e in p.trace.events]
    planned = [m for p in panels for m in p.modules.values()]
    colours = palette(list(dict.fromkeys([*planned, *(p.module(e) for p, e in events)])))
    labels = [f"{m} {direction}" for m in colours for direction in (FORWARD, BACKWARD)]
    position = {label: i for i, label in enumerate([*labels, SEND, RETURN, REDUCE, UPDATE])}
    entries = {
        p.label(e): DIRECTION_COLOURS.get(e.direction)
        or colours[p.module(e)][e.direction == BACKWARD]
        for p, e in events
    }
    ordered = sorted(entries, key=lambda label: position.get(label, -1))
    return {label: entries[label] for label in ordered} | {"idle": IDLE}
