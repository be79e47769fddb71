"""Sample shapes of the papers' data, drawn from quantile tables, and the assumptions about them.

The tables (see `tables`) describe pictures, clips, sounds and texts. Each model's published
preprocessing (`dflop_jax.data`) converts them to tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.mel import MelSpec, sound_counts
from dflop_jax.data.media.tiles import DynamicTiling
from dflop_jax.records import Load
from experiments.paper.tables import TABLES


@dataclass(frozen=True)
class Assumptions:
    """Values that the tables do not give; `ASSUMPTION_SOURCES` explains each."""

    frames_per_s: float = 1.0
    max_frames: int = 32
    max_clip_s: float = 30.0
    chars_per_token: float = 4.0
    chat_tokens: int = 32
    instruction_chars: int = 60
    max_tokens: int = 8192
    min_text_tokens: int = 256
    global_batch: int = 256


ASSUMED = Assumptions()
ASSUMPTION_SOURCES = {
    "frames_per_s": "frames per second of a clip: video_fps in the public DFLOP code",
    "max_frames": "frames of a clip at most: frames_upbound in the same code",
    "max_clip_s": "the paper's clips last 0 to 30 s",
    "chars_per_token": "characters per text token (English, a vocabulary of 130 to 150 thousand)",
    "chat_tokens": "tokens of system prompt and roles",
    "instruction_chars": "assumed prompt of sources that have answers only (captions, transcripts)",
    "max_tokens": "longest sample; longer text loses its end (the public code profiles up to 8k)",
    "min_text_tokens": "samples whose media leave less room than this are dropped",
    "global_batch": "samples per step on 64 devices: the public optimizer's GLOBAL_BATCHSIZE",
}
KINDS = ("single image", "several images", "video", "audio")
MIXTURES: Mapping[str, Mapping[str, float]] = {
    # samples of each kind in the paper
    "vision": {"single image": 65e3, "several images": 60e3, "video": 60e3},
    # The paper does not name Qwen2-Audio's data; all sounds of the tables are equally likely.
    # OrchMLLM's data are not known; all kinds are equally likely.
    "three modalities": dict.fromkeys(KINDS, 1.0),
    **{kind: {kind: 1.0} for kind in KINDS},
    # Half of the samples are of one kind.
    **{f"half {kind}": {**dict.fromkeys(KINDS, 1.0), kind: len(KINDS) - 1.0} for kind in KINDS},
}
LAYOUTS = {"anyres": AnyRes(), "dynamic": DynamicTiling()}
TILE_TOKENS = {"anyres": 729, "dynamic": 1025}  # SigLIP at 384 px, InternViT at 448 px
WINDOW_TOKENS = MelSpec().window_frames // 2  # Whisper's encoder halves the frames


@dataclass(frozen=True, eq=False)
class DrawnSamples:
    """Drawn media and texts of n samples: picture counts [n], picture sizes [pictures, 2]."""

    kind: np.ndarray
    images: np.ndarray
    sizes: np.ndarray
    video_s: np.ndarray
    audio_s: np.ndarray
    prompt_chars: np.ndarray
    answer_chars: np.ndarray


@cache
def load_tables() -> tuple[dict[str, Any], ...]:
    """Load the tables, one for each kind of rows of a source."""
    return tuple(json.loads(TABLES.read_text(encoding="utf-8"))["tables"])


def interpolate(quantiles: Sequence[float], levels: np.ndarray) -> np.ndarray:
    """Interpolate evenly spaced quantiles at `levels` between 0 and 1."""
    return np.interp(levels, np.linspace(0, 1, len(quantiles)), quantiles)


def cumulative_share(quantiles: Sequence[float], limit: float) -> float:
    """Return the share of values up to `limit`, from evenly spaced quantiles."""
    q = np.asarray(quantiles)
    if limit >= q[-1]:
        return 1.0
    above = int(np.searchsorted(q, limit, side="right"))
    if above == 0:
        return 0.0
    part = (limit - q[above - 1]) / (q[above] - q[above - 1])
    return float((above - 1 + part) / (len(q) - 1))


def draw_samples(mixture: str | Mapping[str, float], n: int, seed: int) -> DrawnSamples:
    """Draw `n` samples of a mixture, given by name or as the weights of its kinds.

    A source's weight is its number of usable rows. Values of a sample are independent, except the
    size and the aspect ratio of a picture.

    Raises:
      ValueError: the mixture is unknown or n is below 1.
    """
    if isinstance(mixture, str):
        if mixture not in MIXTURES:
            raise ValueError(f"unknown mixture {mixture!r}; choose from {', '.join(MIXTURES)}")
        mixture = MIXTURES[mixture]
    if n < 1:
        raise ValueError(f"n={n} samples; ask for at least 1")
    rng = np.random.default_rng(seed)
    sources = [t for t in load_tables() if t["kind"] in mixture]
    kind_weights = {
        kind: sum(_table_weight(t) for t in sources if t["kind"] == kind) for kind in mixture
    }
    weights = np.array(
        [mixture[t["kind"]] * _table_weight(t) / kind_weights[t["kind"]] for t in sources]
    )
    source_index = rng.choice(len(sources), n, p=weights / weights.sum())
    levels = rng.random((5, n))
    values = np.zeros((5, n))
    for k, t in enumerate(sources):
        rows = source_index == k
        values[0, rows] = interpolate(t["prompt_chars"], levels[0, rows])
        values[1, rows] = interpolate(t["answer_chars"], levels[1, rows])
        if "video_s" in t:
            max_level = cumulative_share(t["video_s"], ASSUMED.max_clip_s)
            values[2, rows] = interpolate(t["video_s"], levels[2, rows] * max_level)
        if "audio_s" in t:
            values[3, rows] = interpolate(t["audio_s"], levels[3, rows])
        if "images" in t:
            values[4, rows] = np.round(interpolate(t["images"], levels[4, rows]))
    images = values[4].astype(np.int64)
    owner = np.repeat(source_index, images)
    size_levels = rng.random((2, len(owner)))
    sizes = np.zeros((len(owner), 2), np.int64)
    for k, t in enumerate(sources):
        rows = owner == k
        if "images" in t:
            sizes[rows] = _picture_sizes(t, size_levels[:, rows])
    return DrawnSamples(
        kind=np.array([t["kind"] for t in sources])[source_index],
        images=images,
        sizes=sizes,
        video_s=values[2],
        audio_s=values[3],
        prompt_chars=values[0],
        answer_chars=values[1],
    )


def _table_weight(table: dict[str, Any]) -> float:
    share = cumulative_share(table["video_s"], ASSUMED.max_clip_s) if "video_s" in table else 1.0
    return float(table["rows"] * share)


def _picture_sizes(table: dict[str, Any], levels: np.ndarray) -> np.ndarray:
    """Return (width, height) of pictures at levels of the pixel count and the aspect ratio."""
    pixel_levels, aspect_levels = levels
    pixels = interpolate(table["pixels"], pixel_levels)
    bands = table["aspect_by_pixels"]
    band = np.minimum((pixel_levels * len(bands)).astype(int), len(bands) - 1)
    aspect = np.zeros(len(pixel_levels))
    for b, quantiles in enumerate(bands):
        aspect[band == b] = interpolate(quantiles, aspect_levels[band == b])
    sides = np.stack([np.sqrt(pixels * aspect), np.sqrt(pixels / aspect)], axis=1)
    return np.maximum(1, np.round(sides)).astype(np.int64)


def draw_loads(mixture: str | Mapping[str, float], layout: str, n: int, seed: int) -> list[Load]:
    """Draw the loads of `n` samples under a model's picture layout ("anyres", "dynamic").

    Raises:
      ValueError: the mixture or layout is unknown, or n is below 1.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose from {', '.join(LAYOUTS)}")
    loads: list[Load] = []
    while len(loads) < n:
        loads += to_loads(draw_samples(mixture, n, seed), layout)
        seed += 1_000_003  # draw replacements of dropped samples
    return loads[:n]


