"""Sources of clips with captions: of files, or embedded."""

from __future__ import annotations

from typing import Any

from dflop_jax.config import DataConfig
from dflop_jax.data.build import any_tokenizer
from dflop_jax.data.datasets.clip_files import ClipFiles
from dflop_jax.data.datasets.clip_samples import Clips, ClipSource, form_of
from dflop_jax.data.datasets.moving_scenes import MovingScenes
from dflop_jax.data.media.limits import Limits


def make(config: DataConfig, model: Any, split: str) -> ClipSource:
    """The clips that `config.path` lists, or `config.n_samples` moving scenes if it is empty.

    Raises:
      ValueError: a list, file or caption that cannot be read or that the model cannot take.
    """
    return _source(config, model, split, shuffled=False)


def make_shuffled(config: DataConfig, model: Any, split: str) -> ClipSource:
    """Moving scenes with each other's captions, which then say nothing: a control experiment, by
    `data.factory`."""
    if config.path:
        raise ValueError("data.path: captions are shuffled of the embedded clips only; empty it")
    return _source(config, model, split, shuffled=True)


def _source(config: DataConfig, model: Any, split: str, *, shuffled: bool) -> ClipSource:
    form = form_of(model)
    tokenizer = any_tokenizer(config.tokenizer, model.vocab_size)
    clips: Clips
    if config.path:
        clips = ClipFiles(config.path, config.root, split)
    else:
        n, seed = config.n_samples, config.seed
        clips = MovingScenes(n, seed, split, form.channels, shuffled=shuffled)
    limits = Limits.of(config)
    return ClipSource(clips, form, tokenizer, limits, seed=config.seed, split=split)
