"""Datasets in Parquet and Arrow files, read by pyarrow. Opening a file reads only its metadata;
record batches are decoded when rows are read, in the pool's processes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from dflop_jax.data.bounds import MAX_FOOTER_BYTES, MAX_ROWS, MiB, errors_as
from dflop_jax.data.datasets.conversations import TEXT_FIELDS
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, Record, RecordFormat, parse_record
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader

MAX_OPEN_FILES = 16  # open files per process
# Upper limits of a batch decoded from Parquet, and of the cached batches of a file.
MAX_BATCH_BYTES, MAX_BATCH_ROWS = 4 * MiB, 1024
MAX_CACHED_BYTES, MAX_CACHED_BATCHES = 64 * MiB, 256
# Column names, rows of each group, and a function that yields record batches of a group's columns.
DecodeGroups = tuple[Sequence[str], Sequence[int], Callable[[int, Sequence[str]], Iterator[Any]]]


@cache
def import_pyarrow() -> Any:
    """Return pyarrow. ValueError: it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ValueError(
            f"Parquet and Arrow files need pyarrow: pip install 'dflop_jax[parquet]' ({e})"
        ) from None
    # The system's allocator returns memory and reserves none, so memory limits are exact.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow


class TableReader(RecordReader):
    """Reads each row of the files as a record. Media are in the row ({bytes, path}), or files."""

    def __init__(
        self,
        files: tuple[Path, ...],
        roots: Sequence[str | Path] = (),
        records: RecordFormat = DEFAULT_FORMAT,
    ) -> None:
        super().__init__(files, roots, records)
        self._row_format = replace(records, columns={})  # rows already have the fields' names
        self._opened = lru_cache(MAX_OPEN_FILES)(lambda k: TableFile(files[k], records))
        import_pyarrow()  # before processes are forked, which then share it

    def locate(self) -> Iterator[RecordLocation]:
        number = -1
        for k, file in enumerate(self.files):
            for number in range(len(TableFile(file, self._records))):
                yield RecordLocation(self.record_label(k, number), number, k, 0, 0)
        if number < 0:
            raise ValueError(f"{self.name}: holds no rows")

    def read(self, location: RecordLocation) -> Record:
        try:
            table = self._opened(location.file)
            row = table.row(location.number)
        except (ValueError, OSError) as e:
            raise ValueError(f"{location.label}: {e}") from None
        record = parse_record(location.label, row, self._roots.resolve, self._row_format)
        return replace(record, unread=(*record.unread, *table.unread))


class TableFile:
    """Rows of a file by their number; `unread` are columns that are not read. A row group of
    Parquet is decoded from its first row on, so random access needs groups of 100 MB or less.
    ValueError: the file cannot be read, claims more rows than it can hold, or has no text."""

    def __init__(self, file: Path, records: RecordFormat = DEFAULT_FORMAT) -> None:
        with errors_as(f"{file}: cannot be read"):
            open_file = _open_parquet if file.suffix == ".parquet" else _open_arrow
            names, sizes, self._decode = open_file(file)
            if min(sizes, default=0) < 0 or sum(sizes) > min(8 * file.stat().st_size, MAX_ROWS):
                raise ValueError(f"it claims {sum(sizes):,} rows")
            self._columns = records.select_columns(names)
            if not any(text in self._columns for text in TEXT_FIELDS):
                raise ValueError(
                    f"no column {' or '.join(TEXT_FIELDS)}, there are {', '.join(names)}; name "
                    f"it: --data.columns {TEXT_FIELDS[0]}=NAME, or in a mixture columns: "
                    f"{{{TEXT_FIELDS[0]}: NAME}}"
                )
        self.unread = tuple(name for name in names if name not in self._columns.values())
        self._first_rows = [0, *accumulate(sizes)]
        self._cached = deque[tuple[int, Any]](maxlen=MAX_CACHED_BATCHES)  # (first row, batch)
        self._pending: tuple[int, int, Iterator[Any]] = -1, 0, iter(())  # (group, next row, rest)
        self._lock = Lock()  # several threads may read rows

    def __len__(self) -> int:
        return self._first_rows[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a row's fields. ValueError: it cannot be decoded, or the file has changed."""
        if not 0 <= number < len(self):
            raise ValueError(f"there are {len(self):,} rows now; start the run again")
        with errors_as("its record batch cannot be decoded"), self._lock:
            first, batch = self._find_batch(number)
            row = batch.slice(number - first, 1)
            row.validate(full=True)
            values = row.to_pylist()[0]
        return {field: values[column] for field, column in self._columns.items()}

    def _find_batch(self, number: int) -> tuple[int, Any]:
        """Return (number of the first row, record batch) of the batch that holds a row."""
        cached = self._cached
        for first, batch in reversed(cached):
            if first <= number < first + batch.num_rows:
                return first, batch
        wanted = bisect_right(self._first_rows, number) - 1
        group, first, batches = self._pending
        if group != wanted or number < first:
            first = self._first_rows[wanted]
            batches = self._decode(wanted, [*self._columns.values()])
        self._pending = -1, 0, iter(())  # after an error the group is decoded again
        for batch in batches:
            cached.append((first, batch))
            sizes = [b.get_total_buffer_size() for _, b in cached]
            while len(cached) > 1 and sum(sizes[-len(cached) :]) > MAX_CACHED_BYTES:
                cached.popleft()
            if number < first + batch.num_rows:
                self._pending = wanted, first + batch.num_rows, batches
                return first, batch
            first += batch.num_rows
        raise ValueError(f"group {wanted} has fewer rows than the file claims")


def _open_parquet(file: Path) -> DecodeGroups:
    with file.open("rb") as opened:
        opened.seek(-8, 2)
        if (length := int.from_bytes(opened.read(4), "little")) > MAX_FOOTER_BYTES:
            raise ValueError(f"it claims a footer of {length:,} bytes")
    table = import_pyarrow().parquet.ParquetFile(str(file), buffer_size=MiB)
    groups = [table.metadata.row_group(k) for k in range(table.num_row_groups)]

    def decode(k: int, columns: Sequence[str]) -> Iterator[Any]:
        rows = MAX_BATCH_BYTES * groups[k].num_rows // max(1, groups[k].total_byte_size)
        rows = max(1, min(rows, MAX_BATCH_ROWS))
        return table.iter_batches(rows, row_groups=[k], columns=columns, use_threads=False)

    return table.schema_arrow.names, [group.num_rows for group in groups], decode


def _open_arrow(file: Path) -> DecodeGroups:
    ipc, source = import_pyarrow().ipc, import_pyarrow().memory_map(str(file))
    if source.read(8) != b"ARROW1\0\0":  # magic of the file format, before the stream
        source.seek(0)
    first, *batches = ipc.MessageReader.open_stream(source)
    is_plain = first.type == "schema" and all(b.type == "record batch" for b in batches)
    if not is_plain or first.metadata.size > MAX_FOOTER_BYTES:  # else pyarrow would crash
        raise ValueError("it has more than plain columns; save it as Parquet")
    schema, no_columns = ipc.read_schema(first), import_pyarrow().schema([])

    def decode(k: int, columns: Sequence[str]) -> Iterator[Any]:
        yield ipc.read_record_batch(batches[k], schema).select(columns)

    return schema.names, [ipc.read_record_batch(b, no_columns).num_rows for b in batches], decode
