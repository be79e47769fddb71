"""Making the index of a dataset: every record parsed, tokenized, and its media's headers read.

Only what changed is made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.llava_records import KINDS, Record, lot
from dflop_jax.data.datasets.readers import Located, Reader
from dflop_jax.data.datasets.shape_index import (
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
    """Return the index of all `readers`, from `file` where that is up to date; else it is written.

    Args:
      to_pieces: tokenizer of a conversation, such as `ChatTokenizer.pieces`.
      settings: its name or digest; another one makes every table anew.
    """
    known = load_index(file)
    index: dict[str, Indexed] = {}
    for name, reader in readers.items():
        old = known.get(name)
        fresh = old is not None and old.key == make_key(reader.files, settings)
        index[name] = old if old and fresh else index_of(
            reader, to_pieces, settings, workers=workers
        )  # fmt: skip
    if any(known.get(name) is not made for name, made in index.items()):
        save_index(file, {**known, **index})
    return index


def index_of(
    reader: Reader,
    to_pieces: ToPieces,
    settings: str,
    *,
    workers: int = 2,
) -> Indexed:
    """Return the index of a dataset. Unusable records are left out, counted and logged by name."""
    key = make_key(reader.files, settings)
    headers = _Headers()

    def examine(at: Located) -> Row | str:
        try:
            record = reader.read(at)
        except (ValueError, OSError) as e:
            return f"{e}"
        try:
            return _row(at, record, to_pieces(record.turns), headers)
        except (ValueError, OSError) as e:
            return f"{record.name}: {e}"

    tables: list[ShapeTable] = []
    bad: list[str] = []
    listed = 0
    places = reader.locate()
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(places, BATCH)):
            listed += len(batch)
            examined = list(pool.map(examine, batch))
            rows = [row for row in examined if not isinstance(row, str)]
            tables.append(table_of([r for r, _ in rows], [m for _, m in rows]))
            for reason in (e for e in examined if isinstance(e, str)):
                bad = [*bad, reason][:KEPT_REASONS]
                logger.warning("left out %s", reason)
    return Indexed(key, joined(tables), listed, tuple(bad))


def check_usable(index: Indexed, name: str, max_bad_fraction: float) -> None:
    """ValueError when too many records of a dataset are unusable, or none is left."""
    bad = index.listed - len(index.table)
    if bad > max_bad_fraction * index.listed or not len(index.table):
        raise ValueError(
            f"{name}: {bad} of {index.listed} records are unusable ({'; '.join(index.bad[:3])}); "
            f"repair them or raise data.max_bad_fraction={max_bad_fraction}"
        )


def text_counts(pieces: Sequence[Piece]) -> dict[str, int]:
    """Return the text tokens of a conversation, and of those the ones before the first answer."""
    first = next((k for k, p in enumerate(pieces) if p.supervised), len(pieces))
    return {
        "text_tokens": sum(len(p.ids) for p in pieces),
        "prompt_tokens": sum(len(p.ids) for p in pieces[:first]),
    }


def _row(at: Located, record: Record, pieces: Sequence[Piece], headers: _Headers) -> Row:
    place = {k: v for k, v in asdict(at).items() if k != "place"}
    drawn = lot(record.name, at.place)
    return {**place, "lot": drawn, **text_counts(pieces)}, [headers(*m) for m in record.media]


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
    header = {"kind": KINDS.index(kind), "width": 0, "height": 0, "frames": 0, "samples": 0}
    if kind == "image":
        header["width"], header["height"] = picture_size(source)
    elif kind == "video":
        header["frames"] = count_frames(source, MANY)
    else:
        header["samples"] = count_samples(source, SOUND_HZ)
    return header
