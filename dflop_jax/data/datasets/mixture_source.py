"""The samples of a mixture: counts from the index, records and media when asked."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.header_rows import RowsHere, ToPieces
from dflop_jax.data.datasets.held_out import held_out, held_share
from dflop_jax.data.datasets.index_build import IndexRules, check_usable, update_index
from dflop_jax.data.datasets.llava_records import Record, short_digest
from dflop_jax.data.datasets.located import Located, RecordReader
from dflop_jax.data.datasets.mixture import Mixture, chosen, names, short_names, shown
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.shape_index import counted_keys, joined
from dflop_jax.data.media.counts import (
    SampleCounts,
    cut_media,
    described,
    fit,
    load_of,
    sample_counts,
)
from dflop_jax.data.media.decode import DecodedMedia, decode_media
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.text.pieces import TextPiece
from dflop_jax.records import Load

NAMED_RECORDS = 5  # of those left out, in a message
logger = logging.getLogger("dflop_jax.data")


def open_readers(mixture: Mixture, kinds: Kinds = BUILT_IN) -> dict[str, RecordReader]:
    """Return the readers of a mixture's datasets, whose records may have media of such kinds, by
    their names in its index."""
    return {
        key: open_reader(part.path, part.root, dict(part.columns), kinds)
        for key, part in zip(names(mixture.parts), mixture.parts, strict=True)
    }


@dataclass(frozen=True)
class Share:
    """Which samples are shown: of the split "train", or "eval" for the `n_held_out` records (see
    `held_out`; a float is a share of them, see `held_share`) that "train" then leaves out; weights
    do not count there."""

    split: str = "train"
    n_held_out: int | float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in ("train", "eval"):
            raise ValueError(f"split {self.split!r} is not train or eval")
        if self.split == "eval" and not self.n_held_out:
            raise ValueError(
                "the eval split of a dataset on disk needs train.eval_samples or "
                "train.eval_fraction above 0"
            )

    def held_out(self, lots: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Which records of each part are held out; see `held_out` and `held_share`."""
        if isinstance(self.n_held_out, float):
            return held_share(lots, self.n_held_out, self.seed)
        return held_out(lots, self.n_held_out, self.seed)


