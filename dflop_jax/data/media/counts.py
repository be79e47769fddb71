"""Pieces and tokens of samples under a model's preparation and limits, from header tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dflop_jax.data.datasets.shape_index import ShapeTable
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import TEXT_MODULE, Preparation
from dflop_jax.records import Load


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Counts of n samples, int64; those of media by the modules that take them.

    text_tokens, n_media [n]: of the conversation. media [4, n, modules]: pieces, tokens, tokens of
    text between those, and tokens of the largest piece, see `medium.Counted`; sums, and of the last
    the greatest, over a sample's media. Text between tokens of media is not among text_tokens.
    """

    modules: tuple[str, ...]
    text_tokens: np.ndarray
    n_media: np.ndarray
    media: np.ndarray

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def pieces(self) -> np.ndarray:
        """Pieces of every module, [n, modules]."""
        return self.media[0]

    @property
    def all_tokens(self) -> np.ndarray:
        return self.text_tokens + self.media[1:3].sum(axis=(0, 2))

    def taken(self, rows: np.ndarray | slice) -> SampleCounts:
        """Return the counts of the given rows, in that order."""
        text_tokens, n_media = self.text_tokens[rows], self.n_media[rows]
        return SampleCounts(self.modules, text_tokens, n_media, self.media[:, rows])


def fit(table: ShapeTable, how: Preparation, limits: Limits) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of the records that the model can take, and which of them fit: bool [n].

    Under oversize=truncate a sample is the first `max_tokens` tokens of its record, without a
    medium that is not whole among them; it fits if it keeps `ShapeTable.needed_tokens` of text.
    """
    truncate = limits.oversize == "truncate"
    counts, usable = sample_counts(table, how, limits.max_tokens if truncate else None)
    if truncate:
        return counts, counts.text_tokens >= table.records["needed_tokens"][usable]
    return counts, counts.all_tokens <= limits.max_tokens


def sample_counts(
    table: ShapeTable, how: Preparation, max_tokens: int | None = None
) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of the records that the model can take, and which those are: bool
    [len(table)].

    Left out are records with media that no module takes, or that it cannot take: pictures too thin
    for any grid, sounds too short for a token.

    Args:
      max_tokens: a record ends before the first medium that ends behind so many tokens, and has no
        more of text; None: it is whole.
    """
    owner = np.repeat(np.arange(len(table)), table.records["n_media"])
    ok = np.zeros(len(owner), bool)
    counts = np.zeros((4, len(owner) + 1, len(how)), np.int64)  # of each medium, from row 1 on
    for column, medium in enumerate(how.values()):
        for kind in medium.kinds:
            mine = table.of_kind(kind)
            if not len(mine):
                continue
            headers = {name: table.media[name][mine] for name in kind.columns}
            alone = np.bincount(owner[mine], minlength=len(table))[owner[mine]] == 1
            ok[mine], *counted = medium.count(kind.name, headers, alone)
            for values, of_kind in zip(counts, counted, strict=True):
                values[mine + 1, column] = of_kind
    usable = np.bincount(owner[~ok], minlength=len(table)) == 0
    text, n_media = (table.records[c].astype(np.int64) for c in ("text_tokens", "n_media"))
    if max_tokens is not None:
        text, kept = _cut(table, owner, counts[1:3, 1:].sum(axis=(0, 2)), max_tokens)
        n_media = np.bincount(owner[kept], minlength=len(table))
        counts[:, 1:] *= kept[:, None]
    longest = np.zeros((len(table), len(how)), np.int64)
    if counts[3].any():
        np.maximum.at(longest, owner, counts[3, 1:])
    np.cumsum(counts[:3], axis=1, out=counts[:3])
    sums = np.diff(counts[:3, table.media_start], axis=1)
    media = np.concatenate([sums, longest[None]])[:, usable]
    return SampleCounts(tuple(how), text[usable], n_media[usable], media), usable


def _cut(
    table: ShapeTable, owner: np.ndarray, tokens: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what of each record is among its first `max_tokens` tokens: its text tokens, int64
    [len(table)], and which of the m media with these `tokens` stay, bool [m]."""
    places = table.media["tokens_before"]
    order = np.lexsort((places, owner))  # media in the order of the text
    first = table.media_start[owner]  # of each medium's record
    text_before = places[order] - (np.arange(len(owner)) - first)
    ends = np.pad(np.cumsum(tokens[order]), (1, 0))
    whole = text_before + ends[1:] - ends[first] <= max_tokens
    kept = np.empty(len(owner), bool)
    kept[order] = whole
    of_media = np.diff(np.pad(np.cumsum(tokens * kept), (1, 0))[table.media_start])
    text = np.minimum(table.records["text_tokens"], max_tokens - of_media)
    np.minimum.at(text, owner[~whole], text_before[~whole])
    return text, kept


def cut_media(table: ShapeTable, how: Preparation) -> str:
    """Says how many media the model takes only the beginning of, and what to do, and which keys of
    media it does not use; "" for none."""
    said = []
    for medium in how.values():
        for k in medium.kinds:
            columns = {name: table.media[name][table.of_kind(k)] for name in k.columns}
            said.append(medium.cut(k.name, columns))
            given = {key: int((columns[key] > 0).sum()) for key in k.keys if key in columns}
            unused = {key: n for key, n in given.items() if n and not medium.uses_keys}
            said += [f"not used: {key} of {k.name}s ({n:,} of them)" for key, n in unused.items()]
    return "; ".join(filter(None, said))


def load_of(table: ShapeTable, row: int, how: Preparation, counts: SampleCounts) -> Load:
    """Return what a record asks of every module, given the counts of this one sample."""
    lengths: dict[str, tuple[int, ...]] = {}
    runs: dict[str, list[int]] = {}
    stop = int(counts.text_tokens[0] + counts.n_media[0])
    headers = table.headers(row, stop)
    for (module, medium), n in zip(how.items(), counts.pieces[0].tolist(), strict=True):
        names = {kind.name for kind in medium.kinds}
        mine = ((k.name, header) for k, header in headers if k.name in names)
        if medium.piece_tokens:
            lengths[module] = (medium.piece_tokens,) * n
        elif n:
            lengths[module] = tuple(length for media in mine for length in medium.lengths(*media))
        if n and medium.joined:
            runs[module] = [len(medium.lengths(*media)) for media in mine]
    return text_load(lengths, int(counts.all_tokens[0]), runs)


def text_load(
    lengths: Mapping[str, tuple[int, ...]],
    tokens: int,
    runs: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Load:
    """Return the load of pieces by module and a text of so many tokens, and of the `runs` that have
    several pieces; what is empty is left out."""
    every = {**lengths, TEXT_MODULE: (tokens,) * (tokens > 0)}
    together = {m: tuple(n) for m, n in runs.items() if max(n, default=0) > 1}
    return Load({m: n for m, n in every.items() if n}, runs=together)


def described(table: ShapeTable, row: int) -> str:
    """What the headers of a record's media say."""
    return ", ".join(kind.described(header) for kind, header in table.headers(row))


def most_demanding(asks: np.ndarray, limit: int) -> list[int]:
    """Rows of int [n, kinds] such that every row asks for no more of any kind than one of them;
    the `limit` greatest of them at most."""
    scaled = asks / np.maximum(asks.max(axis=0, initial=0), 1)
    left = np.arange(len(asks))
    chosen: list[int] = []
    while len(left) and len(chosen) < limit:
        top = int(left[scaled[left].sum(axis=1).argmax()])
        chosen.append(top)
        left = left[(asks[left] > asks[top]).any(axis=1)]
    return chosen
