"""Readers list the records of a dataset with their places and read one again without the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.data.datasets.record_parser import Record


@dataclass(frozen=True)
class RecordLocation:
    """Where a record is: bytes of `files[file]` (of a shard: from its first member on), its number
    there (of a .jsonl: its line), and its label in messages."""

    label: str
    number: int
    file: int
    offset: int
    size_bytes: int


class RecordReader(ABC):
    """A dataset of records in `files`."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0]}{rest}"

    @abstractmethod
    def locate(self) -> Iterator[RecordLocation]:
        """Yield every record, in order. ValueError: a file that cannot be read at all."""

    def record_label(self, file: int, number: int) -> str:
        """Return the label of a record without reading it."""
        return f"{self.files[file].name}[{number}]"

    @abstractmethod
    def read(self, location: RecordLocation) -> Record:
        """Return a usable record. ValueError: its name and why it is not usable."""
