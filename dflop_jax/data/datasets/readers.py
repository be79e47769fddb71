"""Where records stand: LLaVA-format files in folders, and WebDataset tar shards.

A reader lists every record with the place of its bytes, so that an index can hold a million of
them and read one again by a single seek. Every record of every source comes through here; nothing
here decodes media.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

import msgspec

from dflop_jax.data.bounds import (
    MAX_LIST_BYTES,
    MAX_MEDIA,
    MAX_MEMBERS,
    MAX_SHARDS,
    MAX_TAR_HEADER,
    named,
    parse_json,
    read_bounded,
)
from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.llava_records import Record, parse_record

EXTENSIONS = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "video": ("mp4", "mkv", "webm", "avi", "mov"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
}
CHUNK_BYTES = 1 << 20  # of a line, read at once
MAX_NAME = 200  # characters of a member's name in messages
QUESTION = {"image": "Describe the image.", "video": "Describe the video.",
            "audio": "What is heard?"}  # fmt: skip


@dataclass(frozen=True)
class Located:
    """A record's place: bytes of `files[file]` (a shard's: from its first member on), its number
    there (a line's, in a file of lines), and its name for messages."""

    place: str
    number: int
    file: int
    offset: int
    size_bytes: int


class Reader(Protocol):
    """A dataset of records; `files` are all that its records stand in."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def locate(self) -> Iterator[Located]:
        """Yield every record, in order. ValueError: a file that cannot be read at all."""
        ...

    def place(self, file: int, number: int) -> str:
        """How messages call a record without reading it."""
        ...

    def read(self, at: Located) -> Record:
        """Return a usable record. ValueError: its name and the reason why it is not usable."""
        ...


def open_reader(path: str | Path, roots: Sequence[str | Path] = ()) -> Reader:
    """Return a reader of a LLaVA-format file or its folder (media below `roots`, else below the
    file's folder), or of shards: a .tar, a folder of them, or a pattern `a-{000..127}.tar` or
    `a-*.tar`.

    ValueError when nothing is there.
    """
    try:
        shards = find_shards(str(path))
        return ShardReader(shards) if shards else FileReader(find_file(Path(path)), roots)
    except OSError as e:
        raise ValueError(f"{str(path)[:MAX_NAME]}: {(e.strerror or str(e)).lower()}") from None


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
        raise ValueError(f"{path}: no such file or folder; data.path names a LLaVA-format JSON")
    return path


class FileReader:
    """A .json list or .jsonl of LLaVA-format records.

    A medium is looked for below each of the `roots` in turn. None is opened that lies outside them
    all, whether its path is absolute, climbs, or leads through a link.
    """

    def __init__(self, file: Path, roots: Sequence[str | Path] = ()) -> None:
        self.files, self.name = (file,), str(file)
        self._roots = [Path(r) for r in roots] or [file.parent]
        self._real_roots = [r.resolve() for r in self._roots]

    def place(self, file: int, number: int) -> str:
        name = self.files[file].name
        return f"{name}:{number}" if name.endswith(".jsonl") else f"{name}[{number}]"

    def locate(self) -> Iterator[Located]:
        (file,) = self.files
        number = -1
        for number, start, size in (_lines if file.suffix == ".jsonl" else _items)(file):
            yield Located(self.place(0, number), number, 0, start, size)
        if number < 0:
            raise ValueError(f"{file}: holds no records")

    def read(self, at: Located) -> Record:
        try:
            raw = parse_json(Blob(self.files[at.file], at.offset, at.size_bytes, at.place).read())
        except (ValueError, OSError) as e:
            raise ValueError(f"{at.place}: {e}") from None
        return parse_record(at.place, raw, self._find)

    def _find(self, name: str) -> Path:
        places = [root / name for root in self._roots]
        inside = [p for p in places if any(p.resolve().is_relative_to(r) for r in self._real_roots)]
        if not inside:
            roots = ", ".join(map(str, self._roots))
            raise ValueError(
                f"{name} leads out of {roots}; to allow it, add its folder to data.root"
            )
        for place in inside:
            if place.is_file():
                return place
        raise ValueError(f"missing file {inside[0]}")


def _lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset, size) of the lines that are not blank; the first is number 1."""
    number, start, size, blank = 1, 0, 0, True
    with named(f"{file}: cannot be read"), file.open("rb") as opened:
        while part := opened.readline(CHUNK_BYTES):  # a line may have no end
            size, blank = size + len(part), blank and not part.strip()
            if part.endswith(b"\n"):
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
        raise ValueError(
            f"{file}: {e}, expected a JSON list of records; repair it, or name it .jsonl if each "
            "line is a record"
        ) from None
    start = 0
    for k, item in enumerate(items):
        start = data.index(item, start)
        yield k, start, len(item)
        start += len(item)


class ShardReader:
    """WebDataset shards: tar files where members of equal name, but for the extension, are one
    sample. A sample has a .json, a LLaVA-format record whose media are other members of the sample
    (named in it, or, if it names none, all of them in order), or a .txt, a caption of its one
    medium.
    """

    def __init__(self, shards: tuple[Path, ...]) -> None:
        self.files = shards
        rest = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        self.name = f"{shards[0]}{rest}"

    def place(self, file: int, number: int) -> str:
        return f"{self.files[file].name}[{number}]"

    def locate(self) -> Iterator[Located]:
        number = 0
        for k, shard in enumerate(self.files):
            for key, members in _groups(_members(shard)):
                start, last = members[0].offset, members[-1]
                size = last.offset_data + last.size - start
                name = key.encode(errors="replace").decode()  # it may hold lone surrogates
                yield Located(f"{shard.name}:{name}", number, k, start, size)
                number += 1

    def read(self, at: Located) -> Record:
        shard = self.files[at.file]
        members = {
            m.name: Blob(shard, m.offset_data, m.size, m.name)
            for m in _members(shard, at.offset, at.offset + at.size_bytes)
        }
        return _shard_record(at.place, members)


def find_shards(path: str) -> tuple[Path, ...]:
    """Tar files that a path or pattern names, sorted; none when it names something else.

    ValueError: a compressed shard, or one of a numbered range that is missing.
    """
    numbered = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", path)
    if numbered:
        before, first, last, after = numbered.groups()
        if len(last) > len(str(MAX_SHARDS)) or int(last) - int(first) >= MAX_SHARDS:
            raise ValueError(f"{path}: more than {MAX_SHARDS:,} shards")
        span = range(int(first), int(last) + 1)
        shards = [Path(f"{before}{k:0{len(first)}d}{after}") for k in span]
        missing = [s for s in shards if not s.is_file()]
        if missing or not shards:
            raise ValueError(f"{path}: {len(missing)} shards are missing, e.g. {missing[:1]}")
        return tuple(shards)
    whole = Path(path)
    if "*" in whole.name:
        shards = sorted(whole.parent.glob(whole.name))
        if not shards:
            raise ValueError(f"{path}: no file matches")
    elif whole.is_dir():
        shards = [] if (whole / "dataset.json").is_file() else sorted(whole.glob("*.tar*"))
    else:
        shards = [whole] if ".tar" in whole.name and whole.is_file() else []
    packed = [s for s in shards if s.suffix != ".tar"]
    if packed:
        raise ValueError(f"{packed[0]}: shards must be plain .tar files to be read by offset")
    return tuple(shards)


class _Headers:
    """A tar as `tarfile` reads it, which is headers alone; none of them may be large."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_TAR_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(shard: Path, start: int = 0, end: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a shard whose headers begin in start..end."""
    with named(f"{shard}: broken tar", "; write it anew or leave it out"), shard.open("rb") as file:
        size = shard.stat().st_size
        file.seek(start)
        with tarfile.open(fileobj=_Headers(file), mode="r:") as tar:  # type: ignore[call-overload]
            for _ in range(MAX_MEMBERS):
                member, tar.members = tar.next(), []  # tarfile keeps them all
                if member is None or (end is not None and member.offset >= end):
                    return
                if member.size < 0 or member.issparse():
                    raise ValueError(f"a member of {member.size} bytes, or with holes")
                if member.offset_data + member.size > size:
                    raise ValueError(f"the tar ends inside {member.name[:MAX_NAME]}")
                if member.isfile():
                    yield member
            raise ValueError(f"more than {MAX_MEMBERS:,} members")


def _groups(members: Iterable[tarfile.TarInfo]) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    group: list[tarfile.TarInfo] = []
    for member in members:
        if group and _key(member.name) != _key(group[0].name):
            yield _key(group[0].name), group
            group = []
        if len(group) > MAX_MEDIA:
            raise ValueError(f"more than {MAX_MEDIA} members of sample {group[0].name[:MAX_NAME]}")
        group.append(member)
    if group:
        yield _key(group[0].name), group


def _key(name: str) -> str:
    """A member's name up to the first dot of its last part."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.split(".")[0] or path.name))


def _shard_record(place: str, members: Mapping[str, Blob]) -> Record:
    media = {kind: [n for n in members if n.rsplit(".", 1)[-1].lower() in extensions]
             for kind, extensions in EXTENSIONS.items()}  # fmt: skip
    by_name = {PurePosixPath(name).name: blob for name, blob in members.items()}
    texts = {n.rsplit(".", 1)[-1].lower(): blob for n, blob in members.items()}

    def find(name: str) -> Blob:
        blob = members.get(name) or by_name.get(PurePosixPath(name).name)
        if blob is None:
            raise ValueError(f"missing file {name} in the sample")
        return blob

    try:
        if "json" in texts:
            raw = parse_json(texts["json"].read())
            if isinstance(raw, dict) and not any(raw.get(kind) for kind in EXTENSIONS):
                raw = {**raw, **media}
        elif "txt" in texts:
            raw = _captioned(texts["txt"], media)
        else:
            raise ValueError("neither a .json nor a .txt in this sample of the shard")
    except (ValueError, OSError) as e:
        raise ValueError(f"{place}: {e}") from None
    return parse_record(place, raw, find)


def _captioned(caption: Blob, media: Mapping[str, list[str]]) -> dict[str, object]:
    """Return the record of a caption of a sample's one medium; ValueError unless it has one."""
    kinds = [kind for kind, names in media.items() for _ in names]
    if len(kinds) != 1:
        raise ValueError(f"a caption (.txt) for {len(kinds)} media; it needs one, or a .json")
    question = f"<{kinds[0]}>\n{QUESTION[kinds[0]]}"
    answer = caption.read().decode("utf-8", "replace").strip()
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {kinds[0]: media[kinds[0]], "conversations": turns}
