"""Rows of a Parquet file by their number, decoded by windows of a row group.

A footer is bounded before it is parsed. What the pages hold is decoded where records are read: in
the pool's processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from dflop_jax.data.bounds import MAX_FOOTER_BYTES, MAX_ROWS, named
from dflop_jax.data.datasets.arrow_library import arrow

WINDOW_BYTES = 4 << 20  # of rows decoded at once
WINDOW_ROWS = 1024  # decoded at once, at most
KEPT_BYTES = 64 << 20  # of windows in memory: twice as many decode fewer rows again
BUFFER_BYTES = 1 << 20  # of a column, read at once
MAX_FOOTER_ITEMS = 10_000_000  # row groups x columns, or names
MAGIC = b"PAR1"


class ParquetFile:
    """The columns that `choose` picks, {field: column}, of the columns that the file has.

    Rows of a group are decoded from its first one on, so groups of 100 MB or less, as datasets are
    published, are what random access needs.

    Raises:
      ValueError: it is no Parquet file, or claims what cannot be.
    """

    def __init__(self, file: Path, choose: Callable[[Sequence[str]], dict[str, str]]) -> None:
        self._name = str(file)
        with named(f"{file}: not a readable Parquet file"):
            _check_footer(file)
            self._file = arrow("parquet").ParquetFile(
                str(file),
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,
                thrift_string_size_limit=MAX_FOOTER_BYTES,
                thrift_container_size_limit=MAX_FOOTER_ITEMS,
            )
            facts = self._file.metadata
            groups = [facts.row_group(g) for g in range(facts.num_row_groups)]
            sizes = [group.num_rows for group in groups]
            max_rows = min(8 * file.stat().st_size, MAX_ROWS)  # a bit each at least
            if min(sizes, default=0) < 0 or not sum(sizes) == facts.num_rows <= max_rows:
                raise ValueError(f"it claims {facts.num_rows:,} rows in groups of {sizes[:3]}")
            self._columns = choose(self._file.schema_arrow.names)
        self._starts = [0, *accumulate(sizes)]
        self._at_once = [
            max(1, min(WINDOW_ROWS, WINDOW_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for group in groups
        ]
        self._windows: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._kept_bytes = 0
        self._one_at_a_time = Lock()  # threads decode samples, too
        self._group, self._next = -1, 0  # what is being decoded
        self._rest: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a row's fields. ValueError: it cannot be decoded, or the file has changed."""
        if not 0 <= number < len(self):
            raise ValueError(f"there are {len(self):,} rows now; start the run again")
        group = bisect_right(self._starts, number) - 1
        window, place = divmod(number - self._starts[group], self._at_once[group])
        with named("its row group cannot be decoded"):
            with self._one_at_a_time:
                rows = self._window(group, window)
            if place >= rows.num_rows:
                raise ValueError(f"it ends before row {number}")
            values = rows.slice(place, 1).to_pylist()[0]
        return {field: values[column] for field, column in self._columns.items()}

    def _window(self, group: int, window: int) -> Any:
        """Record batch of the rows `window` * `at_once` and on of a group."""
        if (group, window) in self._windows:
            self._windows.move_to_end((group, window))
            return self._windows[group, window]
        if self._group != group or self._next > window:
            self._group, self._next, self._rest = group, 0, self._batches(group)
        while True:
            try:
                batch = next(self._rest)
            except BaseException:
                self._group = -1  # what has failed does not go on
                raise
            self._next += 1
            self._keep((group, self._next - 1), batch)
            if self._next > window:
                return batch

    def _batches(self, group: int) -> Iterator[Any]:
        size, left = self._at_once[group], self._starts[group + 1] - self._starts[group]
        for batch in self._file.iter_batches(
            size, row_groups=[group], columns=[*self._columns.values()], use_threads=False
        ):
            if batch.num_rows != min(size, left):
                break
            left -= batch.num_rows
            yield batch
        raise ValueError(f"row group {group} of {self._name} has {left} rows less than it claims")

    def _keep(self, key: tuple[int, int], batch: Any) -> None:
        self._windows[key] = batch
        self._kept_bytes += batch.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._windows) > 1:
            self._kept_bytes -= self._windows.popitem(last=False)[1].nbytes


def _check_footer(file: Path) -> None:
    """ValueError unless the file ends in a footer that lies inside it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(0, size - 8))
        end = opened.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC:
        raise ValueError("it does not end as one")
    if length > min(size - 12, MAX_FOOTER_BYTES):
        raise ValueError(f"a footer of {length:,} bytes in a file of {size:,}")
