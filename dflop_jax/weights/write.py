"""Write a folder that transformers loads, one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflop_jax.folders import make_folder
from dflop_jax.weights.contract import Tensor, WeightMap, group_by_name, joined_shape
from dflop_jax.weights.folder import CONFIG, DTYPES, Folder, index_name

NAMES = {np.dtype(d): n for n, d in DTYPES.items()}
# Files beside the tensors: tokenizer, chat template and processors.
_TEXT = ("*.json", "*.txt", "*.model", "*.jinja")
_PROCESSORS = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")  # a folder with such a file has a tokenizer


@dataclass(frozen=True)
class ModuleParams:
    """Parameters of some parts ("entry", "layers", "exit") of a module."""

    module: str
    params: Mapping[str, Any]
    # By stacked part, the indices of the layers that `params` has, in order; default: all layers.
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor to write."""

    name: str  # in the file
    shape: tuple[int, ...]
    dtype: np.dtype
    values: Callable[[], np.ndarray]  # returns the values; `write_file` casts them to `dtype`

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end; ValueError if `path` exists
    or cannot be written."""
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path}: exists already; choose another folder or remove it")
    unfinished = path.with_name(f"{path.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(unfinished, "choose another folder")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_folder(
    path: str | Path,
    map_: WeightMap,
    modules: Sequence[ModuleParams],
    *,
    source: Folder | None = None,
    dtype: str | None = None,
    processor_folders: Sequence[Path] = (),
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write tensors under transformers' names, config.json and, for several files, an index. The
    folder `path` must not exist and is written atomically.

    Args:
      modules: all parameters, one item per segment.
      source: the folder that the weights were read from. It gives names, dtypes, tensors that the
        model ignores, the configuration and the tokenizer's files.
      dtype: "float32", "bfloat16" or "float16" for all tensors except those that stay float32;
        None: the dtypes of `source`, else of the parameters.
      processor_folders: folders with a tokenizer and processors, preferred to those of `source`.
      max_file_bytes: maximum size of a file with more than one tensor.

    Raises:
      ValueError: the folder exists, or a parameter is missing or partly on another process.
    """
    check_dtype(dtype)
    tensors = sorted(_all_tensors(map_, modules, source, dtype), key=lambda t: t.name)
    config = dict(source.config if source else map_.config)
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    with atomic_folder(path) as folder:
        _write_files(folder, tensors, map_, max_file_bytes)
        write_json(folder / CONFIG, config)
        copy_processor_files(folder, [*processor_folders, *([source.path] if source else [])])


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"unknown dtype of weights {dtype!r}; known: {', '.join(DTYPES.values())}")


def segment_tensors(modules: ModuleParams, source: Folder) -> dict[str, WrittenTensor]:
    """Return the tensors of one segment's parameters by canonical name, with the names and dtypes
    of the folder that they were read from."""
    own_tensors = [t for t in source.map.tensors if _find_parameter(t, [modules])]
    return {
        name: _parameter_tensor(parts, [modules], source, None)
        for name, parts in group_by_name(own_tensors).items()
    }


def _all_tensors(
    map_: WeightMap, modules: Sequence[ModuleParams], source: Folder | None, dtype: str | None
) -> Iterator[WrittenTensor]:
    for parts in group_by_name(map_.tensors).values():
        yield _parameter_tensor(parts, modules, source, dtype)
    entries = source.entries if source else {}
    ignored = {n for n in entries if map_.is_ignored(n) and n not in map_.copies}
    for name in ignored:
        assert source is not None
        entry = entries[name]
        kind = np.dtype(dtype or DTYPES.get(entry.dtype, "float32"))
        whole = tuple(slice(0, n) for n in entry.shape)
        values = partial(source.read, name, whole)
        yield WrittenTensor(entry.name, entry.shape, kind, values)
    for u in map_.unused:
        if u.name not in ignored:
            kind = np.dtype(dtype or "float32")
            yield WrittenTensor(u.name, u.shape, kind, partial(np.full, u.shape, u.value))


def _parameter_tensor(
    parts: Sequence[Tensor],
    modules: Sequence[ModuleParams],
    source: Folder | None,
    dtype: str | None,
) -> WrittenTensor:
    """Return one tensor that stacks parameters (or a layer of each) by rows, with the name and
    dtype of the source, if any."""
    parameters = []
    for t in parts:
        parameter = _find_parameter(t, modules)
        if parameter is None:
            raise ValueError(
                f"no parameter {'.'.join((t.module, t.part, *t.path))} for the tensor {t.name!r}; "
                "give the parameters of every segment"
            )
        parameters.append(parameter)
    t, (leaf, _) = parts[0], parameters[0]
    entry = source.entries.get(t.name) if source else None
    requested = "float32" if dtype and t.float32 else dtype
    kind = np.dtype(requested or (DTYPES[entry.dtype] if entry else leaf.dtype))

    def values() -> np.ndarray:
        pairs = zip(parts, parameters, strict=True)
        arrays = [to_file_layout(t, *location, kind) for t, location in pairs]
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    return WrittenTensor(entry.name if entry else t.name, joined_shape(parts), kind, values)


