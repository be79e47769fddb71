"""Instances for `benchmarks/schedule.py`: sample loads, and costs made of them or drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from dflop_jax.records import Load, pairs

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "shapes"
TILE_PX, TILE_TOKENS, MAX_GRID, MAX_FRAMES = 384, 729, 9, 32
FRAME_TOKENS = 196  # of a tile or frame, as the LLM sees it
CHARS_PER_TOKEN, TEMPLATE_TOKENS = 4, 20
ATTENTION_TOKENS = 8000  # tokens at which attention costs an LLM layer as much as its matrices


@lru_cache(maxsize=4)
def trace_loads(folder: Path, *, clips: bool = True, most_tokens: int = 4096) -> tuple[Load, ...]:
    """Loads of a folder of traces (*.jsonl), without audio: images by AnyRes, one frame a second of
    `clips`, and the sequence of tokens of the LLM, cut at `most_tokens`.

    Raises:
      ValueError: no usable row.
    """
    loads = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["audio_s"] or (row["video_s"] and not clips):
                continue
            tiles = sum(tiles_of(w, h) for w, h in row["images"])
            frames = int(np.clip(row["video_s"], 4, MAX_FRAMES)) if row["video_s"] else 0
            chars = row["prompt_chars"] + row["answer_chars"]
            tokens = (tiles + frames) * FRAME_TOKENS + chars // CHARS_PER_TOKEN + TEMPLATE_TOKENS
            pieces: dict[str, tuple[int, ...]] = {"llm": (min(most_tokens, tokens),)}
            if tiles + frames:
                pieces["vision"] = (TILE_TOKENS,) * (tiles + frames)
            loads.append(Load(pieces))
    if not loads:
        raise ValueError(f"{folder}: no *.jsonl with rows without audio; give a folder of traces")
    return tuple(loads)


def tiles_of(width: int, height: int) -> int:
    """Tiles of an AnyRes grid of at most `MAX_GRID` that wastes least of the picture, and one of
    the whole."""

    def lost(columns: int, rows: int) -> tuple[float, int]:
        scale = min(columns * TILE_PX / width, rows * TILE_PX / height)
        shown = min(width * height, width * height * scale**2)
        return -shown, columns * rows

    grids = [
        (c, r) for c in range(1, MAX_GRID + 1) for r in range(1, MAX_GRID + 1) if c * r <= MAX_GRID
    ]
    columns, rows = min(grids, key=lambda g: lost(*g))
    return columns * rows + (columns * rows > 1)


def costs_of(loads: Sequence[Load]) -> np.ndarray:
    """[n, 2]: tiles, and tokens with their attention; both modules' totals are 1."""
    tiles = np.array([len(s.lengths("vision")) for s in loads], float)
    tokens = np.array([s.tokens("llm") for s in loads], float)
    llm = tokens + pairs(tokens) / ATTENTION_TOKENS
    return np.stack([tiles / max(tiles.sum(), 1.0), llm / llm.sum()], axis=1)


def instance(name: str, n: int, n_bins: int, seed: int, traces: Path) -> np.ndarray:
    """Costs [n, 2] of one instance."""
    rng = np.random.default_rng(seed)
    if name == "shapes":
        every = trace_loads(traces)
        return costs_of([every[i] for i in rng.choice(len(every), n, replace=n > len(every))])
    if name == "lognormal":
        return rng.lognormal(0, 1, (n, 2)) / n
    # Pareto with correlated modules; no sample above eight mean ones
    vision = rng.pareto(1.8, n) + 0.1
    llm = 0.5 * vision + rng.lognormal(0, 0.8, n)
    costs = np.stack([vision / vision.sum(), llm / llm.sum()], axis=1)
    return np.minimum(costs, 8 / n)
