"""Builds a source of samples from the data configuration."""

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
from dflop_jax.config_fields import parse_columns
from dflop_jax.data.datasets.index_build import IndexRules, LocalRowReader, ProcessRowReader
from dflop_jax.data.datasets.mixture import Mixture, MixtureEntry, load_mixture
from dflop_jax.data.datasets.mixture_source import MixtureSource, open_readers
from dflop_jax.data.datasets.readers import HUB_PREFIX, find_files, hub_name
from dflop_jax.data.datasets.record_reader import RecordReader
from dflop_jax.data.datasets.scenes import SceneSource
from dflop_jax.data.media.kind import BUILT_IN, Kinds, tag_of
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.process_pool import DecoderReply
from dflop_jax.data.sample import Source, SourceFactory
from dflop_jax.data.text import tokenize
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer
from dflop_jax.data.text.tokenize import (
    BYTE_TOKENIZER,
    FolderTokenizer,
    TemplateFields,
    Tokenizer,
    TokenRun,
)

# Endings of a dataset in one file; names on the hub have none of them.
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
    """Return the dataset or YAML mixture of `config.path` (see `datasets.readers`), or the built-in
    scenes if the path is empty.

    Args:
      n_held_out: number of records, or their fraction (a float), that only the eval split has. For
        the built-in scenes it is the size of the eval split; 0: `n_samples`.
      index_dir: folder of the index file of headers.
      in_processes: make the index in processes that can be killed (see `process_pool`).
      check_media: see `IndexRules`; set it in one process of a run.

    Raises:
      ValueError: data or a tokenizer that cannot be read or that the model cannot take.
    """
    if config.path:
        records = RecordDataset(config, spec, vocab_size, split, n_held_out, str(index_dir))
        return records.source(in_processes=in_processes, check_media=check_media)
    if config.tokenizer and Path(config.tokenizer).is_dir():
        raise ValueError("the built-in scenes take no chat template: leave data.tokenizer empty")
    if config.loss_on_prompts:
        raise ValueError("data.loss_on_prompts needs records: give data.path, or leave it out")
    tokenizer = open_tokenizer(config.tokenizer, vocab_size)
    assert not isinstance(tokenizer, ChatTokenizer)
    n_all = config.n_samples if isinstance(n_held_out, float) else 1
    n_eval_samples = math.ceil(n_held_out * n_all) or config.n_samples
    return SceneSource(
        n_eval_samples if split == "eval" else config.n_samples,
        config.seed,
        spec,
        tokenizer,
        config,
        split=split,
        blank_images=config.blank_images,
    )


