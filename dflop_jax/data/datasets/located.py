"""A record's place in a dataset, and what lists and reads the records of one.

A reader lists every record with its place, so that an index can hold a million of them and read one
again without the others. Every record of every source comes through here; nothing here decodes
media.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflop_jax.data.datasets.llava_records import Record


@dataclass(frozen=True)
class Located:
    """A record's place: bytes of `files[file]` (a shard's: from its first member on), its number
    there (a line's, in a file of lines), and its name for messages."""

    place: str
    number: int
    file: int
    offset: int
    size_bytes: int


class RecordReader(Protocol):
    """A dataset of records; `files` are all that its records stand in."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def locate(self) -> Iterator[Located]:
        """Yield every record, in order. ValueError: a file that cannot be read at all."""
        ...

    def place(self, file: int, number: int) -> str:
        """How messages call a record without reading it."""
        ...

    def read(self, located: Located) -> Record:
        """Return a usable record. ValueError: its name and the reason why it is not usable."""
        ...
