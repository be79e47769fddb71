"""What is known of a dataset before anything is decoded, as arrays, and the one file that keeps it.

A table holds, for each usable record, where it stands, how many text tokens it has, and the header
of each of its media. What these cost depends on the model and is computed from the table (see
`counts`), so one index file serves every model that shares a tokenizer.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflop_jax.data.bounds import named, parse_json
from dflop_jax.data.media.kind import Kind, Kinds, columns_of
from dflop_jax.data.media.kinds import BUILT_IN

VERSION = 11  # of an index file; one more makes every index anew
# Column -> dtype of a record; those of its media are their kind and place, and what headers say.
RECORDS = {"number": np.int64, "file": np.int32, "offset": np.int64, "size_bytes": np.int64,
           "lot": np.uint64, "content": np.uint64,
           "text_tokens": np.int32, "needed_tokens": np.int32}  # fmt: skip


class Row(NamedTuple):
    """A record's columns, those of each of its media, the `file_state` of the files that these lie
    in, by path (what holds the records themselves is none of them), and the record's keys that are
    not read."""

    record: dict[str, int]
    media: tuple[dict[str, int], ...]
    files: Mapping[str, str]
    unread: tuple[str, ...] = ()


@lru_cache
def media_columns(kinds: Kinds) -> Mapping[str, type]:
    """Return the columns of media: the number of their kind, the tokens of the conversation before
    them, each medium there being one, and what any kind's header says."""
    return {"kind": np.int8, "tokens_before": np.int32, **columns_of(kinds)}


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """The usable records of one dataset: n records with m media.

    number, file, offset, size_bytes: where it stands (see `located.Located`).
    lot: what it draws when some are held out (see `llava_records.lot`); content: a digest of it.
    text_tokens: of the whole conversation; needed_tokens: of those, see `pieces.text_counts`.
    media_start [n + 1]: the media of record i are media_start[i] up to media_start[i + 1].
    media: the columns of `media_columns` of `kinds`, each [m]; 0 where one does not apply.
    """

    number: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    size_bytes: np.ndarray
    lot: np.ndarray
    content: np.ndarray
    text_tokens: np.ndarray
    needed_tokens: np.ndarray
    media_start: np.ndarray
    media: Mapping[str, np.ndarray]
    kinds: Kinds = BUILT_IN

    def __post_init__(self) -> None:
        n, m, starts = len(self), len(self.media["kind"]), self.media_start
        bad = [name for name in RECORDS if getattr(self, name).shape != (n,)]
        bad += [name for name in media_columns(self.kinds) if self.media[name].shape != (m,)]
        is_whole = starts.shape == (n + 1,) and starts[0] == 0 and starts[-1] == m
        if not is_whole or (np.diff(starts) < 0).any():
            bad.append("media_start")
        if bad:
            raise ValueError(f"shape table of {n} records: wrong {', '.join(bad)}")

    def __len__(self) -> int:
        return len(self.number)

    def of_kind(self, kind: Kind) -> np.ndarray:
        """Return the places of all media of a kind, int64, ascending."""
        return np.flatnonzero(self.media["kind"] == self.kinds.index(kind))

    def headers(self, row: int, stop: int | None = None) -> list[tuple[Kind, dict[str, int]]]:
        """Return each medium of a record that has less than `stop` `tokens_before` it, None: any:
        its kind, and what its header says."""
        before = self.media["tokens_before"]
        media = [
            k
            for k in range(self.media_start[row], self.media_start[row + 1])
            if stop is None or before[k] < stop
        ]
        kinds = [self.kinds[self.media["kind"][k]] for k in media]
        return [
            (kind, {name: int(self.media[name][k]) for name in kind.columns})
            for kind, k in zip(kinds, media, strict=True)
        ]


def table_of(
    records: Sequence[Mapping[str, int]],
    media: Sequence[Sequence[Mapping[str, int]]],
    kinds: Kinds = BUILT_IN,
) -> ShapeTable:
    """A table from the columns of each record and of each of its media; what these do not have is
    0."""
    flat = [m for ms in media for m in ms]
    return ShapeTable(
        **{k: np.array([r.get(k, 0) for r in records], t) for k, t in RECORDS.items()},
        media_start=np.cumsum([0, *(len(ms) for ms in media)], dtype=np.int64),
        media={
            k: np.array([m.get(k, 0) for m in flat], t) for k, t in media_columns(kinds).items()
        },
        kinds=kinds,
    )


def joined(tables: Sequence[ShapeTable], kinds: Kinds = BUILT_IN) -> ShapeTable:
    """One table of all records, in order; `number` and `file` stay those of each part."""
    if len(tables) == 1:
        return tables[0]
    every = [table_of([], [], kinds), *tables]
    ends = np.cumsum([0, *(t.media_start[-1] for t in tables)])
    starts = [t.media_start[:-1] + e for t, e in zip(tables, ends[:-1], strict=True)]
    return ShapeTable(
        **{name: np.concatenate([getattr(t, name) for t in every]) for name in RECORDS},
        media_start=np.concatenate([*starts, ends[-1:]]).astype(np.int64),
        media={name: np.concatenate([t.media[name] for t in every]) for name in every[0].media},
        kinds=kinds,
    )


