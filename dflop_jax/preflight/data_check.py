"""A look at some of a dataset's records before anything trains on them: which are bad and why, how
large they are, what limits cut, and how some read when tokenized. It takes so many seconds at most.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec
from dflop_jax.data.build import RecordDataset
from dflop_jax.data.datasets.index_build import RowReader, group_by_reason
from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_reader import RecordLocation
from dflop_jax.data.datasets.record_table import IndexRow, RecordTable, build_table
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.counts import (
    describe_cut_media,
    describe_media,
    fit_samples,
    sample_counts,
    sample_load,
)
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import module_of
from dflop_jax.preflight.compare_processors import compare_preparations
from dflop_jax.records import Load

MAX_COMPARED = 10  # samples that transformers prepares, too
MAX_EXAMPLES = 10  # samples, longest samples, and examples of a reason
HEADER_CHUNK = 16  # records of one request
LISTING_FRACTION, HEADERS_FRACTION = (
    0.25,
    0.6,
)  # shares of the time, by whose end each of these stops


@dataclass(frozen=True)
class DataReport:
    """What a look at a dataset saw.

    Attributes:
      listed: records of the data; `all_listed` says whether the time sufficed to list them.
      read: records whose text and headers were read.
      decoded: the read ones whose media were decoded; `is_cut` says whether time ran out first.
      bad_by_reason: of the read ones.
      examples: by reason, the first few in full.
      left_out: records with media that the model does not take.
      tokens: of each usable sample, and by module its pieces and their tokens, int64 [n].
      compared: whether transformers prepares some samples alike, "" where it is not asked.
      unread: keys of usable records that are not read, with the number of their records.
      longest: (name, tokens, media in words), the longest first.
      loads: what the largest samples ask of every module.
      samples: (name, tokens, text) as the model is given some, [[text that is trained on]] and
        [media in words].
      beginnings: how many media the model takes only the beginning of, "" for none.
      cut_text, cut_media, too_long: samples whose text is cut, that lose media, and that are left
        out, by data.max_tokens.
    """

    source: str
    listed: int = 0
    all_listed: bool = True
    read: int = 0
    decoded: int = 0
    is_cut: bool = False
    bad_by_reason: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    left_out: int = 0
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    pieces: dict[str, np.ndarray] = field(default_factory=dict)
    longest: tuple[tuple[str, int, str], ...] = ()
    beginnings: str = ""
    loads: tuple[Load, ...] = ()
    cut_text: int = 0
    cut_media: int = 0
    too_long: int = 0
    samples: tuple[tuple[str, int, str], ...] = ()
    template: str = ""
    unread: dict[str, int] = field(default_factory=dict)
    compared: str = ""

    @property
    def summary(self) -> str:
        """How many records the report covers, in words."""
        at_least = "" if self.all_listed else "at least "
        cut = " before the time for a look was over" * self.is_cut
        return (
            f"{self.read:,} of {at_least}{self.listed:,} records read, {self.decoded:,} of them "
            f"decoded{cut}: {sum(self.bad_by_reason.values()):,} bad, {self.left_out:,} with media "
            "that the model does not take"
        )


def inspect_dataset(
    config: DataConfig,
    spec: MediaSpec,
    vocab_size: int | None,
    max_records: int,
    seconds: float,
    *,
    model: str = "",
) -> DataReport:
    """Read up to `max_records` records, evenly spread, for up to so many seconds, and report on
    them.

    Args:
      model: folder of the model; media are compared with its processors if it is the tokenizer's.

    Raises:
      ValueError: nothing can be read: no such file, not a dataset, no such tokenizer.
    """
    start_s = time.monotonic()
    dataset = RecordDataset(config, spec, vocab_size)
    keys, listed, are_all_listed = _list_records(
        dataset, max_records, start_s + LISTING_FRACTION * seconds
    )
    workers = max(config.workers, len(os.sched_getaffinity(0)))
    rows = _read_rows(
        dataset.process_row_reader,
        keys,
        HEADER_CHUNK,
        workers,
        start_s + HEADERS_FRACTION * seconds,
        inf,
    )
    usable = [p for p, row in rows.items() if not isinstance(row, BadSample)]
    decoding = partial(dataset.process_row_reader, decoded=True)
    decoded = _read_rows(decoding, usable, 1, workers, start_s + seconds, config.sample_timeout_s)
    rows |= decoded
    bad = group_by_reason(
        (p[1].label, r.reason) for p, r in rows.items() if isinstance(r, BadSample)
    )
    good = {p: row for p, row in rows.items() if not isinstance(row, BadSample)}
    decoded_rows = [(p, row) for p in decoded if isinstance(row := rows[p], IndexRow)]
    samples = [
        (dataset.readers[name].read(location), row)
        for (name, location), row in _spread_evenly(decoded_rows, MAX_COMPARED)
        if all(module_of(dataset.preparation, spec.kinds[m["kind"]].name) for m in row.media)
    ]
    return DataReport(
        source=config.path,
        listed=listed,
        all_listed=are_all_listed,
        read=len(rows),
        decoded=len(decoded),
        is_cut=len(rows) < len(keys) or len(decoded) < len(usable),
        bad_by_reason={reason: len(names) for reason, names in bad.items()},
        examples={reason: names[:MAX_EXAMPLES] for reason, names in bad.items()},
        unread=dict(Counter(key for row in good.values() for key in row.unread).most_common()),
        compared=compare_preparations(
            dataset, spec.kinds, samples, of_model=model == config.tokenizer
        ),
        template=getattr(dataset.tokenizer, "template", "ChatML, text as bytes"),
        **_usable_figures(dataset, good, Limits.of(config), spec),
    )


T = TypeVar("T")
RecordKey = tuple[str, RecordLocation]  # a dataset's name and a record of it


def _list_records(
    dataset: RecordDataset, max_records: int, stop_s: float
) -> tuple[list[RecordKey], int, bool]:
    """Return records evenly spread over all that could be listed in time, how many those are, and
    whether they are all."""
    keys: list[RecordKey] = []
    for name, reader in dataset.readers.items():
        for location in reader.locate():
            keys.append((name, location))
            if time.monotonic() > stop_s and len(keys) >= max_records:
                return _spread_evenly(keys, max_records), len(keys), False
    return _spread_evenly(keys, max_records), len(keys), True


def _spread_evenly(items: Sequence[T], max_records: int) -> list[T]:
    n = min(len(items), max_records)
    return [items[i * len(items) // n] for i in range(n)]


def _read_rows(
    make_reader: Callable[[], RowReader],
    keys: Sequence[RecordKey],
    chunk: int,
    workers: int,
    stop_s: float,
    longest_s: float,
) -> dict[RecordKey, IndexRow | BadSample]:
    """Return the rows of the records that could be read in time, in an order spread over them."""
    order = np.random.default_rng(0).permutation(-(-len(keys) // chunk)).tolist()
    chunks = [keys[i * chunk : (i + 1) * chunk] for i in order]

    def read_chunk(chunk_keys: Sequence[RecordKey]) -> dict[RecordKey, IndexRow | BadSample]:
        start_s = time.monotonic()
        if start_s > stop_s and chunk_keys is not chunks[0]:  # on a busy machine one is read
            return {}
        rows: dict[RecordKey, IndexRow | BadSample] = {}
        for name in dict.fromkeys(name for name, _ in chunk_keys):
            dataset_keys = [p for p in chunk_keys if p[0] == name]
            rows |= zip(
                dataset_keys,
                reader.read_rows(name, [location for _, location in dataset_keys]),
                strict=True,
            )
        # What took too long while there was little time is not known to be bad.
        return rows if time.monotonic() - start_s < longest_s else {}

    rows_by_key: dict[RecordKey, IndexRow | BadSample] = {}
    if chunks:
        with closing(make_reader()) as reader, ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(read_chunk, chunks):
                rows_by_key |= rows
    return {p: rows_by_key[p] for p in keys if p in rows_by_key}


def _usable_figures(
    dataset: RecordDataset, good: dict[RecordKey, IndexRow], limits: Limits, spec: MediaSpec
) -> dict[str, Any]:
    """Return the fields of a `DataReport` that describe usable records."""
    records, media = [row.record for row in good.values()], [row.media for row in good.values()]
    table, names = build_table(records, media, spec.kinds), [p for _, p in good]
    counts, usable = sample_counts(table, dataset.preparation)
    usable_rows, keys = np.flatnonzero(usable), list(good)
    if not len(usable_rows):
        return {"left_out": len(table)}
    preparation, (cut, fits) = dataset.preparation, fit_samples(table, dataset.preparation, limits)
    demands = np.concatenate([cut.all_tokens[:, None], cut.media[3]], axis=1) * fits[:, None]
    largest = {*demands.argmax(axis=0).tolist()}  # samples of the longest text, the largest pieces
    longest = np.argsort(-counts.all_tokens, kind="stable")[:MAX_EXAMPLES].tolist()
    samples = []
    for i in _spread_evenly(range(len(usable_rows)), MAX_EXAMPLES):
        (name, location), row = keys[usable_rows[i]], int(usable_rows[i])
        record = dataset.readers[name].read(location)
        text = _render_sample(dataset, record, table, row)
        samples.append((record.name, int(counts.all_tokens[i]), text))
    return {
        "left_out": int((~usable).sum()),
        "tokens": {"all": counts.all_tokens, "text": counts.text_tokens} | {
            module: counts.media[1, :, k] for k, module in enumerate(counts.modules)
        },
        "pieces": {module: counts.n_pieces[:, k] for k, module in enumerate(counts.modules)},
        "longest": tuple(
            (
                names[usable_rows[i]].label,
                int(counts.all_tokens[i]),
                describe_media(table, int(usable_rows[i])) or "no media",
            )
            for i in longest
        ),
        "loads": tuple(
            sample_load(table, usable_rows[i], preparation, cut.select(slice(i, i + 1)))
            for i in largest
        ),
        "beginnings": describe_cut_media(table, dataset.preparation),
        "cut_text": int((fits & (cut.text_tokens < counts.text_tokens)).sum()),
        "cut_media": int((fits & (cut.n_media < counts.n_media)).sum()),
        "too_long": int((~fits).sum()),
        "samples": tuple(samples),
    }  # fmt: skip


def _render_sample(dataset: RecordDataset, record: Record, table: RecordTable, row: int) -> str:
    media = [kind.described(header) for kind, header in table.headers(row)]
    text = ""
    for p in dataset.encode_turns(record.turns, record.fields):
        shown_text = (
            f"[{media[p.medium]}]"
            if p.medium >= 0
            else dataset.tokenizer.decode_with_special(p.ids)
        )
        text += f"[[{shown_text}]]" if p.supervised else shown_text
    return text
