"""From a path that a user gives to a reader of what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dflop_jax.data.bounds import MAX_NAME_CHARS, errors_as
from dflop_jax.data.datasets.find_tables import find_tables, hub_folder
from dflop_jax.data.datasets.json_file import FileReader, find_file
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, RecordFormat
from dflop_jax.data.datasets.record_reader import RecordReader
from dflop_jax.data.datasets.shards import ShardReader, find_shards
from dflop_jax.data.datasets.tables import TableReader
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN


def open_reader(
    path: str | Path,
    roots: Sequence[str | Path] = (),
    columns: Mapping[str, str] = DEFAULT_FORMAT.columns,
    kinds: Kinds = BUILT_IN,
) -> RecordReader:
    """Return a reader of what the path names.

    It may be a LLaVA-format file or its folder; shards: a .tar, a folder of them, or a pattern
    `a-{000..127}.tar` or `a-*.tar`; Parquet or Arrow files: one, a pattern, or a folder as Hugging
    Face's datasets have it, which may also be named by its id where the hub's cache has it.

    Args:
      roots: folders of the media; empty: the folder of the file.
      columns: field -> column, where a record's fields have other names.
      kinds: of media that records may have.

    Raises:
      ValueError: nothing is there, one of several has to be named, or records have no such field.
    """
    with errors_as(f"{path}: records cannot be so"):
        records = RecordFormat(columns, kinds)
    try:
        if (cached := hub_folder(str(path))) is not None:
            # a file of the cache is a link to its bytes, which lie beside
            path, roots = cached, roots or [cached, *_blob_folders(cached)]
        if tables := find_tables(str(path)):
            return TableReader(tables, roots, records)
        if shards := find_shards(str(path)):
            return ShardReader(shards, records)
        return FileReader(find_file(Path(path)), roots, records)
    except OSError as e:
        raise ValueError(
            f"{str(path)[:MAX_NAME_CHARS]}: {(e.strerror or str(e)).lower()}"
        ) from None


def _blob_folders(folder: Path) -> list[Path]:
    """Where the hub's cache keeps the bytes of a repository's files."""
    return [p.parent / "blobs" for p in folder.parents if p.name == "snapshots"][:1]
