"""What is known of a dataset before anything is decoded, as arrays, and the one file that keeps it.

A table holds, for each usable record, where it stands, how many text tokens it has, and the header
of each of its media. What these cost depends on the model and is computed from the table (see
`counts`), so one index file serves every model that shares a tokenizer.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.data.bounds import MAX_CLIP_FRAMES, MAX_PIXELS, named, parse_json

VERSION = 4
# Field -> dtype, and what it counts: records (n), media (m), or records + 1.
RECORDS = {"number": np.int64, "file": np.int32, "offset": np.int64, "size_bytes": np.int64,
           "lot": np.uint64, "text_tokens": np.int32, "prompt_tokens": np.int32}  # fmt: skip
MEDIA = {"kind": np.int8, "width": np.int32, "height": np.int32, "frames": np.int32,
         "samples": np.int64, "total": np.int32, "rate_num": np.int32,
         "rate_den": np.int32}  # fmt: skip
Row = tuple[dict[str, int], tuple[dict[str, int], ...]]  # a record's fields and each medium's
COLUMNS: dict[str, type] = {**RECORDS, **MEDIA, "media_start": np.int64}


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """The usable records of one dataset: n records with m media.

    number: of the record in its dataset (see `readers.Located`); file, offset, size_bytes: its
    bytes.
    lot: what it draws when some are held out (see `llava_records.lot`).
    text_tokens: of the whole conversation; prompt_tokens: of those, before the first answer.
    media_start [n + 1]: the media of record i are media_start[i] up to media_start[i + 1].
    kind: index into `llava_records.KINDS`; width, height: upright pixels of an image, or those of a
    clip's frames as stored; frames: what a clip offers at 2 a second; samples: of a sound at 16
    kHz; total: a clip's frames in all; rate_num / rate_den: its frames a second. 0 where it does
    not apply.
    """

    number: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    size_bytes: np.ndarray
    lot: np.ndarray
    text_tokens: np.ndarray
    prompt_tokens: np.ndarray
    media_start: np.ndarray
    kind: np.ndarray
    width: np.ndarray
    height: np.ndarray
    frames: np.ndarray
    samples: np.ndarray
    total: np.ndarray
    rate_num: np.ndarray
    rate_den: np.ndarray

    def __post_init__(self) -> None:
        n, m = len(self.number), len(self.kind)
        bad = [name for name in RECORDS if getattr(self, name).shape != (n,)]
        bad += [name for name in MEDIA if getattr(self, name).shape != (m,)]
        starts = self.media_start
        if (
            starts.shape != (n + 1,)
            or starts[0] != 0
            or starts[-1] != m
            or (np.diff(starts) < 0).any()
        ):
            bad.append("media_start")
        if bad:
            raise ValueError(f"shape table of {n} records: wrong {', '.join(bad)}")

    def __len__(self) -> int:
        return len(self.number)

    def taken(self, rows: np.ndarray) -> ShapeTable:
        """The table of the given rows, in that order."""
        counts = np.diff(self.media_start)[rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        media = np.arange(starts[-1]) + np.repeat(self.media_start[rows] - starts[:-1], counts)
        return ShapeTable(
            **{name: getattr(self, name)[rows] for name in RECORDS},
            **{name: getattr(self, name)[media] for name in MEDIA},
            media_start=starts,
        )


def table_of(
    records: Sequence[Mapping[str, int]], media: Sequence[Sequence[Mapping[str, int]]]
) -> ShapeTable:
    """A table from the fields of each record and of each of its media."""
    flat = [m for ms in media for m in ms]
    return ShapeTable(
        **{k: np.array([r[k] for r in records], t) for k, t in RECORDS.items()},
        **{k: np.array([m[k] for m in flat], t) for k, t in MEDIA.items()},
        media_start=np.cumsum([0, *(len(ms) for ms in media)], dtype=np.int64),
    )


def joined(tables: Sequence[ShapeTable]) -> ShapeTable:
    """One table of all records, in order; `number` and `file` stay those of each part."""
    if len(tables) == 1:
        return tables[0]
    ends = np.cumsum([0, *(len(t.kind) for t in tables)])
    starts = [t.media_start[:-1] + e for t, e in zip(tables, ends[:-1], strict=True)]
    names = [f.name for f in fields(ShapeTable) if f.name != "media_start"]
    empty = table_of([], [])
    return ShapeTable(
        **{n: np.concatenate([getattr(t, n) for t in (empty, *tables)]) for n in names},
        media_start=np.concatenate([*starts, ends[-1:]]).astype(np.int64),
    )


@dataclass(frozen=True, eq=False)
class Indexed:
    """A dataset's table, and how it came about.

    key: what the table was made from; another key means that it must be made anew.
    listed: records of the dataset, the unusable among them; bad: reasons of the first of those.
    """

    key: str
    table: ShapeTable
    listed: int
    bad: tuple[str, ...]


def make_key(files: Sequence[Path], settings: str) -> str:
    """Names, sizes and times of the files that hold the records, and what else tables depend on."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return json.dumps([stats, settings], separators=(",", ":"))


def save_index(file: Path, datasets: Mapping[str, Indexed]) -> None:
    """Writes all datasets into one .npz, which exists whole or not at all."""
    meta: dict[str, Any] = {"version": VERSION, "datasets": {}}
    arrays: dict[str, np.ndarray] = {}
    for k, (name, d) in enumerate(datasets.items()):
        meta["datasets"][name] = {"key": d.key, "listed": d.listed, "bad": list(d.bad), "at": k}
        arrays |= {f"{k}.{f.name}": getattr(d.table, f.name) for f in fields(ShapeTable)}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def load_index(file: Path) -> dict[str, Indexed]:
    """The datasets of an index file; none when there is no such file or it is of another version.

    ValueError when the file is damaged.
    """
    if not file.is_file():
        return {}
    with (
        named(f"{file}: damaged index", "; delete it, it is made anew"),
        file.open("rb") as opened,
        zipfile.ZipFile(opened) as arrays,
    ):
        meta = parse_json(_array(arrays, "meta", np.uint8).tobytes())
        if meta["version"] != VERSION:
            return {}
        index = {}
        for name, d in meta["datasets"].items():
            columns = {c: _array(arrays, f"{d['at']}.{c}", t) for c, t in COLUMNS.items()}
            table, listed = ShapeTable(**columns), int(d["listed"])
            _check_values(table, listed)
            index[name] = Indexed(str(d["key"]), table, listed, tuple(map(str, d["bad"])))
        return index


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
    picture, clip, sound = (table.kind == k for k in range(3))
    wrong = [name for name in RECORDS if name != "lot" and (getattr(table, name) < 0).any()]
    wrong += [] if (picture | clip | sound).all() else ["kind"]
    area = table.width[picture].astype(np.int64) * table.height[picture]
    sides = np.minimum(table.width[picture], table.height[picture])
    wrong += ["width"] if (sides < 1).any() or (area > MAX_PIXELS).any() else []
    frames = table.frames[clip]
    wrong += ["frames"] if ((frames < 1) | (frames > MAX_CLIP_FRAMES)).any() else []
    facts = ("width", "height", "total", "rate_num", "rate_den")
    wrong += [f"{name} of a clip" for name in facts if (getattr(table, name)[clip] < 1).any()]
    wrong += ["samples"] if (table.samples[sound] < 1).any() else []
    wrong += ["prompt_tokens"] if (table.prompt_tokens > table.text_tokens).any() else []
    wrong += ["listed"] if listed < len(table) else []
    if wrong:
        raise ValueError(f"impossible {', '.join(wrong)}")
