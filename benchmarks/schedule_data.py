"""Instances for `benchmarks/schedule.py`: sample shapes, and costs made of them or drawn."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.media.tiling import count_tiles
from dflop_jax.records import SampleShape

TILE_PX, MAX_GRID, TOKENS_PER_TILE, MAX_FRAMES, MAX_TOKENS = 384, 9, 49, 32, 4096
CHARS_PER_TOKEN, TEMPLATE_TOKENS = 4, 20
ATTENTION_TOKENS = 8000  # tokens at which attention costs an LLM layer as much as its matrices


@lru_cache(maxsize=1)
def embedded_shapes() -> tuple[SampleShape, ...]:
    """Every second sample of the embedded scenes, at the tiny model's tile size."""
    source = make_source(DataConfig(), MediaSpec(48, 9))
    return tuple(source.shape(i) for i in range(0, len(source), 2))


@lru_cache(maxsize=1)
def trace_shapes(folder: Path) -> tuple[SampleShape, ...]:
    """Shapes of a folder of traces (*.jsonl): images by AnyRes, one frame a second, no audio.

    Raises:
      ValueError: no usable row.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["audio_s"]:
                continue
            tiles = sum(count_tiles(w, h, TILE_PX, MAX_GRID) for w, h in row["images"])
            frames = int(np.clip(row["video_s"], 4, MAX_FRAMES)) if row["video_s"] else 0
            chars = row["prompt_chars"] + row["answer_chars"]
            text = chars // CHARS_PER_TOKEN + TEMPLATE_TOKENS
            tokens = min(MAX_TOKENS, (tiles + frames) * TOKENS_PER_TILE + text)
            found.append(SampleShape(tiles + frames, text, tokens, frames))
    if not found:
        raise ValueError(f"{folder}: no *.jsonl with rows without audio; give a folder of traces")
    return tuple(found)


def costs_of(shapes: list[SampleShape]) -> np.ndarray:
    """[n, 2]: tiles, and tokens with their attention; both modules' totals are 1."""
    tiles = np.array([s.tiles for s in shapes], float)
    tokens = np.array([s.llm_tokens for s in shapes], float)
    llm = tokens + tokens**2 / ATTENTION_TOKENS
    return np.stack([tiles / max(tiles.sum(), 1.0), llm / llm.sum()], axis=1)


def instance(name: str, n: int, n_bins: int, seed: int, traces: Path | None) -> np.ndarray:
    """Costs [n, 2] of one instance."""
    rng = np.random.default_rng(seed)
    if name in ("embedded", "shapes"):
        every = embedded_shapes() if name == "embedded" else trace_shapes(traces or Path())
        return costs_of([every[i] for i in rng.choice(len(every), n, replace=n > len(every))])
    if name == "lognormal":
        return rng.lognormal(0, 1, (n, 2)) / n
    # Pareto with correlated modules; no sample above eight mean ones
    vision = rng.pareto(1.8, n) + 0.1
    llm = 0.5 * vision + rng.lognormal(0, 0.8, n)
    costs = np.stack([vision / vision.sum(), llm / llm.sum()], axis=1)
    return np.minimum(costs, 8 / n)
