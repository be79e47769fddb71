"""Files with one JSON row per line: a run appends rows, and a resumed run drops some of them.

If the process is killed, the last line may be incomplete; readers ignore such a line, and a resumed
run drops it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dflop_jax.folders import DISK_FULL_ERRNOS

log = logging.getLogger("dflop_jax")
Row = TypeVar("Row")


class RowFile:
    """Appends rows to a file. While the disk is full, rows are pending in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._pending = bytearray()  # may begin with the rest of a row that is partly written
        self._has_warned = False

    def append(self, row: Any) -> None:
        """Add a row, a mapping or a record, and pass it to the operating system unless the disk is
        full. OSError: it cannot be written for another reason."""
        # JSON has no nan or infinity: msgspec writes null, which readers convert to nan.
        self._pending += msgspec.json.encode(row) + b"\n"
        self._flush()

    def drop_except(self, is_kept: Callable[[RowHeader], bool]) -> int:
        """Keep the rows that `is_kept` accepts; drop the others and an incomplete last row. Return
        the number of complete rows dropped. The new file replaces the old one atomically."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self.path.exists():
            return 0
        new_path, n_dropped = self.path.with_suffix(".tmp"), 0
        with self.path.open("rb") as old, new_path.open("wb") as new:
            for line in old:
                header = read_header(line)
                if header is not None and is_kept(header):
                    new.write(line.rstrip(b"\n") + b"\n")
                else:
                    n_dropped += header is not None
        new_path.replace(self.path)
        return n_dropped

    def close(self) -> None:
        """Write pending rows, or warn that they are lost."""
        self._flush()
        if self._file is not None:
            self._file.close()
        if self._pending:
            log.warning("%s: the disk is full, so its last rows are lost", self.path)

    def _flush(self) -> None:
        try:
            while self._pending:
                if self._file is None:
                    self._file = FileIO(self.path, "ab")
                del self._pending[: self._file.write(self._pending)]
        except OSError as e:
            if e.errno not in DISK_FULL_ERRNOS:
                self._pending.clear()
                raise
            if not self._has_warned:
                text = "%s: %s; rows wait in memory until there is room, and the run continues"
                log.warning(text, self.path, e.strerror)
            self._has_warned = True


class RowHeader(msgspec.Struct):
    """The fields that decide which rows are kept."""

    step: int
    prices: str = ""  # of a sampled step


_HEADER_DECODER = msgspec.json.Decoder(RowHeader)


def read_header(line: bytes) -> RowHeader | None:
    """Return the header of a complete row; None for an incomplete row, which never parses."""
    try:
        return _HEADER_DECODER.decode(line)
    except msgspec.DecodeError:
        return None


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file except an incomplete last one; no lines if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") or read_header(line) is not None:
                yield line.rstrip(b"\n")


def read_rows(
    path: Path, kind: type[Row], description: str, remedy: str = "remove the line"
) -> Iterator[Row]:
    """Yield a file's complete rows, if any, as records of a type; ValueError names a bad line."""
    decoder = msgspec.json.Decoder(kind)
    for n, line in enumerate(complete_lines(path), 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as e:
            raise ValueError(f"{path}:{n}: not {description} ({e}); {remedy}") from None
