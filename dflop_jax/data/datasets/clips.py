"""Clips and their captions as samples for a flow-matching model of latents.

A sample's time and noise are drawn from (seed, split, number of the clip, epoch) alone, so they are
the same in every run, process and schedule, and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.datasets.clip_lists import Clip, draw_clips, list_files
from dflop_jax.data.datasets.record_parser import short_digest
from dflop_jax.data.media.medium import TEXT_MODULE
from dflop_jax.data.sample import STREAMS, FeatureGather, Sample
from dflop_jax.data.text.chat import AnyTokenizer
from dflop_jax.records import Load

GENERATOR = "generator"
MAX_TIME = 1000.0  # the generator's time input for pure noise
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ClipFormat:
    """Clip format of a generator: `preprocessing["generator"]` of its model."""

    channels: int  # of latents [channels, time, rows, columns]
    patch: Grid  # size of a token's patch along time, rows and columns
    shift: float  # shift of the noise schedule; above 1: more noise
    time_tokens: int  # number of time tokens per clip; their roles are 1, 2, ...
    text: int  # role of text tokens
    clip: int  # role of patch tokens

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """Return the number of patches along time, rows and columns. ValueError: wrong shape."""
        fits = len(shape) == 4 and shape[0] == self.channels and min(shape) >= 1
        if not fits or any(n % p for n, p in zip(shape[1:], self.patch)):
            p = self.patch
            raise ValueError(
                f"latents of shape {list(shape)}, the model needs [{self.channels}, time, rows, "
                f"columns] in multiples of {p[0]}, {p[1]} and {p[2]}"
            )
        t, h, w = (n // p for n, p in zip(shape[1:], self.patch))
        return t, h, w

    def patches(self, latents: np.ndarray) -> np.ndarray:
        """Return patches [n, values] by time, row, column; values by time, row, column, channel."""
        t, h, w = self.grid(latents.shape)
        a, b, c = self.patch
        split = latents.reshape(self.channels, t, a, h, b, w, c)
        return split.transpose(1, 3, 5, 2, 4, 6, 0).reshape(t * h * w, -1)

    def latents(self, patches: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the latents of patches (the inverse of `patches`)."""
        t, h, w = grid
        a, b, c = self.patch
        split = patches.reshape(t, h, w, a, b, c, self.channels).transpose(6, 0, 3, 1, 4, 2, 5)
        return split.reshape(self.channels, t * a, h * b, w * c)

    def noise_level(self, fraction: float) -> float:
        """Return the shifted noise level, 0 to 1, at a fraction, 0 to 1, of the way to noise."""
        return self.shift * fraction / (1.0 + (self.shift - 1.0) * fraction)

    def tokens(self, n_text: int, grid: Grid) -> int:
        """Return the number of the generator's tokens for a clip."""
        return self.time_tokens + n_text + int(np.prod(grid))

    def fields(self, n_text: int, grid: Grid) -> dict[str, np.ndarray]:
        """Return the generator's fields that do not depend on a clip's values: role [tokens],
        positions [tokens, 3], weights [tokens]."""
        n = int(np.prod(grid))
        roles = [np.arange(1, self.time_tokens + 1), np.full(n_text, self.text)]
        positions = np.indices(grid).reshape(3, n).T
        n_before = self.time_tokens + n_text
        return {
            "role": np.concatenate([*roles, np.full(n, self.clip)]).astype(np.int32),
            "positions": np.pad(positions, ((n_before, 0), (0, 0))).astype(np.int32),
            "weights": np.concatenate([np.zeros(n_before), np.ones(n)]).astype(np.float32),
        }


def clip_format_of(model: Any) -> ClipFormat:
    """Return the clip format of a model. ValueError: the model has no generator."""
    if GENERATOR not in model.preprocessing:
        raise ValueError(
            f"a {type(model).__name__} generates no clips; choose model.factory=models.wan:build"
        )
    return ClipFormat(**model.preprocessing[GENERATOR])


def caption_ids(
    caption: str, tokenizer: AnyTokenizer, limits: DataConfig, label: str
) -> np.ndarray:
    """Return the caption's token ids with an end token, int32, cut to `limits.max_tokens`.
    ValueError: no caption, or it is too long and `limits.oversize` is "error"."""
    if not caption.strip():
        raise ValueError(f"{label}: no caption; say what the clip shows")
    end = [tokenizer.im_end_id] if tokenizer.im_end_id >= 0 else []
    ids = [*tokenizer.encode(caption), *end]
    if len(ids) > limits.max_tokens and limits.oversize == "error":
        raise ValueError(
            f"{label}: the caption's {len(ids)} tokens exceed data.max_tokens={limits.max_tokens};"
            " raise it, or set data.oversize to truncate"
        )
    return np.array(ids[: limits.max_tokens], np.int32)


