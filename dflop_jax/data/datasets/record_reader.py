"""Readers list the locations of a dataset's records, and read single records by location."""

from __future__ import annotations

import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from dflop_jax.data import bounds
from dflop_jax.data.bounds import MAX_PARTS, errors_as, parse_json
from dflop_jax.data.datasets.blob import Blob, MediaRoots
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, Record, RecordFormat, parse_record


@dataclass(frozen=True)
class RecordLocation:
    label: str  # name in messages
    number: int  # number in its file; in a .jsonl: its line
    file: int  # index in the reader's `files`
    offset: int  # of its first byte; in a shard: of its first member
    size_bytes: int


class RecordReader(ABC):
    """Reads a dataset of records in `files`, with media in `roots` or beside the first file."""

    def __init__(
        self,
        files: tuple[Path, ...],
        roots: Sequence[str | Path] = (),
        records: RecordFormat = DEFAULT_FORMAT,
    ) -> None:
        self.files = files
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0]}{rest}"
        self._roots, self._records = MediaRoots(roots or [files[0].parent]), records

    @abstractmethod
    def locate(self) -> Iterator[RecordLocation]:
        """Yield the location of every record, in order. ValueError: a file cannot be read."""

    def record_label(self, file: int, number: int) -> str:
        """Return the label of a record without reading it."""
        return f"{self.files[file].name}[{number}]"

    @abstractmethod
    def read(self, location: RecordLocation) -> Record:
        """Return the record. ValueError names a record that is unusable, and the reason."""


class FileReader(RecordReader):
    """Reads LLaVA-format records from a .json list or a .jsonl file."""

    def record_label(self, file: int, number: int) -> str:
        name = self.files[file].name
        return f"{name}:{number}" if name.endswith(".jsonl") else super().record_label(file, number)

    def locate(self) -> Iterator[RecordLocation]:
        (file,) = self.files
        number = -1
        for number, start, size in (_lines if file.suffix == ".jsonl" else _items)(file):
            yield RecordLocation(self.record_label(0, number), number, 0, start, size)
        if number < 0:
            raise ValueError(f"{file}: holds no records; name a file with records")

    def read(self, location: RecordLocation) -> Record:
        label, file = location.label, self.files[location.file]
        try:
            raw = parse_json(Blob(file, location.offset, location.size_bytes, label).read())
        except (ValueError, OSError) as e:
            raise ValueError(f"{label}: {e}") from None
        return parse_record(label, raw, self._roots.resolve, self._records)


def _lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number from 1, offset, size in bytes) of each line that is not blank."""
    number, start, size, blank = 1, 0, 0, True
    with errors_as(f"{file}: cannot be read"), file.open("rb") as opened:
        if not bounds.strip_byte_order_mark(opened.read(4)):
            raise ValueError("empty; name a file that holds records")
        opened.seek(0)
        while chunk := opened.readline(bounds.MiB):  # a line may be of any length
            size, blank = size + len(chunk), blank and not chunk.strip()
            if chunk.endswith(b"\n"):
                if not blank:
                    yield number, start, size - 1
                number, start, size, blank = number + 1, start + size, 0, True
        if not blank:
            yield number, start, size


def _items(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number from 0, offset, size in bytes) of a JSON list's items. ValueError: no list."""
    data = bounds.read_bounded(file, bounds.MAX_LIST_BYTES)
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


class ShardReader(RecordReader):
    """Reads tar files (WebDataset). Members whose names differ only in the extension are one
    sample: a .json with a LLaVA-format record, whose media are members that it names or else all
    others in order; or a .txt with the caption of one medium."""

    def locate(self) -> Iterator[RecordLocation]:
        number = 0
        for k, shard in enumerate(self.files):
            for key, group in groupby(_members(shard), lambda member: _sample_key(member.name)):
                members = [*islice(group, MAX_PARTS + 2)]
                name = key.encode(errors="replace").decode()  # it may hold lone surrogates
                if len(members) > MAX_PARTS + 1:
                    short = name[: bounds.MAX_NAME_CHARS]
                    raise ValueError(f"more than {MAX_PARTS} members of sample {short}")
                start, last = members[0].offset, members[-1]
                size = last.offset_data + last.size - start
                yield RecordLocation(f"{shard.name}:{name}", number, k, start, size)
                number += 1

    def read(self, location: RecordLocation) -> Record:
        shard, label, records = self.files[location.file], location.label, self._records
        members = {
            m.name: Blob(shard, m.offset_data, m.size, m.name)
            for m in _members(shard, location.offset, location.offset + location.size_bytes)
        }
        media = {
            kind.name: [n for n in members if _extension(n) in kind.extensions]
            for kind in records.kinds
        }
        by_name = {PurePosixPath(name).name: blob for name, blob in members.items()}
        texts = {_extension(name): blob for name, blob in members.items()}

        def resolve(name: str) -> Blob:
            blob = members.get(name) or by_name.get(PurePosixPath(name).name)
            if blob is None:
                raise ValueError(f"missing file {name} in the sample")
            return blob

        try:
            if "json" in texts:
                raw = parse_json(texts["json"].read())
            elif "txt" in texts:
                records = replace(records, columns={})
                kinds = [kind for kind in records.kinds for _ in media[kind.name]]
                if len(kinds) != 1:
                    raise ValueError(f"a caption (.txt) for {len(kinds)} media, not for one")
                question = f"<{kinds[0].name}>\n{kinds[0].question}"
                answer = texts["txt"].read().decode("utf-8", "replace").strip()
                pairs = (("human", question), ("gpt", answer))
                raw = {"conversations": [{"from": role, "value": text} for role, text in pairs]}
            else:
                raise ValueError("this sample of the shard has no .json or .txt")
        except (ValueError, OSError) as e:
            raise ValueError(f"{label}: {e}") from None
        return parse_record(label, raw, resolve, records, default_media=media)


class _TarHeaders:
    """A tar file of which `tarfile` reads only headers; a large header is an error."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= bounds.MAX_TAR_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(shard: Path, start: int = 0, end: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a shard whose headers begin at bytes start up to end."""
    with (
        errors_as(f"{shard}: broken tar", "; write it anew or leave it out"),
        shard.open("rb") as file,
    ):
        size = shard.stat().st_size
        file.seek(start)
        with tarfile.open(fileobj=_TarHeaders(file), mode="r:") as tar:  # type: ignore[call-overload]
            for _ in range(bounds.MAX_MEMBERS):
                member, tar.members = tar.next(), []  # else tarfile would keep all members
                if member is None or (end is not None and member.offset >= end):
                    return
                if member.size < 0 or member.issparse():
                    raise ValueError(f"a member of {member.size} bytes, or with holes")
                if member.offset_data + member.size > size:
                    raise ValueError(f"the tar ends inside {member.name[: bounds.MAX_NAME_CHARS]}")
                if member.isfile():
                    yield member
            raise ValueError(f"more than {bounds.MAX_MEMBERS:,} members")


def _sample_key(name: str) -> str:
    """Return a member's path up to the first dot of its file name."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.split(".")[0] or path.name))


def _extension(name: str) -> str:
    return name.rsplit(".", 1)[-1].lower()
