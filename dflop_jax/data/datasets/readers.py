"""Where records stand: LLaVA-format files in folders, and WebDataset tar shards.

A reader lists every record with the place of its bytes, so that an index can hold a million of
them and read one again by a single seek. Every record of every source comes through here; nothing
here decodes media.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.llava_records import Record, parse_json, parse_record

EXTENSIONS = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "video": ("mp4", "mkv", "webm", "avi", "mov"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
}
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


def open_reader(path: str | Path, root: str | Path | None = None) -> Reader:
    """Return a reader of a LLaVA-format file or its folder (media relative to `root`, else to the
    file's folder), or of shards: a .tar, a folder of them, or a pattern `a-{000..127}.tar` or
    `a-*.tar`.

    ValueError when nothing is there.
    """
    shards = find_shards(str(path))
    return ShardReader(shards) if shards else FileReader(find_file(Path(path)), root)


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
    """A .json list or .jsonl of LLaVA-format records."""

    def __init__(self, file: Path, root: str | Path | None = None) -> None:
        self.files, self.name = (file,), str(file)
        self._root = Path(root) if root is not None else file.parent

    def place(self, file: int, number: int) -> str:
        name = self.files[file].name
        return f"{name}:{number}" if name.endswith(".jsonl") else f"{name}[{number}]"

    def locate(self) -> Iterator[Located]:
        (file,) = self.files
        data = file.read_bytes()
        parts = list(_lines(data) if file.suffix == ".jsonl" else _items(data, file))
        if not parts:
            raise ValueError(f"{file}: holds no records")
        for number, start, size in parts:
            yield Located(self.place(0, number), number, 0, start, size)

    def read(self, at: Located) -> Record:
        data = Blob(self.files[at.file], at.offset, at.size_bytes, at.place).read()
        return _parsed(at.place, data, self._find)

    def _find(self, name: str) -> Path:
        if not (self._root / name).is_file():
            raise ValueError(f"missing file {self._root / name}")
        return self._root / name


def _lines(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset, size) of the lines that are not blank; the first is number 1."""
    start = 0
    for n, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield n, start, len(line)
        start += len(line) + 1


def _items(data: bytes, file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset, size) of a JSON list's items. ValueError: it is no list."""
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except msgspec.ValidationError as e:
        raise ValueError(f"{file}: expected a JSON list of records ({e})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{file}: not JSON ({e}); repair it, or name it .jsonl if each line is a record"
        ) from None
    start = 0
    for k, item in enumerate(items):
        start = data.index(item, start)
        yield k, start, len(item)
        start += len(item)


def _parsed(place: str, data: bytes, find: Callable[[str], Path | Blob]) -> Record:
    try:
        raw = parse_json(data)
    except ValueError as e:
        raise ValueError(f"{place}: {e}") from None
    return parse_record(place, raw, find)


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
                yield Located(f"{shard.name}:{key}", number, k, start, size)
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


def _members(shard: Path, start: int = 0, end: int | None = None) -> list[tarfile.TarInfo]:
    """Regular files of a shard whose headers begin in start..end."""
    found = []
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    if end is not None and member.offset >= end:
                        break
                    if member.isfile():
                        found.append(member)
    except (tarfile.TarError, EOFError) as e:
        raise ValueError(f"{shard}: broken tar ({e}); write it anew or leave it out") from None
    if found and found[-1].offset_data + found[-1].size > size:
        raise ValueError(f"{shard}: the tar ends inside {found[-1].name}; write it anew")
    return found


def _groups(members: list[tarfile.TarInfo]) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    group: list[tarfile.TarInfo] = []
    for member in members:
        if group and _key(member.name) != _key(group[0].name):
            yield _key(group[0].name), group
            group = []
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
    except ValueError as e:
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
