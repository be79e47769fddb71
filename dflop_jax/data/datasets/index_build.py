"""Builds the index of a dataset: parses and tokenizes records, and reads the headers of media.

Headers are untrusted, so `ProcessRowReader` reads them in processes that can be killed (see
`process_pool`), each record within a deadline and a memory limit.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.data.bounds import MAX_EXAMPLES, one_line
from dflop_jax.data.datasets import record_table
from dflop_jax.data.datasets.blob import MediaFile, MissingFile
from dflop_jax.data.datasets.conversations import TEXT_FIELDS
from dflop_jax.data.datasets.record_parser import Record, short_digest
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader
from dflop_jax.data.datasets.record_table import DatasetIndex, IndexRow, RecordTable, file_state
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.compose import decode_media
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.kind import BUILT_IN, Kinds, with_keys
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.process_pool import MAX_TRIES, DecoderPool, DecoderReply
from dflop_jax.data.sample import SourceFactory
from dflop_jax.data.text.tokenize import TemplateFields, TokenRun, count_text_tokens

CHUNK_RECORDS = 64  # records per task; the pool gets as many tasks at a time
REMEDIES = {
    "missing file": "media files are searched in the folder of the JSON file, or in the folders of "
    "--data.root; set it to their folder",
    f"no {', '.join(TEXT_FIELDS)}": "name the columns of fields by --data.columns, such as "
    "messages=chat,image=pictures",
    "no column": "--data.columns FIELD=COLUMN names a column that does not exist; correct it",
}
_FILE = re.compile(r"(?:\w+://|\.{0,2}/)?[^\s:'\"(]*/[^\s:'\"(]+")
_DETAIL, _NUMBER = re.compile(r"\s*\(.*$"), re.compile(r"\d+")
logger = logging.getLogger("dflop_jax.data")
EncodeTurns = Callable[[Sequence[tuple[str, str]], TemplateFields], tuple[TokenRun, ...]]


class LocalRowReader:
    """Reads index rows of records in this process.

    Args:
      preparation: the model's preparation, to check that media can be decoded; None: only headers
        are read.
      reads_variable: returns whether the chat template reads a field of this name.
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
        # Each file is read once, since several records may show one picture.
        self._state, self._header = cache(file_state), cache(partial(read_header, kinds=kinds))

    def read_rows(
        self, dataset: str, locations: Sequence[RecordLocation]
    ) -> list[IndexRow | BadSample]:
        """Return the row of each record, or a `BadSample` with the reason; thread-safe."""
        return [self._row(self._readers[dataset], location) for location in locations]

    def answer(self, request: bytes) -> DecoderReply:
        """Return the reply to a request of a `ProcessRowReader`."""
        dataset, locations = msgspec.json.decode(request, type=tuple[str, list[RecordLocation]])
        return DecoderReply(rows=tuple(self.read_rows(dataset, locations)))

    def close(self) -> None:  # it has no process to end
        pass

    def _row(self, reader: RecordReader, location: RecordLocation) -> IndexRow | BadSample:
        try:
            record = reader.read(location)
        except (ValueError, OSError, MemoryError) as e:
            missing = e.__cause__.args if isinstance(e.__cause__, MissingFile) else ()
            reason = str(e) or f"{location.label}: {one_line(e)}"
            return BadSample(reason, dict.fromkeys(missing, ""))
        # Taken before the headers are read, so a file that changes meanwhile is read again.
        files = {str(m): self._state(m) for _, m in record.media if isinstance(m, Path)}
        try:
            token_runs = self._encode_turns(record.turns, record.fields)
            text_columns, text_positions = count_text_tokens(token_runs)
            headers = []
            for (kind, medium), keys in zip(record.media, record.keys, strict=True):
                is_file = isinstance(medium, Path)
                header = (self._header if is_file else self._header.__wrapped__)(kind, medium)
                headers.append(with_keys(header, keys))
            media = tuple(h | p for h, p in zip(headers, text_positions, strict=True))
            columns = _record_columns(location, record, headers) | text_columns
        except (ValueError, OSError, MemoryError) as e:
            return BadSample(f"{record.name}: {str(e) or one_line(e)}", files)
        if self._preparation is not None:
            table = record_table.build_table([columns], [media], self._kinds)
            try:
                _, is_usable = sample_counts(table, self._preparation)
                if is_usable.all():  # a record that the model cannot take is not bad
                    decode_media(record, table, 0, self._preparation)
            except Exception as e:  # untrusted files may fail in any way
                return BadSample(f"{record.name}: {one_line(e)}", files)
        unread = {*record.unread, *(n for n in record.fields.names if not self._reads_variable(n))}
        return IndexRow(columns, media, files, tuple(sorted(unread)))