def to_loads(samples: DrawnSamples, layout: str) -> list[Load]:
    """Return the loads of the usable samples that leave room for text."""
    tiles, visual_tokens, usable = _count_pictures(samples, layout)
    frames = np.where(
        samples.video_s > 0,
        np.clip(np.ceil(samples.video_s * ASSUMED.frames_per_s), 1, ASSUMED.max_frames),
        0,
    ).astype(np.int64)
    visual_tokens += np.where(frames > 0, LAYOUTS[layout].count_clips(np.maximum(frames, 1)), 0)
    mel = MelSpec()
    n_audio_samples = np.maximum(np.round(samples.audio_s * mel.sample_rate).astype(np.int64), 0)
    windows, audio_tokens = np.zeros((2, len(n_audio_samples)), np.int64)
    audible = n_audio_samples > 2 * mel.hop
    windows[audible], _, audio_tokens[audible] = sound_counts(n_audio_samples[audible], mel)
    usable &= audible | (samples.audio_s == 0)
    prompt = np.where(samples.prompt_chars > 0, samples.prompt_chars, ASSUMED.instruction_chars)
    text = ASSUMED.chat_tokens + np.ceil(prompt / ASSUMED.chars_per_token)
    text = (text + np.ceil(samples.answer_chars / ASSUMED.chars_per_token)).astype(np.int64)
    max_text_tokens = ASSUMED.max_tokens - visual_tokens - audio_tokens
    usable &= max_text_tokens >= ASSUMED.min_text_tokens
    text = np.minimum(text, max_text_tokens)
    rows = np.stack([tiles + frames, windows, text + visual_tokens + audio_tokens], axis=1)
    return [
        Load(
            {
                "vision": (TILE_TOKENS[layout],) * n_tiles,
                "audio": (WINDOW_TOKENS,) * n_windows,
                "llm": (n_tokens,),
            }
        )
        for n_tiles, n_windows, n_tokens in rows[usable].tolist()
    ]


