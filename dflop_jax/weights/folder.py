"""A checkpoint folder of transformers on disk: its configuration and slices of its tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from dflop_jax.weights.contract import WeightMap, group_by_name, joined_shape

CONFIG = "config.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file; `name` and `dtype` are as safetensors gives them."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def index_name(map_: WeightMap) -> str:
    """Return the name of the index file, which maps tensors to a checkpoint's files."""
    return f"{map_.stem}.safetensors.index.json"


class Folder:
    """One checkpoint's configuration and tensor headers; `read` reads the tensors.

    Raises:
      ValueError: the folder, its config.json, its safetensors or a file that the index names is
        missing, or a file is not in the safetensors format.
    """

    def __init__(self, path: str | Path, map_: WeightMap):
        self.path, self.map = Path(path), map_
        self.config = read_config(self.path)
        self._index = index_name(map_)
        self.entries: dict[str, TensorEntry] = {}
        for file, names in self._files().items():
            for entry in _read_header(file, names, self._index):
                key = map_.canonical(entry.name)
                if key in self.entries:
                    raise ValueError(
                        f"{file}: {entry.name!r} and {self.entries[key].name!r} are names of the "
                        "same tensor; remove one of them"
                    )
                self.entries[key] = entry

    def _files(self) -> Mapping[Path, list[str] | None]:
        """Return the checkpoint's files and the tensors to read from each, None for all."""
        whole = self.path / f"{self.map.stem}.safetensors"
        if whole.is_file():  # preferred to an index, as in transformers: the index may be older
            return {whole: None}
        if (self.path / self._index).is_file():
            index = _read_json(self.path / self._index).get("weight_map")
            if not isinstance(index, Mapping) or not all(
                isinstance(f, str) and Path(f).name == f for f in index.values()
            ):
                raise ValueError(
                    f"{self.path / self._index}: weight_map must map every tensor to the name of a "
                    "file in the same folder; download it again"
                )
            files = defaultdict(list)
            for name, file in index.items():
                files[self.path / file].append(name)
            return files
        tensor_files = [*self.path.glob("*.safetensors")]
        if len(tensor_files) != 1:
            raise ValueError(
                f"{self.path}: {len(tensor_files)} safetensors but no {self._index}; save the "
                "model with transformers' save_pretrained, which writes safetensors and their index"
            )
        return {tensor_files[0]: None}

    def check(self) -> None:
        """Raise ValueError unless the folder holds exactly this model's tensors. The message names
        the file, the config key or tensor, its value there and the value that the model needs."""
        if differing := self.map.mismatches(self.config):
            key, theirs, ours = differing[0]
            more_keys = f" ({len(differing) - 1} more keys differ)" if len(differing) > 1 else ""
            raise ValueError(
                f"{self.path / CONFIG}: {key} is {theirs!r}, the model has {ours!r}{more_keys}; "
                "choose the model size of this folder"
            )
        wanted = group_by_name(self.map.tensors)
        if missing := [n for n in wanted if n not in self.entries]:
            raise ValueError(
                f"{self.path}: no tensor {_quote_names(missing)}; the download is incomplete or "
                "the folder holds another model; download it again, or name the folder of this one"
            )
        if extra := [
            e for n, e in self.entries.items() if n not in wanted and not self.map.is_ignored(n)
        ]:
            raise ValueError(
                f"{extra[0].file}: unexpected tensor {_quote_names([e.name for e in extra])}; "
                "the folder holds another model or an adapter: merge it first"
            )
        for name, parts in wanted.items():
            entry, shape = self.entries[name], joined_shape(parts)
            if entry.dtype not in DTYPES:
                raise ValueError(
                    f"{entry.file}: {entry.name!r} is {entry.dtype}; convert it to float32, "
                    "bfloat16 or float16 (quantised weights must be dequantised)"
                )
            if entry.shape != shape:
                raise ValueError(
                    f"{entry.file}: {entry.name!r} is {list(entry.shape)}, the model needs "
                    f"{list(shape)}; choose the model size of this folder"
                )
        for copy, original in self.map.copies.items():
            if copy in self.entries and not self._has_equal_row(copy, original):
                raise ValueError(
                    f"{self.entries[copy].file}: {self.entries[copy].name!r} is not "
                    f"{self.entries[original].name!r}, though {CONFIG} ties them; set "
                    "tie_word_embeddings to false there and choose a model size without tying"
                )

    def _has_equal_row(self, a: str, b: str) -> bool:
        """Return whether two matrices have equal shapes and first rows."""
        first = (slice(0, 1), slice(None))
        same_shape = self.entries[a].shape == self.entries[b].shape
        return same_shape and np.array_equal(self.read(a, first), self.read(b, first))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of the tensor with a canonical name, in the file's layout. The file is
        closed afterwards, because its mapped pages count as the process's memory."""
        entry = self.entries[name]
        with safe_open(entry.file, framework="numpy") as opened:
            return opened.get_slice(entry.name)[index]


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json; ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name one with {CONFIG} and safetensors")
    return _read_json(folder / CONFIG)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; name a folder of transformers") from None
    except (OSError, ValueError) as e:
        raise ValueError(f"{file}: cannot be read as JSON ({e}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds no JSON object; download it again")
    return value


def _read_header(file: Path, names: Iterable[str] | None, index: str) -> list[TensorEntry]:
    """Return the entries of a file's tensors without reading their values."""
    try:
        with safe_open(file, framework="numpy") as opened:
            names_in_file = set(opened.keys())
            chosen = sorted(names_in_file) if names is None else names
            if gone := [n for n in chosen if n not in names_in_file]:
                raise ValueError(
                    f"{file}: no tensor {_quote_names(gone)}, although {index} lists it; "
                    "download both again"
                )
            slices = [(name, opened.get_slice(name)) for name in chosen]
            return [TensorEntry(file, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices]
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file, though {index} names it; download it") from None
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{file}: not a safetensors file ({e}); download it again") from None


def _quote_names(names: list[str]) -> str:
    return f"{names[0]!r}" + f" and {len(names) - 1} more" * (len(names) > 1)
