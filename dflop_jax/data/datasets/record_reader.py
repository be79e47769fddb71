"""Readers list the records of a dataset with their places and read one again without the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.data.datasets.record_parser import Record


@dataclass(frozen=True)
class RecordLocation:
    """A record's place: bytes of `files[file]` (a shard's: from its first member on), its number
    there (a line's, in a file of lines), and its name for messages."""

    label: str
    number: int
    file: int
    offset: int
    size_bytes: int


class RecordReader(ABC):
    """A dataset of records; `files` are all that its records stand in."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0]}{rest}"

    @abstractmethod
    def locate(self) -> Iterator[RecordLocation]:
        """Yield every record, in order. ValueError: a file that cannot be read at all."""

    def record_label(self, file: int, number: int) -> str:
        """How messages call a record without reading it."""
        return f"{self.files[file].name}[{number}]"

    @abstractmethod
    def read(self, location: RecordLocation) -> Record:
        """Return a usable record. ValueError: its name and the reason why it is not usable."""