class MixtureSource:
    """Random access to the samples that one epoch of a mixture shows.

    Making one reads its index and makes anew what changed since, by headers and text alone.
    Subset rules count the usable records of a dataset, so that a broken one shifts nothing else
    than its own place. Records that cannot be used are left out and counted in `unusable`, those
    that the model cannot take in `left_out`. Epochs of the same records in the same order have one
    `digest`, wherever they lie.

    Args:
      how: how the model takes media.
      to_pieces: the tokenizer, whose digest is in the index's settings.
      kinds: of media that records may have.

    Raises:
      ValueError: a dataset that cannot be read, or is unusable above the share that may be; nothing
        left for this model, or to train on.
    """

    def __init__(
        self,
        mixture: Mixture,
        how: Preparation,
        to_pieces: ToPieces,
        rules: IndexRules,
        *,
        kinds: Kinds = BUILT_IN,
        share: Share = Share(),
        name: str = "mixture",
    ) -> None:
        self.name = name
        self.how, self._to_pieces = how, to_pieces
        keys = names(mixture.parts)
        readers = open_readers(mixture, kinds)
        reads = rules.row_reader or partial(RowsHere, readers, to_pieces, kinds)
        index = update_index(rules, readers, reads, kinds)
        for key, reader in readers.items():
            check_usable(index[key], reader.name, rules.max_bad_fraction)
            if unread := index[key].unread:
                logger.warning("%s: not read: %s", reader.name, counted_keys(unread))
        self._readers = list(readers.values())
        self._table = joined([index[key].table for key in readers], kinds)
        starts = np.cumsum([0, *(len(index[key].table) for key in readers)])
        self._dataset = np.repeat(np.arange(len(readers)), np.diff(starts))
        self._counts, usable = sample_counts(self._table, how)
        if cut := cut_media(self._table, how):
            logger.warning("%s: %s", name, cut)
        listed = sum(index[key].listed for key in readers)
        self.unusable, self.left_out = listed - len(self._table), int((~usable).sum())
        if self.left_out:
            rows = np.flatnonzero(~usable)[:NAMED_RECORDS].tolist()
            named = [f"{self._name(row)}: {described(self._table, row)}" for row in rows]
            named += ["..."] * (self.left_out > NAMED_RECORDS)
            why = f"the model cannot take their media ({'; '.join(named)})"
            if not usable.any():
                raise ValueError(f"{name}: no record is usable: {why}")
            logger.warning("%s: %d records left out: %s", name, self.left_out, why)
        parts = []
        for key, part in zip(keys, mixture.parts, strict=True):
            k = list(readers).index(key)
            rows = starts[k] + np.flatnonzero(usable[starts[k] : starts[k + 1]])
            parts.append(rows[chosen(part, len(rows), share.seed)])
        is_train = share.split == "train"
        if share.n_held_out:
            try:
                held = share.held_out([self._table.lot[rows] for rows in parts])
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from None
            parts = [rows[mask != is_train] for rows, mask in zip(parts, held, strict=True)]
        if is_train:
            parts = [
                shown(part, rows, share.seed)
                for part, rows in zip(mixture.parts, parts, strict=True)
            ]
        self._rows = np.concatenate(parts)
        self.digest = short_digest(self._table.content[self._rows].tobytes())
        self._part_names = short_names(mixture.parts)
        self._part_ends = np.cumsum([len(rows) for rows in parts])
        self._place = np.cumsum(usable) - 1  # row of the table -> row of the counts
        if not len(self._rows):
            raise ValueError("the mixture shows no sample; check subsets, weights and split")

    def __len__(self) -> int:
        return len(self._rows)

    def counts(self) -> SampleCounts:
        """Return the counts of all samples, uncut; nothing is decoded."""
        return self._counts.taken(self._place[self._rows])

    def fit(self, limits: Limits) -> tuple[SampleCounts, np.ndarray]:
        """Return the counts of all samples under the limits, and which fit; see `counts.fit`."""
        rows = self._place[self._rows]
        counts, fits = fit(self._table, self.how, limits)
        return counts.taken(rows), fits[rows]

    def load(self, index: int, counts: SampleCounts) -> Load:
        """Return what the sample of these counts asks of every module; see `counts.load_of`."""
        return load_of(self._table, int(self._rows[index]), self.how, counts)

    def label(self, index: int) -> str:
        """How logs and errors call the sample."""
        return self._name(int(self._rows[index]))

    def part_of(self, index: int) -> str:
        """The name of the part that shows the sample (see `mixture.short_names`)."""
        return self._part_names[int(np.searchsorted(self._part_ends, index, side="right"))]

    def record(self, index: int) -> Record:
        """Return the sample's turns and where its media are; ValueError when it changed since."""
        row, t = int(self._rows[index]), self._table
        file, number = int(t.file[row]), int(t.number[row])
        reader, place = self._readers[self._dataset[row]], self._name(row)
        try:
            return reader.read(
                Located(place, number, file, int(t.offset[row]), int(t.size_bytes[row]))
            )
        except OSError as e:
            raise ValueError(f"{place}: {e}") from e

    def pieces(self, record: Record) -> tuple[TextPiece, ...]:
        """Return the tokenized conversation, with the places of its media."""
        return self._to_pieces(record.turns, record.fields)

    def media(
        self, index: int, record: Record, kept: Collection[int] | None = None
    ) -> DecodedMedia:
        """Return the decoded media of the sample's record, those of the numbers `kept` (None: all).

        ValueError, naming the record.
        """
        try:
            return decode_media(record, self._table, int(self._rows[index]), self.how, kept)
        except Exception as e:  # other people's files may fail in any way
            raise ValueError(f"{record.name}: {one_line(e)}") from e

    def _name(self, row: int) -> str:
        """How messages call the record of a row of the table: its file's path and its number."""
        reader, file = self._readers[self._dataset[row]], int(self._table.file[row])
        place = reader.place(file, int(self._table.number[row]))
        return str(reader.files[file].parent / place)
