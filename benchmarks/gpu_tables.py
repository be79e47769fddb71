"""The segments of `gpu_step.py` as a table: what they should take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
_KEY = ("of", "layers", "rows", "tokens", "remat")


def segment_table(lines: Sequence[Line]) -> str:
    """Text of a row for each segment, its forward and backward tasks together, in milliseconds
    by the roofline of plans; `flat` is the share of the peak by the flat one."""
    segments: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if "of" in line and "predicted_ms" in line:
            segments.setdefault(tuple(line[k] for k in _KEY), []).append(line)
    titles = (*_KEY, "ms", "MFU", "flat ms", "flat MFU", "measured ms", "peak GiB")
    rows = [titles, *(_row(key, tasks) for key, tasks in segments.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )


def _row(key: tuple[Any, ...], tasks: Sequence[Line]) -> tuple[str, ...]:
    def total(name: str) -> float:
        return sum(float(t[name]) for t in tasks)

    ms, flat_ms, peak_ms = (total(n) for n in ("predicted_ms", "flat_ms", "peak_ms"))
    measured = f"{total('ms'):.1f}" if all("ms" in t for t in tasks) else "-"
    return (
        *map(str, key),
        f"{ms:.1f}",
        f"{peak_ms / ms:.1%}",
        f"{flat_ms:.1f}",
        f"{peak_ms / flat_ms:.1%}",
        measured,
        f"{max(t['peak_bytes'] for t in tasks) / 2**30:.1f}",
    )
