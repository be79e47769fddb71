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

from dflop_jax.data.datasets.header_rows import RowReader
from dflop_jax.data.datasets.llava_records import TEXTS, RecordReader
from dflop_jax.data.datasets.shape_index import (
    Indexed,
    ShapeTable,
    file_state,
    joined,
    load_index,
    make_key,
    save_index,
    table_of,
)
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN

RECORDS_AT_ONCE = 4096  # under way with all workers: twice as many take twice the memory
CHUNK = 64  # records with one worker
STATS_AT_ONCE = 8  # of files, which a network answers late
SHOWN_REASONS = 3  # of each kind, in the log
KEPT_REASONS = 20  # why records cannot be taken, in a message
REMEDIES = {
    "missing file": "missing files are looked for in the folder of the JSON file, or in those of "
    "--data.root; name theirs if it is another",
    f"no {', '.join(TEXTS)}": "fields of other names are said by --data.columns, such as "
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
    rules: IndexRules,
    readers: Mapping[str, RecordReader],
    kinds: Kinds = BUILT_IN,
) -> dict[str, Indexed]:
    """Return the index of all `readers`, from its file where that is up to date; else it is
    written, as it is where that is damaged: a bit on a disk is to end no run. The index has all
    `kinds` of media."""
    try:
        known = load_index(rules.file, kinds)
    except ValueError as e:
        logger.warning("%s; it is made anew", e)
        known = {}
    keys = {name: make_key(reader.files, rules.settings) for name, reader in readers.items()}
    stale = [name for name, key in keys.items() if name not in known or known[name].key != key]
    if rules.check_media:
        stale += [n for n, r in readers.items() if n not in stale and _has_changed(known[n], r)]
    if not stale:
        return {name: known[name] for name in readers}
    made: dict[str, Indexed] = {}
    with closing(rules.row_reader()) as rows:
        for k, name in enumerate(stale):
            file = rules.file.with_suffix(f".{k}.unusable.txt")
            made[name] = _index_of(
                name, readers[name], keys[name], rows, kinds, rules.workers, file
            )
    save_index(rules.file, {**known, **made}, kinds)
    return {name: made.get(name) or known[name] for name in readers}


def _index_of(
    name: str,
    reader: RecordReader,
    key: str,
    rows: RowReader,
    kinds: Kinds,
    workers: int,
    file: Path,
) -> Indexed:
    """Make the index of a dataset. Unusable records are left out; some of each reason are logged,
    all are written to `file`."""
    tables: list[ShapeTable] = []
    bad: list[tuple[str, str]] = []  # (place, why)
    unread: Counter[str] = Counter()
    listed, files = 0, dict[str, str]()
    places = reader.locate()
    with ThreadPoolExecutor(workers) as pool:
        while chunks := list(islice(_chunks(places), RECORDS_AT_ONCE // CHUNK)):
            listed += sum(map(len, chunks))
            read = [r for part in pool.map(lambda c: rows.rows(name, c), chunks) for r in part]
            usable = [r for r in read if not isinstance(r, BadSample)]
            tables.append(table_of([r.record for r in usable], [r.media for r in usable], kinds))
            unread.update(key for r in usable for key in r.unread)
            for located, r in zip(chain.from_iterable(chunks), read, strict=True):
                files |= r.files
                if isinstance(r, BadSample):
                    bad.append((located.place, r.reason))
    reasons = by_reason(bad)
    for reason, whys in reasons.items():
        shown = "; ".join(whys[:SHOWN_REASONS])
        logger.warning("left out %d records (%s): %s", len(whys), reason, shown)
    if len(bad) > SHOWN_REASONS:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{why}\n" for _, why in bad), encoding="utf-8")
        logger.warning("%s lists all that are left out. %s", file, remedy_of(reasons))
    kept = tuple(why for _, why in bad[:KEPT_REASONS])
    return Indexed(key, joined(tables, kinds), listed, kept, files, unread)


def _has_changed(index: Indexed, reader: RecordReader) -> bool:
    """Whether files of media of a dataset have changed since its index was made; says which."""

    def changed(files: Sequence[str]) -> list[str]:
        return [file for file in files if file_state(file) != index.files[file]]

    with ThreadPoolExecutor(STATS_AT_ONCE) as pool:
        found = [file for part in pool.map(changed, _chunks(iter(index.files))) for file in part]
    if found:
        text = "%s: %d files of media changed since they were indexed (%s); all are read again"
        logger.warning(text, reader.name, len(found), found[0])
    return bool(found)


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(items, CHUNK)):
        yield chunk


def check_usable(index: Indexed, name: str, max_bad_fraction: float) -> None:
    """ValueError when too many records of a dataset are unusable, or none is left."""
    bad = index.listed - len(index.table)
    if bad > max_bad_fraction * index.listed or not len(index.table):
        raise ValueError(
            f"{name}: {bad} of {index.listed} records are unusable ({'; '.join(index.bad[:3])}); "
            f"repair them, {remedy_of(index.bad)} or raise "
            f"data.max_bad_fraction={max_bad_fraction}"
        )


def reason_of(why: str, place: str) -> str:
    """What is wrong with the record at a place, without what is its own: name, files, numbers,
    details."""
    text = why.removeprefix(place)
    if text.startswith(" id="):
        text = text.partition(": ")[2] or text
    text = _FILE.sub("FILE", text.removeprefix(": "))
    text = _NUMBER.sub("N", _DETAIL.sub("", text.removeprefix("FILE: ")))
    return text.strip().removesuffix(" FILE")[:100] or "unreadable"


def by_reason(bad: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return why records are unusable, given as (place, why), by what they have in common, the most
    frequent first."""
    found = defaultdict(list)
    for place, why in bad:
        found[reason_of(why, place)].append(why)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def remedy_of(whys: Collection[str]) -> str:
    """What may be done about missing files or columns, "" where none are."""
    said = (remedy for sign, remedy in REMEDIES.items() if any(sign in why for why in whys))
    return "; ".join(said)
