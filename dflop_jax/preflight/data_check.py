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
from dflop_jax.data.build import Records
from dflop_jax.data.datasets.header_rows import RowReader
from dflop_jax.data.datasets.index_build import by_reason
from dflop_jax.data.datasets.llava_records import Located, Record
from dflop_jax.data.datasets.shape_index import Row, ShapeTable, table_of
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.media.counts import cut_media, described, fit, load_of, sample_counts
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import module_of
from dflop_jax.preflight.compare_processors import compare_preparations
from dflop_jax.records import Load

COMPARED = 10  # samples that transformers prepares, too
SHOWN = 10  # samples, longest samples, and examples of a reason
HEADER_CHUNK = 16  # records of one request
LISTING, HEADERS = 0.25, 0.6  # shares of the time, by whose end each of these stops


@dataclass(frozen=True)
class DataLook:
    """What a look at a dataset saw.

    Attributes:
      listed: records of the data; `all_listed` says whether the time sufficed to list them.
      read: records whose text and headers were read; decoded: of those, with their media; `is_cut`
        says whether the time was over before all that should be were.
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
    def words(self) -> str:
        """How many records it is of."""
        of_all = "" if self.all_listed else "at least "
        cut = " before the time for a look was over" * self.is_cut
        return (
            f"{self.read:,} of {of_all}{self.listed:,} records read, {self.decoded:,} of them "
            f"decoded{cut}: {sum(self.bad_by_reason.values()):,} bad, {self.left_out:,} with media "
            "that the model does not take"
        )


def look(
    config: DataConfig,
    spec: MediaSpec,
    vocab_size: int | None,
    most: int,
    seconds: float,
    *,
    model: str = "",
) -> DataLook:
    """Look at up to `most` records, evenly spread, for up to so many seconds.

    Args:
      model: folder of the model; media are compared with its processors if it is the tokenizer's.

    Raises:
      ValueError: nothing can be read: no such file, not a dataset, no such tokenizer.
    """
    begun_s = time.monotonic()
    opened = Records(config, spec, vocab_size)
    places, listed, whole = _listed(opened, most, begun_s + LISTING * seconds)
    workers = max(config.workers, len(os.sched_getaffinity(0)))
    rows = _read(opened.rows_apart, places, HEADER_CHUNK, workers, begun_s + HEADERS * seconds, inf)
    usable = [p for p, row in rows.items() if not isinstance(row, BadSample)]
    decoding = partial(opened.rows_apart, decoded=True)
    decoded = _read(decoding, usable, 1, workers, begun_s + seconds, config.sample_timeout_s)
    rows |= decoded
    bad = by_reason((p[1].place, r.reason) for p, r in rows.items() if isinstance(r, BadSample))
    good = {p: row for p, row in rows.items() if not isinstance(row, BadSample)}
    seen = [(p, row) for p in decoded if isinstance(row := rows[p], Row)]
    samples = [
        (opened.readers[name].read(located), row)
        for (name, located), row in _spread(seen, COMPARED)
        if all(module_of(opened.how, spec.kinds[m["kind"]].name) for m in row.media)
    ]
    return DataLook(
        source=config.path,
        listed=listed,
        all_listed=whole,
        read=len(rows),
        decoded=len(decoded),
        is_cut=len(rows) < len(places) or len(decoded) < len(usable),
        bad_by_reason={reason: len(names) for reason, names in bad.items()},
        examples={reason: names[:SHOWN] for reason, names in bad.items()},
        unread=dict(Counter(key for row in good.values() for key in row.unread).most_common()),
        compared=compare_preparations(
            opened, spec.kinds, samples, of_model=model == config.tokenizer
        ),
        template=getattr(opened.tokenizer, "template", "ChatML, text as bytes"),
        **_figures(opened, good, Limits.of(config), spec),
    )


T = TypeVar("T")
Place = tuple[str, Located]  # a dataset's name and a record of it


def _listed(opened: Records, most: int, stop_s: float) -> tuple[list[Place], int, bool]:
    """Records evenly spread over all that could be listed in time, how many those are, and whether
    they are all."""
    places: list[Place] = []
    for name, reader in opened.readers.items():
        for located in reader.locate():
            places.append((name, located))
            if time.monotonic() > stop_s and len(places) >= most:
                return _spread(places, most), len(places), False
    return _spread(places, most), len(places), True


def _spread(items: Sequence[T], most: int) -> list[T]:
    n = min(len(items), most)
    return [items[i * len(items) // n] for i in range(n)]


def _read(
    make: Callable[[], RowReader],
    places: Sequence[Place],
    chunk: int,
    workers: int,
    stop_s: float,
    longest_s: float,
) -> dict[Place, Row | BadSample]:
    """What is read of the places, in an order that is spread over them, until the time is over."""
    order = np.random.default_rng(0).permutation(-(-len(places) // chunk)).tolist()
    chunks = [places[i * chunk : (i + 1) * chunk] for i in order]

    def one(part: Sequence[Place]) -> dict[Place, Row | BadSample]:
        begun_s = time.monotonic()
        if begun_s > stop_s:
            return {}
        rows: dict[Place, Row | BadSample] = {}
        for name in dict.fromkeys(name for name, _ in part):
            mine = [p for p in part if p[0] == name]
            rows |= zip(mine, reader.rows(name, [located for _, located in mine]), strict=True)
        # What took too long while there was little time is not known to be bad.
        return rows if time.monotonic() - begun_s < longest_s else {}

    found: dict[Place, Row | BadSample] = {}
    if chunks:
        with closing(make()) as reader, ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(one, chunks):
                found |= rows
    return {p: found[p] for p in places if p in found}


def _figures(
    opened: Records, good: dict[Place, Row], limits: Limits, spec: MediaSpec
) -> dict[str, Any]:
    """The figures of a `DataLook` that are of usable records."""
    records, media = [row.record for row in good.values()], [row.media for row in good.values()]
    table, names = table_of(records, media, spec.kinds), [p for _, p in good]
    counts, usable = sample_counts(table, opened.how)
    kept, places = np.flatnonzero(usable), list(good)
    if not len(kept):
        return {"left_out": len(table)}
    how, (cut, fits) = opened.how, fit(table, opened.how, limits)
    asks = np.concatenate([cut.all_tokens[:, None], cut.media[3]], axis=1) * fits[:, None]
    most = {*asks.argmax(axis=0).tolist()}  # samples of the longest text, the largest pieces
    longest = np.argsort(-counts.all_tokens, kind="stable")[:SHOWN].tolist()
    samples = []
    for i in _spread(range(len(kept)), SHOWN):
        (name, located), row = places[kept[i]], int(kept[i])
        record = opened.readers[name].read(located)
        text = _shown(opened, record, table, row)
        samples.append((record.name, int(counts.all_tokens[i]), text))
    return {
        "left_out": int((~usable).sum()),
        "tokens": {"all": counts.all_tokens, "text": counts.text_tokens} | {
            module: counts.media[1, :, k] for k, module in enumerate(counts.modules)
        },
        "pieces": {module: counts.pieces[:, k] for k, module in enumerate(counts.modules)},
        "longest": tuple(
            (
                names[kept[i]].place,
                int(counts.all_tokens[i]),
                described(table, int(kept[i])) or "no media",
            )
            for i in longest
        ),
        "loads": tuple(load_of(table, kept[i], how, cut.taken(slice(i, i + 1))) for i in most),
        "beginnings": cut_media(table, opened.how),
        "cut_text": int((fits & (cut.text_tokens < counts.text_tokens)).sum()),
        "cut_media": int((fits & (cut.n_media < counts.n_media)).sum()),
        "too_long": int((~fits).sum()),
        "samples": tuple(samples),
    }  # fmt: skip


def _shown(opened: Records, record: Record, table: ShapeTable, row: int) -> str:
    media = [kind.described(header) for kind, header in table.headers(row)]
    text = ""
    for p in opened.to_pieces(record.turns, record.fields):
        said = f"[{media[p.medium]}]" if p.medium >= 0 else opened.tokenizer.spelled(p.ids)
        text += f"[[{said}]]" if p.supervised else said
    return text