def _count_pictures(
    samples: DrawnSamples, layout: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tiles, LLM tokens, usable) of each sample's pictures, [n]."""
    n = len(samples.images)
    owner = np.repeat(np.arange(n), samples.images)
    n_pictures = samples.images[owner]
    is_usable, tiles, tokens = np.ones(len(owner), bool), *np.zeros((2, len(owner)), np.int64)
    for count in np.unique(n_pictures):
        rows = n_pictures == count
        tiling = LAYOUTS[layout]
        if isinstance(tiling, DynamicTiling):  # pictures of a sample share its tiles
            tiling = replace(tiling, max_tiles=max(1, tiling.max_tiles // int(count)))
        is_usable[rows], tiles[rows], tokens[rows] = tiling.count(
            *samples.sizes[rows].T, n_pictures[rows] == 1
        )
    usable = np.bincount(owner[~is_usable], minlength=n) == 0
    total = [np.bincount(owner, x, minlength=n).astype(np.int64) for x in (tiles, tokens)]
    return total[0], total[1], usable


def summarize_loads(loads: Sequence[Load]) -> dict[str, tuple[float, float]]:
    """Return the mean and the coefficient of variation of tiles, windows and tokens per sample."""
    columns = {
        "tiles": [len(load.lengths("vision")) for load in loads],
        "windows": [len(load.lengths("audio")) for load in loads],
        "LLM tokens": [load.tokens("llm") for load in loads],
    }
    used = {k: np.array(v, float) for k, v in columns.items() if max(v) > 0}
    return {k: (float(v.mean()), float(v.std() / v.mean())) for k, v in used.items()}
