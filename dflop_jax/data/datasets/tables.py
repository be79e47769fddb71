"""Datasets of rows: Parquet and Arrow files, of one dataset or a split of it, read by pyarrow.

Opening a file reads its metadata alone. Record batches are decoded where rows are read: in the
pool's processes.
"""

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

from dflop_jax.data.bounds import MAX_FOOTER_BYTES, MAX_ROWS, named
from dflop_jax.data.datasets.blob import Roots
from dflop_jax.data.datasets.llava_records import (
    TEXTS,
    USUAL,
    Located,
    Record,
    RecordFormat,
    RecordReader,
    parse_record,
)

OPEN_FILES = 16  # at once, in a process
BATCH_BYTES, BATCH_ROWS = 4 << 20, 1024  # upper bounds of a batch that is decoded from Parquet
KEPT_BYTES, KEPT_BATCHES = 64 << 20, 256  # upper bounds of a file's batches in memory
# Columns' names, rows of each group, and an iterator of record batches of a group's columns.
Opened = tuple[Sequence[str], Sequence[int], Callable[[int, Sequence[str]], Iterator[Any]]]


@cache
def arrow() -> Any:
    """Return pyarrow. ValueError: it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ValueError(
            f"Parquet and Arrow files need pyarrow: pip install 'dflop_jax[parquet]' ({e})"
        ) from None
    # The system's allocator gives memory back and reserves none, so that limits hold.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow


class TableReader(RecordReader):
    """Each row of the files is a record. Media are in the row itself ({bytes, path}, as `datasets`
    has them), or files below `roots`, else below the folder of the first file."""

    def __init__(
        self,
        files: tuple[Path, ...],
        roots: Sequence[str | Path] = (),
        records: RecordFormat = USUAL,
    ) -> None:
        super().__init__(files)
        self._records = records
        self._renamed = replace(records, columns={})  # rows as they are read
        self._roots = Roots(roots or [files[0].parent])
        self._opened = lru_cache(OPEN_FILES)(lambda k: TableFile(files[k], records))
        arrow()  # loaded before processes are forked, which then share it

    def locate(self) -> Iterator[Located]:
        any_row = False
        for k, file in enumerate(self.files):
            for number in range(len(TableFile(file, self._records))):
                any_row = True
                yield Located(self.place(k, number), number, k, 0, 0)
        if not any_row:
            raise ValueError(f"{self.name}: holds no rows")

    def read(self, located: Located) -> Record:
        try:
            table = self._opened(located.file)
            row = table.row(located.number)
        except (ValueError, OSError) as e:
            raise ValueError(f"{located.place}: {e}") from None
        record = parse_record(located.place, row, self._roots.find, self._renamed)
        return replace(record, unread=(*record.unread, *table.unread))


class TableFile:
    """Rows of a file by their number. `unread` are the columns that no field is read from.

    A row group of Parquet is decoded from its first row on: random access needs groups of 100 MB
    or less.

    Raises:
      ValueError: the file cannot be read, claims more rows than it can hold, or has no text.
    """

    def __init__(self, file: Path, records: RecordFormat = USUAL) -> None:
        with named(f"{file}: cannot be read"):
            names, sizes, self._decode = (_parquet if file.suffix == ".parquet" else _arrow)(file)
            if min(sizes, default=0) < 0 or sum(sizes) > min(8 * file.stat().st_size, MAX_ROWS):
                raise ValueError(f"it claims {sum(sizes):,} rows")
            self._columns = records.chosen(names)
            if not any(text in self._columns for text in TEXTS):
                raise ValueError(
                    f"no column {' or '.join(TEXTS)}, there are {', '.join(names)}; say which it "
                    f"is: --data.columns {TEXTS[0]}=NAME, or in a mixture columns: "
                    f"{{{TEXTS[0]}: NAME}}"
                )
        self.unread = tuple(name for name in names if name not in self._columns.values())
        self._starts = [0, *accumulate(sizes)]
        self._kept = deque[tuple[int, Any]](maxlen=KEPT_BATCHES)  # (first row, batch)
        self._pending: tuple[int, int, Iterator[Any]] = -1, 0, iter(())  # (group, next row, rest)
        self._lock = Lock()  # threads read rows, too

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a row's fields. ValueError: it cannot be decoded, or the file has changed."""
        if not 0 <= number < len(self):
            raise ValueError(f"there are {len(self):,} rows now; start the run again")
        with named("its record batch cannot be decoded"), self._lock:
            first, batch = self._find(number)
            row = batch.slice(number - first, 1)
            row.validate(full=True)
            values = row.to_pylist()[0]
        return {field: values[column] for field, column in self._columns.items()}

    def _find(self, number: int) -> tuple[int, Any]:
        """Return the record batch that has a row, after the number of its first row."""
        kept = self._kept
        for first, batch in reversed(kept):
            if first <= number < first + batch.num_rows:
                return first, batch
        wanted = bisect_right(self._starts, number) - 1
        group, first, batches = self._pending
        if group != wanted or number < first:
            first, batches = self._starts[wanted], self._decode(wanted, [*self._columns.values()])
        self._pending = -1, 0, iter(())  # what fails is decoded anew
        for batch in batches:
            kept.append((first, batch))
            while len(kept) > 1 and sum(b.get_total_buffer_size() for _, b in kept) > KEPT_BYTES:
                kept.popleft()
            if number < first + batch.num_rows:
                self._pending = wanted, first + batch.num_rows, batches
                return first, batch
            first += batch.num_rows
        raise ValueError(f"group {wanted} has fewer rows than the file claims")


def _parquet(file: Path) -> Opened:
    with file.open("rb") as opened:
        opened.seek(-8, 2)
        if (length := int.from_bytes(opened.read(4), "little")) > MAX_FOOTER_BYTES:
            raise ValueError(f"it claims a footer of {length:,} bytes")
    table = arrow().parquet.ParquetFile(str(file), buffer_size=1 << 20)  # bytes read at once
    groups = [table.metadata.row_group(k) for k in range(table.num_row_groups)]

    def decode(k: int, columns: Sequence[str]) -> Iterator[Any]:
        rows = BATCH_BYTES * groups[k].num_rows // max(1, groups[k].total_byte_size)
        rows = max(1, min(rows, BATCH_ROWS))
        return table.iter_batches(rows, row_groups=[k], columns=columns, use_threads=False)

    return table.schema_arrow.names, [group.num_rows for group in groups], decode


def _arrow(file: Path) -> Opened:
    ipc, source = arrow().ipc, arrow().memory_map(str(file))
    if source.read(8) != b"ARROW1\0\0":  # of the format with a footer: a stream follows
        source.seek(0)
    first, *batches = ipc.MessageReader.open_stream(source)
    is_plain = first.type == "schema" and all(b.type == "record batch" for b in batches)
    if not is_plain or first.metadata.size > MAX_FOOTER_BYTES:  # reading no schema would crash
        raise ValueError("it has more than plain columns; save it as Parquet")
    schema, no_columns = ipc.read_schema(first), arrow().schema([])

    def decode(k: int, columns: Sequence[str]) -> Iterator[Any]:
        yield ipc.read_record_batch(batches[k], schema).select(columns)

    return schema.names, [ipc.read_record_batch(b, no_columns).num_rows for b in batches], decode
