"""What an index holds of a record, by its text and the headers of its media, here or apart.

Headers are other people's: `RowsApart` has them read in processes that can be killed (see `pool`),
each record within a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import msgspec

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.blob import MediaFile, NoFile
from dflop_jax.data.datasets.llava_records import Located, Record, RecordReader, lot, short_digest
from dflop_jax.data.datasets.shape_index import Row, file_state, table_of
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.compose import decode_media
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.media.part_keys import with_keys
from dflop_jax.data.pool.processes import TRIES, DecoderReply, Workers
from dflop_jax.data.sample import OpenedBy
from dflop_jax.data.text.tokenize import TemplateFields, TextPiece, text_counts

ToPieces = Callable[[Sequence[tuple[str, str]], TemplateFields], tuple[TextPiece, ...]]


class RowsHere:
    """Reads what an index holds of records of some datasets, in this process.

    Args:
      to_pieces: tokenizer of a conversation, such as `ChatTokenizer.pieces`.
      kinds: of media that the records may have.
      how: the model takes media, which are decoded to see whether that goes; None: headers alone
        are read.
      shows: whether the chat template asks for a field of this name.
    """

    def __init__(
        self,
        readers: Mapping[str, RecordReader],
        to_pieces: ToPieces,
        kinds: Kinds = BUILT_IN,
        how: Preparation | None = None,
        shows: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._readers, self._to_pieces = readers, to_pieces
        self._kinds, self._how, self._shows = kinds, how, shows
        # Of files, each read once: several records may show one picture.
        self._state, self._header = cache(file_state), cache(partial(header, kinds=kinds))

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        """Return the row of each record, or why it is unusable; for several threads at once."""
        return [self._row(self._readers[dataset], located) for located in places]

    def answer(self, request: bytes) -> DecoderReply:
        """Reply to a request of `RowsApart`."""
        dataset, places = msgspec.json.decode(request, type=tuple[str, list[Located]])
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
        if self._how is not None:
            table = table_of([of_record], [media], self._kinds)
            try:
                if sample_counts(table, self._how)[1].all():  # what the model takes none of is good
                    decode_media(record, table, 0, self._how)
            except Exception as e:  # other people's files may fail in any way
                return BadSample(f"{record.name}: {one_line(e)}", files)
        return row


class RowsApart:
    """Reads records in processes, as many as ask at once; one that hurts its process is unusable.

    Args:
      opened_by: a function that returns `RowsHere.answer` of the same datasets and tokenizer.
      timeout_s, memory_bytes: that a record may take.
    """

    def __init__(self, opened_by: OpenedBy, timeout_s: float, memory_bytes: int) -> None:
        self._workers = Workers(opened_by, timeout_s, memory_bytes)

    def rows(self, dataset: str, places: Sequence[Located]) -> list[Row | BadSample]:
        n, label = len(places), places[0].place
        answer = self._workers.answer(
            msgspec.json.encode((dataset, places)),
            label if n == 1 else f"{label} and {n - 1} after it",
            tries=TRIES if n == 1 else 1,
        )
        if not isinstance(answer, BadSample):
            return [*answer.rows]
        if n == 1:
            return [answer]
        # one of them hurts: each alone
        return [row for located in places for row in self.rows(dataset, [located])]

    def close(self) -> None:
        self._workers.close()


RowReader = RowsHere | RowsApart


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
    return {"kind": number, **kinds[number].header(source)}
