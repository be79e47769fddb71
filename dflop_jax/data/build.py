"""From the data configuration to a source."""

from __future__ import annotations

from dflop_jax.config import DataConfig
from dflop_jax.data.llava import LlavaSource
from dflop_jax.data.sample import Limits, Source, VisionSpec
from dflop_jax.data.scene_source import SceneSource
from dflop_jax.data.text import Tokenizer, make_tokenizer


def make_source(
    config: DataConfig,
    spec: VisionSpec,
    split: str = "train",
    *,
    eval_fraction: float = 0.0,
    tokenizer: Tokenizer | None = None,
) -> Source:
    """The embedded scenes when `config.path` is empty, else the LLaVA-format dataset there.

    `eval_fraction` of a dataset on disk is held out for the eval split; scenes have an eval split
    of their own, of the same size. ValueError: see LlavaSource and make_tokenizer.
    """
    tokenizer = tokenizer or make_tokenizer(config.tokenizer)
    limits = Limits(config.max_tiles, config.max_frames, config.max_tokens, config.oversize)
    if not config.path:
        return SceneSource(
            config.n_samples,
            config.seed,
            spec,
            tokenizer,
            limits,
            split=split,
            blank_images=config.blank_images,
        )
    return LlavaSource(
        config.path,
        spec,
        tokenizer,
        limits,
        root=config.root or None,
        split=split,
        eval_fraction=eval_fraction,
        blank_images=config.blank_images,
        max_bad_fraction=config.max_bad_fraction,
        workers=config.workers,
    )