@dataclass(frozen=True, eq=False)
class Indexed:
    """A dataset's table, and how it came about.

    key: what the table was made from; another key means that it must be made anew.
    listed: records of the dataset, the unusable among them; bad: reasons of the first of those.
    files: the `file_state` of every file of media, by path.
    unread: keys of usable records that are not read, each with the number of its records.
    """

    key: str
    table: ShapeTable
    listed: int
    bad: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)


def counted_keys(unread: Mapping[str, int]) -> str:
    """Keys of records in words, each with the number of its records, the most frequent first."""
    ordered = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{key} ({n:,} record{'s' * (n != 1)})" for key, n in ordered)


def file_state(file: str | Path) -> str:
    """Return the size of a file in bytes and the time of its last change in ns, "" for none."""
    with suppress(OSError):
        found = os.stat(file)
        if stat.S_ISREG(found.st_mode):
            return f"{found.st_size} {found.st_mtime_ns}"
    return ""


def make_key(files: Sequence[Path], settings: str) -> str:
    """Names, sizes and times of the files that hold the records, and what else tables depend on."""
    return json.dumps([[(str(f.resolve()), file_state(f)) for f in files], settings])


def save_index(file: Path, datasets: Mapping[str, Indexed], kinds: Kinds = BUILT_IN) -> None:
    """Writes all datasets into one .npz, which exists whole or not at all."""
    meta: dict[str, Any] = {"version": _version(kinds), "datasets": {}}
    arrays: dict[str, np.ndarray] = {}
    for k, (name, d) in enumerate(datasets.items()):
        kept = {"key": d.key, "listed": d.listed, "bad": list(d.bad), "files": dict(d.files)}
        meta["datasets"][name] = {**kept, "unread": dict(d.unread), "at": k}
        columns = {c: getattr(d.table, c) for c in (*RECORDS, "media_start")} | {**d.table.media}
        arrays |= {f"{k}.{c}": column for c, column in columns.items()}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def load_index(file: Path, kinds: Kinds = BUILT_IN) -> dict[str, Indexed]:
    """The datasets of an index file; none when there is no such file, or it is of another version
    or of other kinds of media.

    ValueError when the file is damaged.
    """
    if not file.is_file():
        return {}
    with (
        named(f"{file}: damaged index"),
        file.open("rb") as opened,
        zipfile.ZipFile(opened) as arrays,
    ):
        meta = parse_json(_array(arrays, "meta", np.uint8).tobytes())
        if meta["version"] != _version(kinds):
            return {}
        index = {}
        for name, d in meta["datasets"].items():
            media = {
                c: _array(arrays, f"{d['at']}.{c}", t) for c, t in media_columns(kinds).items()
            }
            columns = {c: _array(arrays, f"{d['at']}.{c}", t) for c, t in RECORDS.items()}
            starts = _array(arrays, f"{d['at']}.media_start", np.int64)
            table = ShapeTable(**columns, media_start=starts, media=media, kinds=kinds)
            listed = int(d["listed"])
            _check_values(table, listed)
            unread = {str(key): int(n) for key, n in d["unread"].items()}
            bad, files = tuple(map(str, d["bad"])), dict(d["files"])
            index[name] = Indexed(str(d["key"]), table, listed, bad, files, unread)
        return index


def _version(kinds: Kinds) -> str:
    return f"{VERSION} {' '.join(kind.name for kind in kinds)}"


def _array(arrays: zipfile.ZipFile, name: str, dtype: type) -> np.ndarray:
    """A one-dimensional array of a .npz; ValueError when its header claims more than is there."""
    entry = arrays.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    with arrays.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is of another format")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        data = file.read()
    array = np.frombuffer(data, np.dtype(dtype))
    if kind != array.dtype or shape != array.shape:
        raise ValueError(f"{name} is {kind} {shape}, not {array.dtype} {array.shape}")
    return array


def _check_values(table: ShapeTable, listed: int) -> None:
    """ValueError for values that no reader of records and headers gives."""
    wrong = [name for name in RECORDS if (getattr(table, name) < 0).any()]
    wrong += [name for name, column in table.media.items() if (column < 0).any()]
    wrong += ["kind"] if (table.media["kind"] >= len(table.kinds)).any() else []
    for kind in table.kinds:
        mine = table.of_kind(kind)
        wrong += kind.wrong({name: table.media[name][mine] for name in kind.columns})
    wrong += ["needed_tokens"] if (table.needed_tokens > table.text_tokens).any() else []
    before, n_media = table.media["tokens_before"], np.diff(table.media_start)
    ends = np.repeat(table.text_tokens + n_media, n_media)
    wrong += ["tokens_before"] if (before >= ends).any() else []
    wrong += ["listed"] if listed < len(table) else []
    if wrong:
        raise ValueError(f"impossible {', '.join(wrong)}")
