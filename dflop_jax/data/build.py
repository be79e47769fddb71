"""From the data configuration to a source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.fitting import preprocessing
from dflop_jax.data.datasets.index_build import ToPieces
from dflop_jax.data.datasets.mixture import Mixture, Part, load_mixture
from dflop_jax.data.datasets.mixture_samples import MixtureSamples
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.datasets.scene_source import SceneSource
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.sample import Limits, OpenedBy, Source
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import OMNI_TAG, Tokenizer, chat_pieces, make_tokenizer


def make_source(
    config: DataConfig,
    spec: MediaSpec,
    split: str = "train",
    *,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
    index_dir: str | Path = ".",
) -> Source:
    """Return the embedded scenes when `config.path` is empty, else what is there.

    What is on disk (a LLaVA-format file or its folder, tar shards, a YAML mixture of them) goes by
    an index of headers, kept in `index_dir`. `eval_fraction` of it is held out for the eval split;
    scenes have an eval split of their own, of the same size.

    Raises:
      ValueError: data that cannot be read or that the model cannot take, or a tokenizer with more
        ids than the model's `vocab_size`.
    """
    arguments = {"config": config, "spec": spec, "split": split, "eval_fraction": eval_fraction,
                 "vocab_size": vocab_size, "index_dir": str(index_dir)}  # fmt: skip
    limits = Limits(config.max_tiles, config.max_frames, config.max_tokens, config.oversize)
    if not config.path and _is_chat(config):
        raise ValueError("the embedded scenes take no chat template: leave data.tokenizer empty")
    tokenizer = any_tokenizer(config.tokenizer, vocab_size)
    if config.path:
        opened_by = OpenedBy(f"{__name__}:open_source", msgspec.to_builtins(arguments))
        return _mixture(config, spec, limits, split, eval_fraction, index_dir, tokenizer, opened_by)
    assert not isinstance(tokenizer, ChatTokenizer)
    if not spec.tile_px:
        raise ValueError("the embedded scenes are pictures, which this model does not take; "
                         "give data.path")  # fmt: skip
    return SceneSource(
        config.n_samples,
        config.seed,
        spec,
        tokenizer,
        limits,
        split=split,
        blank_images=config.blank_images,
    )


@dataclass(frozen=True)
class _Arguments:
    """Those of `make_source`, as JSON brings them."""

    config: DataConfig
    spec: MediaSpec
    split: str
    eval_fraction: float
    vocab_size: int | None
    index_dir: str


def open_source(arguments: Mapping[str, Any]) -> Source:
    """Make the source that `make_source` made in another process."""
    a = msgspec.convert(arguments, _Arguments)
    return make_source(
        a.config,
        a.spec,
        a.split,
        eval_fraction=a.eval_fraction,
        vocab_size=a.vocab_size,
        index_dir=a.index_dir,
    )


def _is_chat(config: DataConfig) -> bool:
    return bool(config.tokenizer) and Path(config.tokenizer).is_dir()


def any_tokenizer(path: str, vocab_size: int | None) -> Tokenizer | ChatTokenizer:
    """Return that of a model's folder with its chat template, a tokenizer.json, or (empty) bytes.

    Raises:
      ValueError: it cannot be read, or does not fit an embedding of `vocab_size` rows.
    """
    if path and Path(path).is_dir():
        return ChatTokenizer(path, embedding_size=vocab_size)
    return make_tokenizer(path, vocab_size)


def _mixture(
    config: DataConfig,
    spec: MediaSpec,
    limits: Limits,
    split: str,
    eval_fraction: float,
    index_dir: str | Path,
    tokenizer: Tokenizer | ChatTokenizer,
    opened_by: OpenedBy,
) -> MixtureSamples:
    to_pieces: ToPieces
    between: tuple[tuple[int, ...], ...] = ()
    if isinstance(tokenizer, ChatTokenizer):
        to_pieces, settings = tokenizer.pieces, tokenizer.digest
        between = tokenizer.between_frames(limits.max_frames)
    else:
        to_pieces = partial(chat_pieces, tokenizer=tokenizer, tag=OMNI_TAG)
        settings = _digest(config.tokenizer)
    if config.path.endswith((".yaml", ".yml")):
        mixture = load_mixture(config.path)
    else:
        mixture = Mixture((Part(config.path, root=config.root),))
    name = hashlib.sha256(
        f"{Path(config.path).resolve()}|{','.join(config.root)}".encode()
    ).hexdigest()[:16]
    source = MixtureSource(
        mixture,
        preprocessing(spec, limits, between),
        to_pieces,
        settings,
        index_file=Path(index_dir) / f"index-{name}.npz",
        seed=config.seed,
        split=split,
        eval_fraction=eval_fraction,
        max_bad_fraction=config.max_bad_fraction,
        workers=config.workers,
        name=config.path if split == "train" else f"{config.path} ({split})",
    )
    return MixtureSamples(
        source,
        spec,
        limits,
        placeholder=tokenizer.visual_id,
        blank_images=config.blank_images,
        opened_by=opened_by,
    )


def _digest(tokenizer: str) -> str:
    """What names the tokens of a tokenizer.json, or of bytes."""
    if not tokenizer:
        return "bytes"
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]
