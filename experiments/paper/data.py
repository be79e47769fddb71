"""Sample shapes of the paper's data, drawn from the quantile tables, and what is assumed of them.

The tables (see `tables`) say what pictures, clips, sounds and texts there are; each model's own
published preprocessing (`dflop_jax.data`) says what they cost.
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
    """What the tables do not say. `source` of each stands in `WHY`."""

    frames_per_s: float = 1.0
    max_frames: int = 32
    max_clip_s: float = 30.0
    chars_per_token: float = 4.0
    chat_tokens: int = 32
    instruction_chars: int = 60
    max_tokens: int = 8192
    least_text_tokens: int = 256
    global_batch: int = 256


WHY = {
    "frames_per_s": "frames a second of a clip: the public DFLOP code's video_fps",
    "max_frames": "most frames of a clip: its frames_upbound",
    "max_clip_s": "the paper's clips are of 0 to 30 s",
    "chars_per_token": "characters of a text token (English, a vocabulary of 130 to 150 thousand)",
    "chat_tokens": "tokens of system prompt and roles",
    "instruction_chars": "of a sample whose source has answers only (captions, transcripts)",
    "max_tokens": "longest sample; text is cut from the end (the public code profiles up to 8k)",
    "least_text_tokens": "a sample whose media leave less than this is not used",
    "global_batch": "samples of a step on 64 devices: the public optimizer's GLOBAL_BATCHSIZE",
}
MIXTURES: Mapping[str, Mapping[str, float]] = {
    # samples of each kind in the paper
    "vision": {"single image": 65e3, "several images": 60e3, "video": 60e3},
    # The paper does not name Qwen2-Audio's data: all sounds of the tables, as many as there are.
    "audio": {"audio": 1.0},
    # OrchMLLM's data are not known: as many samples of every kind.
    "three modalities": {"single image": 1.0, "several images": 1.0, "video": 1.0, "audio": 1.0},
}
LAYOUTS = {"anyres": AnyRes(), "dynamic": DynamicTiling()}
TILE_TOKENS = {"anyres": 729, "dynamic": 1025}  # of SigLIP at 384 px, of InternViT at 448 px
WINDOW_TOKENS = 1500  # of Whisper's 30 s


@dataclass(frozen=True, eq=False)
class Draws:
    """`n` samples as media and texts: pictures [n] of them each, sizes by picture [pictures, 2]."""

    kind: np.ndarray
    images: np.ndarray
    sizes: np.ndarray
    video_s: np.ndarray
    audio_s: np.ndarray
    prompt_chars: np.ndarray
    answer_chars: np.ndarray


@cache
def tables() -> tuple[dict[str, Any], ...]:
    """The shipped tables, one for each kind of rows of a source."""
    return tuple(json.loads(TABLES.read_text(encoding="utf-8"))["tables"])


def at(quantiles: Sequence[float], u: np.ndarray) -> np.ndarray:
    """Values at levels `u` of a table of quantiles at even levels."""
    return np.interp(u, np.linspace(0, 1, len(quantiles)), quantiles)


def share_below(quantiles: Sequence[float], limit: float) -> float:
    """Share of a distribution given by quantiles at even levels that is at most `limit`."""
    q = np.asarray(quantiles)
    if limit >= q[-1]:
        return 1.0
    above = int(np.searchsorted(q, limit, side="right"))
    if above == 0:
        return 0.0
    part = (limit - q[above - 1]) / (q[above] - q[above - 1])
    return float((above - 1 + part) / (len(q) - 1))


def draw(
    mixture: str | Mapping[str, float], n: int, seed: int, how: Assumptions | None = None
) -> Draws:
    """`n` samples of a mixture, by name or as the weights of its kinds; sources of a kind count by
    their rows (of clips, by those that are short enough), and the figures of a sample are
    independent but for a picture's shape.

    Raises:
      ValueError: no such mixture, or n below 1.
    """
    how = how or Assumptions()
    if isinstance(mixture, str):
        if mixture not in MIXTURES:
            raise ValueError(f"unknown mixture {mixture!r}; known: {', '.join(MIXTURES)}")
        mixture = MIXTURES[mixture]
    if n < 1:
        raise ValueError(f"n={n} samples; ask for at least 1")
    rng = np.random.default_rng(seed)
    chosen = [t for t in tables() if t["kind"] in mixture]
    of_kind = {kind: sum(_weight(t, how) for t in chosen if t["kind"] == kind) for kind in mixture}
    weight = np.array([mixture[t["kind"]] * _weight(t, how) / of_kind[t["kind"]] for t in chosen])
    which = rng.choice(len(chosen), n, p=weight / weight.sum())
    u = rng.random((5, n))
    values = np.zeros((5, n))
    for k, t in enumerate(chosen):
        rows = which == k
        values[0, rows] = at(t["prompt_chars"], u[0, rows])
        values[1, rows] = at(t["answer_chars"], u[1, rows])
        if "video_s" in t:
            values[2, rows] = at(
                t["video_s"], u[2, rows] * share_below(t["video_s"], how.max_clip_s)
            )
        if "audio_s" in t:
            values[3, rows] = at(t["audio_s"], u[3, rows])
        if "images" in t:
            values[4, rows] = np.round(at(t["images"], u[4, rows]))
    images = values[4].astype(np.int64)
    owner = np.repeat(which, images)
    v = rng.random((2, len(owner)))
    sizes = np.zeros((len(owner), 2), np.int64)
    for k, t in enumerate(chosen):
        rows = owner == k
        if "images" in t:
            sizes[rows] = _sizes(t, v[0, rows], v[1, rows])
    return Draws(
        kind=np.array([t["kind"] for t in chosen])[which],
        images=images,
        sizes=sizes,
        video_s=values[2],
        audio_s=values[3],
        prompt_chars=values[0],
        answer_chars=values[1],
    )


def _weight(table: dict[str, Any], how: Assumptions) -> float:
    short = share_below(table["video_s"], how.max_clip_s) if "video_s" in table else 1.0
    return float(table["rows"] * short)


def _sizes(table: dict[str, Any], u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(width, height) of pictures at levels u of pixels and v of the aspect ratio."""
    pixels = at(table["pixels"], u)
    bands = table["aspect_by_pixels"]
    band = np.minimum((u * len(bands)).astype(int), len(bands) - 1)
    aspect = np.zeros(len(u))
    for b, quantiles in enumerate(bands):
        aspect[band == b] = at(quantiles, v[band == b])
    sides = np.stack([np.sqrt(pixels * aspect), np.sqrt(pixels / aspect)], axis=1)
    return np.maximum(1, np.round(sides)).astype(np.int64)


