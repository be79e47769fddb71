"""What an index holds of a record, by its text and the headers of its media, here or apart.

Headers are other people's: `ProcessRowReader` has them read in processes that can be killed (see
`pool`), each record within a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import msgspec

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.blob import MediaFile, MissingFile
from dflop_jax.data.datasets.record_parser import Record, short_digest, split_hash
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader
from dflop_jax.data.datasets.record_table import IndexRow, build_table, file_state
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.compose import decode_media
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.media_keys import with_keys
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.pool.processes import MAX_TRIES, DecoderPool, DecoderReply
from dflop_jax.data.sample import SourceFactory
from dflop_jax.data.text.tokenize import TemplateFields, TokenRun, count_text_tokens

EncodeTurns = Callable[[Sequence[tuple[str, str]], TemplateFields], tuple[TokenRun, ...]]


class LocalRowReader:
    """Reads what an index holds of records of some datasets, in this process.

    Args:
      encode_turns: tokenizer of a conversation, such as `ChatTokenizer.encode_turns`.
      kinds: of media that the records may have.
      preparation: of media by the model; media are decoded as a check. None: headers alone are
        read.
      reads_variable: whether the chat template asks for a field of this name.
    """

    def __init__(
        self,
        readers: Mapping[str, RecordReader],
        encode_turns: EncodeTurns,
        kinds: Kinds = BUILT_IN,
        preparation: Preparation | None = None,
        reads_variable: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._readers, self._encode_turns = readers, encode_turns
        self._kinds, self._preparation = kinds, preparation
        self._reads_variable = reads_variable
        # Of files, each read once: several records may show one picture.
        self._state, self._header = cache(file_state), cache(partial(read_header, kinds=kinds))

    def read_rows(
        self, dataset: str, locations: Sequence[RecordLocation]
    ) -> list[IndexRow | BadSample]:
        """Return the row of each record, or why it is unusable; thread-safe."""
        return [self._row(self._readers[dataset], location) for location in locations]

    def answer(self, request: bytes) -> DecoderReply:
        """Return the reply to a request of a `ProcessRowReader`."""
        dataset, locations = msgspec.json.decode(request, type=tuple[str, list[RecordLocation]])
        return DecoderReply(rows=tuple(self.read_rows(dataset, locations)))

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    def _row(self, reader: RecordReader, location: RecordLocation) -> IndexRow | BadSample:
        try:
            record = reader.read(location)
        except (ValueError, OSError, MemoryError) as e:
            missing = e.__cause__.args if isinstance(e.__cause__, MissingFile) else ()
            files = dict.fromkeys(missing, "")
            return BadSample(str(e) or f"{location.label}: {one_line(e)}", files)
        # Before the headers are read: a file that changes meanwhile is then read anew.
        files = {str(m): self._state(m) for _, m in record.media if isinstance(m, Path)}
        try:
            text_columns, text_positions = count_text_tokens(
                self._encode_turns(record.turns, record.fields)
            )
            unread = {
                *record.unread,
                *(n for n in record.fields.names if not self._reads_variable(n)),
            }
            cached, read_uncached = self._header, self._header.__wrapped__
            headers = [
                with_keys((cached if isinstance(m, Path) else read_uncached)(kind, m), keys)
                for (kind, m), keys in zip(record.media, record.keys, strict=True)
            ]
            media = tuple(
                columns | text_position
                for columns, text_position in zip(headers, text_positions, strict=True)
            )
            record_columns = _record_columns(location, record, headers) | text_columns
            row = IndexRow(record_columns, media, files, tuple(sorted(unread)))
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(f"{record.name}: {str(e) or one_line(e)}", files)
        if self._preparation is not None:
            table = build_table([record_columns], [media], self._kinds)
            try:
                if sample_counts(table, self._preparation)[
                    1
                ].all():  # what the model takes none of is good
                    decode_media(record, table, 0, self._preparation)
            except Exception as e:  # other people's files may fail in any way
                return BadSample(f"{record.name}: {one_line(e)}", files)
        return row


class ProcessRowReader:
    """Reads rows in child processes, one for each pending request; a record that kills its process
    is unusable.

    Args:
      factory: makes `LocalRowReader.answer` of the same datasets and tokenizer.
      timeout_s, memory_bytes: limits of a record.
    """

    def __init__(self, factory: SourceFactory, timeout_s: float, memory_bytes: int) -> None:
        self._workers = DecoderPool(factory, timeout_s, memory_bytes)

    def read_rows(
        self, dataset: str, locations: Sequence[RecordLocation]
    ) -> list[IndexRow | BadSample]:
        n, label = len(locations), locations[0].label
        answer = self._workers.answer(
            msgspec.json.encode((dataset, locations)),
            label if n == 1 else f"{label} and {n - 1} after it",
            tries=MAX_TRIES if n == 1 else 1,
        )
        if not isinstance(answer, BadSample):
            return [*answer.rows]
        if n == 1:
            return [answer]
        # one of them hurts: each alone
        return [row for location in locations for row in self.read_rows(dataset, [location])]

    def close(self) -> None:
        self._workers.close()


RowReader = LocalRowReader | ProcessRowReader


def _record_columns(
    location: RecordLocation, record: Record, media: Sequence[dict[str, int]]
) -> dict[str, int]:
    """The columns of a record but those of its text; its content is told from others by text, names
    and headers."""
    location_columns = {
        name: getattr(location, name) for name in ("number", "file", "offset", "size_bytes")
    }
    headers = [{k: v for k, v in columns.items() if v} for columns in media]
    text = record.turns, record.weights, record.fields.messages, record.fields.variables
    content = *text, [m.name for _, m in record.media], headers
    number = int(short_digest(msgspec.json.encode(content)), 16)
    return {
        **location_columns,
        "split_hash": split_hash(record.name, location.label),
        "content_hash": number,
    }


def read_header(kind: str, source: MediaFile, kinds: Kinds = BUILT_IN) -> dict[str, int]:
    """Return the columns of a medium; ValueError if it cannot be read."""
    number = [k.name for k in kinds].index(kind)
    return {"kind": number, **kinds[number].header(source)}
