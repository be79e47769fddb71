"""Quantile tables of real sample shapes, from which the experiments draw their data.

Command:  python -m experiments.paper.tables FOLDER     (a folder of SOURCE.jsonl shape files)
Minutes:  under 1
Writes:   experiments/paper/tables.json

A row of a shape file is {"source", "images": [[w, h], ...], "video_s", "audio_s", "prompt_chars",
"answer_chars"}. A table holds numbers only: quantiles of each value, and of the aspect ratio
within bands of the pixel count, because the two correlate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TABLES = Path(__file__).with_name("tables.json")
QUANTILES = 100  # at 0, 1/QUANTILES, ..., 1
BANDS, BAND_LEVELS = 10, 20  # bands of pixels, and quantiles of the aspect ratio in each
KINDS = ("single image", "several images", "video", "audio", "text")
NOTE = (
    "Facts only: quantiles of sizes, durations and lengths of text, counted over the even rows of "
    "each source; no text, picture or sound. Licences are those of what was counted."
)
# Source -> (origin, licence) from the tables; add a line with these three for a new source.
SOURCES = {
    t["source"]: (t["taken_from"], t["licence"])
    for t in json.loads(TABLES.read_text(encoding="utf-8"))["tables"]
}


def classify_row(row: dict[str, Any]) -> str:
    """Return the row's kind, one of KINDS."""
    if row["video_s"] is not None:
        return "video"
    if row["audio_s"] is not None:
        return "audio"
    return ("text", "single image")[len(row["images"])] if len(row["images"]) < 2 else KINDS[1]


def compute_quantiles(values: Sequence[float] | np.ndarray, levels: int = QUANTILES) -> list[float]:
    """Return quantiles of `values` at 0, 1/levels, ..., 1 with six digits."""
    found = np.quantile(np.asarray(values, float), np.linspace(0, 1, levels + 1))
    return [float(f"{q:.6g}") for q in found]


def build_table(source: str, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build the table of one kind of rows of one source."""
    origin, licence = SOURCES[source]
    table: dict[str, Any] = {
        "kind": kind,
        "source": source,
        "taken_from": origin,
        "licence": licence,
        "rows": len(rows),
        "prompt_chars": compute_quantiles([r["prompt_chars"] for r in rows]),
        "answer_chars": compute_quantiles([r["answer_chars"] for r in rows]),
    }
    for field in ("video_s", "audio_s"):
        if kind == field.removesuffix("_s"):
            table[field] = compute_quantiles([r[field] for r in rows])
    if "image" in kind:
        table |= _picture_quantiles(rows)
    return table


def _picture_quantiles(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sizes = np.array([size for r in rows for size in r["images"]], float)
    pixels, aspect = sizes.prod(axis=1), sizes[:, 0] / sizes[:, 1]
    by_size = np.argsort(pixels, kind="stable")
    bands = [aspect[part] for part in np.array_split(by_size, min(BANDS, len(by_size)))]
    return {
        "images": compute_quantiles([len(r["images"]) for r in rows]),
        "pixels": compute_quantiles(pixels),
        "aspect_by_pixels": [compute_quantiles(band, BAND_LEVELS) for band in bands],
    }


def build_tables(folder: Path) -> dict[str, Any]:
    """Build all tables of a folder of shape files.

    Raises:
      ValueError: the file of a source is missing or does not hold shapes.
    """
    tables = []
    for source in SOURCES:
        file = folder / f"{source}.jsonl"
        if not file.is_file():
            raise ValueError(f"{file} is missing; give a folder of SOURCE.jsonl shape files")
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            kinds = [classify_row(r) for r in rows]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{file}: not a file of shapes ({e!r}); see --help") from None
        for kind in KINDS:
            if chosen := [r for r, k in zip(rows, kinds, strict=True) if k == kind]:
                tables.append(build_table(source, kind, chosen))
    return {"note": NOTE, "tables": tables}


def format_json(facts: dict[str, Any]) -> str:
    """Format tables as JSON with a line for each, for readable diffs."""
    lines = ",\n".join("  " + json.dumps(t, separators=(",", ":")) for t in facts["tables"])
    return f'{{"note": {json.dumps(facts["note"])},\n "tables": [\n{lines}\n]}}\n'


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        facts = build_tables(Path(arguments[0]))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    TABLES.write_text(format_json(facts), encoding="utf-8")
    print(f"{TABLES}: {len(facts['tables'])} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
