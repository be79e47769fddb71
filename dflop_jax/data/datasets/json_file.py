"""LLaVA-format records in a JSON list or in lines, their media beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dflop_jax.data.bounds import (
    MAX_LIST_BYTES,
    errors_as,
    parse_json,
    read_bounded,
    strip_byte_order_mark,
)
from dflop_jax.data.datasets.blob import Blob, MediaRoots
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, Record, RecordFormat, parse_record
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader

CHUNK_BYTES = 1 << 20  # of a line, read at once


def find_file(path: Path) -> Path:
    """Return the dataset file: the path itself, or dataset.json or the only .json(l) in a folder.

    ValueError when there is none, or several.
    """
    if path.is_dir():
        if (path / "dataset.json").is_file():
            return path / "dataset.json"
        files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
        if len(files) != 1:
            raise ValueError(
                f"{path}: holds no dataset.json and {len(files)} .json/.jsonl files; "
                "name the dataset file itself"
            )
        return files[0]
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file or folder; check --data: records in JSON or JSON lines, "
            "Parquet, Arrow, .tar shards, or a YAML mixture of them"
        )
    return path


class FileReader(RecordReader):
    """A .json list or .jsonl of records; their media lie below `roots`, else the file's folder."""

    def __init__(
        self, file: Path, roots: Sequence[str | Path] = (), records: RecordFormat = DEFAULT_FORMAT
    ) -> None:
        super().__init__((file,))
        self._roots, self._records = MediaRoots(roots or [file.parent]), records

    def record_label(self, file: int, number: int) -> str:
        name = self.files[file].name
        return f"{name}:{number}" if name.endswith(".jsonl") else super().record_label(file, number)

    def locate(self) -> Iterator[RecordLocation]:
        (file,) = self.files
        number = -1
        for number, start, size in (_lines if file.suffix == ".jsonl" else _items)(file):
            yield RecordLocation(self.record_label(0, number), number, 0, start, size)
        if number < 0:
            raise ValueError(f"{file}: holds no records; name a file that does")

    def read(self, location: RecordLocation) -> Record:
        try:
            file = self.files[location.file]
            blob = Blob(file, location.offset, location.size_bytes, location.label)
            raw = parse_json(blob.read())
        except (ValueError, OSError) as e:
            raise ValueError(f"{location.label}: {e}") from None
        return parse_record(location.label, raw, self._roots.resolve, self._records)


def _lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset, size) of the lines that are not blank; the first is number 1."""
    number, start, size, blank = 1, 0, 0, True
    with errors_as(f"{file}: cannot be read"), file.open("rb") as opened:
        if not strip_byte_order_mark(opened.read(4)):
            raise ValueError("empty; name a file that holds records")
        opened.seek(0)
        while chunk := opened.readline(CHUNK_BYTES):  # a line may have no end
            size, blank = size + len(chunk), blank and not chunk.strip()
            if chunk.endswith(b"\n"):
                if not blank:
                    yield number, start, size - 1
                number, start, size, blank = number + 1, start + size, 0, True
        if not blank:
            yield number, start, size


def _items(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset, size) of a JSON list's items. ValueError: it is no list."""
    data = read_bounded(file, MAX_LIST_BYTES)
    try:
        items = parse_json(data, list[msgspec.Raw])
    except ValueError as e:
        remedy = (
            "repair it, or name it .jsonl if each line is a record"
            if file.suffix == ".json"
            else f"give one, JSON lines (.jsonl) or Parquet, {file.suffix or 'this'} is not read"
        )
        raise ValueError(f"{file}: {e}, expected a JSON list of records; {remedy}") from None
    start = 0
    for k, item in enumerate(items):
        start = data.index(item, start)
        yield k, start, len(item)
        start += len(item)
