"""A mixture as a source of samples: what fits the limits, cut where it does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.header_rows import ToPieces
from dflop_jax.data.datasets.index_build import IndexRules, check_usable, update_index
from dflop_jax.data.datasets.llava_records import Located, Record, RecordReader, short_digest
from dflop_jax.data.datasets.mixture import Mixture, chosen, held_out, names, short_names, shown
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.shape_index import counted_keys, joined
from dflop_jax.data.media.compose import blanked, compose, decode_media
from dflop_jax.data.media.counts import (
    cut_media,
    described,
    fit,
    load_of,
    most_demanding,
    sample_counts,
)
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.sample import OpenedBy, Sample
from dflop_jax.data.text.tokenize import TextPiece, first_tokens, trained_on
from dflop_jax.records import Load

MAX_TAIL = 64  # samples named as the most demanding
NAMED_RECORDS = 5  # of those left out, in a message
logger = logging.getLogger("dflop_jax.data")


def open_readers(mixture: Mixture, kinds: Kinds = BUILT_IN) -> dict[str, RecordReader]:
    """Return the readers of a mixture's datasets, whose records may have media of such kinds, by
    their names in its index."""
    return {
        key: open_reader(part.path, part.root, part.columns, kinds)
        for key, part in zip(names(mixture), mixture, strict=True)
    }


class MixtureSource:
    """The samples that one epoch of a mixture shows and that fit `config.max_tokens`.

    Making one reads its index and makes anew what changed since, by headers and text alone.
    Subset rules count the usable records of a dataset, so that a broken one shifts nothing else
    than its own place. By its oversize a longer sample is cut (see `counts.fit`), left out, or
    an error. `counts` says how many records are usable, unusable, left out since the model cannot
    take them, and samples oversize. Epochs of the same records in the same order have one `digest`,
    wherever they lie.

    Args:
      how: how the model takes media.
      to_pieces: the tokenizer, whose digest is in the index's settings.
      placeholder: token id where media stand.
      split: "train", or "eval" for the `n_held_out` records (a float: such a share, see `held_out`)
        that "train" then leaves out; weights do not count there.

    Raises:
      ValueError: a dataset that cannot be read, or is unusable above the share that may be; nothing
        left for this model, or to train on, or that fits.
    """

    def __init__(
        self,
        mixture: Mixture,
        how: Preparation,
        to_pieces: ToPieces,
        rules: IndexRules,
        config: DataConfig,
        *,
        placeholder: int = 0,
        split: str = "train",
        n_held_out: int | float = 0,
    ) -> None:
        is_train, limits = split == "train", Limits.of(config)
        if not is_train and split != "eval":
            raise ValueError(f"split {split!r} is not train or eval")
        if not is_train and not n_held_out:
            raise ValueError(
                "the eval split of a dataset on disk needs train.eval_samples or "
                "train.eval_fraction above 0"
            )
        self.name = name = config.path if is_train else f"{config.path} ({split})"
        self.opened_by: OpenedBy | None = None
        self._how, self._to_pieces = how, to_pieces
        self._placeholder, self._blank, seed = placeholder, config.blank_images, config.seed
        self._is_train, self._prompts = is_train, config.loss_on_prompts
        kinds = (*dict.fromkeys([*BUILT_IN, *(k for m in how.values() for k in m.kinds)]),)
        readers = open_readers(mixture, kinds)
        index = update_index(rules, readers, kinds)
        for key, reader in readers.items():
            check_usable(index[key], reader.name, rules.max_bad_fraction)
            if unread := index[key].unread:
                logger.warning("%s: not read: %s", reader.name, counted_keys(unread))
        self._readers = list(readers.values())
        self._table = table = joined([index[key].table for key in readers], kinds)
        starts = np.cumsum([0, *(len(index[key].table) for key in readers)])
        self._dataset = np.repeat(np.arange(len(readers)), np.diff(starts))
        whole, usable = sample_counts(table, how)
        if cut := cut_media(table, how):
            logger.warning("%s: %s", name, cut)
        n_left_out = int((~usable).sum())
        if n_left_out:
            rows = np.flatnonzero(~usable)[:NAMED_RECORDS].tolist()
            named = [f"{self._name(row)}: {described(table, row)}" for row in rows]
            named += ["..."] * (n_left_out > NAMED_RECORDS)
            why = f"the model cannot take their media ({'; '.join(named)})"
            if not usable.any():
                raise ValueError(f"{name}: no record is usable: {why}")
            logger.warning("%s: %d records left out: %s", name, n_left_out, why)
        parts = []
        for key, part in zip(names(mixture), mixture, strict=True):
            k = list(readers).index(key)
            rows = starts[k] + np.flatnonzero(usable[starts[k] : starts[k + 1]])
            parts.append(rows[chosen(part, len(rows), seed)])
        if n_held_out:
            try:
                held = held_out([table.records["lot"][rows] for rows in parts], n_held_out, seed)
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from None
            parts = [rows[mask != is_train] for rows, mask in zip(parts, held, strict=True)]
        if is_train:
            parts = [shown(part, rows, seed) for part, rows in zip(mixture, parts, strict=True)]
        rows = np.concatenate(parts)
        if not len(rows):
            raise ValueError("the mixture shows no sample; check subsets, weights and split")
        self.digest = short_digest(table.records["content"][rows].tobytes())
        counts, fits = fit(table, how, limits)
        of_row = (np.cumsum(usable) - 1)[rows]  # rows of the counts
        fits = fits[of_row]
        self._rows, self._counts = rows[fits], counts.taken(of_row[fits])
        self._part_names = short_names(mixture)
        self._part = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts])[fits]
        whole, n_listed = whole.taken(of_row), sum(index[key].listed for key in readers)
        self.counts = {"usable": len(self), "unusable": n_listed - len(table),
                       "left out": n_left_out, "oversize": int((~fits).sum())}  # fmt: skip
        if n_cut := np.count_nonzero(self._counts.n_media < whole.n_media[fits]):
            logger.warning(
                "%s: %d of %d samples are cut before some of their media by data.max_tokens=%d",
                name, n_cut, len(rows), limits.max_tokens,
            )  # fmt: skip
        if not fits.all():
            first = int(np.flatnonzero(~fits)[0])
            why = (
                f"{self.counts['oversize']} of {len(rows)} samples exceed "
                f"data.max_tokens={limits.max_tokens} ({self._name(int(rows[first]))} has "
                f"{int(whole.all_tokens[first])} tokens)"
            )
            if limits.oversize == "error" or not fits.any():
                raise ValueError(f"{why}; raise it, or lower the limits of media (data.max_...)")
            logger.warning("left out: %s", why)
        logger.info("%s: %s", name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def label(self, index: int) -> str:
        return self._name(int(self._rows[index]))

    def tail(self) -> list[int]:
        """Samples that ask for most: no other asks for more of every module than one of them."""
        pieces, tokens, _, longest = self._counts.media
        asks = self._counts.all_tokens[:, None], pieces, tokens, longest
        return most_demanding(np.concatenate(asks, 1), MAX_TAIL)

    def part_of(self, index: int) -> str:
        """The name of the part that shows the sample (see `mixture.short_names`)."""
        return self._part_names[self._part[index]]

    def load(self, index: int) -> Load:
        counts = self._counts.taken(slice(index, index + 1))
        return load_of(self._table, int(self._rows[index]), self._how, counts)

    def sample(self, index: int) -> Sample:
        record = self.record(index)
        try:
            pieces: Sequence[TextPiece] = self._to_pieces(record.turns, record.fields)
            if self._is_train:  # held-out losses stay those of plain answers
                pieces = trained_on(pieces, record.weights, prompts=self._prompts)
            stop = int(self._counts.text_tokens[index] + self._counts.n_media[index])
            pieces = first_tokens(pieces, stop)
            kept = {p.medium for p in pieces}
            media = decode_media(record, self._table, int(self._rows[index]), self._how, kept)
        except Exception as e:  # other people's files may fail in any way
            raise ValueError(f"{record.name}: {one_line(e)}") from e
        sample = compose(pieces, media, self._how, placeholder=self._placeholder)
        return blanked(sample, self._how) if self._blank else sample

    def record(self, index: int) -> Record:
        """Return the sample's turns and where its media are; ValueError when it changed since."""
        row = int(self._rows[index])
        at = self._table.records[row]
        numbers = (int(at[name]) for name in ("number", "file", "offset", "size_bytes"))
        located = Located(self._name(row), *numbers)
        return self._readers[self._dataset[row]].read(located)

    def _name(self, row: int) -> str:
        """How messages call the record of a row of the table: its file's path and its number."""
        reader, at = self._readers[self._dataset[row]], self._table.records[row]
        place = reader.place(int(at["file"]), int(at["number"]))
        return str(reader.files[at["file"]].parent / place)
