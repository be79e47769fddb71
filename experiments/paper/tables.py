"""Quantile tables of real sample shapes: what the paper's experiments draw their data from.

Command:  python -m experiments.paper.tables FOLDER     (a folder of SOURCE.jsonl shape files)
Minutes:  under 1
Writes:   experiments/paper/tables.json

A row of a shape file is {"source", "images": [[w, h], ...], "video_s", "audio_s", "prompt_chars",
"answer_chars"}. A table holds numbers only: quantiles of each figure, and of the aspect ratio
within bands of the number of pixels, since the two hang together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TABLES = Path(__file__).with_name("tables.json")
LEVELS = 100  # quantiles are at 0, 1/LEVELS, ..., 1
BANDS, BAND_LEVELS = 10, 20  # bands of pixels, and quantiles of the aspect ratio in each
KINDS = ("single image", "several images", "video", "audio", "text")
NOTE = (
    "Facts only: quantiles of sizes, durations and lengths of text, counted over the even rows of "
    "each source; no text, picture or sound. Licences are those of what was counted."
)
# Source -> (where it was taken from, its licence), which the tables state: a new source begins as a
# line of these three.
SOURCES = {
    t["source"]: (t["taken_from"], t["licence"])
    for t in json.loads(TABLES.read_text(encoding="utf-8"))["tables"]
}


def kind_of(row: dict[str, Any]) -> str:
    """Which of KINDS a row is."""
    if row["video_s"] is not None:
        return "video"
    if row["audio_s"] is not None:
        return "audio"
    return ("text", "single image")[len(row["images"])] if len(row["images"]) < 2 else KINDS[1]


def quantiles(values: Sequence[float] | np.ndarray, levels: int = LEVELS) -> list[float]:
    """Of `values`, at 0, 1/levels, ..., 1, to six digits."""
    found = np.quantile(np.asarray(values, float), np.linspace(0, 1, levels + 1))
    return [float(f"{q:.6g}") for q in found]


def table_of(source: str, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of one kind of rows of one source."""
    origin, licence = SOURCES[source]
    table: dict[str, Any] = {
        "kind": kind,
        "source": source,
        "taken_from": origin,
        "licence": licence,
        "rows": len(rows),
        "prompt_chars": quantiles([r["prompt_chars"] for r in rows]),
        "answer_chars": quantiles([r["answer_chars"] for r in rows]),
    }
    for field in ("video_s", "audio_s"):
        if kind == field.removesuffix("_s"):
            table[field] = quantiles([r[field] for r in rows])
    if "image" in kind:
        table |= _images(rows)
    return table


def _images(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sizes = np.array([size for r in rows for size in r["images"]], float)
    pixels, aspect = sizes.prod(axis=1), sizes[:, 0] / sizes[:, 1]
    by_size = np.argsort(pixels, kind="stable")
    bands = [aspect[part] for part in np.array_split(by_size, min(BANDS, len(by_size)))]
    return {
        "images": quantiles([len(r["images"]) for r in rows]),
        "pixels": quantiles(pixels),
        "aspect_by_pixels": [quantiles(band, BAND_LEVELS) for band in bands],
    }


def make(folder: Path) -> dict[str, Any]:
    """All tables of a folder of shape files.

    Raises:
      ValueError: a file of SOURCES is missing there, or holds something else than shapes.
    """
    tables = []
    for source in SOURCES:
        file = folder / f"{source}.jsonl"
        if not file.is_file():
            raise ValueError(f"{file} is missing; give a folder of SOURCE.jsonl shape files")
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            kinds = [kind_of(r) for r in rows]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{file}: not a file of shapes ({e!r}); see --help") from None
        for kind in KINDS:
            if chosen := [r for r, k in zip(rows, kinds, strict=True) if k == kind]:
                tables.append(table_of(source, kind, chosen))
    return {"note": NOTE, "tables": tables}


def text_of(facts: dict[str, Any]) -> str:
    """JSON with a line for each table, so that differences can be read."""
    lines = ",\n".join("  " + json.dumps(t, separators=(",", ":")) for t in facts["tables"])
    return f'{{"note": {json.dumps(facts["note"])},\n "tables": [\n{lines}\n]}}\n'


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        facts = make(Path(arguments[0]))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    TABLES.write_text(text_of(facts), encoding="utf-8")
    print(f"{TABLES}: {len(facts['tables'])} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
