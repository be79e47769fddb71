"""Pieces and tokens of samples under a model's preparation, from header tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dflop_jax.data.datasets.shape_index import ShapeTable
from dflop_jax.data.media.medium import TEXT_MODULE, Preparation
from dflop_jax.records import Load


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Counts of n samples, int64; those of media by the modules that take them.

    text_tokens [n]: of the conversation. media [4, n, modules]: pieces, tokens, tokens of text
    between those, and tokens of the largest piece, see `medium.Counted`; sums, and of the last the
    greatest, over a sample's media. Text between tokens of media is not among text_tokens.
    """

    modules: tuple[str, ...]
    text_tokens: np.ndarray
    media: np.ndarray

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def pieces(self) -> np.ndarray:
        """Pieces of every module, [n, modules]."""
        return self.media[0]

    @property
    def media_tokens(self) -> np.ndarray:
        """Tokens of each sample that are not of its conversation's text."""
        return self.media[1:3].sum(axis=(0, 2))

    @property
    def all_tokens(self) -> np.ndarray:
        return self.text_tokens + self.media_tokens

    def asks(self) -> np.ndarray:
        """What each sample's media ask for, [n, columns]: pieces, tokens, the largest piece."""
        return np.concatenate(self.media[[0, 1, 3]], axis=1)

    def taken(self, rows: np.ndarray) -> SampleCounts:
        """Return the counts of the given rows, in that order."""
        return SampleCounts(self.modules, self.text_tokens[rows], self.media[:, rows])

    def where(self, keep: np.ndarray, other: SampleCounts) -> SampleCounts:
        """Return these counts where `keep` bool [n], elsewhere those of `other`."""
        text = np.where(keep, self.text_tokens, other.text_tokens)
        return SampleCounts(self.modules, text, np.where(keep[:, None], self.media, other.media))


def sample_counts(table: ShapeTable, how: Preparation) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of the records that the model can take, and which those are: bool
    [len(table)].

    Left out are records with media that no module takes, or that it cannot take: pictures too thin
    for any grid, sounds too short for a token.
    """
    owner = np.repeat(np.arange(len(table)), np.diff(table.media_start))
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
    longest = np.zeros((len(table), len(how)), np.int64)
    if counts[3].any():
        np.maximum.at(longest, owner, counts[3, 1:])
    np.cumsum(counts[:3], axis=1, out=counts[:3])
    sums = np.diff(counts[:3, table.media_start], axis=1)
    media = np.concatenate([sums, longest[None]])[:, usable]
    text = table.text_tokens[usable].astype(np.int64)
    return SampleCounts(tuple(how), text, media), usable


def cut_media(table: ShapeTable, how: Preparation) -> str:
    """Says how many media the model takes only the beginning of, and what to do; "" for none."""
    said = (
        medium.cut(k.name, {name: table.media[name][table.of_kind(k)] for name in k.columns})
        for medium in how.values()
        for k in medium.kinds
    )
    return "; ".join(filter(None, said))


def load_of(table: ShapeTable, row: int, how: Preparation, pieces: np.ndarray, tokens: int) -> Load:
    """Return what a record asks of every module.

    Args:
      pieces: of each module, int [modules]. tokens: of the text with all that stands in it.
    """
    lengths: dict[str, tuple[int, ...]] = {}
    runs: dict[str, list[int]] = {}
    for (module, medium), n in zip(how.items(), pieces.tolist(), strict=True):
        names = {kind.name for kind in medium.kinds}
        mine = ((k.name, header) for k, header in table.headers(row) if k.name in names)
        if medium.piece_tokens:
            lengths[module] = (medium.piece_tokens,) * n
        elif n:
            lengths[module] = tuple(length for media in mine for length in medium.lengths(*media))
        if n and medium.joined:
            shown = (medium.unseen(name, header, False) for name, header in mine)
            runs[module] = [len(decoded.lengths) for decoded in shown if decoded]
    return text_load(lengths, tokens, runs)


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