def loads(
    mixture: str | Mapping[str, float],
    layout: str,
    n: int,
    seed: int,
    how: Assumptions | None = None,
) -> list[Load]:
    """Loads of `n` samples of a mixture under a model's layout of pictures ("anyres", "dynamic").

    Raises:
      ValueError: an unknown mixture or layout, or n below 1.
    """
    how = how or Assumptions()
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    found: list[Load] = []
    while len(found) < n:
        found += _loads(draw(mixture, n, seed, how), layout, how)
        seed += 1_000_003  # for those that replace what was too large
    return found[:n]


def _loads(drawn: Draws, layout: str, how: Assumptions) -> list[Load]:
    """Loads of the samples that are usable and leave room for text."""
    tiles, visual, usable = _pictures(drawn, layout)
    frames = np.where(
        drawn.video_s > 0,
        np.clip(np.ceil(drawn.video_s * how.frames_per_s), 1, how.max_frames),
        0,
    ).astype(np.int64)
    visual += np.where(frames > 0, LAYOUTS[layout].count_clips(np.maximum(frames, 1)), 0)
    mel = MelSpec()
    heard = np.maximum(np.round(drawn.audio_s * mel.sample_rate).astype(np.int64), 0)
    windows, sound = np.zeros((2, len(heard)), np.int64)
    audible = heard > 2 * mel.hop
    windows[audible], _, sound[audible] = sound_counts(heard[audible], mel)
    usable &= audible | (drawn.audio_s == 0)
    prompt = np.where(drawn.prompt_chars > 0, drawn.prompt_chars, how.instruction_chars)
    text = how.chat_tokens + np.ceil(prompt / how.chars_per_token)
    text = (text + np.ceil(drawn.answer_chars / how.chars_per_token)).astype(np.int64)
    room = how.max_tokens - visual - sound
    usable &= room >= how.least_text_tokens
    text = np.minimum(text, room)
    rows = np.stack([tiles + frames, windows, text + visual + sound], axis=1)
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


def _pictures(drawn: Draws, layout: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tiles, LLM tokens, usable) of each sample's pictures, [n]."""
    n = len(drawn.images)
    owner = np.repeat(np.arange(n), drawn.images)
    together = drawn.images[owner]
    ok, tiles, tokens = np.ones(len(owner), bool), *np.zeros((2, len(owner)), np.int64)
    for count in np.unique(together):
        rows = together == count
        one = LAYOUTS[layout]
        if isinstance(one, DynamicTiling):  # InternVL's pictures of a sample share its tiles
            one = replace(one, max_tiles=max(1, one.max_tiles // int(count)))
        ok[rows], tiles[rows], tokens[rows] = one.count(*drawn.sizes[rows].T, together[rows] == 1)
    usable = np.bincount(owner[~ok], minlength=n) == 0
    total = [np.bincount(owner, x, minlength=n).astype(np.int64) for x in (tiles, tokens)]
    return total[0], total[1], usable


def facts(drawn: Sequence[Load]) -> dict[str, tuple[float, float]]:
    """Mean and coefficient of variation of the items and tokens of samples, for reports."""
    columns = {
        "tiles": [len(load.lengths("vision")) for load in drawn],
        "windows": [len(load.lengths("audio")) for load in drawn],
        "LLM tokens": [load.tokens("llm") for load in drawn],
    }
    used = {k: np.array(v, float) for k, v in columns.items() if max(v) > 0}
    return {k: (float(v.mean()), float(v.std() / v.mean())) for k, v in used.items()}
