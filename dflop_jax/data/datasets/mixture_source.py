"""A mixture as a source of samples, which cuts or drops samples that exceed the limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.bounds import MAX_EXAMPLES, one_line
from dflop_jax.data.datasets.index_build import EncodeTurns, IndexRules, check_usable, update_index
from dflop_jax.data.datasets.mixture import Mixture, display_names, select_rows
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.record_parser import Record, short_digest
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader
from dflop_jax.data.datasets.record_table import concatenate_tables, format_key_counts
from dflop_jax.data.media import counts as media_counts
from dflop_jax.data.media.compose import blank_media, compose_sample, decode_media
from dflop_jax.data.media.kind import BUILT_IN, Kinds
from dflop_jax.data.media.medium import Preparation
from dflop_jax.data.sample import Sample, SourceFactory
from dflop_jax.data.text.tokenize import TokenRun, truncate_runs, weight_runs
from dflop_jax.records import Load

MAX_LARGEST_SAMPLES = 64  # upper limit of `largest_samples`
logger = logging.getLogger("dflop_jax.data")


def open_readers(mixture: Mixture, kinds: Kinds = BUILT_IN) -> dict[str, RecordReader]:
    """Return the readers of a mixture's datasets by their keys in the index."""
    return {e.key: open_reader(e.path, e.root, e.columns, kinds) for e in mixture}


