"""Checks some of a dataset's records before a run, within a time limit: reports bad records with
reasons, token counts, samples that limits cut, and the text of some tokenized samples.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
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
from dflop_jax.data.media import counts
from dflop_jax.data.media.medium import module_of
from dflop_jax.preflight.compare_processors import compare_preparations
from dflop_jax.records import Load

MAX_EXAMPLES = 10  # limit of samples shown, longest samples, compared samples, and bad records
# fractions of the time limit after which listing and reading headers stop
LISTING_FRACTION, HEADERS_FRACTION = 0.25, 0.6


@dataclass(frozen=True)
class DataReport:
    """Results of a check of a dataset."""

    source: str
    listed: int = 0  # number of records listed
    all_listed: bool = True  # all records were listed in time
    read: int = 0  # records whose text and headers were read
    decoded: int = 0  # records read whose media were decoded
    is_cut: bool = False  # time ran out before all were read and decoded
    bad_by_reason: dict[str, int] = field(default_factory=dict)  # number of bad records read
    examples: dict[str, list[str]] = field(default_factory=dict)  # messages by reason
    left_out: int = 0  # records with media that the model does not take
    # tokens of each usable sample, and its tokens and pieces by module, int64 [n]
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    pieces: dict[str, np.ndarray] = field(default_factory=dict)
    longest: tuple[
        tuple[str, int, str], ...
    ] = ()  # name, tokens, description of media; longest first
    beginnings: str = ""  # message about media that the model cuts to their beginning
    loads: tuple[Load, ...] = ()  # loads of the largest samples
    # samples whose text is cut, that lose media, and that are left out, by data.max_tokens
    cut_text: int = 0
    cut_media: int = 0
    too_long: int = 0
    # name, tokens, text that the model reads, with [[text trained on]] and [description of media]
    samples: tuple[tuple[str, int, str], ...] = ()
    template: str = ""
    unread: dict[str, int] = field(default_factory=dict)  # number of records by unread key
    compared: str = ""  # message of `compare_preparations`, "" without a comparison

    @property
    def summary(self) -> str:
        """The number of records in the report, as text."""
        at_least = "" if self.all_listed else "at least "
        cut = " before the time limit" * self.is_cut
        return (
            f"{self.read:,} of {at_least}{self.listed:,} records read, {self.decoded:,} of them "
            f"decoded{cut}: {sum(self.bad_by_reason.values()):,} bad, {self.left_out:,} with media "
            "that the model does not take"
        )


def inspect_dataset(
    config: DataConfig, spec: MediaSpec, vocab_size: int, n_records: int, seconds: float, model: str
) -> DataReport:
    """Return a report on up to `n_records` evenly spaced records, read for up to `seconds`. Media
    are compared with the processors of the folder `model` if it is the tokenizer's. ValueError: no
    such file, not a dataset, no such tokenizer."""
    dataset = RecordDataset(config, spec, vocab_size)
    stop_listing_s = time.monotonic() + LISTING_FRACTION * seconds
    keys, listed, are_all_listed = _list_records(dataset, n_records, stop_listing_s)
    header_reader = dataset.process_row_reader()  # loads the tokenizer, which may take seconds
    start_s = time.monotonic()
    workers = max(config.workers, len(os.sched_getaffinity(0)))
    rows = _read_rows(header_reader, keys, workers, start_s + HEADERS_FRACTION * seconds, inf)
    usable = [p for p, row in rows.items() if not isinstance(row, BadSample)]
    decoder = dataset.process_row_reader(decoded=True)
    decoded = _read_rows(decoder, usable, workers, start_s + seconds, config.sample_timeout_s)
    rows |= decoded
    bad = group_by_reason(
        (p[1].label, r.reason) for p, r in rows.items() if isinstance(r, BadSample)
    )
    good = {p: row for p, row in rows.items() if not isinstance(row, BadSample)}
    decoded_rows = [(p, row) for p in decoded if isinstance(row := rows[p], IndexRow)]
    samples = [
        (dataset.readers[name].read(location), row)
        for (name, location), row in _spread_evenly(decoded_rows, MAX_EXAMPLES)
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
        compared=compare_preparations(dataset, samples, of_model=model == config.tokenizer),
        template=getattr(dataset.tokenizer, "template", "ChatML, text as bytes"),
        **_summarize_usable(dataset, good),
    )


T = TypeVar("T")
RecordKey = tuple[str, RecordLocation]  # dataset and record
Rows = dict[RecordKey, IndexRow | BadSample]


def _list_records(
    dataset: RecordDataset, max_records: int, stop_s: float
) -> tuple[list[RecordKey], int, bool]:
    """Return evenly spaced records of those listed in time, the number listed, and whether all were
    listed."""
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
    reader: RowReader, keys: Sequence[RecordKey], workers: int, stop_s: float, longest_s: float
) -> Rows:
    """Return the rows of the records that were read in time; they are read in random order."""

    def read_row(key: RecordKey) -> Rows:
        start_s = time.monotonic()
        if start_s > stop_s:
            return {}
        (row,) = reader.read_rows(key[0], [key[1]])
        # A record that is cut off by the time limit is not known to be bad.
        return {key: row} if time.monotonic() - start_s < longest_s else {}

    order = np.random.default_rng(0).permutation(len(keys)).tolist()
    rows_by_key: Rows = {}
    with closing(reader), ThreadPoolExecutor(workers) as pool:
        for row in pool.map(read_row, [keys[i] for i in order]):
            rows_by_key |= row
    return {key: rows_by_key[key] for key in keys if key in rows_by_key}


def _summarize_usable(dataset: RecordDataset, good: dict[RecordKey, IndexRow]) -> dict[str, Any]:
    """Return the fields of `DataReport` for usable records."""
    keys, preparation = [*good], dataset.preparation
    records, media = [row.record for row in good.values()], [row.media for row in good.values()]
    table = build_table(records, media, dataset.spec.kinds)
    whole, usable = counts.sample_counts(table, preparation)
    usable_rows = np.flatnonzero(usable).tolist()
    if not usable_rows:
        return {"left_out": len(table)}
    cut, fits = counts.fit_samples(table, preparation, dataset.config)
    demands = np.concatenate([cut.all_tokens[:, None], cut.media[3]], axis=1) * fits[:, None]
    largest = {*demands.argmax(axis=0).tolist()}  # longest text, and largest piece per module
    n_tokens = whole.all_tokens.tolist()
    samples = []
    for i in _spread_evenly(range(len(usable_rows)), MAX_EXAMPLES):
        name, location = keys[usable_rows[i]]
        record = dataset.readers[name].read(location)
        text = _render_sample(dataset, record, table, usable_rows[i])
        samples.append((record.name, n_tokens[i], text))
    longest = []
    for i in np.argsort(-whole.all_tokens, kind="stable")[:MAX_EXAMPLES].tolist():
        described = counts.describe_media(table, usable_rows[i]) or "no media"
        longest.append((keys[usable_rows[i]][1].label, n_tokens[i], described))
    return {
        "left_out": int((~usable).sum()),
        "tokens": {"all": whole.all_tokens, "text": whole.text_tokens}
        | {module: whole.media[1, :, k] for k, module in enumerate(whole.modules)},
        "pieces": {module: whole.n_pieces[:, k] for k, module in enumerate(whole.modules)},
        "longest": tuple(longest),
        "loads": tuple(
            counts.sample_load(table, usable_rows[i], preparation, cut.select(slice(i, i + 1)))
            for i in largest
        ),
        "beginnings": counts.describe_cut_media(table, preparation),
        "cut_text": int((fits & (cut.text_tokens < whole.text_tokens)).sum()),
        "cut_media": int((fits & (cut.n_media < whole.n_media)).sum()),
        "too_long": int((~fits).sum()),
        "samples": tuple(samples),
    }


def _render_sample(dataset: RecordDataset, record: Record, table: RecordTable, row: int) -> str:
    media = [kind.described(header) for kind, header in table.headers(row)]
    text = ""
    for p in dataset.encode_turns(record.turns, record.fields):
        decoded_text = dataset.tokenizer.decode_with_special(p.ids)
        shown_text = f"[{media[p.medium]}]" if p.medium >= 0 else decoded_text
        text += f"[[{shown_text}]]" if p.supervised else shown_text
    return text
