"""Colours of pictures and pages: of modules and directions, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, RETURN, SEND, UPDATE
from dflop_jax.report.metrics import IDLE as IDLE_PHASE
from dflop_jax.report.spent import DATA, SAVE, SCHEDULE

IDLE, INK, FAINT = "#eef0f3", "#1f2933", "#7b8794"
Palette = Mapping[str, tuple[str, str]]  # module -> (forward, backward)
# Of modules of well-known names; hues that colour-blind readers tell apart.
MODULE_COLOURS = {
    "vision": ("#7fcdbb", "#1b8a7a"),
    "audio": ("#fdd49e", "#d98324"),
    "generator": ("#d4b9da", "#8e44ad"),
    "llm": ("#9ecae1", "#2b6cb0"),
}
# Of other modules, in the order in which plans have them.
OTHER_COLOURS = (("#c7d59f", "#6b8e23"), ("#f4b6c2", "#c2455f"), ("#d9c7b0", "#8c6239"))
# Of tasks that look alike whatever their module.
DIRECTION_COLOURS = {REDUCE: "#e0a100", UPDATE: "#52606d", SEND: "#b3bcc8", RETURN: "#8793a3"}
# Of curves that have no colour of their own, by turns: runs, say.
LINE_COLOURS = ("#c2455f", "#2b6cb0", "#1b8a7a", "#d98324", "#8e44ad", "#52606d")
# Of what a step's seconds go to, whatever the module.
_PHASES = {
    FORWARD: "#7fcdbb", BACKWARD: "#1b8a7a", DATA: "#9ecae1", SCHEDULE: "#d4b9da", SAVE: "#fdd49e",
    **DIRECTION_COLOURS,
}  # fmt: skip
_IDLE_PHASE = ("#d5dae0", "#3b444e")  # light and dark
# Each colour of a timeline -> the one that stands for it on a dark page.
DARK = {
    "#7fcdbb": "#2c7d6f",
    "#1b8a7a": "#5fd0bb",
    "#fdd49e": "#8f6026",
    "#d98324": "#f2ab4c",
    "#d4b9da": "#6f4383",
    "#8e44ad": "#c78fe2",
    "#9ecae1": "#32659c",
    "#2b6cb0": "#7db6f2",
    "#c7d59f": "#5f7628",
    "#6b8e23": "#abcf55",
    "#f4b6c2": "#8e3d50",
    "#c2455f": "#f08ba2",
    "#d9c7b0": "#715535",
    "#8c6239": "#cfa878",
    "#e0a100": "#e6b83c",
    "#52606d": "#9aa7b4",
    "#b3bcc8": "#4c5662",
    "#8793a3": "#717d8b",
}


def palette(modules: Sequence[str]) -> Palette:
    """Colours of modules: their own, or by turns those of `OTHER_COLOURS`."""
    others = [m for m in modules if m not in MODULE_COLOURS]
    spare = {m: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, m in enumerate(others)}
    return {m: MODULE_COLOURS.get(m) or spare[m] for m in modules}


def phase_colours(phase: str) -> tuple[str, str]:
    """The colours, light and dark, of what a step's seconds go to (`metrics.StepMetrics`)."""
    if phase == IDLE_PHASE:
        return _IDLE_PHASE
    light = _PHASES.get(phase, LINE_COLOURS[0])
    return light, DARK[light]


def ink_on(colour: str) -> str:
    """The colour of text on a colour "#rrggbb": white on dark ones."""
    r, g, b = bytes.fromhex(colour[1:])
    return "#ffffff" if 0.299 * r + 0.587 * g + 0.114 * b < 0.55 * 255 else INK