class MixtureSource:
    """The samples of one epoch of a mixture that fit into `config.max_tokens`.

    Subset rules count only the usable records of a dataset. A sample above the limit is cut (see
    `counts.fit_samples`), left out, or an error.

    Attributes:
      counts: numbers of records that are "usable", "unusable" and "left out" because the model
        cannot take their media, and of "oversize" samples.
      digest: hash of the epoch's records and their order, independent of folders.

    Args:
      placeholder: token id at the positions of media.
      split: "train", or "eval" for the `n_held_out` records (a float: their fraction, see
        `select_held_out`) that "train" leaves out; "eval" ignores weights.

    Raises:
      ValueError: a dataset cannot be read, has too many unusable records, or leaves no sample.
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
        if split == "eval" and not n_held_out:
            raise ValueError(
                "the eval split of a dataset on disk needs train.eval_samples or "
                "train.eval_fraction above 0"
            )
        self.name = config.path if split == "train" else f"{config.path} ({split})"
        self.factory: SourceFactory | None = None
        self._preparation, self._encode_turns = preparation, encode_turns
        self._placeholder, self._blank = placeholder, config.blank_images
        self._is_train, self._prompts = split == "train", config.loss_on_prompts
        self.counts: dict[str, int] = {}
        self._read_index(mixture, rules)
        uncut_counts, usable = media_counts.sample_counts(self._table, preparation)
        self._report_left_out(usable)
        keys = list(self._readers)
        usable_rows = [
            np.flatnonzero(usable & (self._reader_of_row == keys.index(entry.key)))
            for entry in mixture
        ]
        hashes = self._table.records["split_hash"]
        try:
            rows = select_rows(mixture, usable_rows, hashes, config.seed, split, n_held_out)
        except ValueError as e:
            raise ValueError(f"{self.name}: {e}") from None
        self._dataset_names = display_names(mixture)
        self._entry_of_sample = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
        self._rows = np.concatenate(rows)
        if not len(self._rows):
            raise ValueError("the mixture has no sample; check subsets, weights and split")
        self.digest = short_digest(self._table.records["content_hash"][self._rows].tobytes())
        count_rows = (np.cumsum(usable) - 1)[self._rows]  # row of each sample in the counts
        self._keep_fitting(config, count_rows, uncut_counts.select(count_rows))
        logger.info("%s: %s", self.name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))

    def _read_index(self, mixture: Mixture, rules: IndexRules) -> None:
        """Set the readers of all datasets and their joint table."""
        own_kinds = (kind for medium in self._preparation.values() for kind in medium.kinds)
        kinds = (*dict.fromkeys([*BUILT_IN, *own_kinds]),)
        self._readers = open_readers(mixture, kinds)
        index = update_index(rules, self._readers, kinds)
        for key, reader in self._readers.items():
            check_usable(index[key], reader.name, rules.max_bad_fraction)
            if unread := index[key].unread:
                logger.warning("%s: not read: %s", reader.name, format_key_counts(unread))
        tables = [index[key].table for key in self._readers]
        self._table = concatenate_tables(tables, kinds)
        self._reader_of_row = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
        n_listed = sum(index[key].listed for key in self._readers)
        self.counts = {"usable": 0, "unusable": n_listed - len(self._table)}

    def _report_left_out(self, usable: np.ndarray) -> None:
        """Warn of media that the model takes in part and of records that it cannot take."""
        if cut := media_counts.describe_cut_media(self._table, self._preparation):
            logger.warning("%s: %s", self.name, cut)
        left_out = np.flatnonzero(~usable).tolist()
        self.counts["left out"] = len(left_out)
        if left_out:
            examples = [
                f"{self._row_label(row)}: {media_counts.describe_media(self._table, row)}"
                for row in left_out[:MAX_EXAMPLES]
            ]
            reason = f"the model cannot take their media, such as {'; '.join(examples)}"
            if not usable.any():
                raise ValueError(f"{self.name}: no record is usable: {reason}")
            logger.warning("%s: %d records left out: %s", self.name, len(left_out), reason)

    def _keep_fitting(
        self, limits: DataConfig, count_rows: np.ndarray, uncut_counts: media_counts.SampleCounts
    ) -> None:
        """Keep the samples that fit the limits, some of them cut, and warn of the others.

        Args:
          count_rows: row of each sample in the counts of usable records.
          uncut_counts: counts of each whole sample.
        """
        counts, fits = media_counts.fit_samples(self._table, self._preparation, limits)
        rows, fits = self._rows, fits[count_rows]
        self._rows, self._entry_of_sample = rows[fits], self._entry_of_sample[fits]
        self._counts = counts.select(count_rows[fits])
        self.counts |= {"usable": len(self), "oversize": int((~fits).sum())}
        if n_cut := np.count_nonzero(self._counts.n_media < uncut_counts.n_media[fits]):
            logger.warning(
                "%s: %d of %d samples are cut before some of their media by data.max_tokens=%d",
                self.name,
                n_cut,
                len(rows),
                limits.max_tokens,
            )
        if fits.all():
            return
        first = int(np.flatnonzero(~fits)[0])
        reason = (
            f"{self.counts['oversize']} of {len(rows)} samples exceed "
            f"data.max_tokens={limits.max_tokens} ({self._row_label(int(rows[first]))} has "
            f"{int(uncut_counts.all_tokens[first])} tokens)"
        )
        if limits.oversize == "error" or not fits.any():
            raise ValueError(f"{reason}; raise it, or lower the limits of media (data.max_...)")
        logger.warning("left out: %s", reason)

    def __len__(self) -> int:
        return len(self._rows)

    def label(self, index: int) -> str:
        return self._row_label(int(self._rows[index]))

    def largest_samples(self) -> list[int]:
        """Return indices of samples such that any sample needs at most as much as one of them."""
        pieces, tokens, _, longest = self._counts.media
        demands = self._counts.all_tokens[:, None], pieces, tokens, longest
        return media_counts.largest_rows(np.concatenate(demands, 1), MAX_LARGEST_SAMPLES)

    def dataset_of(self, index: int) -> str:
        """Return the name of the sample's part of the mixture (see `mixture.display_names`)."""
        return self._dataset_names[self._entry_of_sample[index]]

    def load(self, index: int) -> Load:
        counts, row = self._counts.select(slice(index, index + 1)), int(self._rows[index])
        return media_counts.sample_load(self._table, row, self._preparation, counts)

    def sample(self, index: int) -> Sample:
        record, row = self.record(index), int(self._rows[index])
        try:
            runs: Sequence[TokenRun] = self._encode_turns(record.turns, record.fields)
            if self._is_train:  # the eval loss is over unweighted answers only
                runs = weight_runs(runs, record.weights, prompts=self._prompts)
            stop = int(self._counts.text_tokens[index] + self._counts.n_media[index])
            runs = truncate_runs(runs, stop)
            numbers = {run.medium for run in runs}
            media = decode_media(record, self._table, row, self._preparation, numbers)
        except Exception as e:  # untrusted files may fail in any way
            raise ValueError(f"{record.name}: {one_line(e)}") from e
        sample = compose_sample(runs, media, self._preparation, placeholder=self._placeholder)
        return blank_media(sample, self._preparation) if self._blank else sample

    def record(self, index: int) -> Record:
        """Return the sample's record. ValueError: it has changed and is unusable."""
        row = int(self._rows[index])
        columns = ("number", "file", "offset", "size_bytes")
        numbers = (int(self._table.records[row][name]) for name in columns)
        return self._reader(row).read(RecordLocation(self._row_label(row), *numbers))

    def _reader(self, row: int) -> RecordReader:
        return [*self._readers.values()][self._reader_of_row[row]]

    def _row_label(self, row: int) -> str:
        """Return the name of a row's record in messages: its file's path and its number."""
        reader, columns = self._reader(row), self._table.records[row]
        label = reader.record_label(int(columns["file"]), int(columns["number"]))
        return str(reader.files[columns["file"]].parent / label)
