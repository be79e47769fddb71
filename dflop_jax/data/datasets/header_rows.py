"""What an index holds of a record, by its text and the headers of its media, here or apart.

Headers are other people's: `RowsApart` has them read in processes that can be killed (see `pool`),
each record within a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.datasets.llava_records import Record, lot
from dflop_jax.data.datasets.located import Located, RecordReader
from dflop_jax.data.datasets.shape_index import RECORDS, Row, media_columns
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.pool.messages import DecoderReply, DecoderSetup
from dflop_jax.data.pool.processes import TRIES, Workers
from dflop_jax.data.text.pieces import TextPiece, text_counts

ToPieces = Callable[[Sequence[tuple[str, str]]], tuple[TextPiece, ...]]


class RowReader(Protocol):
    """Reads what an index holds of records of some datasets; from several threads at once."""

    def rows(self, dataset: str, places: Sequence[Located]) -> Sequence[Row | BadSample]:
        """Return the row of each record, or why it is unusable."""
        ...

    def close(self) -> None: ...


class RowsHere:
    """Reads records in this process.

    Args:
      to_pieces: tokenizer of a conversation, such as `ChatTokenizer.pieces`.
      kinds: of media that the records may have.
      decode: decodes the media of a record with its row, to see whether that goes; None: headers
        alone are read.
    """

    def __init__(
        self,
        readers: Mapping[str, RecordReader],
        to_pieces: ToPieces,
        kinds: Kinds = BUILT_IN,
        decode: Callable[[Record, Row], None] | None = None,
    ) -> None:
        self._readers, self._to_pieces, self._decode = readers, to_pieces, decode
        self._headers = _MediaHeaders(kinds)

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        return [self._row(self._readers[dataset], located) for located in places]

    def answer(self, line: bytes, _: object) -> DecoderReply:
        """Reply to a request of `RowsApart`."""
        dataset, places = msgspec.json.decode(line, type=tuple[str, list[Located]])
        rows = self.rows(dataset, places)
        return DecoderReply(rows=tuple(r.reason if isinstance(r, BadSample) else r for r in rows))

    def close(self) -> None:
        """There is nothing to end."""

    def _row(self, reader: RecordReader, located: Located) -> Row | BadSample:
        try:
            record = reader.read(located)
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(str(e) or f"{located.place}: {one_line(e)}")
        try:
            of_text, places = text_counts(self._to_pieces(record.turns))
            media = zip(record.media, places, strict=True)
            row = (
                _fields(located, record) | of_text,
                tuple(self._headers(*medium) | place for medium, place in media),
            )
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(f"{record.name}: {str(e) or one_line(e)}")
        if self._decode:
            try:
                self._decode(record, row)
            except Exception as e:  # other people's files may fail in any way
                return BadSample(f"{record.name}: {one_line(e)}")
        return row


class RowsApart:
    """Reads records in processes, as many as ask at once; one that hurts its process is unusable.

    Args:
      setup: names a function that returns `Here.answer` of the same datasets and tokenizer.
      timeout_s: seconds that a record may take.
      kinds: as for `RowsHere`.
    """

    def __init__(self, setup: DecoderSetup, timeout_s: float, kinds: Kinds = BUILT_IN) -> None:
        self._workers, self._kinds = Workers(setup, timeout_s), kinds

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        n, label = len(places), places[0].place
        rows = self._workers.answer(
            msgspec.json.encode((dataset, places)),
            label if n == 1 else f"{label} and {n - 1} after it",
            partial(_rows, n, self._kinds),
            tries=TRIES if n == 1 else 1,
        )
        if not isinstance(rows, BadSample):
            return rows
        if n == 1:
            return [rows]
        # one of them hurts: each alone
        return [row for located in places for row in self.rows(dataset, [located])]

    def close(self) -> None:
        self._workers.close()


def _rows(n: int, kinds: Kinds, reply: DecoderReply, _: object) -> list[Row | BadSample]:
    """What a process says of n records; ValueError for what none of ours says."""
    if len(reply.rows) != n:
        raise ValueError(f"{len(reply.rows)} rows of {n} records")
    of_record, of_medium = _largest_numbers(kinds)
    for row in reply.rows:
        if not isinstance(row, str):
            _check(row[0], of_record)
            for medium in row[1]:
                _check(medium, of_medium)
    return [BadSample(row) if isinstance(row, str) else row for row in reply.rows]


@lru_cache
def _largest_numbers(kinds: Kinds) -> tuple[dict[str, int], dict[str, int]]:
    """Return the largest number that each column of a record, and of a medium, can hold."""

    def largest_of(columns: Mapping[str, type]) -> dict[str, int]:
        return {name: int(np.iinfo(np.dtype(dtype).name).max) for name, dtype in columns.items()}

    return largest_of(RECORDS), largest_of(media_columns(kinds))


def _check(numbers: Mapping[str, int], largest: Mapping[str, int]) -> None:
    if numbers.keys() != largest.keys() or any(
        not 0 <= v <= largest[k] for k, v in numbers.items()
    ):
        raise ValueError(f"a row {numbers}")


def _fields(located: Located, record: Record) -> dict[str, int]:
    """The columns of a record but those of its text."""
    return {
        "number": located.number,
        "file": located.file,
        "offset": located.offset,
        "size_bytes": located.size_bytes,
        "lot": lot(record.name, located.place),
    }


class _MediaHeaders:
    """Headers of media, each file read once: several records may show one picture."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._known: dict[tuple[str, Path], dict[str, int]] = {}

    def __call__(self, kind: str, source: MediaFile) -> dict[str, int]:
        if not isinstance(source, Path):
            return header(kind, source, self._kinds)
        if (kind, source) not in self._known:
            self._known[kind, source] = header(kind, source, self._kinds)
        return self._known[kind, source]


def header(kind: str, source: MediaFile, kinds: Kinds = BUILT_IN) -> dict[str, int]:
    """Return the columns of a medium; ValueError if it cannot be read."""
    number = [k.name for k in kinds].index(kind)
    columns = dict.fromkeys(media_columns(kinds), 0)
    return columns | {"kind": number} | {**kinds[number].header(source)}
