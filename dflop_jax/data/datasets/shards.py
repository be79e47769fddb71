"""WebDataset shards: tar files whose members of equal name are a record and its media."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from dflop_jax.data.bounds import (
    MAX_MEDIA,
    MAX_MEMBERS,
    MAX_NAME_CHARS,
    MAX_SHARDS,
    MAX_TAR_HEADER_BYTES,
    errors_as,
    parse_json,
)
from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.find_tables import match_files, require_files
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, Record, RecordFormat, parse_record
from dflop_jax.data.datasets.record_reader import RecordLocation, RecordReader
from dflop_jax.data.media.kind import Kinds


def find_shards(path: str) -> tuple[Path, ...]:
    """Tar files that a path or pattern names, sorted; none when it names something else.

    ValueError: a compressed shard, or one of a numbered range that is missing.
    """
    numbered = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", path)
    if numbered:
        prefix, first, last, suffix = numbered.groups()
        if len(last) > len(str(MAX_SHARDS)) or int(last) - int(first) >= MAX_SHARDS:
            raise ValueError(f"{path}: more than {MAX_SHARDS:,} shards")
        span = range(int(first), int(last) + 1)
        names = [f"{prefix}{k:0{len(first)}d}{suffix}" for k in span]
        return tuple(require_files(Path(), names, path))
    pattern = Path(path)
    if "*" in pattern.name:
        shards = match_files(pattern)
    elif pattern.is_dir():
        shards = [] if (pattern / "dataset.json").is_file() else sorted(pattern.glob("*.tar*"))
    else:
        shards = [pattern] if ".tar" in pattern.name and pattern.is_file() else []
    compressed = [s for s in shards if s.suffix != ".tar"]
    if compressed:
        raise ValueError(f"{compressed[0]}: shards must be plain .tar files to be read by offset")
    return tuple(shards)


class ShardReader(RecordReader):
    """WebDataset shards: tar files where members of equal name, but for the extension, are one
    sample. A sample has a .json, a LLaVA-format record whose media are other members of the sample
    (named in it, or, if it names none, all of them in order), or a .txt, a caption of its one
    medium.
    """

    def __init__(self, shards: tuple[Path, ...], records: RecordFormat = DEFAULT_FORMAT) -> None:
        super().__init__(shards)
        self._records = records

    def locate(self) -> Iterator[RecordLocation]:
        number = 0
        for k, shard in enumerate(self.files):
            for key, members in _group_members(_members(shard)):
                start, last = members[0].offset, members[-1]
                size = last.offset_data + last.size - start
                name = key.encode(errors="replace").decode()  # it may hold lone surrogates
                yield RecordLocation(f"{shard.name}:{name}", number, k, start, size)
                number += 1

    def read(self, location: RecordLocation) -> Record:
        shard = self.files[location.file]
        members = {
            m.name: Blob(shard, m.offset_data, m.size, m.name)
            for m in _members(shard, location.offset, location.offset + location.size_bytes)
        }
        return _shard_record(location.label, members, self._records)


class _TarHeaders:
    """A tar as `tarfile` reads it, which is headers alone; none of them may be large."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_TAR_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(shard: Path, start: int = 0, end: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a shard whose headers begin in start..end."""
    with (
        errors_as(f"{shard}: broken tar", "; write it anew or leave it out"),
        shard.open("rb") as file,
    ):
        size = shard.stat().st_size
        file.seek(start)
        with tarfile.open(fileobj=_TarHeaders(file), mode="r:") as tar:  # type: ignore[call-overload]
            for _ in range(MAX_MEMBERS):
                member, tar.members = tar.next(), []  # tarfile keeps them all
                if member is None or (end is not None and member.offset >= end):
                    return
                if member.size < 0 or member.issparse():
                    raise ValueError(f"a member of {member.size} bytes, or with holes")
                if member.offset_data + member.size > size:
                    raise ValueError(f"the tar ends inside {member.name[:MAX_NAME_CHARS]}")
                if member.isfile():
                    yield member
            raise ValueError(f"more than {MAX_MEMBERS:,} members")


def _group_members(
    members: Iterable[tarfile.TarInfo],
) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    group: list[tarfile.TarInfo] = []
    for member in members:
        if group and _sample_key(member.name) != _sample_key(group[0].name):
            yield _sample_key(group[0].name), group
            group = []
        if len(group) > MAX_MEDIA:
            raise ValueError(
                f"more than {MAX_MEDIA} members of sample {group[0].name[:MAX_NAME_CHARS]}"
            )
        group.append(member)
    if group:
        yield _sample_key(group[0].name), group


def _sample_key(name: str) -> str:
    """A member's name up to the first dot of its last part."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.split(".")[0] or path.name))


def _shard_record(label: str, members: Mapping[str, Blob], records: RecordFormat) -> Record:
    media = {kind.name: [n for n in members if n.rsplit(".", 1)[-1].lower() in kind.extensions]
             for kind in records.kinds}  # fmt: skip
    by_name = {PurePosixPath(name).name: blob for name, blob in members.items()}
    texts = {n.rsplit(".", 1)[-1].lower(): blob for n, blob in members.items()}

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
            raw = _caption_record(texts["txt"], media, records.kinds)
        else:
            raise ValueError("neither a .json nor a .txt in this sample of the shard")
    except (ValueError, OSError) as e:
        raise ValueError(f"{label}: {e}") from None
    return parse_record(label, raw, resolve, records, default_media=media)


def _caption_record(
    caption: Blob, media: Mapping[str, list[str]], kinds: Kinds
) -> dict[str, object]:
    """Return the record of a caption of a sample's one medium; ValueError unless it has one."""
    kinds_of_media = [kind for kind in kinds for _ in media[kind.name]]
    if len(kinds_of_media) != 1:
        raise ValueError(
            f"a caption (.txt) for {len(kinds_of_media)} media; it needs one, or a .json"
        )
    question = f"<{kinds_of_media[0].name}>\n{kinds_of_media[0].question}"
    answer = caption.read().decode("utf-8", "replace").strip()
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns}
