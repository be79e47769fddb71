"""From the data configuration to a source."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub.utils import HfUri

from dflop_jax.config import DataConfig
from dflop_jax.config_fields import named_columns
from dflop_jax.data.datasets.find_tables import HUB, hub_name
from dflop_jax.data.datasets.header_rows import RowReader, RowsApart, RowsHere, ToPieces
from dflop_jax.data.datasets.index_build import IndexRules
from dflop_jax.data.datasets.json_file import find_file
from dflop_jax.data.datasets.llava_records import Record
from dflop_jax.data.datasets.located import RecordReader
from dflop_jax.data.datasets.mixture import Mixture, MixturePart, load_mixture
from dflop_jax.data.datasets.mixture_samples import MixtureSamples
from dflop_jax.data.datasets.mixture_source import MixtureSource, Share, open_readers
from dflop_jax.data.datasets.scene_source import SceneSource
from dflop_jax.data.datasets.shape_index import Row, table_of
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.decode import decode_media
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.pool.messages import DecoderReply, DecoderSetup
from dflop_jax.data.sample import OpenedBy, Source
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import BYTES, Tokenizer, chat_pieces, make_tokenizer
from dflop_jax.data.text.tokenizer_files import FolderTokenizer
from dflop_jax.data.text.weighting import trained_on

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
    apart: bool = True,
    check_media: bool = True,
) -> Source:
    """Return the embedded scenes when `config.path` is empty, else what is there.

    What is on disk (a LLaVA-format file or its folder, tar shards, a YAML mixture of them) goes by
    an index of headers, kept in `index_dir`; it is made in processes of their own (see `pool`), or
    here unless `apart`. So many records of it (a float: such a share of them) are held out for the
    eval split; scenes have an eval split of their own, of as many (of the same size, for 0).
    `check_media`: see `update_index`; one process of a run does.

    Raises:
      ValueError: data that cannot be read or that the model cannot take, or a tokenizer with more
        ids than the model's `vocab_size`.
    """
    if config.tokenizer and not config.path and Path(config.tokenizer).is_dir():
        raise ValueError("the embedded scenes take no chat template: leave data.tokenizer empty")
    tokenizer = any_tokenizer(config.tokenizer, vocab_size, spec.kinds)
    if config.path:
        index, resolved = str(index_dir), getattr(tokenizer, "resolved", None)
        made = _Arguments(config, spec, split, n_held_out, vocab_size, index, resolved)
        return _mixture(made, tokenizer, apart and hasattr(os, "fork"), check_media)
    if config.loss_on_prompts:
        raise ValueError(
            "data.loss_on_prompts is of records: give data.path, or leave it out for the scenes"
        )
    assert not isinstance(tokenizer, ChatTokenizer)
    is_share = isinstance(n_held_out, float)
    of_eval = math.ceil(n_held_out * (config.n_samples if is_share else 1)) or config.n_samples
    return SceneSource(
        of_eval if split == "eval" else config.n_samples,
        config.seed,
        spec,
        tokenizer,
        Limits.of(config),
        split=split,
        blank_images=config.blank_images,
    )


@dataclass(frozen=True)
class _Arguments:
    """Those of `make_source`, as JSON brings them."""

    config: DataConfig
    spec: MediaSpec
    split: str
    n_held_out: int | float
    vocab_size: int | None
    index_dir: str
    resolved: FolderTokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer | ChatTokenizer:
        return any_tokenizer(self.config.tokenizer, self.vocab_size, self.spec.kinds, self.resolved)


def open_source(arguments: Mapping[str, Any]) -> Source:
    """Make the source that `make_source` made in another process."""
    a = msgspec.convert(arguments, _Arguments)
    return _mixture(a, a.tokenizer, hasattr(os, "fork"), check_media=False)


def open_rows(arguments: Mapping[str, Any]) -> Callable[[bytes, object], DecoderReply]:
    """Return what answers for the index of that source, in another process."""
    a = msgspec.convert(arguments, _Arguments)
    return _rows_here(a, a.tokenizer).answer


def open_decoded_rows(arguments: Mapping[str, Any]) -> Callable[[bytes, object], DecoderReply]:
    """As `open_rows`; a record whose media cannot be decoded as the model takes them is unusable,
    too."""
    a = msgspec.convert(arguments, _Arguments)
    tokenizer = a.tokenizer
    how = a.spec.prepared(Limits.of(a.config), tokenizer)

    def decode(record: Record, row: Row) -> None:
        table = table_of([row.record], [row.media], a.spec.kinds)
        if sample_counts(table, how)[1].all():  # what the model takes none of is not bad
            decode_media(record, table, 0, how)

    return _rows_here(a, tokenizer, decode).answer


def _rows_apart(a: _Arguments, opens: str) -> Callable[[], RowReader]:
    """Make what reads rows by a function of this module in other processes."""
    memory = int(a.config.sample_memory_bytes)
    setup = DecoderSetup(f"{__name__}:{opens}", msgspec.to_builtins(a), memory)
    return partial(RowsApart, setup, a.config.sample_timeout_s, a.spec.kinds)


def _rows_here(
    a: _Arguments,
    tokenizer: Tokenizer | ChatTokenizer,
    decode: Callable[[Record, Row], None] | None = None,
) -> RowsHere:
    kinds, shows = a.spec.kinds, getattr(tokenizer, "shows", lambda _: False)
    to_pieces = _to_pieces(tokenizer, kinds)
    return RowsHere(open_readers(_parts(a.config), kinds), to_pieces, kinds, decode, shows)


@dataclass(frozen=True)
class Looks:
    """What looks at records of some data without training on them.

    Attributes:
      readers: of each dataset, by name.
      headers, decoded: make what reads rows apart, by headers alone and with the media decoded.
      how: the model takes media.
    """

    readers: Mapping[str, RecordReader]
    headers: Callable[[], RowReader]
    decoded: Callable[[], RowReader]
    to_pieces: ToPieces
    tokenizer: Tokenizer | ChatTokenizer
    how: Preparation


def looks(config: DataConfig, spec: MediaSpec, vocab_size: int | None = None) -> Looks:
    """Return what looks at the records of `config.path`.

    Raises:
      ValueError: no such data, or no such tokenizer.
    """
    tokenizer = any_tokenizer(config.tokenizer, vocab_size, spec.kinds)
    resolved = getattr(tokenizer, "resolved", None)
    arguments = _Arguments(config, spec, "train", 0, vocab_size, ".", resolved)
    return Looks(
        open_readers(_parts(config), spec.kinds),
        _rows_apart(arguments, "open_rows"),
        _rows_apart(arguments, "open_decoded_rows"),
        _to_pieces(tokenizer, spec.kinds),
        tokenizer,
        spec.prepared(Limits.of(config), tokenizer),
    )


def any_tokenizer(
    path: str,
    vocab_size: int | None,
    kinds: Kinds = BUILT_IN,
    resolved: FolderTokenizer | None = None,
) -> Tokenizer | ChatTokenizer:
    """Return that of a model's folder with its chat template, a tokenizer.json, or (empty) bytes.

    Raises:
      ValueError: it cannot be read, or does not fit an embedding of `vocab_size` rows.
    """
    if path and Path(path).is_dir():
        return ChatTokenizer(path, embedding_size=vocab_size, kinds=kinds, resolved=resolved)
    return make_tokenizer(path, vocab_size)


def _mixture(
    made: _Arguments, tokenizer: Tokenizer | ChatTokenizer, apart: bool, check_media: bool
) -> MixtureSamples:
    config, limits = made.config, Limits.of(made.config)
    is_train = made.split == "train"
    kinds = made.spec.kinds
    extra_kinds = [kind.name for kind in kinds if kind not in BUILT_IN]
    place = "|".join([str(Path(config.path).resolve()), ",".join(config.root), *extra_kinds])
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    source = MixtureSource(
        _parts(config),
        made.spec.prepared(limits, tokenizer),
        _to_pieces(tokenizer, kinds),
        IndexRules(
            Path(made.index_dir) / f"index-{name}.npz",
            getattr(tokenizer, "digest", "") or _digest(config.tokenizer),
            _rows_apart(made, "open_rows") if apart else partial(_rows_here, made, tokenizer),
            config.max_bad_fraction,
            config.workers,
            check_media,
        ),
        kinds=kinds,
        share=Share(made.split, made.n_held_out, config.seed),
        name=config.path if is_train else f"{config.path} ({made.split})",
    )
    return MixtureSamples(
        source,
        limits,
        placeholder=tokenizer.placeholder_id,
        blank_images=config.blank_images,
        opened_by=OpenedBy(f"{__name__}:open_source", msgspec.to_builtins(made)),
        # Held-out losses stay those of plain answers.
        weighting=partial(trained_on, prompts=config.loss_on_prompts) if is_train else None,
    )


def check_paths(config: DataConfig) -> None:
    """ValueError for data, folders of media or a tokenizer that are not there; nothing of them is
    read but a mixture."""
    if config.factory or not config.path:
        return
    for part in _parts(config).parts:
        if part.path.endswith((".json", ".jsonl")):
            find_file(Path(part.path))
    if config.tokenizer not in ("", BYTES) and not Path(config.tokenizer).exists():
        raise ValueError(
            f"{config.tokenizer}: no such tokenizer.json or folder with one; leave data.tokenizer "
            "empty for byte-level"
        )


def hub_datasets(config: DataConfig) -> list[tuple[str, HfUri]]:
    """The paths of the data that name a dataset on the hub. A path in a folder that is here, or
    with the ending of a file, is taken for a mistake of a path."""
    if config.factory or not config.path:
        return []
    paths = [part.path for part in _parts(config).parts]
    if config.eval_path:
        paths += [part.path for part in _parts(replace(config, path=config.eval_path)).parts]
    return [
        (path, uri)
        for path in paths
        if (uri := hub_name(path))
        and (
            path.startswith(HUB) or not (Path(path).parent.is_dir() or path.endswith(FILE_ENDINGS))
        )
    ]


def _parts(config: DataConfig) -> Mixture:
    """The mixture that `config.path` names: of a YAML file, or a dataset alone."""
    for root in config.root:
        if not Path(root).is_dir():
            raise ValueError(f"data.root={root}: no such folder; give the one that media lie below")
    columns = tuple(sorted(named_columns(config.columns).items()))
    if config.path.endswith((".yaml", ".yml")):
        if columns:
            raise ValueError(
                f"data.columns is for one dataset; give `columns` to the parts of {config.path}"
            )
        return load_mixture(config.path)
    return Mixture((MixturePart(config.path, root=config.root, columns=columns),))


def _to_pieces(tokenizer: Tokenizer | ChatTokenizer, kinds: Kinds) -> ToPieces:
    if isinstance(tokenizer, ChatTokenizer):
        return tokenizer.pieces
    return lambda turns, _: chat_pieces(turns, tokenizer, tag_of(kinds))


def _digest(tokenizer: str) -> str:
    """What names the tokens of a tokenizer.json, or of bytes."""
    if tokenizer in ("", BYTES):
        return BYTES
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]
