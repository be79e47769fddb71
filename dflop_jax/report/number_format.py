"""Format numbers as text."""

from __future__ import annotations

import math


def number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and thousands separators; "-" for nan."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 10**digits - 0.5:  # includes values that rounding gives one digit more
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if value else "0"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as "1.25 s", "14 min 36 s", "2 d 3 h"."""
    if not 10 <= seconds < math.inf:
        return f"{number(seconds)} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (s, "s")]
    first = next((i for i, (n, _) in enumerate(units) if n), len(units) - 1)
    return " ".join(f"{n} {unit}" for n, unit in units[first : first + 2] if n)


def flops_text(value: float) -> str:
    """Return FLOPs with a unit: MFLOP, GFLOP or TFLOP; "-" for nan."""
    if math.isnan(value):
        return "-"
    units = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
    unit, name = next((u for u in units if value >= u[0]), units[-1])
    return f"{number(value / unit)} {name}"


def percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1%}"
