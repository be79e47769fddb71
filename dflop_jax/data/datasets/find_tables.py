"""Which Parquet or Arrow files a path names, by the layouts of Hugging Face's datasets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.utils import HfUri, parse_hf_uri

from dflop_jax.data.bounds import MAX_NAME_CHARS, MAX_YAML_BYTES, parse_json, read_bounded
from dflop_jax.data.media.kinds import BUILT_IN

SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train", "validation", "valid", "val", "dev", "eval", "test"}
HUB_PREFIX = "hf://datasets/"
HUB_ID = re.compile(r"(?![^@]*(?:--|\.\.))\w[\w.-]*\b/\w[\w.-]*\b")  # OWNER/NAME
# Beside media, files of a dataset on the hub that are read, or looked at: no code, no pickles.
HUB_ENDINGS = ("parquet", "arrow", "json", "jsonl", "tar", "yaml", "txt", "m4v")
SHARD_OF = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.\w+)")


def find_tables(path: str) -> tuple[Path, ...]:
    """Return the sorted files that a path, a pattern `a-*.parquet` or a folder names; () when it
    names something else. Of a folder with splits the train split is taken.

    ValueError: several datasets or splits of which one must be named, or a missing file.
    """
    pattern = Path(path)
    if pattern.suffix in SUFFIXES and "*" in pattern.name:
        files = match_files(pattern)
    elif pattern.is_dir():
        files = _tables_of_dataset(pattern)
    else:
        files = [pattern] if pattern.suffix in SUFFIXES and pattern.is_file() else []
    return tuple(files)


def match_files(pattern: Path) -> list[Path]:
    """Return the sorted files of a pattern in a folder; ValueError when there are none."""
    if files := sorted(pattern.parent.glob(pattern.name)):
        return files
    raise ValueError(f"{pattern}: no file matches; give a pattern of files that are there")


def hub_name(path: str) -> HfUri | None:
    """Return the dataset, revision and folder that `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`
    names on the Hugging Face hub, or `OWNER/NAME` where no such path exists; None for any other
    path.

    HfUriError, a ValueError: the path is a malformed name.
    """
    if path.startswith(HUB_PREFIX):
        return parse_hf_uri(path)
    is_name = HUB_ID.fullmatch(path) and not Path(path).exists()
    return HfUri("dataset", path) if is_name else None


def hub_files(uri: HfUri) -> list[str]:
    """Return patterns of the files that are downloaded of a dataset on the hub, or of a folder in
    it."""
    endings = [*HUB_ENDINGS, *(e for kind in BUILT_IN for e in kind.extensions)]
    prefix = uri.path_in_repo and f"{uri.path_in_repo}/"
    return [f"{prefix}*.{e}" for end in endings for e in (end, end.upper())]


def hub_folder(path: str) -> Path | None:
    """Return the folder in the hub's cache that a path names, None where `hub_name` is None.

    ValueError: it is not in the cache.
    """
    if (uri := hub_name(path)) is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            uri.id, repo_type="dataset", revision=uri.revision, local_files_only=True,
            allow_patterns=hub_files(uri),
        )  # fmt: skip
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{path}: no such file or folder, and no dataset in the cache of the hub; "
            f"fetch it: hf download --repo-type dataset {uri.id}"
        ) from None
    return Path(folder, uri.path_in_repo)


def _tables_of_dataset(folder: Path) -> list[Path]:
    if (folder / "dataset.json").is_file():
        return []
    if (folder / "state.json").is_file():
        return _saved_tables(folder)
    if files := _tables_in(folder):
        return _check_shards(folder, _train_split(folder, files))
    subfolders = [p for p in sorted(folder.iterdir()) if p.is_dir() and _tables_in(p)]
    subfolders = [p for p in subfolders if p.name in ("data", "train")][:1] or subfolders
    if len(subfolders) > 1:
        raise ValueError(
            f"{folder}: holds several datasets, name one: "
            f"{_format_names(p.name for p in subfolders)}"
        )
    return _tables_of_dataset(subfolders[0]) if subfolders else []


def _saved_tables(folder: Path) -> list[Path]:
    """Return the files that `save_to_disk` wrote; others in the folder are caches."""
    try:
        state = parse_json(read_bounded(folder / "state.json", MAX_YAML_BYTES), dict)
        names = [Path(f["filename"]).name for f in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder}/state.json: names no data files ({e})") from None
    return require_files(folder, names)


def _tables_in(folder: Path) -> list[Path]:
    for suffix in SUFFIXES:
        if files := sorted(f for f in folder.glob(f"*{suffix}") if f.is_file()):
            return [f for f in files if not f.name.startswith("cache-")]
    return []


def _train_split(folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of the train split where their names have splits."""
    split_of = {f: next((w for w in re.split(r"[-_.]", f.stem) if w in SPLITS), "") for f in files}
    splits = sorted(set(split_of.values()))
    if "train" in splits:
        return [f for f in files if split_of[f] == "train"]
    if len(splits) > 1:
        raise ValueError(
            f"{folder}: holds splits {_format_names(filter(None, splits))}; name the files of "
            f"one, such as {folder}/*{splits[-1]}*{files[0].suffix}"
        )
    return files


def _check_shards(folder: Path, files: list[Path]) -> list[Path]:
    """Return the files; ValueError when one of those numbered K-of-N is missing."""
    matches = (SHARD_OF.fullmatch(f.name) for f in files)
    for name, n, suffix in sorted({m.group(1, 2, 3) for m in matches if m}):
        require_files(folder, [f"{name}-{k:05d}-of-{n}{suffix}" for k in range(int(n))])
    return files


def require_files(folder: Path, names: list[str], label: str = "") -> list[Path]:
    """Return the files of these names; ValueError when there are none or one is missing.

    Args:
      label: names them in the message; "": the folder.
    """
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ValueError(
            f"{label or folder}: {len(missing)} of {len(names)} files are missing, e.g. "
            f"{_format_names(missing)}; fetch them"
        )
    return [folder / name for name in names]


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(names)[:MAX_NAME_CHARS]