def _find_parameter(t: Tensor, modules: Sequence[ModuleParams]) -> tuple[Any, int | None] | None:
    """Return the array of a parameter and the layer's index in it; None if it is missing."""
    for m in modules:
        leaf: Any = m.params.get(t.part) if m.module == t.module else None
        for key in t.path:
            leaf = leaf.get(key) if isinstance(leaf, Mapping) else None
        if leaf is None:
            continue
        if t.layer is None:
            return leaf, None
        if t.layer in (rows := m.rows.get(t.part) or range(leaf.shape[0])):
            return leaf, rows.index(t.layer)
    return None


def to_file_layout(t: Tensor, leaf: Any, layer: int | None, dtype: np.dtype) -> np.ndarray:
    """Return a parameter, or one layer of a stacked one, in the layout of its file."""
    layout = t.layout
    value = gather_to_host(leaf, layer, t.name)
    transposed = value.reshape([layout.split[i] for i in layout.order])
    return transposed.transpose(np.argsort(layout.order)).reshape(layout.file_shape).astype(dtype)


@jax.jit
def _layer_of(stack: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def gather_to_host(leaf: Any, layer: int | None, name: str) -> np.ndarray:
    """Return a parameter, or one layer of a stacked one, assembled on the host from its shards."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    if not leaf.is_fully_addressable:
        raise ValueError(
            f"{name!r} is sharded over several processes; resume the checkpoint in a run of one "
            "process and write the folder there"
        )
    array = np.empty(leaf.shape if layer is None else leaf.shape[1:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        if layer is None:
            array[shard.index] = np.asarray(shard.data)
            continue
        start, stop, _ = shard.index[0].indices(leaf.shape[0])
        if start <= layer < stop:
            array[shard.index[1:]] = np.asarray(_layer_of(shard.data, np.int32(layer - start)))
    return array


def _write_files(
    folder: Path, tensors: Iterable[WrittenTensor], map_: WeightMap, max_file_bytes: int
) -> None:
    files: list[list[WrittenTensor]] = [[]]
    size = 0
    for t in tensors:
        if files[-1] and size + t.n_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(t)
        size += t.n_bytes
    if len(files) == 1:
        write_file(folder / f"{map_.stem}.safetensors", files[0])
        return
    index: dict[str, str] = {}
    for i, file_tensors in enumerate(files, start=1):
        name = f"{map_.stem}-{i:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, file_tensors)
        index |= {t.name: name for t in file_tensors}
    total = sum(t.n_bytes for file_tensors in files for t in file_tensors)
    about = {"metadata": {"total_size": total}, "weight_map": index}
    write_json(folder / index_name(map_), about)


def write_file(file: Path, tensors: Sequence[WrittenTensor]) -> None:
    """Write a safetensors file: the header's size, the header, the values without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        facts = {"dtype": NAMES[t.dtype], "shape": list(t.shape)}
        header[t.name] = facts | {"data_offsets": [offset, offset + t.n_bytes]}
        offset += t.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values are aligned
    with file.open("wb") as array:
        array.write(len(text).to_bytes(8, "little"))
        array.write(text)
        for t in tensors:
            values = np.ascontiguousarray(t.values(), t.dtype)
            array.write(values.view(np.uint8).reshape(-1).data)
        array.flush()
        os.fsync(array.fileno())


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_processor_files(target: Path, folders: Iterable[Path]) -> None:
    """Copy the files that prepare a model's inputs: each processor file from the first of `folders`
    that has it, tokenizer and template files from the first folder with a tokenizer."""
    existing = [folder for folder in folders if folder.is_dir()]
    text = next((f for f in existing if any(any(f.glob(t)) for t in _TOKENIZERS)), None)
    for folder in existing[:1] if text is None else [text]:
        for file in (f for pattern in _TEXT for f in folder.glob(pattern)):
            ours = file.name == CONFIG or file.name.endswith(".index.json")
            if not ours and file.name not in _PROCESSORS:
                shutil.copyfile(file, target / file.name)
    for name in _PROCESSORS:
        if found := next((f / name for f in existing if (f / name).is_file()), None):
            shutil.copyfile(found, target / name)
