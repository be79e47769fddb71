"""Which Parquet or Arrow files a path names, by the layouts of Hugging Face's datasets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dflop_jax.data.bounds import MAX_NAME, MAX_SHARDS, MAX_YAML_BYTES, parse_json, read_bounded

SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train", "validation", "valid", "val", "dev", "eval", "test"}
HUB = "hf://datasets/"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Endings of files of a data set on the hub that are read, or looked at: no code, no pickles.
HUB_ENDINGS = (
    *("parquet", "arrow", "json", "jsonl", "tar", "yaml", "txt"),
    *("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("mp4", "webm", "mkv", "mov", "avi", "m4v", "wav", "flac", "mp3", "ogg", "opus", "m4a"),
)
SHARD_OF = re.compile(r"(.*)-(\d{5})-of-(\d{5})")


def find_tables(path: str) -> tuple[Path, ...]:
    """Files that a path, a pattern `a-*.parquet` or a folder names, sorted; none when it names
    something else. Of a folder with splits the train split is taken.

    ValueError: several datasets or splits of which one has to be named, or a missing file.
    """
    whole = Path(path)
    if whole.suffix in SUFFIXES and "*" in whole.name:
        files = sorted(whole.parent.glob(whole.name))
        if not files:
            raise ValueError(f"{path}: no file matches; give a pattern of files that are there")
    elif whole.is_dir():
        files = _in_folder(whole)
    else:
        files = [whole] if whole.suffix in SUFFIXES and whole.is_file() else []
    if len(files) > MAX_SHARDS:
        raise ValueError(f"{path}: more than {MAX_SHARDS:,} files")
    return tuple(files)


def hub_name(path: str) -> tuple[str, str] | None:
    """The data set (OWNER/NAME) and the folder in it that `hf://datasets/OWNER/NAME[/FOLDER]` names
    on Hugging Face's hub, or `OWNER/NAME` where there is no such path; None for any other path."""
    name, rest = path.removeprefix(HUB), ""
    if name != path:
        name, rest = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    if not HUB_ID.fullmatch(name) or (name == path and Path(path).exists()):
        return None
    return name, rest


def hub_files(folder: str) -> tuple[str, ...]:
    """Patterns of the files of a data set on the hub, or of a folder in it, that are fetched."""
    below = f"{folder}/*" if folder else "*"
    return tuple(f"{below}.{e}" for end in HUB_ENDINGS for e in (end, end.upper()))


def hub_folder(path: str) -> Path | None:
    """The folder in the hub's cache that a path names, None for one that is not of the hub; see
    `hub_name`.

    ValueError: it is not in the cache.
    """
    if (named := hub_name(path)) is None:
        return None
    name, rest = named
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                repo_type="dataset",
                local_files_only=True,
                allow_patterns=list(hub_files(rest)),
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        raise ValueError(
            f"{path}: no such file or folder, and no dataset in the cache of the hub; "
            f"fetch it: hf download --repo-type dataset {name}"
        ) from None
    if ".." in Path(rest).parts:
        raise ValueError(f"{path}: leads out of the dataset")
    return folder / rest


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset.json").is_file():
        return []
    if (folder / "state.json").is_file():
        return _saved(folder)
    folders = {p.name: _tables(p) for p in sorted(folder.iterdir()) if p.is_dir()}
    below = {name: files for name, files in folders.items() if files}
    files = _tables(folder) or below.pop("data", [])
    if files:
        return _complete(_train_split(folder, files))
    if (folder / "dataset_dict.json").is_file() and "train" in below:
        return _saved(folder / "train")
    for only in ["train"] if "train" in below else [*below] if len(below) == 1 else []:
        return _complete(below[only])
    if below:
        raise ValueError(f"{folder}: holds several datasets, name one: {_some(below)}")
    return []


def _saved(folder: Path) -> list[Path]:
    """Files that `save_to_disk` wrote; others in the folder are caches."""
    try:
        state = parse_json(read_bounded(folder / "state.json", MAX_YAML_BYTES), dict)
        names = [str(f["filename"]) for f in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder}/state.json: names no data files ({e})") from None
    files = [folder / Path(name).name for name in names]
    missing = [f for f in files if not f.is_file()]
    if missing or not files:
        raise ValueError(f"{folder}: {len(missing)} of {len(files)} files are missing, e.g. "
                         f"{_some(f.name for f in missing)}")  # fmt: skip
    return files


def _tables(folder: Path) -> list[Path]:
    for suffix in SUFFIXES:
        if files := sorted(f for f in folder.glob(f"*{suffix}") if f.is_file()):
            return [f for f in files if not f.name.startswith("cache-")]
    return []


def _train_split(folder: Path, files: list[Path]) -> list[Path]:
    """Those of the train split where names say splits."""
    split_of = {f: next((w for w in re.split(r"[-_.]", f.stem) if w in SPLITS), "") for f in files}
    splits = sorted(set(split_of.values()))
    if "train" in splits:
        return [f for f in files if split_of[f] == "train"]
    if len(splits) > 1:
        pattern = files[0].parent / f"*{splits[-1]}*{files[0].suffix}"
        raise ValueError(
            f"{folder}: holds splits {_some(filter(None, splits))}; name the files of one, such as "
            f"{pattern}"
        )
    return files


def _complete(files: list[Path]) -> list[Path]:
    """ValueError when one of the files numbered K-of-N is missing."""
    numbered: dict[tuple[str, int], set[int]] = {}
    for match in (SHARD_OF.fullmatch(f.stem) for f in files):
        if match:
            numbered.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, n), there in numbered.items():
        if len(there) < n:
            first = next(k for k in range(n) if k not in there)
            raise ValueError(
                f"{files[0].parent}: {len(there)} of {n} files are there, "
                f"{name}-{first:05d}-of-{n:05d}{files[0].suffix} is missing; fetch the rest"
            )
    return files


def _some(names: Iterable[str]) -> str:
    return ", ".join(names)[:MAX_NAME]