@dataclass(frozen=True)
class RecordDataset:
    """The dataset of `config.path` prepared for a model. It converts to JSON for other
    processes."""

    config: DataConfig
    spec: MediaSpec
    vocab_size: int | None = None
    split: str = "train"
    n_held_out: int | float = 0
    index_dir: str = "."
    # The tokenizer's folder as `transformers` resolved it in another process.
    resolved: FolderTokenizer | None = None

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        path = self.config.tokenizer
        return open_tokenizer(path, self.vocab_size, self.spec.kinds, self.resolved)

    @cached_property
    def readers(self) -> dict[str, RecordReader]:
        return open_readers(_load_mixture(self.config), self.spec.kinds)

    @cached_property
    def preparation(self) -> Preparation:
        return self.spec.prepared(self.config, self.tokenizer)

    def encode_turns(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields
    ) -> tuple[TokenRun, ...]:
        if isinstance(self.tokenizer, ChatTokenizer):
            return self.tokenizer.encode_turns(turns, fields)
        return tokenize.encode_chatml(turns, self.tokenizer, tag_of(self.spec.kinds))

    def local_row_reader(self, *, decoded: bool = False) -> LocalRowReader:
        """Return a reader of index rows in this process. `decoded`: also decode the media, and call
        a record unusable if that fails."""
        reads_variable = getattr(self.tokenizer, "reads_variable", lambda _: False)
        preparation = self.preparation if decoded else None
        return LocalRowReader(
            self.readers, self.encode_turns, self.spec.kinds, preparation, reads_variable
        )

    def process_row_reader(self, *, decoded: bool = False) -> ProcessRowReader:
        """Return a reader of index rows in child processes, see `local_row_reader`."""
        arguments = {"dataset": self._to_builtins(), "decoded": decoded}
        factory = SourceFactory(f"{__name__}:open_row_reader", arguments)
        memory_bytes = int(self.config.sample_memory_bytes)
        return ProcessRowReader(factory, self.config.sample_timeout_s, memory_bytes)

    def source(self, *, in_processes: bool, check_media: bool) -> MixtureSource:
        """Return the source of the split; see `make_source` for the arguments."""
        config = self.config
        extra_kinds = [kind.name for kind in self.spec.kinds if kind not in BUILT_IN]
        data_key = "|".join([str(Path(config.path).resolve()), ",".join(config.root), *extra_kinds])
        name = hashlib.sha256(data_key.encode()).hexdigest()[:16]
        digest = getattr(self.tokenizer, "digest", "") or BYTE_TOKENIZER
        if isinstance(self.tokenizer, tokenize.FileTokenizer):
            digest = hashlib.sha256(Path(config.tokenizer).read_bytes()).hexdigest()[:16]
        reads_in_processes = in_processes and hasattr(os, "fork")
        rules = IndexRules(
            Path(self.index_dir) / f"index-{name}.npz",
            digest,
            self.process_row_reader if reads_in_processes else self.local_row_reader,
            config.max_bad_fraction,
            config.workers,
            check_media,
        )
        source = MixtureSource(
            _load_mixture(config),
            self.preparation,
            self.encode_turns,
            rules,
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
    """Return the same source as `make_source` in the parent process."""
    return msgspec.convert(arguments, RecordDataset).source(in_processes=True, check_media=False)


def open_row_reader(arguments: Mapping[str, Any]) -> Callable[[bytes], DecoderReply]:
    """Return a function that answers requests for index rows, for use in a child process."""
    dataset = msgspec.convert(arguments["dataset"], RecordDataset)
    return dataset.local_row_reader(decoded=arguments["decoded"]).answer


def open_tokenizer(
    path: str,
    vocab_size: int | None,
    kinds: Kinds = BUILT_IN,
    resolved: FolderTokenizer | None = None,
) -> AnyTokenizer:
    """Return the tokenizer with chat template of a model's folder, the tokenizer of a
    tokenizer.json, or the byte tokenizer (an empty path or "bytes"). ValueError: it cannot be read
    or has more than `vocab_size` ids."""
    if path and Path(path).is_dir():
        return ChatTokenizer(path, embedding_size=vocab_size, kinds=kinds, resolved=resolved)
    tokenizer: Tokenizer = (
        tokenize.ByteTokenizer() if path in ("", BYTE_TOKENIZER) else tokenize.FileTokenizer(path)
    )
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{path or 'the byte tokenizer'} has {tokenizer.vocab_size} ids, the model's "
            f"vocabulary {vocab_size}; choose a model with a larger vocabulary"
        )
    return tokenizer


def check_paths(config: DataConfig) -> None:
    """Raise ValueError if the data, media folders or tokenizer do not exist."""
    if config.factory or not config.path:
        return
    for entry in _load_mixture(config):
        if entry.path.endswith((".json", ".jsonl")):
            find_files(entry.path)
    if config.tokenizer not in ("", BYTE_TOKENIZER) and not Path(config.tokenizer).exists():
        raise ValueError(
            f"{config.tokenizer}: no such tokenizer.json or folder with one; leave data.tokenizer "
            "empty for byte-level"
        )


def hub_datasets(config: DataConfig) -> list[tuple[str, HfUri]]:
    """Return (path, uri) of each dataset on the hub. A missing path that looks local is not one."""
    if config.factory or not config.path:
        return []
    paths = [entry.path for entry in _load_mixture(config)]
    if config.eval_path:
        paths += [entry.path for entry in _load_mixture(replace(config, path=config.eval_path))]

    def is_meant(path: str) -> bool:
        is_local = Path(path).parent.is_dir() or path.endswith(FILE_ENDINGS)
        return path.startswith(HUB_PREFIX) or not is_local

    return [(path, uri) for path in paths if (uri := hub_name(path)) and is_meant(path)]


def _load_mixture(config: DataConfig) -> Mixture:
    """Return the mixture of `config.path`: a YAML file, or a single dataset."""
    for root in config.root:
        if not Path(root).is_dir():
            raise ValueError(f"data.root={root}: no such folder; give the folder of the media")
    columns = parse_columns(config.columns)
    if config.path.endswith((".yaml", ".yml")):
        if columns:
            remedy = f"give `columns` to the parts of {config.path}"
            raise ValueError(f"data.columns is for one dataset; {remedy}")
        return load_mixture(config.path)
    return (MixtureEntry(config.path, root=config.root, columns=columns),)
