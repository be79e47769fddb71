"""Tables of a dataset's records and media headers, and the index file that stores them.

A table holds each usable record's location, number of text tokens, and the header of each of its
media. The tokens of media depend on the model and are computed from the table (see `counts`), so
one index file serves every model that shares a tokenizer.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflop_jax.data.bounds import errors_as, parse_json
from dflop_jax.data.media.kind import BUILT_IN, Kind, Kinds

VERSION = 13  # of index files; increase it to rebuild every index
# Columns of a record and its number of media.
RECORD_COLUMNS = np.dtype(
    [
        ("number", np.int64),
        ("file", np.int32),
        ("offset", np.int64),
        ("size_bytes", np.int64),
        ("split_hash", np.uint64),
        ("content_hash", np.uint64),
        ("text_tokens", np.int32),
        ("needed_tokens", np.int32),
        ("n_media", np.int32),
    ]
)


class IndexRow(NamedTuple):
    record: dict[str, int]  # the record's columns
    media: tuple[dict[str, int], ...]  # columns of each medium
    files: Mapping[str, str]  # the `file_state` of media files by path
    unread: tuple[str, ...] = ()  # keys that are not read


@lru_cache
def media_columns(kinds: Kinds) -> np.dtype:
    """Return the columns of media: the kind, position in the text, and every kind's header."""
    columns: dict[str, type] = {"kind": np.int8, "tokens_before": np.int32}
    for kind in kinds:
        columns.update(kind.columns)
    return np.dtype([*columns.items()])


@dataclass(frozen=True, eq=False)
class RecordTable:
    """The n usable records of one dataset, with m media in total.

    records [n], dtype `RECORD_COLUMNS`: number, file, offset, size_bytes (see `RecordLocation`);
      split_hash, a hash of the id that decides whether the record is held out; content_hash;
      text_tokens and needed_tokens (see `tokenize.count_text_tokens`); n_media.
    media [m], dtype `media_columns(kinds)`, in the order of records; unused columns are 0.
    """

    records: np.ndarray
    media: np.ndarray
    kinds: Kinds = BUILT_IN

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def media_start(self) -> np.ndarray:
        """First medium of each record, int64 [n + 1]; the last entry is the number of media."""
        return np.append(0, np.cumsum(self.records["n_media"], dtype=np.int64))

    def rows_of_kind(self, kind: Kind) -> np.ndarray:
        """Return the rows of all media of a kind, int64, ascending."""
        return np.flatnonzero(self.media["kind"] == self.kinds.index(kind))

    def headers(self, row: int, stop: int | None = None) -> list[tuple[Kind, dict[str, int]]]:
        """Return (kind, header) of each medium of a record, or of media before token `stop`."""
        media = self.media[self.media_start[row] : self.media_start[row + 1]]
        return [
            (kind := self.kinds[m["kind"]], {name: int(m[name]) for name in kind.columns})
            for m in media
            if stop is None or m["tokens_before"] < stop
        ]


def build_table(
    records: Sequence[Mapping[str, int]],
    media: Sequence[Sequence[Mapping[str, int]]],
    kinds: Kinds = BUILT_IN,
) -> RecordTable:
    """Return a table from the columns of each record and of each of its media, 0 if missing."""
    record_rows = [{**r, "n_media": len(ms)} for r, ms in zip(records, media, strict=True)]

    def structured_array(rows: Sequence[Mapping[str, int]], columns: np.dtype) -> np.ndarray:
        names = columns.names or ()
        return np.array([tuple(row.get(name, 0) for name in names) for row in rows], columns)

    media_rows = structured_array([m for ms in media for m in ms], media_columns(kinds))
    return RecordTable(structured_array(record_rows, RECORD_COLUMNS), media_rows, kinds)


def concatenate_tables(tables: Sequence[RecordTable], kinds: Kinds = BUILT_IN) -> RecordTable:
    """Return one table of all records, in order; `number` and `file` are not changed."""
    all_tables = [build_table([], [], kinds), *tables]
    records, media = (np.concatenate(p) for p in zip(*((t.records, t.media) for t in all_tables)))
    return RecordTable(records, media, kinds)


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The table of a dataset, and the state of the files from which it was made."""

    key: str  # the dataset's files and settings; the table is rebuilt if the key changes
    table: RecordTable
    listed: int  # records of the dataset, including unusable ones
    bad: Sequence[str]  # why the first unusable records are unusable
    files: Mapping[str, str] = field(default_factory=dict)  # `file_state` of media files, by path
    unread: Mapping[str, int] = field(default_factory=dict)  # number of records by unread key


def format_key_counts(unread: Mapping[str, int]) -> str:
    """Return each key and its number of records as text, the most frequent key first."""
    ordered = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{key} ({n:,} record{'s' * (n != 1)})" for key, n in ordered)


def file_state(file: str | Path) -> str:
    """Return the size of a file in bytes and its modification time in ns, "" if it is missing."""
    with suppress(OSError):
        file_stat = os.stat(file)
        if stat.S_ISREG(file_stat.st_mode):
            return f"{file_stat.st_size} {file_stat.st_mtime_ns}"
    return ""


def save_index(file: Path, datasets: Mapping[str, DatasetIndex], kinds: Kinds = BUILT_IN) -> None:
    """Write the index of all datasets into one .npz, which is replaced atomically."""
    fields_by_name = {name: {**vars(d), "table": None} for name, d in datasets.items()}
    header = json.dumps({"version": _index_version(kinds), "datasets": fields_by_name}).encode()
    arrays = {"meta": np.frombuffer(header, np.uint8)}
    for k, d in enumerate(datasets.values()):
        arrays |= {f"{k}.records": d.table.records, f"{k}.media": d.table.media}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def load_index(file: Path, kinds: Kinds = BUILT_IN) -> dict[str, DatasetIndex]:
    """Return the datasets of an index file; none if it is missing or has another version or other
    kinds."""
    if not file.is_file():
        return {}
    with (
        errors_as(f"{file}: damaged index"),
        file.open("rb") as opened,
        np.load(opened, allow_pickle=False) as arrays,
    ):
        header = parse_json(arrays["meta"].tobytes())
        if header["version"] != _index_version(kinds):
            return {}
        index = {}
        for k, (name, fields_by_name) in enumerate(header["datasets"].items()):
            table = RecordTable(arrays[f"{k}.records"], arrays[f"{k}.media"], kinds)
            index[name] = DatasetIndex(**{**fields_by_name, "table": table})
        return index


def _index_version(kinds: Kinds) -> str:
    return " ".join([str(VERSION), *(kind.name for kind in kinds)])
