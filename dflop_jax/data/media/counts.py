"""Counts the pieces and tokens of samples under a model's preparation, from header tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.record_table import RecordTable
from dflop_jax.data.media.medium import TEXT_MODULE, Preparation
from dflop_jax.records import Load


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Counts of n samples, int64."""

    modules: tuple[str, ...]  # modules that take media
    text_tokens: np.ndarray  # [n], without text inside a medium
    n_media: np.ndarray  # [n]
    # [4, n, modules]: sums of `pieces`, `tokens` and `between` over a sample's media, and the
    # maximum of `longest`, see `medium.MediaCounts`
    media: np.ndarray

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def n_pieces(self) -> np.ndarray:
        """Pieces in every module, [n, modules]."""
        return self.media[0]

    @property
    def all_tokens(self) -> np.ndarray:
        return self.text_tokens + self.media[1:3].sum(axis=(0, 2))

    def select(self, rows: np.ndarray | slice) -> SampleCounts:
        """Return the counts of the given rows, in that order."""
        text_tokens, n_media = self.text_tokens[rows], self.n_media[rows]
        return SampleCounts(self.modules, text_tokens, n_media, self.media[:, rows])


def fit_samples(
    table: RecordTable, preparation: Preparation, limits: DataConfig
) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of n records that the model can take, and a mask of those that fit. With
    oversize=truncate a sample is the first `max_tokens` tokens of its record, and ends before the
    first medium that is cut; it fits if it keeps `needed_tokens` of text."""
    truncate = limits.oversize == "truncate"
    counts, usable = sample_counts(table, preparation, limits.max_tokens if truncate else None)
    if truncate:
        return counts, counts.text_tokens >= table.records["needed_tokens"][usable]
    return counts, counts.all_tokens <= limits.max_tokens


def sample_counts(
    table: RecordTable, preparation: Preparation, max_tokens: int | None = None
) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of the records that the model can take, and their mask, bool [len(table)].
    A record is left out if no module can take one of its media. A record is cut to `max_tokens`
    tokens, and before the first medium that ends after them."""
    owner = np.repeat(np.arange(len(table)), table.records["n_media"])
    is_usable = np.zeros(len(owner), bool)
    counts = np.zeros((4, len(owner) + 1, len(preparation)), np.int64)  # media from index 1
    for column, medium in enumerate(preparation.values()):
        for kind in medium.kinds:
            rows = table.rows_of_kind(kind)
            if not len(rows):
                continue
            headers = {name: table.media[name][rows] for name in kind.columns}
            alone = np.bincount(owner[rows], minlength=len(table))[owner[rows]] == 1
            is_usable[rows], *counted = medium.count(kind.name, headers, alone)
            for values, kind_values in zip(counts, counted, strict=True):
                values[rows + 1, column] = kind_values
    usable = np.bincount(owner[~is_usable], minlength=len(table)) == 0
    text, n_media = (table.records[c].astype(np.int64) for c in ("text_tokens", "n_media"))
    if max_tokens is not None:
        text, kept_mask = _truncate(table, owner, counts[1:3, 1:].sum(axis=(0, 2)), max_tokens)
        n_media = np.bincount(owner[kept_mask], minlength=len(table))
        counts[:, 1:] *= kept_mask[:, None]
    longest = np.zeros((len(table), len(preparation)), np.int64)
    if counts[3].any():
        np.maximum.at(longest, owner, counts[3, 1:])
    np.cumsum(counts[:3], axis=1, out=counts[:3])
    sums = np.diff(counts[:3, table.media_start], axis=1)
    media = np.concatenate([sums, longest[None]])[:, usable]
    return SampleCounts(tuple(preparation), text[usable], n_media[usable], media), usable


def _truncate(
    table: RecordTable, owner: np.ndarray, tokens: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the text tokens of each record among its first `max_tokens` tokens, int64
    [len(table)], and a mask of the media that stay, bool [m], given the `tokens` of each."""
    tokens_before = table.media["tokens_before"]
    order = np.lexsort((tokens_before, owner))  # media in the order of the text
    first = table.media_start[owner]  # of each medium's record
    text_before = tokens_before[order] - (np.arange(len(owner)) - first)
    ends = np.pad(np.cumsum(tokens[order]), (1, 0))
    is_whole = text_before + ends[1:] - ends[first] <= max_tokens
    kept_mask = np.empty(len(owner), bool)
    kept_mask[order] = is_whole
    media_tokens = np.diff(np.pad(np.cumsum(tokens * kept_mask), (1, 0))[table.media_start])
    text = np.minimum(table.records["text_tokens"], max_tokens - media_tokens)
    np.minimum.at(text, owner[~is_whole], text_before[~is_whole])
    return text, kept_mask


def describe_cut_media(table: RecordTable, preparation: Preparation) -> str:
    """Return messages about media that are cut to their beginning and media keys that the model
    ignores; "" for none."""
    messages = []
    for medium in preparation.values():
        for k in medium.kinds:
            columns = {name: table.media[name][table.rows_of_kind(k)] for name in k.columns}
            messages.append(medium.cut(k.name, columns))
            for key in () if medium.uses_keys else k.keys:
                if n := int((columns.get(key, np.zeros(0)) > 0).sum()):
                    messages.append(f"not used: {key} of {k.name}s ({n:,} of them)")
    return "; ".join(filter(None, messages))


def sample_load(
    table: RecordTable, row: int, preparation: Preparation, counts: SampleCounts
) -> Load:
    """Return the load of a record, given the counts of its sample."""
    lengths: dict[str, tuple[int, ...]] = {}
    runs: dict[str, list[int]] = {}
    headers = table.headers(row, int(counts.text_tokens[0] + counts.n_media[0]))
    for (module, medium), n in zip(preparation.items(), counts.n_pieces[0].tolist(), strict=True):
        if medium.piece_tokens and not medium.is_joined:
            lengths[module] = (medium.piece_tokens,) * n
        elif n:
            selected = [medium.lengths(k.name, h) for k, h in headers if k in medium.kinds]
            lengths[module] = tuple(length for one in selected for length in one)
            runs[module] = [len(one) for one in selected] if medium.is_joined else []
    return build_load(lengths, int(counts.all_tokens[0]), runs)


def build_load(
    lengths: Mapping[str, tuple[int, ...]],
    tokens: int,
    runs: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Load:
    """Return the load of a text of `tokens` and of pieces by module, without empty modules. `runs`:
    number of pieces of each medium, dropped if all are 1."""
    all_lengths = {**lengths, TEXT_MODULE: (tokens,) * (tokens > 0)}
    long_runs = {m: tuple(n) for m, n in runs.items() if max(n, default=0) > 1}
    return Load({m: n for m, n in all_lengths.items() if n}, runs=long_runs)


def describe_media(table: RecordTable, row: int) -> str:
    """Return a description of a record's media."""
    return ", ".join(kind.described(header) for kind, header in table.headers(row))


def largest_rows(demands: np.ndarray, limit: int) -> list[int]:
    """Return rows of int [n, kinds] such that every row is at most one of them in all columns;
    only the `limit` largest."""
    scaled = demands / np.maximum(demands.max(axis=0, initial=0), 1)
    remaining = np.arange(len(demands))
    chosen: list[int] = []
    while len(remaining) and len(chosen) < limit:
        largest = int(remaining[scaled[remaining].sum(axis=1).argmax()])
        chosen.append(largest)
        remaining = remaining[(demands[remaining] > demands[largest]).any(axis=1)]
    return chosen
