"""What an index holds of a record, by its text and the headers of its media, here or apart.

Headers are other people's: `Apart` has them read in processes that can be killed (see `pool`), each
record within a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.blob import Medium
from dflop_jax.data.datasets.llava_records import KINDS, Record, lot
from dflop_jax.data.datasets.located import Located, Reader
from dflop_jax.data.datasets.shape_index import MEDIA, RECORDS, Row
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.audio import count_samples
from dflop_jax.data.media.tiling import picture_size
from dflop_jax.data.media.video import clip_header
from dflop_jax.data.pool.messages import Reply, Setup
from dflop_jax.data.pool.processes import TRIES, Workers
from dflop_jax.data.text.pieces import Piece, text_counts

SOUND_HZ = 16000
MANY = 1 << 30  # frames: no cap, the model's is applied later
_MOST = {name: int(np.iinfo(np.dtype(t).name).max) for name, t in {**RECORDS, **MEDIA}.items()}

ToPieces = Callable[[Sequence[tuple[str, str]]], tuple[Piece, ...]]


class RowReader(Protocol):
    """Reads what an index holds of records of some datasets; from several threads at once."""

    def rows(self, dataset: str, places: Sequence[Located]) -> Sequence[Row | BadSample]:
        """Return the row of each record, or why it is unusable."""
        ...

    def close(self) -> None: ...


class Here:
    """Reads records in this process.

    Args:
      to_pieces: tokenizer of a conversation, such as `ChatTokenizer.pieces`.
    """

    def __init__(self, readers: Mapping[str, Reader], to_pieces: ToPieces) -> None:
        self._readers, self._to_pieces = readers, to_pieces
        self._headers = _Headers()

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        return [self._row(self._readers[dataset], at) for at in places]

    def answer(self, line: bytes, _: object) -> Reply:
        """Reply to a request of `Apart`."""
        dataset, places = msgspec.json.decode(line, type=tuple[str, list[Located]])
        rows = self.rows(dataset, places)
        return Reply(rows=tuple(r.reason if isinstance(r, BadSample) else r for r in rows))

    def close(self) -> None:
        """There is nothing to end."""

    def _row(self, reader: Reader, at: Located) -> Row | BadSample:
        try:
            record = reader.read(at)
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(str(e) or f"{at.place}: {one_line(e)}")
        try:
            fields = _fields(at, record, self._to_pieces(record.turns))
            return fields, tuple(self._headers(*medium) for medium in record.media)
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(f"{record.name}: {str(e) or one_line(e)}")


class Apart:
    """Reads records in processes, as many as ask at once; one that hurts its process is unusable.

    Args:
      setup: names a function that returns `Here.answer` of the same datasets and tokenizer.
      timeout_s: seconds that a record may take.
    """

    def __init__(self, setup: Setup, timeout_s: float) -> None:
        self._workers = Workers(setup, timeout_s)

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        n, label = len(places), places[0].place
        rows = self._workers.answer(
            msgspec.json.encode((dataset, places)),
            label if n == 1 else f"{label} and {n - 1} after it",
            partial(_rows, n),
            tries=TRIES if n == 1 else 1,
        )
        if not isinstance(rows, BadSample):
            return rows
        # one of them hurts: each alone
        return [rows] if n == 1 else [row for at in places for row in self.rows(dataset, [at])]

    def close(self) -> None:
        self._workers.close()


def _rows(n: int, reply: Reply, _: object) -> list[Row | BadSample]:
    """What a process says of n records; ValueError for what none of ours says."""
    if len(reply.rows) != n:
        raise ValueError(f"{len(reply.rows)} rows of {n} records")
    for row in reply.rows:
        if not isinstance(row, str):
            _check(row[0], RECORDS)
            for medium in row[1]:
                _check(medium, MEDIA)
    return [BadSample(row) if isinstance(row, str) else row for row in reply.rows]


def _check(numbers: Mapping[str, int], columns: Mapping[str, type]) -> None:
    if numbers.keys() != columns.keys() or any(not 0 <= v <= _MOST[k] for k, v in numbers.items()):
        raise ValueError(f"a row {numbers}")


def _fields(at: Located, record: Record, pieces: Sequence[Piece]) -> dict[str, int]:
    """The columns of a record."""
    place = {"number": at.number, "file": at.file, "offset": at.offset, "size_bytes": at.size_bytes}
    return {**place, "lot": lot(record.name, at.place), **text_counts(pieces)}


class _Headers:
    """Headers of media, each file read once: several records may show one picture."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path], dict[str, int]] = {}

    def __call__(self, kind: str, source: Medium) -> dict[str, int]:
        if not isinstance(source, Path):
            return header(kind, source)
        if (kind, source) not in self._known:
            self._known[kind, source] = header(kind, source)
        return self._known[kind, source]


def header(kind: str, source: Medium) -> dict[str, int]:
    """Return the columns of a medium; ValueError if it cannot be read."""
    columns = dict.fromkeys(MEDIA, 0) | {"kind": KINDS.index(kind)}
    if kind == "image":
        columns["width"], columns["height"] = picture_size(source)
    elif kind == "video":
        clip = clip_header(source)
        columns |= {"frames": clip.count(MANY), **clip.facts._asdict()}
    else:
        columns["samples"] = count_samples(source, SOUND_HZ)
    return columns
