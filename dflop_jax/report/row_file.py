"""Files of JSON rows, a line each: added to while a run goes on, cut where it is resumed, read line
by line however long they are.

A kill may cut the last line short; such a line counts for nothing. While the disk is full rows wait
in memory, so that a run that needs no disk for its next step goes on.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dflop_jax.full_disk import FULL

HELD_BYTES = 16 << 20  # rows that wait for room, of each file: about 10,000 of metrics
_TAIL_BYTES = 1 << 16  # read at first to find a file's last row
log = logging.getLogger("dflop_jax")


class FullDisk:
    """Says once that rows wait for room on the disk, for all files of a folder."""

    def __init__(self) -> None:
        self._said = False

    def say(self, file: Path, error: OSError) -> None:
        if not self._said:
            log.warning(
                "%s: %s; rows wait in memory until there is room again, the run goes on",
                file,
                error.strerror,
            )
        self._said = True


class RowFile:
    """Adds rows to a file, which is made with its first row.

    Rows that find no room on the disk are held back, HELD_BYTES at most, and written before later
    ones; of more, the oldest are dropped and counted in `lost`. No part of a row stays in the file.
    """

    def __init__(self, path: Path, full: FullDisk):
        self.path, self.lost = path, 0
        self._full = full
        self._file: FileIO | None = None
        self._end = 0  # bytes of whole rows in the file
        self._cut = False  # part of a row may follow them
        self._held: deque[bytes] = deque()
        self._held_bytes = 0

    def append(self, row: Any) -> None:
        """Add a row, a mapping or a record; it is on its way to disk when this returns, or held
        back.

        Raises:
          OSError: it cannot be written for another reason than a full disk.
        """
        # JSON has no nan or infinity: msgspec writes null, which readers take for nan.
        line = msgspec.json.encode(row) + b"\n"
        self._held.append(line)
        self._held_bytes += len(line)
        while self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._held.popleft())
            self.lost += 1
        self._flush()

    @property
    def is_waiting(self) -> bool:
        """Whether rows wait for room on the disk."""
        return bool(self._held)

    def keep(self, wanted: Callable[[RowKey], bool]) -> int:
        """Drop the other rows, and a last one that a kill cut short; returns how many whole
        ones."""
        self._flush()
        self._close()
        return keep_rows(self.path, wanted)

    def close(self) -> None:
        """Write what can be written; what cannot is lost, which is said."""
        self._flush()
        self._close()
        self._give_up()
        if self.lost:
            log.warning("%s: %d rows found no room on the disk and are lost", self.path, self.lost)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        try:
            while self._held:
                self._write(self._held[0])
                self._held_bytes -= len(self._held.popleft())
        except OSError as e:
            if e.errno not in FULL:
                self._give_up()
                raise
            self._full.say(self.path, e)

    def _give_up(self) -> None:
        self.lost += len(self._held)
        self._held.clear()
        self._held_bytes = 0

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self._file = opened(self.path)
            self._end = os.fstat(self._file.fileno()).st_size
        if self._cut:
            self._file.truncate(self._end)
            self._cut = False
        rest = line
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._cut = len(rest) < len(line)
            if self._cut:
                with suppress(OSError):  # else before the next row
                    self._file.truncate(self._end)
                    self._cut = False
            raise
        self._end += len(line)


def opened(path: Path) -> FileIO:
    """The file, to add to its end without a buffer."""
    return FileIO(path, "ab")


class RowKey(msgspec.Struct):
    """What tells which rows stay; `prices` are those of a sampled step."""

    step: int
    prices: str = ""


_KEYS = msgspec.json.Decoder(RowKey)


def key_of(line: bytes) -> RowKey | None:
    """The key of a whole row; None of one that was cut short: a cut object never parses."""
    try:
        return _KEYS.decode(line)
    except msgspec.DecodeError:
        return None


def keep_rows(path: Path, wanted: Callable[[RowKey], bool]) -> int:
    """Drop the other rows of a file, and a last one that a kill cut short; returns how many whole
    ones."""
    if not path.exists():
        return 0
    dropped, front_bytes, in_front, later = 0, 0, True, False
    with path.open("rb") as file:
        for line in file:
            key = key_of(line)
            stays = key is not None and wanted(key)
            dropped += key is not None and not stays
            later |= stays and not in_front
            in_front &= stays
            front_bytes += len(line) if in_front else 0
    if later:
        _rewrite(path, wanted)
        return dropped
    # Those that go are the last, as when a run is resumed: nothing is copied.
    with path.open("r+b") as old:
        old.truncate(front_bytes)
        if front_bytes and _last_byte(old) != b"\n":
            old.write(b"\n")
    return dropped


def _last_byte(file: BinaryIO) -> bytes:
    """And the file is left at its end."""
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _rewrite(path: Path, wanted: Callable[[RowKey], bool]) -> None:
    """The rows that are wanted, renamed over the file: a kill in between loses none."""
    fresh = path.with_suffix(".tmp")
    with path.open("rb") as old, fresh.open("wb") as new:
        for line in old:
            key = key_of(line)
            if key is not None and wanted(key):
                new.write(line.rstrip(b"\n") + b"\n")
    fresh.replace(path)


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of rows without a last one that a kill cut short; none without the
    file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") or key_of(line) is not None:
                yield line.rstrip(b"\n")


def last_line(path: Path) -> bytes | None:
    """The last whole line of a file of rows, read from its end; None without one."""
    if not path.exists():
        return None
    tail_bytes, size = _TAIL_BYTES, path.stat().st_size
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - tail_bytes))
            lines = file.read().split(b"\n")
        if tail_bytes < size:
            lines = lines[1:]  # which may have begun before
        if lines and key_of(lines[-1]) is None:
            lines.pop()  # nothing after the last newline, or a row cut short
        if lines or tail_bytes >= size:
            return lines[-1] if lines else None
        tail_bytes *= 4
