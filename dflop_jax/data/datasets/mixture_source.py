"""A mixture as a source of samples: what fits the limits, cut where it does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.bounds import one_line
from dflop_jax.data.datasets.index_build import IndexRules, check_usable, update_index
from dflop_jax.data.datasets.mixture import (
    Mixture,
    dataset_keys,
    display_names,
    repeat_by_weight,
    select_held_out,
    select_subset,
)
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.record_parser import Record, short_digest
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader
from dflop_jax.data.datasets.record_table import concatenate_tables, format_key_counts
from dflop_jax.data.datasets.row_reader import EncodeTurns
from dflop_jax.data.media.compose import blank_media, compose, decode_media
from dflop_jax.data.media.counts import (
    describe_cut_media,
    describe_media,
    fit_samples,
    largest_rows,
    sample_counts,
    sample_load,
)
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.sample import Sample, SourceFactory
from dflop_jax.data.text.tokenize import TokenRun, truncate_runs, weight_runs
from dflop_jax.records import Load

MAX_LARGEST_SAMPLES = 64  # samples named as the most demanding
MAX_NAMED_RECORDS = 5  # of those left out, in a message
logger = logging.getLogger("dflop_jax.data")


def open_readers(mixture: Mixture, kinds: Kinds = BUILT_IN) -> dict[str, RecordReader]:
    """Return the readers of a mixture's datasets, whose records may have media of such kinds, by
    their names in its index."""
    return {
        key: open_reader(entry.path, entry.root, entry.columns, kinds)
        for key, entry in zip(dataset_keys(mixture), mixture, strict=True)
    }


class MixtureSource:
    """The samples that one epoch of a mixture shows and that fit `config.max_tokens`.

    Making one reads its index and makes anew what changed since, by headers and text alone.
    Subset rules count the usable records of a dataset, so that a broken one shifts nothing else
    than its own place. By its oversize a longer sample is cut (see `counts.fit_samples`), left out,
    or an error. `counts` says how many records are usable, unusable, left out since the model
    cannot take them, and samples oversize. Epochs of the same records in the same order have one
    `digest`, wherever they lie.

    Args:
      how: how the model takes media.
      to_pieces: the tokenizer, whose digest is in the index's settings.
      placeholder: token id where media stand.
      split: "train", or "eval" for the `n_held_out` records (a float: such a share, see
        `select_held_out`) that "train" then leaves out; weights do not count there.

    Raises:
      ValueError: a dataset that cannot be read, or is unusable above the share that may be; nothing
        left for this model, or to train on, or that fits.
    """

    def __init__(
        self,
        mixture: Mixture,
        preparation: Preparation,
        encode_turns: EncodeTurns,
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
        self.factory: SourceFactory | None = None
        self._preparation, self._encode_turns = preparation, encode_turns
        self._placeholder, self._blank, seed = placeholder, config.blank_images, config.seed
        self._is_train, self._prompts = is_train, config.loss_on_prompts
        kinds = (*dict.fromkeys([*BUILT_IN, *(k for m in preparation.values() for k in m.kinds)]),)
        readers = open_readers(mixture, kinds)
        index = update_index(rules, readers, kinds)
        for key, reader in readers.items():
            check_usable(index[key], reader.name, rules.max_bad_fraction)
            if unread := index[key].unread:
                logger.warning("%s: not read: %s", reader.name, format_key_counts(unread))
        self._readers = list(readers.values())
        self._table = table = concatenate_tables([index[key].table for key in readers], kinds)
        starts = np.cumsum([0, *(len(index[key].table) for key in readers)])
        self._reader_of_row = np.repeat(np.arange(len(readers)), np.diff(starts))
        uncut_counts, usable = sample_counts(table, preparation)
        if cut := describe_cut_media(table, preparation):
            logger.warning("%s: %s", name, cut)
        n_left_out = int((~usable).sum())
        if n_left_out:
            rows = np.flatnonzero(~usable)[:MAX_NAMED_RECORDS].tolist()
            examples = [f"{self._row_label(row)}: {describe_media(table, row)}" for row in rows]
            examples += ["..."] * (n_left_out > MAX_NAMED_RECORDS)
            reason = f"the model cannot take their media ({'; '.join(examples)})"
            if not usable.any():
                raise ValueError(f"{name}: no record is usable: {reason}")
            logger.warning("%s: %d records left out: %s", name, n_left_out, reason)
        rows_by_entry = []
        for key, entry in zip(dataset_keys(mixture), mixture, strict=True):
            k = list(readers).index(key)
            rows = starts[k] + np.flatnonzero(usable[starts[k] : starts[k + 1]])
            rows_by_entry.append(rows[select_subset(entry, len(rows), seed)])
        if n_held_out:
            try:
                masks = select_held_out(
                    [table.records["split_hash"][rows] for rows in rows_by_entry], n_held_out, seed
                )
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from None
            rows_by_entry = [
                rows[mask != is_train] for rows, mask in zip(rows_by_entry, masks, strict=True)
            ]
        if is_train:
            rows_by_entry = [
                repeat_by_weight(entry, rows, seed)
                for entry, rows in zip(mixture, rows_by_entry, strict=True)
            ]
        rows = np.concatenate(rows_by_entry)
        if not len(rows):
            raise ValueError("the mixture shows no sample; check subsets, weights and split")
        self.digest = short_digest(table.records["content_hash"][rows].tobytes())
        counts, fits = fit_samples(table, preparation, limits)
        count_rows = (np.cumsum(usable) - 1)[rows]  # rows of the counts
        fits = fits[count_rows]
        self._rows, self._counts = rows[fits], counts.select(count_rows[fits])
        self._dataset_names = display_names(mixture)
        self._entry_of_sample = np.repeat(
            np.arange(len(rows_by_entry)), [len(rows) for rows in rows_by_entry]
        )[fits]
        uncut_counts, n_listed = (
            uncut_counts.select(count_rows),
            sum(index[key].listed for key in readers),
        )
        self.counts = {"usable": len(self), "unusable": n_listed - len(table),
                       "left out": n_left_out, "oversize": int((~fits).sum())}  # fmt: skip
        if n_cut := np.count_nonzero(self._counts.n_media < uncut_counts.n_media[fits]):
            logger.warning(
                "%s: %d of %d samples are cut before some of their media by data.max_tokens=%d",
                name, n_cut, len(rows), limits.max_tokens,
            )  # fmt: skip
        if not fits.all():
            first = int(np.flatnonzero(~fits)[0])
            reason = (
                f"{self.counts['oversize']} of {len(rows)} samples exceed "
                f"data.max_tokens={limits.max_tokens} ({self._row_label(int(rows[first]))} has "
                f"{int(uncut_counts.all_tokens[first])} tokens)"
            )
            if limits.oversize == "error" or not fits.any():
                raise ValueError(f"{reason}; raise it, or lower the limits of media (data.max_...)")
            logger.warning("left out: %s", reason)
        logger.info("%s: %s", name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def label(self, index: int) -> str:
        return self._row_label(int(self._rows[index]))

    def largest_samples(self) -> list[int]:
        """Samples that ask for most: no other asks for more of every module than one of them."""
        pieces, tokens, _, longest = self._counts.media
        demands = self._counts.all_tokens[:, None], pieces, tokens, longest
        return largest_rows(np.concatenate(demands, 1), MAX_LARGEST_SAMPLES)

    def dataset_of(self, index: int) -> str:
        """The name of the part that shows the sample (see `mixture.display_names`)."""
        return self._dataset_names[self._entry_of_sample[index]]

    def load(self, index: int) -> Load:
        counts = self._counts.select(slice(index, index + 1))
        return sample_load(self._table, int(self._rows[index]), self._preparation, counts)

    def sample(self, index: int) -> Sample:
        record = self.record(index)
        try:
            pieces: Sequence[TokenRun] = self._encode_turns(record.turns, record.fields)
            if self._is_train:  # held-out losses stay those of plain answers
                pieces = weight_runs(pieces, record.weights, prompts=self._prompts)
            stop = int(self._counts.text_tokens[index] + self._counts.n_media[index])
            pieces = truncate_runs(pieces, stop)
            media_numbers = {p.medium for p in pieces}
            media = decode_media(
                record, self._table, int(self._rows[index]), self._preparation, media_numbers
            )
        except Exception as e:  # other people's files may fail in any way
            raise ValueError(f"{record.name}: {one_line(e)}") from e
        sample = compose(pieces, media, self._preparation, placeholder=self._placeholder)
        return blank_media(sample, self._preparation) if self._blank else sample

    def record(self, index: int) -> Record:
        """Return the sample's turns and where its media are; ValueError when it changed since."""
        row = int(self._rows[index])
        record_columns = self._table.records[row]
        numbers = (int(record_columns[name]) for name in ("number", "file", "offset", "size_bytes"))
        location = RecordLocation(self._row_label(row), *numbers)
        return self._readers[self._reader_of_row[row]].read(location)

    def _row_label(self, row: int) -> str:
        """How messages call the record of a row of the table: its file's path and its number."""
        reader, record_columns = self._readers[self._reader_of_row[row]], self._table.records[row]
        label = reader.record_label(int(record_columns["file"]), int(record_columns["number"]))
        return str(reader.files[record_columns["file"]].parent / label)