class ProcessRowReader:
    """Reads index rows in child processes, one for each pending request. A record that kills its
    process is unusable. `factory` returns `LocalRowReader.answer`; the limits apply per record."""

    def __init__(self, factory: SourceFactory, timeout_s: float, memory_bytes: int) -> None:
        self._pool = DecoderPool(factory, timeout_s, memory_bytes)
        self.close = self._pool.close

    def read_rows(
        self, dataset: str, locations: Sequence[RecordLocation]
    ) -> list[IndexRow | BadSample]:
        n, label = len(locations), locations[0].label
        answer = self._pool.answer(
            msgspec.json.encode((dataset, locations)),
            label if n == 1 else f"{label} and {n - 1} after it",
            tries=MAX_TRIES if n == 1 else 1,
        )
        if not isinstance(answer, BadSample):
            return [*answer.rows]
        if n == 1:
            return [answer]
        # One of them fails: read each alone.
        return [row for location in locations for row in self.read_rows(dataset, [location])]


RowReader = LocalRowReader | ProcessRowReader


def _record_columns(
    location: RecordLocation, record: Record, headers: Sequence[Mapping[str, int]]
) -> dict[str, int]:
    """Return a record's columns, without those that count its text."""
    location_columns = {
        name: getattr(location, name) for name in ("number", "file", "offset", "size_bytes")
    }
    text = record.turns, record.weights, record.fields.messages, record.fields.variables
    names = [m.name for _, m in record.media]
    content = *text, names, [{k: v for k, v in columns.items() if v} for columns in headers]
    identity = record.name.removeprefix(location.label).removeprefix(" id=") or location.label
    return {
        **location_columns,
        "split_hash": int(short_digest(identity.encode()), 16),
        "content_hash": int(short_digest(msgspec.json.encode(content)), 16),
    }


def read_header(kind: str, source: MediaFile, kinds: Kinds = BUILT_IN) -> dict[str, int]:
    """Return the columns of a medium. ValueError: it cannot be read."""
    number = [k.name for k in kinds].index(kind)
    return {"kind": number, **kinds[number].header(source)}


@dataclass(frozen=True)
class IndexRules:
    """Settings for building an index in `file`."""

    file: Path
    settings: str  # the tokenizer's name or digest; every table is rebuilt if it changes
    row_reader: Callable[[], RowReader]  # returns a reader; called only if records must be read
    max_bad_fraction: float = 0.1  # maximum share of a dataset's records that may be unusable
    workers: int = 2  # threads that read records
    check_media: bool = True  # also rebuild if media files changed since they were indexed


def update_index(
    rules: IndexRules, readers: Mapping[str, RecordReader], kinds: Kinds = BUILT_IN
) -> dict[str, DatasetIndex]:
    """Return the index of all `readers`; rebuild and write tables that are damaged or outdated."""
    try:
        stored = record_table.load_index(rules.file, kinds)
    except ValueError as e:
        logger.warning("%s; it is rebuilt", e)
        stored = {}
    keys = {}
    for name, reader in readers.items():
        states = [(str(file.resolve()), file_state(file)) for file in reader.files]
        keys[name] = json.dumps([states, rules.settings])
    stale = [name for name, key in keys.items() if name not in stored or stored[name].key != key]
    if rules.check_media:
        stale += [n for n, r in readers.items() if n not in stale and _has_changed(stored[n], r)]
    if not stale:
        return {name: stored[name] for name in readers}
    with closing(rules.row_reader()) as rows:
        for number, name in enumerate(stale):
            stored[name] = _build_index(
                name, readers[name], keys[name], rules, rows, kinds, number=number
            )
    record_table.save_index(rules.file, stored, kinds)
    return {name: stored[name] for name in readers}


