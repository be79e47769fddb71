"""Making the index of a dataset: every record parsed, tokenized, and its media's headers read.

Only what changed is made anew. Several processes may each do a share of the records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.llava_records import Record, lot
from dflop_jax.data.datasets.readers import Located, Reader
from dflop_jax.data.datasets.shape_index import (
    KINDS,
    Indexed,
    ShapeTable,
    joined,
    load_index,
    make_key,
    save_index,
    table_of,
)
from dflop_jax.data.media.audio import count_samples
from dflop_jax.data.media.tiling import picture_size
from dflop_jax.data.media.video import count_frames
from dflop_jax.data.text.pieces import Piece

SOUND_HZ = 16000
MANY = 1 << 30  # frames: no cap, the model's is applied later
BATCH = 4096  # records under way at once
KEPT_REASONS = 20
logger = logging.getLogger("dflop_jax.data")

ToPieces = Callable[[Sequence[tuple[str, str]]], tuple[Piece, ...]]
Row = tuple[dict[str, int], list[dict[str, int]]]


def update_index(
    file: Path,
    readers: Mapping[str, Reader],
    to_pieces: ToPieces,
    settings: str,
    *,
    workers: int = 2,
) -> dict[str, Indexed]:
    """The index of all `readers`, from `file` where it is up to date, which is written otherwise.

    Args:
      to_pieces: tokenizer of a conversation, such as `ChatTokenizer.pieces`.
      settings: its name or digest; another one makes every table anew.
    """
    known = load_index(file)
    found: dict[str, Indexed] = {}
    for name, reader in readers.items():
        old = known.get(name)
        fresh = old is not None and old.key == make_key(reader.files, settings)
        found[name] = old if old and fresh else index_of(
            reader, to_pieces, settings, workers=workers
        )  # fmt: skip
    if any(known.get(name) is not d for name, d in found.items()):
        save_index(file, {**known, **found})
    return found


def index_of(
    reader: Reader,
    to_pieces: ToPieces,
    settings: str,
    *,
    workers: int = 2,
    share: tuple[int, int] = (0, 1),
) -> Indexed:
    """The index of a dataset, or of the share (k, n): a k-th of n parts of its records, by turns.

    Unusable records are left out, counted and logged. `merged` joins the shares of all processes.
    """
    k, n = share
    key = make_key(reader.files, settings)
    headers = _Headers()

    def examine(item: tuple[int, Located]) -> Row | str:
        number, at = item
        try:
            record = reader.read(at)
            return _row(number, at, record, to_pieces(record.turns), headers)
        except (ValueError, OSError) as e:
            return f"{at.place}: {e}"

    tables: list[ShapeTable] = []
    bad: list[str] = []
    listed = 0
    mine = (item for item in enumerate(reader.locate()) if item[0] % n == k)
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(mine, BATCH)):
            listed += len(batch)
            found = list(pool.map(examine, batch))
            rows = [f for f in found if not isinstance(f, str)]
            tables.append(table_of([r for r, _ in rows], [m for _, m in rows]))
            for reason in (f for f in found if isinstance(f, str)):
                bad = [*bad, reason][:KEPT_REASONS]
                logger.warning("left out %s", reason)
    return Indexed(key, joined(tables), listed, tuple(bad))


def merged(shares: Sequence[Indexed]) -> Indexed:
    """The index of a dataset from all its shares; ValueError when they are of different states."""
    if len({s.key for s in shares}) != 1:
        raise ValueError("shares of an index were made from different files; make them anew")
    table = joined([s.table for s in shares])
    bad = tuple(reason for s in shares for reason in s.bad)[:KEPT_REASONS]
    return Indexed(
        shares[0].key, table.taken(table.number.argsort()), sum(s.listed for s in shares), bad
    )


def check_usable(index: Indexed, name: str, max_bad_fraction: float) -> None:
    """ValueError when too many records of a dataset are unusable, or none is left."""
    bad = index.listed - len(index.table)
    if bad > max_bad_fraction * index.listed or not len(index.table):
        raise ValueError(
            f"{name}: {bad} of {index.listed} records are unusable ({'; '.join(index.bad[:3])}); "
            f"repair them or raise data.max_bad_fraction={max_bad_fraction}"
        )


def _row(
    number: int, at: Located, record: Record, pieces: Sequence[Piece], headers: _Headers
) -> Row:
    first = next((k for k, p in enumerate(pieces) if p.supervised), len(pieces))
    place = {k: v for k, v in asdict(at).items() if k != "place"}
    tokens = {
        "text_tokens": sum(len(p.ids) for p in pieces),
        "prompt_tokens": sum(len(p.ids) for p in pieces[:first]),
    }
    drawn = lot(record.name, at.place)
    return {"number": number, **place, "lot": drawn, **tokens}, [headers(*m) for m in record.media]


class _Headers:
    """Headers of media, each file read once: several records may show one picture."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path], dict[str, int]] = {}

    def __call__(self, kind: str, source: Path | Blob) -> dict[str, int]:
        if not isinstance(source, Path):
            return _header(kind, source)
        if (kind, source) not in self._known:
            self._known[kind, source] = _header(kind, source)
        return self._known[kind, source]


def _header(kind: str, source: Path | Blob) -> dict[str, int]:
    found = {"kind": KINDS.index(kind), "width": 0, "height": 0, "frames": 0, "samples": 0}
    if kind == "image":
        found["width"], found["height"] = picture_size(source)
    elif kind == "video":
        found["frames"] = count_frames(source, MANY)
    else:
        found["samples"] = count_samples(source, SOUND_HZ)
    return found
