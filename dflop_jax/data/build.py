"""From the data configuration to a source."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub.utils import HfUri

from dflop_jax.config import DataConfig
from dflop_jax.config_fields import named_columns
from dflop_jax.data.datasets.find_tables import HUB_PREFIX, hub_name
from dflop_jax.data.datasets.index_build import IndexRules
from dflop_jax.data.datasets.json_file import find_file
from dflop_jax.data.datasets.mixture import Mixture, MixtureEntry, load_mixture
from dflop_jax.data.datasets.mixture_source import MixtureSource, open_readers
from dflop_jax.data.datasets.record_reader import RecordReader
from dflop_jax.data.datasets.row_reader import LocalRowReader, ProcessRowReader
from dflop_jax.data.datasets.scene_source import SceneSource
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.pool.processes import DecoderReply
from dflop_jax.data.sample import Source, SourceFactory
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import (
    BYTE_TOKENIZER,
    ByteTokenizer,
    FileTokenizer,
    TemplateFields,
    Tokenizer,
    TokenRun,
    encode_chatml,
)
from dflop_jax.data.text.tokenizer_files import FolderTokenizer

# Of what is one file; names on the hub have none.
FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".tar", ".yaml", ".yml")


def make_source(
    config: DataConfig,
    spec: MediaSpec,
    split: str = "train",
    *,
    n_held_out: int | float = 0,
    vocab_size: int | None = None,
    index_dir: str | Path = ".",
    in_processes: bool = True,
    check_media: bool = True,
) -> Source:
    """Return the dataset of `config.path`, or the embedded scenes where it is empty.

    A dataset on disk (a LLaVA-format file or its folder, tar shards, tables, a YAML mixture) is
    read through an index of headers, kept in `index_dir`.

    Args:
      n_held_out: records that the eval split has and the train split lacks; a float: their
        fraction.
        The embedded scenes have other scenes in their eval split: as many, or `n_samples` for 0.
      in_processes: make the index in processes that can be killed (see `pool`).
      check_media: see `update_index`; one process of a run does.

    Raises:
      ValueError: data that cannot be read or that the model cannot take, or a tokenizer with more
        ids than the model's `vocab_size`.
    """
    if config.path:
        records = RecordDataset(config, spec, vocab_size, split, n_held_out, str(index_dir))
        return records.source(in_processes=in_processes, check_media=check_media)
    if config.tokenizer and Path(config.tokenizer).is_dir():
        raise ValueError("the embedded scenes take no chat template: leave data.tokenizer empty")
    if config.loss_on_prompts:
        raise ValueError(
            "data.loss_on_prompts is of records: give data.path, or leave it out for the scenes"
        )
    tokenizer = open_tokenizer(config.tokenizer, vocab_size)
    assert not isinstance(tokenizer, ChatTokenizer)
    n_all = config.n_samples if isinstance(n_held_out, float) else 1
    n_eval_samples = math.ceil(n_held_out * n_all) or config.n_samples
    return SceneSource(
        n_eval_samples if split == "eval" else config.n_samples,
        config.seed,
        spec,
        tokenizer,
        Limits.of(config),
        split=split,
        blank_images=config.blank_images,
    )


@dataclass(frozen=True)
class RecordDataset:
    """The dataset of `config.path` as a model takes it; it may be sent to another process as JSON.

    Attributes:
      resolved: the tokenizer's folder as `transformers` resolved it in another process.

    Raises:
      ValueError: on use, where there is no such data or tokenizer.
    """

    config: DataConfig
    spec: MediaSpec
    vocab_size: int | None = None
    split: str = "train"
    n_held_out: int | float = 0
    index_dir: str = "."
    resolved: FolderTokenizer | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | ChatTokenizer:
        return open_tokenizer(
            self.config.tokenizer, self.vocab_size, self.spec.kinds, self.resolved
        )

    @cached_property
    def readers(self) -> dict[str, RecordReader]:
        """The readers of all datasets, by key."""
        return open_readers(_load_mixture(self.config), self.spec.kinds)

    @cached_property
    def preparation(self) -> Preparation:
        """How the model takes media."""
        return self.spec.prepared(Limits.of(self.config), self.tokenizer)

    def encode_turns(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields
    ) -> tuple[TokenRun, ...]:
        if isinstance(self.tokenizer, ChatTokenizer):
            return self.tokenizer.encode_turns(turns, fields)
        return encode_chatml(turns, self.tokenizer, tag_of(self.spec.kinds))

    def local_row_reader(self, *, decoded: bool = False) -> LocalRowReader:
        """Return a reader of index rows in this process. `decoded`: a record is also unusable when
        its media cannot be decoded as the model takes them."""
        chat = self.tokenizer if isinstance(self.tokenizer, ChatTokenizer) else None
        reads_variable = chat.reads_variable if chat else lambda _: False
        preparation = self.preparation if decoded else None
        return LocalRowReader(
            self.readers, self.encode_turns, self.spec.kinds, preparation, reads_variable
        )

    def process_row_reader(self, *, decoded: bool = False) -> ProcessRowReader:
        """Return a reader of index rows in other processes, see `local_row_reader`."""
        arguments = {"dataset": self._to_builtins(), "decoded": decoded}
        factory = SourceFactory(f"{__name__}:open_row_reader", arguments)
        memory_bytes = int(self.config.sample_memory_bytes)
        return ProcessRowReader(factory, self.config.sample_timeout_s, memory_bytes)

    def source(self, *, in_processes: bool, check_media: bool) -> MixtureSource:
        """Return the samples of the split; arguments as for `make_source`."""
        config = self.config
        extra_kinds = [kind.name for kind in self.spec.kinds if kind not in BUILT_IN]
        data_key = "|".join([str(Path(config.path).resolve()), ",".join(config.root), *extra_kinds])
        name = hashlib.sha256(data_key.encode()).hexdigest()[:16]
        source = MixtureSource(
            _load_mixture(config),
            self.preparation,
            self.encode_turns,
            IndexRules(
                Path(self.index_dir) / f"index-{name}.npz",
                getattr(self.tokenizer, "digest", "") or _tokenizer_digest(config.tokenizer),
                self.process_row_reader
                if in_processes and hasattr(os, "fork")
                else self.local_row_reader,
                config.max_bad_fraction,
                config.workers,
                check_media,
            ),
            config,
            placeholder=self.tokenizer.placeholder_id,
            split=self.split,
            n_held_out=self.n_held_out,
        )
        source.factory = SourceFactory(f"{__name__}:open_source", self._to_builtins())
        return source

    def _to_builtins(self) -> dict[str, Any]:
        resolved = getattr(self.tokenizer, "resolved", None)
        return msgspec.to_builtins(replace(self, resolved=resolved))


def open_source(arguments: Mapping[str, Any]) -> Source:
    """Return the source that `make_source` made in another process."""
    return msgspec.convert(arguments, RecordDataset).source(in_processes=True, check_media=False)


def open_row_reader(arguments: Mapping[str, Any]) -> Callable[[bytes], DecoderReply]:
    """Return what answers requests for index rows of a dataset, in another process."""
    dataset = msgspec.convert(arguments["dataset"], RecordDataset)
    return dataset.local_row_reader(decoded=arguments["decoded"]).answer


def open_tokenizer(
    path: str,
    vocab_size: int | None,
    kinds: Kinds = BUILT_IN,
    resolved: FolderTokenizer | None = None,
) -> Tokenizer | ChatTokenizer:
    """Return the tokenizer of a model's folder with its chat template, of a tokenizer.json, or of
    bytes (an empty path or "bytes").

    Raises:
      ValueError: it cannot be read, or does not fit an embedding of `vocab_size` rows.
    """
    if path and Path(path).is_dir():
        return ChatTokenizer(path, embedding_size=vocab_size, kinds=kinds, resolved=resolved)
    tokenizer: Tokenizer = ByteTokenizer() if path in ("", BYTE_TOKENIZER) else FileTokenizer(path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{path or 'the byte tokenizer'} has {tokenizer.vocab_size} ids, the model's "
            f"vocabulary {vocab_size}; take a model with a larger vocabulary"
        )
    return tokenizer


def check_paths(config: DataConfig) -> None:
    """Raise ValueError for data, media folders or a tokenizer that do not exist; only a mixture is
    read."""
    if config.factory or not config.path:
        return
    for entry in _load_mixture(config):
        if entry.path.endswith((".json", ".jsonl")):
            find_file(Path(entry.path))
    if config.tokenizer not in ("", BYTE_TOKENIZER) and not Path(config.tokenizer).exists():
        raise ValueError(
            f"{config.tokenizer}: no such tokenizer.json or folder with one; leave data.tokenizer "
            "empty for byte-level"
        )


def hub_datasets(config: DataConfig) -> list[tuple[str, HfUri]]:
    """Return (path, uri) of the datasets that the configuration names on the hub. A path in an
    existing folder, or with the ending of a file, is treated as a mistyped path."""
    if config.factory or not config.path:
        return []
    paths = [entry.path for entry in _load_mixture(config)]
    if config.eval_path:
        paths += [entry.path for entry in _load_mixture(replace(config, path=config.eval_path))]
    return [
        (path, uri)
        for path in paths
        if (uri := hub_name(path))
        and (
            path.startswith(HUB_PREFIX)
            or not (Path(path).parent.is_dir() or path.endswith(FILE_ENDINGS))
        )
    ]


def _load_mixture(config: DataConfig) -> Mixture:
    """Return the mixture of `config.path`: of a YAML file, or one dataset alone."""
    for root in config.root:
        if not Path(root).is_dir():
            raise ValueError(f"data.root={root}: no such folder; give the one that media lie below")
    columns = named_columns(config.columns)
    if config.path.endswith((".yaml", ".yml")):
        if columns:
            raise ValueError(
                f"data.columns is for one dataset; give `columns` to the parts of {config.path}"
            )
        return load_mixture(config.path)
    return (MixtureEntry(config.path, root=config.root, columns=columns),)


def _tokenizer_digest(tokenizer: str) -> str:
    """Return what identifies the tokens of a tokenizer.json, or of bytes."""
    if tokenizer in ("", BYTE_TOKENIZER):
        return BYTE_TOKENIZER
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]
