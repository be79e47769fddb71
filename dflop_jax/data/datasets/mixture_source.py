"""The samples of a mixture: shapes from the index, records and media when asked."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from dflop_jax.data.datasets.costs import Preprocessing, SampleCost, SampleCosts, sample_costs
from dflop_jax.data.datasets.index_build import ToPieces, check_usable, update_index
from dflop_jax.data.datasets.llava_records import Record, check_split
from dflop_jax.data.datasets.mixture import Mixture, chosen, names, shown
from dflop_jax.data.datasets.readers import Located, Reader, open_reader
from dflop_jax.data.datasets.shape_index import joined
from dflop_jax.data.media.decode import Pictures, Sound, decode_media
from dflop_jax.data.text.pieces import Piece

logger = logging.getLogger("dflop_jax.data")


class MixtureSource:
    """Random access to the samples that one epoch of a mixture shows.

    Making one reads `index_file` and makes anew what changed since, by headers and text alone.
    Subset rules count the usable records of a dataset, so that a broken one shifts nothing else
    than its own place. Records that the model cannot take are left out and counted in `left_out`.

    Args:
      to_pieces, settings: the tokenizer and its digest (see `update_index`).
      split: "train", or "eval" for the share `eval_fraction` of records (chosen by a hash of their
        id) that "train" then leaves out; weights do not count there.

    Raises:
      ValueError: a dataset that cannot be read, or is unusable above `max_bad_fraction`; nothing
        left for this model.
    """

    def __init__(
        self,
        mixture: Mixture,
        how: Preprocessing,
        to_pieces: ToPieces,
        settings: str,
        *,
        index_file: str | Path,
        seed: int = 0,
        split: str = "train",
        eval_fraction: float = 0.0,
        max_bad_fraction: float = 0.1,
        workers: int = 2,
        name: str = "mixture",
    ) -> None:
        check_split(split, eval_fraction)
        self.name = name
        self._how, self._to_pieces = how, to_pieces
        keys = names(mixture.parts)
        readers: dict[str, Reader] = {
            key: open_reader(part.path, part.root or None)
            for key, part in zip(keys, mixture.parts, strict=True)
        }
        index = update_index(Path(index_file), readers, to_pieces, settings, workers=workers)
        for key, reader in readers.items():
            check_usable(index[key], reader.name, max_bad_fraction)
        self._readers = list(readers.values())
        self._table = joined([index[key].table for key in readers])
        starts = np.cumsum([0, *(len(index[key].table) for key in readers)])
        dataset_of = {key: k for k, key in enumerate(readers)}
        self._dataset = np.repeat(np.arange(len(readers)), np.diff(starts))
        self._costs, usable = sample_costs(self._table, how)
        self.left_out = int((~usable).sum())
        if self.left_out:
            logger.warning("%d records left out: the model cannot take them", self.left_out)
        parts = []
        for key, part in zip(keys, mixture.parts, strict=True):
            k = dataset_of[key]
            rows = starts[k] + np.flatnonzero(usable[starts[k] : starts[k + 1]])
            rows = rows[chosen(part, len(rows), seed)]
            held = self._table.lot[rows] < np.float64(eval_fraction) * 2.0**64
            if split == "eval":
                parts.append(rows[held])
            else:
                parts.append(shown(part, rows[~held], seed))
        self._rows = np.concatenate(parts)
        self._place = np.cumsum(usable) - 1  # row of the table -> row of the costs
        if not len(self._rows):
            raise ValueError("the mixture shows no sample; check subsets, weights and split")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def how(self) -> Preprocessing:
        return self._how

    def costs(self, how: Preprocessing | None = None) -> SampleCosts:
        """Costs of all samples, or what they would be under another preparation that takes the
        same media; nothing is decoded."""
        costs = sample_costs(self._table, how)[0] if how else self._costs
        return costs.taken(self._place[self._rows])

    def prompt_tokens(self) -> np.ndarray:
        """int64 [n]: text tokens before the first answer, of all samples."""
        return self._table.prompt_tokens[self._rows].astype(np.int64)

    def cost(self, index: int) -> SampleCost:
        """Cost of one sample."""
        return self._costs[int(self._place[self._rows[index]])]

    def label(self, index: int) -> str:
        """How logs and errors call the sample."""
        return self._at(index)[1].place

    def record(self, index: int) -> Record:
        """The sample's turns and where its media are; ValueError when it changed since."""
        reader, at = self._at(index)
        return reader.read(at)

    def pieces(self, index: int) -> tuple[Piece, ...]:
        """The tokenized conversation, with the places of its media."""
        return self._to_pieces(self.record(index).turns)

    def media(self, index: int, how: Preprocessing | None = None) -> tuple[Pictures | Sound, ...]:
        """The decoded media in the order of their tags, prepared as the mixture's or another way.

        ValueError, naming the record.
        """
        record = self.record(index)
        try:
            return decode_media(record, self._table, int(self._rows[index]), how or self._how)
        except (ValueError, OSError) as e:
            raise ValueError(f"{record.name}: {e}") from e

    def _at(self, index: int) -> tuple[Reader, Located]:
        row, t = self._rows[index], self._table
        reader = self._readers[self._dataset[row]]
        file = int(t.file[row])
        place = f"{reader.files[file]}[{t.number[row]}]"
        return reader, Located(place, file, int(t.offset[row]), int(t.size_bytes[row]))
