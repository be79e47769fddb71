"""Rows of an Arrow file or stream (as `datasets` saves them) by their number, without copying it.

Messages are found by their own framing, bounded before it is believed; only the record batch that
a row stands in is read, where records are read: in the pool's processes.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from dflop_jax.data.bounds import MAX_FOOTER_BYTES, MAX_ROWS, named
from dflop_jax.data.datasets.arrow_library import arrow

FILE_MAGIC = b"ARROW1\0\0"  # of the format with a footer; a stream begins with its first message
CONTINUED = b"\xff\xff\xff\xff"
SCHEMA, DICTIONARIES, BATCH = 1, 2, 3  # kinds of messages


@dataclass(frozen=True)
class _Message:
    kind: int
    offset: int
    size_bytes: int
    rows: int


class ArrowFile:
    """The columns that `choose` picks, {field: column}, of the columns that the file has.

    Raises:
      ValueError: it is no Arrow file, is compressed, or claims what cannot be.
    """

    def __init__(self, file: Path, choose: Callable[[Sequence[str]], dict[str, str]]) -> None:
        self._path = file
        self._bytes: Any = None  # mapped when the first row is read
        with named(f"{file}: not a readable Arrow file"):
            with file.open("rb") as opened:
                first, *self._batches = _messages(opened, file.stat().st_size)
                opened.seek(first.offset)
                head = opened.read(first.size_bytes)
            if first.kind != SCHEMA or any(b.kind != BATCH for b in self._batches):
                raise ValueError("it has more than plain columns; save it as Parquet")
            self._schema = arrow("ipc").read_schema(arrow().py_buffer(head))
            self._starts = [0, *accumulate(b.rows for b in self._batches)]
            if len(self) > min(8 * file.stat().st_size, MAX_ROWS):
                raise ValueError(f"it claims {len(self):,} rows")
            self._columns = choose(self._schema.names)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a row's fields. ValueError: they are not as they should be."""
        if not 0 <= number < len(self):
            raise ValueError(f"there are {len(self):,} rows now; start the run again")
        place = bisect_right(self._starts, number) - 1
        message = self._batches[place]
        with named("its record batch cannot be read"):
            if self._bytes is None:
                self._bytes = arrow().memory_map(str(self._path)).read_buffer()
            data = self._bytes.slice(message.offset, message.size_bytes)
            batch = arrow("ipc").read_record_batch(arrow("ipc").read_message(data), self._schema)
            row = batch.slice(number - self._starts[place], 1).select([*self._columns.values()])
            row.validate(full=True)
            values = row.to_pylist()[0]
        return {field: values[column] for field, column in self._columns.items()}


def _messages(file: BinaryIO, size: int) -> Iterator[_Message]:
    """Yield the messages of a file of `size` bytes: prefix, facts, and a body that lies inside."""
    offset = len(FILE_MAGIC) if file.read(8) == FILE_MAGIC else 0
    while offset < size:
        file.seek(offset)
        prefix = file.read(8)
        length = int.from_bytes(prefix[4:], "little")
        if prefix[:4] != CONTINUED or len(prefix) < 8:
            raise ValueError(f"no message at byte {offset}")
        if length == 0:
            return
        if length > min(size - offset - 8, MAX_FOOTER_BYTES):
            raise ValueError(f"a message of {length:,} bytes at byte {offset}")
        try:
            kind, body, rows = _facts(file.read(length))
        except struct.error:
            raise ValueError(f"a broken message at byte {offset}") from None
        if not 0 <= body <= size - offset - 8 - length or rows < 0:
            raise ValueError(f"{rows} rows in {body:,} bytes at byte {offset}, beyond its end")
        yield _Message(kind, offset, 8 + length + body, rows)
        offset += 8 + length + body


def _facts(data: bytes) -> tuple[int, int, int]:
    """(kind, bytes of the body, rows) of a message; struct.error where it points out of itself.

    ValueError: it is compressed.
    """
    message = _table(data, 0)
    kind = struct.unpack_from("<B", data, message[1])[0] if message[1] else 0
    body = struct.unpack_from("<q", data, message[3])[0] if message[3] else 0
    if kind != BATCH:
        return kind, body, 0
    batch = _table(data, message[2])
    if batch[3]:
        raise ValueError("it is compressed; save it without, or as Parquet")
    return kind, body, struct.unpack_from("<q", data, batch[0])[0] if batch[0] else 0


def _table(data: bytes, start: int) -> list[int]:
    """Places of the first four fields of a flatbuffer's table whose offset stands at `start`; 0 for
    one that it lacks."""
    table = start + struct.unpack_from("<I", data, start)[0]
    fields = table - struct.unpack_from("<i", data, table)[0]
    length = struct.unpack_from("<H", data, fields)[0]
    places = []
    for k in range(4):
        there = 6 + 2 * k <= length
        offset = struct.unpack_from("<H", data, fields + 4 + 2 * k)[0] if there else 0
        places.append(table + offset if offset else 0)
    return places
