"""Opens the reader for a path that the user gives.

A path names a LLaVA-format file or its folder; tar shards: one, a folder, or a pattern
`a-{000..127}.tar` or `a-*.tar`; Parquet or Arrow files: one, a pattern, a folder with the layout of
Hugging Face datasets, or the id of a dataset in the hub's cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from huggingface_hub.utils import HfUri, parse_hf_uri

from dflop_jax.data import bounds
from dflop_jax.data.bounds import MAX_MEMBERS, MAX_NAME_CHARS
from dflop_jax.data.datasets.record_parser import DEFAULT_FORMAT, RecordFormat
from dflop_jax.data.datasets.record_reader import FileReader, RecordReader, ShardReader
from dflop_jax.data.datasets.tables import TableReader
from dflop_jax.data.media.kind import BUILT_IN, Kinds

TABLE_SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train", "validation", "valid", "val", "dev", "eval", "test"}
HUB_PREFIX = "hf://datasets/"
HUB_ID = re.compile(r"(?![^@]*(?:--|\.\.))\w[\w.-]*\b/\w[\w.-]*\b")  # OWNER/NAME
# Files of a dataset on the hub that are downloaded besides media: no code, no pickles.
HUB_ENDINGS = ("parquet", "arrow", "json", "jsonl", "tar", "yaml", "txt", "m4v")
SHARD_OF = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.\w+)")
RANGE = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")


def open_reader(
    path: str | Path,
    roots: Sequence[str | Path] = (),
    columns: Mapping[str, str] = DEFAULT_FORMAT.columns,
    kinds: Kinds = BUILT_IN,
) -> RecordReader:
    """Return a reader of the dataset at a path.

    Args:
      roots: folders of the media; empty: the folder of the file.
      columns: field -> column, for records whose fields have other names.

    Raises:
      ValueError: no dataset is there, the path is ambiguous, or records have no such field.
    """
    with bounds.errors_as(f"{path}: cannot read such records"):
        records = RecordFormat(columns, kinds)
    try:
        if (cached := hub_folder(str(path))) is not None:
            # Files in the cache are links into the folder "blobs" beside "snapshots".
            blobs = [p.parent / "blobs" for p in cached.parents if p.name == "snapshots"][:1]
            path, roots = cached, roots or [cached, *blobs]
        files = find_files(str(path))
    except OSError as e:
        raise ValueError(
            f"{str(path)[:MAX_NAME_CHARS]}: {(e.strerror or str(e)).lower()}"
        ) from None
    if files[0].suffix in TABLE_SUFFIXES:
        return TableReader(files, roots, records)
    if ".tar" in files[0].name:
        if compressed := [file for file in files if file.suffix != ".tar"]:
            raise ValueError(
                f"{compressed[0]}: shards must be plain .tar files to be read by offset"
            )
        return ShardReader(files, roots, records)
    if len(files) > 1:
        raise ValueError(f"{path}: several JSON files; list them in a YAML mixture")
    return FileReader(files, roots, records)


def find_files(path: str) -> tuple[Path, ...]:
    """Return the sorted files of a path, pattern, numbered range or folder; in a folder with splits
    only those of the train split. ValueError: no file, a missing file, or several datasets or
    splits to choose from."""
    pattern = Path(path)
    if numbered := RANGE.fullmatch(path):
        prefix, first, last, suffix = numbered.groups()
        if len(last) > len(str(MAX_MEMBERS)) or int(last) - int(first) >= MAX_MEMBERS:
            raise ValueError(f"{path}: more than {MAX_MEMBERS:,} shards")
        span = range(int(first), int(last) + 1)
        names = [f"{prefix}{k:0{len(first)}d}{suffix}" for k in span]
        return _require_files(Path(), names, path)
    if "*" in pattern.name:
        if files := sorted(pattern.parent.glob(pattern.name)):
            return tuple(files)
        raise ValueError(f"{path}: no file matches; give a pattern of files that are there")
    if pattern.is_dir():
        return _files_of_folder(pattern)
    if not pattern.is_file():
        raise ValueError(
            f"{path}: no such file or folder; check --data: records in JSON or JSON lines, "
            "Parquet, Arrow, .tar shards, or a YAML mixture of them"
        )
    return (pattern,)


def hub_name(path: str) -> HfUri | None:
    """Return the hub's dataset of `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`, or of
    `OWNER/NAME` if no such path exists; None for other paths. ValueError: it is malformed."""
    if path.startswith(HUB_PREFIX):
        return parse_hf_uri(path)
    is_name = HUB_ID.fullmatch(path) and not Path(path).exists()
    return HfUri("dataset", path) if is_name else None


def hub_files(uri: HfUri) -> list[str]:
    """Return the patterns of files to download from a dataset or folder on the hub."""
    endings = [*HUB_ENDINGS, *(e for kind in BUILT_IN for e in kind.extensions)]
    prefix = uri.path_in_repo and f"{uri.path_in_repo}/"
    return [f"{prefix}*.{e}" for end in endings for e in (end, end.upper())]


def hub_folder(path: str) -> Path | None:
    """Return a dataset's folder in the hub's cache, or None if the path names no such dataset."""
    if (uri := hub_name(path)) is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            uri.id,
            repo_type="dataset",
            revision=uri.revision,
            local_files_only=True,
            allow_patterns=hub_files(uri),
        )
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{path}: no such file or folder, and no dataset in the cache of the hub; "
            f"fetch it: hf download --repo-type dataset {uri.id}"
        ) from None
    return Path(folder, uri.path_in_repo)


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    """Return the first that exists: dataset.json, tables, a subfolder's tables, tar shards, or the
    only .json or .jsonl file."""
    if (folder / "dataset.json").is_file():
        return (folder / "dataset.json",)
    if (folder / "state.json").is_file():
        return _saved_tables(folder)
    if tables := _tables_in(folder):
        return _train_split(folder, tables)
    subfolders = [p for p in sorted(folder.iterdir()) if p.is_dir() and _tables_in(p)]
    subfolders = [p for p in subfolders if p.name in ("data", "train")][:1] or subfolders
    if len(subfolders) > 1:
        names = _format_names(p.name for p in subfolders)
        raise ValueError(f"{folder}: holds several datasets, name one: {names}")
    if subfolders:
        return _files_of_folder(subfolders[0])
    if shards := sorted(folder.glob("*.tar*")):
        return tuple(shards)
    files = [p for p in folder.iterdir() if p.suffix in (".json", ".jsonl")]
    if len(files) != 1:
        raise ValueError(
            f"{folder}: holds no dataset.json and {len(files)} .json/.jsonl files; "
            "name the dataset file itself"
        )
    return tuple(files)


def _saved_tables(folder: Path) -> tuple[Path, ...]:
    """Return the files that `save_to_disk` wrote, without cache files."""
    try:
        data = bounds.read_bounded(folder / "state.json", bounds.MAX_YAML_BYTES)
        state = bounds.parse_json(data, dict)
        names = [Path(f["filename"]).name for f in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder}/state.json: names no data files ({e})") from None
    return _require_files(folder, names, str(folder))


def _tables_in(folder: Path) -> list[Path]:
    for suffix in TABLE_SUFFIXES:
        if files := sorted(f for f in folder.glob(f"*{suffix}") if f.is_file()):
            return [f for f in files if not f.name.startswith("cache-")]
    return []


def _train_split(folder: Path, files: list[Path]) -> tuple[Path, ...]:
    """Return the files of the train split, or all files if their names have no split."""
    split_of = {f: next((w for w in re.split(r"[-_.]", f.stem) if w in SPLITS), "") for f in files}
    splits = sorted(set(split_of.values()))
    if "train" in splits:
        files = [f for f in files if split_of[f] == "train"]
    elif len(splits) > 1:
        raise ValueError(
            f"{folder}: holds splits {_format_names(filter(None, splits))}; name the files of "
            f"one, such as {folder}/*{splits[-1]}*{files[0].suffix}"
        )
    matches = (SHARD_OF.fullmatch(f.name) for f in files)
    for name, n, suffix in sorted({m.group(1, 2, 3) for m in matches if m}):
        names = [f"{name}-{k:05d}-of-{n}{suffix}" for k in range(int(n))]
        _require_files(folder, names, str(folder))
    return tuple(files)


def _require_files(folder: Path, names: list[str], label: str) -> tuple[Path, ...]:
    """Return the paths of the named files. ValueError: a file is missing, or none is named."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ValueError(
            f"{label}: {len(missing)} of {len(names)} files are missing, e.g. "
            f"{_format_names(missing)}; fetch them"
        )
    return tuple(folder / name for name in names)


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(names)[:MAX_NAME_CHARS]
