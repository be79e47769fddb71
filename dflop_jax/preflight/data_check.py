"""A look at some of a dataset's records before anything trains on them: which are bad and why, how
large they are, what limits cut, and how some read when tokenized. It takes so many seconds at most.
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

MAX_EXAMPLES = 10  # samples, longest samples, samples compared, and examples of a reason
# shares of the time, by whose end each of these stops
LISTING_FRACTION, HEADERS_FRACTION = 0.25, 0.6


@dataclass(frozen=True)
class DataReport:
    """What a look at a dataset saw."""

    source: str
    listed: int = 0  # records of the data
    all_listed: bool = True  # whether the time sufficed to list them
    read: int = 0  # records whose text and headers were read
    decoded: int = 0  # the read ones whose media were decoded
    is_cut: bool = False  # whether time ran out before all were
    bad_by_reason: dict[str, int] = field(default_factory=dict)  # of the read ones
    examples: dict[str, list[str]] = field(default_factory=dict)  # by reason, the first in full
    left_out: int = 0  # records with media that the model does not take
    # of each usable sample, and by module its pieces and their tokens, int64 [n]
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    pieces: dict[str, np.ndarray] = field(default_factory=dict)
    longest: tuple[tuple[str, int, str], ...] = ()  # name, tokens, media in words; longest first
    beginnings: str = ""  # of how many media the model takes only the beginning
    loads: tuple[Load, ...] = ()  # what the largest samples ask of every module
    # samples whose text is cut, that lose media, and that are left out, by data.max_tokens
    cut_text: int = 0
    cut_media: int = 0
    too_long: int = 0
    # name, tokens, text as the model is given it, [[trained on]] and [media in words]
    samples: tuple[tuple[str, int, str], ...] = ()
    template: str = ""
    unread: dict[str, int] = field(default_factory=dict)  # keys that are not read, with records
    compared: str = ""  # whether transformers prepares some samples alike, "" where not asked

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
    config: DataConfig, spec: MediaSpec, vocab_size: int, n_records: int, seconds: float, model: str
) -> DataReport:
    """Read up to `n_records` records, evenly spread, for up to so many seconds, and report on
    them. Media are compared with the processors of the folder `model` if it is the tokenizer's.
    ValueError: no such file, not a dataset, no such tokenizer."""
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
        **_usable_figures(dataset, good),
    )


T = TypeVar("T")
RecordKey = tuple[str, RecordLocation]  # a dataset's name and a record of it
Rows = dict[RecordKey, IndexRow | BadSample]


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
    reader: RowReader, keys: Sequence[RecordKey], workers: int, stop_s: float, longest_s: float
) -> Rows:
    """Return the rows of the records that could be read in time, in an order spread over them."""

    def read_row(key: RecordKey) -> Rows:
        start_s = time.monotonic()
        if start_s > stop_s:
            return {}
        (row,) = reader.read_rows(key[0], [key[1]])
        # What took too long while there was little time is not known to be bad.
        return {key: row} if time.monotonic() - start_s < longest_s else {}

    order = np.random.default_rng(0).permutation(len(keys)).tolist()
    rows_by_key: Rows = {}
    with closing(reader), ThreadPoolExecutor(workers) as pool:
        for row in pool.map(read_row, [keys[i] for i in order]):
            rows_by_key |= row
    return {key: rows_by_key[key] for key in keys if key in rows_by_key}


def _usable_figures(dataset: RecordDataset, good: dict[RecordKey, IndexRow]) -> dict[str, Any]:
    """Return the fields of a `DataReport` that describe usable records."""
    keys, preparation = [*good], dataset.preparation
    records, media = [row.record for row in good.values()], [row.media for row in good.values()]
    table = build_table(records, media, dataset.spec.kinds)
    whole, usable = counts.sample_counts(table, preparation)
    usable_rows = np.flatnonzero(usable).tolist()
    if not usable_rows:
        return {"left_out": len(table)}
    cut, fits = counts.fit_samples(table, preparation, dataset.config)
    demands = np.concatenate([cut.all_tokens[:, None], cut.media[3]], axis=1) * fits[:, None]
    largest = {*demands.argmax(axis=0).tolist()}  # samples of the longest text, the largest pieces
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