def clip_sample(
    clip_format: ClipFormat,
    ids: np.ndarray,
    grid: Grid,
    clean: np.ndarray,
    noise: np.ndarray,
    noise_level: float,
) -> Sample:
    """Return the sample of a caption and a clip; `clean` and `noise` are patches [n, values]."""
    n_text, tokens = len(ids), clip_format.tokens(len(ids), grid)
    values = ((tokens - len(clean), 0), (0, 0))
    fields = clip_format.fields(n_text, grid) | {
        "time": np.full(tokens, MAX_TIME * noise_level, np.float32),
        "latents": np.pad(
            np.float32(1.0 - noise_level) * clean + np.float32(noise_level) * noise, values
        ),
        "target": np.pad(noise - clean, values),
    }
    index = np.full((tokens, 1), -1, np.int32)
    index[clip_format.time_tokens : clip_format.time_tokens + n_text, 0] = np.arange(n_text)
    read = {TEXT_MODULE: {"tokens": ids}, GENERATOR: fields}
    load = Load({TEXT_MODULE: (n_text,), GENERATOR: (tokens,)})
    return Sample(read, {(TEXT_MODULE, GENERATOR): FeatureGather(index)}, load)


class ClipSource:
    """A source of clips. With n clips, `sample(i + k * n)` is clip i with the time and noise of
    epoch k; its load is the same in all epochs. ValueError: a clip has no caption, or latents that
    the model cannot take."""

    varies = True  # see `sample.Source`

    def __init__(
        self,
        name: str,
        clips: Sequence[Clip],
        clip_format: ClipFormat,
        tokenizer: AnyTokenizer,
        limits: DataConfig,
        *,
        seed: int,
        split: str,
    ) -> None:
        self.name = name
        self._clips, self._format, self._key = clips, clip_format, (seed, STREAMS[split])
        self.digest = short_digest(msgspec.json.encode([(c.caption, c.shape) for c in clips]))
        self._ids = [caption_ids(c.caption, tokenizer, limits, c.label) for c in clips]
        self._grids: list[Grid] = []
        for clip in clips:
            try:
                self._grids.append(clip_format.grid(clip.shape))
            except ValueError as e:
                raise ValueError(f"{clip.label}: {e}") from None

    def __len__(self) -> int:
        return len(self._clips)

    def label(self, index: int) -> str:
        return self._clips[index % len(self)].label

    def load(self, index: int) -> Load:
        n_text, grid = len(self._ids[index % len(self)]), self._grids[index % len(self)]
        return Load({TEXT_MODULE: (n_text,), GENERATOR: (self._format.tokens(n_text, grid),)})

    def sample(self, index: int) -> Sample:
        epoch, clip = divmod(index, len(self))
        clean = self._format.patches(self._clips[clip].read())
        rng = np.random.default_rng((*self._key, clip, epoch))
        noise_level = self._format.noise_level(rng.random())
        noise = rng.standard_normal(clean.shape, np.float32)
        ids, grid = self._ids[clip], self._grids[clip]
        return clip_sample(self._format, ids, grid, clean, noise, noise_level)


def make_clip_source(
    config: DataConfig, model: Any, split: str, *, shuffled: bool = False
) -> ClipSource:
    """Return the source of the clips listed in `config.path`, or of `config.n_samples` moving
    scenes if it is empty. `shuffled` gives each clip another's caption. ValueError: a list, file or
    caption cannot be read, or the model cannot take it."""
    clip_format = clip_format_of(model)
    tokenizer = open_tokenizer(config.tokenizer, model.vocab_size)
    n, seed = config.n_samples, config.seed
    if config.path:
        name = config.path if split == "train" else f"{config.path} ({split})"
        clips = list_files(config.path, config.root, split)
    else:
        name = f"moving scenes(n={n}, seed={seed}, {split})"
        clips = draw_clips(name, n, seed, split, clip_format.channels)
    if shuffled:
        n_rolled = max(1, n // 2)
        rolled = clips[n_rolled:] + clips[:n_rolled]
        clips = [c._replace(caption=named.caption) for c, named in zip(clips, rolled)]
    limits = config
    return ClipSource(name, clips, clip_format, tokenizer, limits, seed=seed, split=split)


def make_shuffled(config: DataConfig, model: Any, split: str) -> ClipSource:
    """Return the source with shuffled captions, a control experiment, for `data.factory`."""
    return make_clip_source(config, model, split, shuffled=True)
