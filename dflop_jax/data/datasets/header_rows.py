"""What an index holds of a record, by its text and the headers of its media, here or apart.

Headers are other people's: `RowsApart` has them read in processes that can be killed (see `pool`),
each record within a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.datasets.llava_records import Record, lot, short_digest
from dflop_jax.data.datasets.located import Located, RecordReader
from dflop_jax.data.datasets.roots import NoFile
from dflop_jax.data.datasets.shape_index import RECORDS, Row, file_state, media_columns
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.part_keys import with_keys
from dflop_jax.data.pool.messages import DecoderReply, DecoderSetup
from dflop_jax.data.pool.processes import TRIES, Workers
from dflop_jax.data.text.pieces import TemplateFields, TextPiece, text_counts

ToPieces = Callable[[Sequence[tuple[str, str]], TemplateFields], tuple[TextPiece, ...]]


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
      shows: whether the chat template asks for a field of this name.
    """

    def __init__(
        self,
        readers: Mapping[str, RecordReader],
        to_pieces: ToPieces,
        kinds: Kinds = BUILT_IN,
        decode: Callable[[Record, Row], None] | None = None,
        shows: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._readers, self._to_pieces, self._decode = readers, to_pieces, decode
        self._shows = shows
        # Of files, each read once: several records may show one picture.
        self._state, self._header = cache(file_state), cache(partial(header, kinds=kinds))

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        return [self._row(self._readers[dataset], located) for located in places]

    def answer(self, line: bytes, _: object) -> DecoderReply:
        """Reply to a request of `RowsApart`."""
        dataset, places = msgspec.json.decode(line, type=tuple[str, list[Located]])
        return DecoderReply(rows=tuple(self.rows(dataset, places)))

    def close(self) -> None:
        """There is nothing to end."""

    def _row(self, reader: RecordReader, located: Located) -> Row | BadSample:
        try:
            record = reader.read(located)
        except (ValueError, OSError, MemoryError) as e:
            missing = e.__cause__.args if isinstance(e.__cause__, NoFile) else ()
            files = dict.fromkeys(missing, "")
            return BadSample(str(e) or f"{located.place}: {one_line(e)}", files)
        # Before the headers are read: a file that changes meanwhile is then read anew.
        files = {str(m): self._state(m) for _, m in record.media if isinstance(m, Path)}
        try:
            of_text, places = text_counts(self._to_pieces(record.turns, record.fields))
            unread = {*record.unread, *(n for n in record.fields.names if not self._shows(n))}
            cached, read = self._header, self._header.__wrapped__
            headers = [
                with_keys((cached if isinstance(m, Path) else read)(kind, m), keys)
                for (kind, m), keys in zip(record.media, record.keys, strict=True)
            ]
            media = tuple(columns | place for columns, place in zip(headers, places, strict=True))
            of_record = _fields(located, record, headers) | of_text
            row = Row(of_record, media, files, tuple(sorted(unread)))
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(f"{record.name}: {str(e) or one_line(e)}", files)
        if self._decode:
            try:
                self._decode(record, row)
            except Exception as e:  # other people's files may fail in any way
                return BadSample(f"{record.name}: {one_line(e)}", files)
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
    for row in reply.rows:
        if isinstance(row, Row):
            _check(row.record, RECORDS)
            for medium in row.media:
                _check(medium, media_columns(kinds))
    return [*reply.rows]


@cache
def _largest(dtype: type) -> int:
    return int(np.iinfo(dtype).max)


def _check(numbers: Mapping[str, int], columns: Mapping[str, type]) -> None:
    if numbers.keys() != columns.keys() or any(
        not 0 <= v <= _largest(columns[k]) for k, v in numbers.items()
    ):
        raise ValueError(f"a row {numbers}")


def _fields(located: Located, record: Record, media: Sequence[dict[str, int]]) -> dict[str, int]:
    """The columns of a record but those of its text; its content is told from others by text, names
    and headers."""
    place = {name: getattr(located, name) for name in ("number", "file", "offset", "size_bytes")}
    headers = [{k: v for k, v in columns.items() if v} for columns in media]
    text = record.turns, record.weights, record.fields.messages, record.fields.variables
    content = *text, [m.name for _, m in record.media], headers
    number = int(short_digest(msgspec.json.encode(content)), 16)
    return {**place, "lot": lot(record.name, located.place), "content": number}


def header(kind: str, source: MediaFile, kinds: Kinds = BUILT_IN) -> dict[str, int]:
    """Return the columns of a medium; ValueError if it cannot be read."""
    number = [k.name for k in kinds].index(kind)
    columns = dict.fromkeys(media_columns(kinds), 0)
    return columns | {"kind": number} | {**kinds[number].header(source)}
