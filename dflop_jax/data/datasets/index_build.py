"""Making the index of a dataset: every record parsed, tokenized, and its media's headers read.

Only what changed is made anew.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dflop_jax.data.datasets.record_parser import TEXT_FIELDS
from dflop_jax.data.datasets.record_reader import RecordReader
from dflop_jax.data.datasets.record_table import (
    DatasetIndex,
    RecordTable,
    build_table,
    concatenate_tables,
    file_state,
    load_index,
    make_key,
    save_index,
)
from dflop_jax.data.datasets.row_reader import RowReader
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN

MAX_PENDING_RECORDS = 4096  # under way with all workers: twice as many take twice the memory
CHUNK_RECORDS = 64  # records with one worker
STAT_THREADS = 8  # of files, which a network answers late
MAX_LOGGED_REASONS = 3  # of each kind, in the log
MAX_INDEXED_REASONS = 20  # why records cannot be taken, in a message
REMEDIES = {
    "missing file": "missing files are looked for in the folder of the JSON file, or in those of "
    "--data.root; name theirs if it is another",
    f"no {', '.join(TEXT_FIELDS)}": "fields of other names are said by --data.columns, such as "
    "messages=chat,image=pictures",
    "no column": "--data.columns FIELD=COLUMN names a column that is not there; mend it",
}
_FILE = re.compile(r"(?:\w+://|\.{0,2}/)?[^\s:'\"(]*/[^\s:'\"(]+")
_DETAIL, _NUMBER = re.compile(r"\s*\(.*$"), re.compile(r"\d+")
logger = logging.getLogger("dflop_jax.data")


@dataclass(frozen=True)
class IndexRules:
    """How an index is made.

    Attributes:
      file: where it is kept.
      settings: the tokenizer's name or digest; another one makes every table anew.
      row_reader: makes what reads records, if there are some to read.
      max_bad_fraction: of a dataset's records that may be unusable.
      workers: threads that read records.
      check_media: look whether files of media changed since they were indexed, too.
    """

    file: Path
    settings: str
    row_reader: Callable[[], RowReader]
    max_bad_fraction: float = 0.1
    workers: int = 2
    check_media: bool = True


def update_index(
    rules: IndexRules, readers: Mapping[str, RecordReader], kinds: Kinds = BUILT_IN
) -> dict[str, DatasetIndex]:
    """Return the index of all `readers`, read from its file if that is up to date, else rebuilt and
    written.

    A damaged file is rebuilt with a warning. The index has columns for all `kinds` of media.
    """
    try:
        stored = load_index(rules.file, kinds)
    except ValueError as e:
        logger.warning("%s; it is made anew", e)
        stored = {}
    keys = {name: make_key(reader.files, rules.settings) for name, reader in readers.items()}
    stale = [name for name, key in keys.items() if name not in stored or stored[name].key != key]
    if rules.check_media:
        stale += [n for n, r in readers.items() if n not in stale and _has_changed(stored[n], r)]
    if not stale:
        return {name: stored[name] for name in readers}
    rebuilt: dict[str, DatasetIndex] = {}
    with closing(rules.row_reader()) as rows:
        for i_dataset, name in enumerate(stale):
            file = rules.file.with_suffix(f".{i_dataset}.unusable.txt")
            rebuilt[name] = _build_index(
                name, readers[name], keys[name], rows, kinds, rules.workers, file
            )
    save_index(rules.file, {**stored, **rebuilt}, kinds)
    return {name: rebuilt.get(name) or stored[name] for name in readers}


def _build_index(
    name: str,
    reader: RecordReader,
    key: str,
    rows: RowReader,
    kinds: Kinds,
    workers: int,
    file: Path,
) -> DatasetIndex:
    """Make the index of a dataset. Unusable records are left out; some of each reason are logged,
    all are written to `file`."""
    tables: list[RecordTable] = []
    bad: list[tuple[str, str]] = []  # (place, why)
    unread: Counter[str] = Counter()
    n_listed, files = 0, dict[str, str]()
    locations = reader.locate()
    with ThreadPoolExecutor(workers) as pool:
        while chunks := list(islice(_chunks(locations), MAX_PENDING_RECORDS // CHUNK_RECORDS)):
            n_listed += sum(map(len, chunks))
            read = [
                r
                for chunk_rows in pool.map(lambda c: rows.read_rows(name, c), chunks)
                for r in chunk_rows
            ]
            usable = [r for r in read if not isinstance(r, BadSample)]
            tables.append(build_table([r.record for r in usable], [r.media for r in usable], kinds))
            unread.update(key for r in usable for key in r.unread)
            for location, r in zip(chain.from_iterable(chunks), read, strict=True):
                files |= r.files
                if isinstance(r, BadSample):
                    bad.append((location.label, r.reason))
    reasons = group_by_reason(bad)
    for reason, messages in reasons.items():
        examples = "; ".join(messages[:MAX_LOGGED_REASONS])
        logger.warning("left out %d records (%s): %s", len(messages), reason, examples)
    if len(bad) > MAX_LOGGED_REASONS:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{reason}\n" for _, reason in bad), encoding="utf-8")
        logger.warning("%s lists all that are left out. %s", file, find_remedies(reasons))
    reasons_in_index = tuple(reason for _, reason in bad[:MAX_INDEXED_REASONS])
    return DatasetIndex(
        key, concatenate_tables(tables, kinds), n_listed, reasons_in_index, files, unread
    )


def _has_changed(index: DatasetIndex, reader: RecordReader) -> bool:
    """Return whether media files of a dataset changed since its index was made; log the first."""

    def changed(files: Sequence[str]) -> list[str]:
        return [file for file in files if file_state(file) != index.files[file]]

    with ThreadPoolExecutor(STAT_THREADS) as pool:
        changed_files = [
            file
            for changed_chunk in pool.map(changed, _chunks(iter(index.files)))
            for file in changed_chunk
        ]
    if changed_files:
        text = "%s: %d files of media changed since they were indexed (%s); all are read again"
        logger.warning(text, reader.name, len(changed_files), changed_files[0])
    return bool(changed_files)


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(items, CHUNK_RECORDS)):
        yield chunk


def check_usable(index: DatasetIndex, name: str, max_bad_fraction: float) -> None:
    """Raise ValueError when too many records of a dataset are unusable, or none is left."""
    bad = index.listed - len(index.table)
    if bad > max_bad_fraction * index.listed or not len(index.table):
        raise ValueError(
            f"{name}: {bad} of {index.listed} records are unusable ({'; '.join(index.bad[:3])}); "
            f"repair them, {find_remedies(index.bad)} or raise "
            f"data.max_bad_fraction={max_bad_fraction}"
        )


def normalize_reason(reason: str, label: str) -> str:
    """Return why a record is unusable, without its name, files, numbers and details."""
    text = reason.removeprefix(label)
    if text.startswith(" id="):
        text = text.partition(": ")[2] or text
    text = _FILE.sub("FILE", text.removeprefix(": "))
    text = _NUMBER.sub("N", _DETAIL.sub("", text.removeprefix("FILE: ")))
    return text.strip().removesuffix(" FILE")[:100] or "unreadable"


def group_by_reason(bad: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return messages of unusable records, given as (label, message), by their normalized reason,
    the most frequent first."""
    messages_by_reason = defaultdict(list)
    for label, reason in bad:
        messages_by_reason[normalize_reason(reason, label)].append(reason)
    return dict(sorted(messages_by_reason.items(), key=lambda item: -len(item[1])))


def find_remedies(messages: Collection[str]) -> str:
    """Return what to do about missing files or columns, "" where none are missing."""
    remedies = (
        remedy for sign, remedy in REMEDIES.items() if any(sign in reason for reason in messages)
    )
    return "; ".join(remedies)