def _build_index(
    name: str,
    reader: RecordReader,
    key: str,
    rules: IndexRules,
    rows: RowReader,
    kinds: Kinds,
    *,
    number: int,
) -> DatasetIndex:
    """Return the index of a dataset without unusable records. Examples of each reason are logged;
    all unusable records are written to the `number`-th file beside the index."""
    tables: list[RecordTable] = []
    bad: list[tuple[str, str]] = []  # (label, reason)
    unread: Counter[str] = Counter()
    n_listed, files = 0, dict[str, str]()
    chunks = _chunks(reader.locate())
    with ThreadPoolExecutor(rules.workers) as pool:
        while pending := list(islice(chunks, CHUNK_RECORDS)):
            locations = [*chain.from_iterable(pending)]
            n_listed += len(locations)
            read = [*chain.from_iterable(pool.map(lambda c: rows.read_rows(name, c), pending))]
            usable = [r for r in read if not isinstance(r, BadSample)]
            tables.append(
                record_table.build_table(
                    [r.record for r in usable], [r.media for r in usable], kinds
                )
            )
            unread.update(key for r in usable for key in r.unread)
            for location, r in zip(locations, read, strict=True):
                files |= r.files
                if isinstance(r, BadSample):
                    bad.append((location.label, r.reason))
    reasons = group_by_reason(bad)
    for reason, messages in reasons.items():
        examples = "; ".join(messages[:MAX_EXAMPLES])
        logger.warning("left out %d records (%s): %s", len(messages), reason, examples)
    if len(bad) > MAX_EXAMPLES:
        file = rules.file.with_suffix(f".{number}.unusable.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{reason}\n" for _, reason in bad), encoding="utf-8")
        logger.warning("%s lists all unusable records. %s", file, find_remedies(reasons))
    first_reasons = tuple(reason for _, reason in bad[:MAX_EXAMPLES])
    table = record_table.concatenate_tables(tables, kinds)
    return DatasetIndex(key, table, n_listed, first_reasons, files, unread)


def _has_changed(index: DatasetIndex, reader: RecordReader) -> bool:
    """Return whether media files of a dataset changed since it was indexed; log the first one."""
    with ThreadPoolExecutor() as pool:  # network file systems are slow
        states = chain.from_iterable(
            pool.map(lambda chunk: [*map(file_state, chunk)], _chunks(iter(index.files)))
        )
        changed_files = [f for f, state in zip(index.files, states) if state != index.files[f]]
    if changed_files:
        text = "%s: %d files of media changed since they were indexed (%s); all are read again"
        logger.warning(text, reader.name, len(changed_files), changed_files[0])
    return bool(changed_files)


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(items, CHUNK_RECORDS)):
        yield chunk


def check_usable(index: DatasetIndex, name: str, max_bad_fraction: float) -> None:
    """Raise ValueError if too many records of a dataset are unusable, or all are."""
    bad = index.listed - len(index.table)
    if bad > max_bad_fraction * index.listed or not len(index.table):
        raise ValueError(
            f"{name}: {bad} of {index.listed} records are unusable ({'; '.join(index.bad)}); "
            f"repair them, {find_remedies(index.bad)} or raise "
            f"data.max_bad_fraction={max_bad_fraction}"
        )


def normalize_reason(reason: str, label: str) -> str:
    """Return a reason without the record's label and id, file names, numbers and details."""
    text = reason.removeprefix(label)
    if text.startswith(" id="):
        text = text.partition(": ")[2] or text
    text = _FILE.sub("FILE", text.removeprefix(": "))
    text = _NUMBER.sub("N", _DETAIL.sub("", text.removeprefix("FILE: ")))
    return text.strip().removesuffix(" FILE")[:100] or "unreadable"


def group_by_reason(bad: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group the messages of (label, message) by normalized reason, the most frequent first."""
    messages_by_reason = defaultdict(list)
    for label, reason in bad:
        messages_by_reason[normalize_reason(reason, label)].append(reason)
    return dict(sorted(messages_by_reason.items(), key=lambda item: -len(item[1])))


def find_remedies(messages: Collection[str]) -> str:
    """Return how to fix missing files or columns, "" if the messages report none."""
    return "; ".join(
        remedy for sign, remedy in REMEDIES.items() if any(sign in reason for reason in messages)
    )
