"""Datasets of rows: Parquet and Arrow files, of one dataset or a split of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from dflop_jax.data.datasets.arrow_file import ArrowFile
from dflop_jax.data.datasets.arrow_library import arrow
from dflop_jax.data.datasets.llava_records import (
    TEXTS,
    USUAL,
    Record,
    RecordFormat,
    parse_record,
)
from dflop_jax.data.datasets.located import Located
from dflop_jax.data.datasets.parquet_file import ParquetFile
from dflop_jax.data.datasets.roots import Roots

OPEN_FILES = 16  # at once, in a process


class TableReader:
    """Each row of the files is a record. Media are in the row itself ({bytes, path}, as `datasets`
    has them), or files below `roots`, else below the folder of the first file."""

    def __init__(
        self,
        files: tuple[Path, ...],
        roots: Sequence[str | Path] = (),
        records: RecordFormat = USUAL,
    ) -> None:
        self.files, self._records = files, records
        self._renamed = replace(records, columns={})  # rows as they are read
        self._unread: tuple[str, ...] = ()
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0]}{rest}"
        self._roots = Roots(roots or [files[0].parent])
        self._opened = lru_cache(OPEN_FILES)(self._open)
        arrow("parquet")  # loaded before processes are forked, which then share it

    def place(self, file: int, number: int) -> str:
        return f"{self.files[file].name}[{number}]"

    def locate(self) -> Iterator[Located]:
        any_row = False
        for k in range(len(self.files)):
            for number in range(len(self._open(k))):
                any_row = True
                yield Located(self.place(k, number), number, k, 0, 0)
        if not any_row:
            raise ValueError(f"{self.name}: holds no rows")

    def read(self, located: Located) -> Record:
        try:
            row = self._opened(located.file).row(located.number)
        except (ValueError, OSError) as e:
            raise ValueError(f"{located.place}: {e}") from None
        record = parse_record(located.place, row, self._roots.find, self._renamed)
        return replace(record, unread=(*record.unread, *self._unread))

    def _open(self, file: int) -> ParquetFile | ArrowFile:
        path = self.files[file]
        if path.suffix == ".parquet":
            return ParquetFile(path, self._choose)
        return ArrowFile(path, self._choose)

    def _choose(self, names: Sequence[str]) -> dict[str, str]:
        chosen = self._records.chosen(names)
        if not any(text in chosen for text in TEXTS):
            raise ValueError(
                f"no column {' or '.join(TEXTS)}, there are {', '.join(names)}; say which it is: "
                f"--data.columns {TEXTS[0]}=NAME, or in a mixture columns: {{{TEXTS[0]}: NAME}}"
            )
        self._unread = tuple(name for name in names if name not in chosen.values())
        return chosen
