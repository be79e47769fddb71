"""Precomputed latents of clips: a list in JSON, a file of each beside it.

The list holds records {"caption": TEXT, "latents": FILE, "split": "train" or "eval"}; without a
split a record is for training. A file is .npy or .safetensors, then with the tensor "latents" or
one tensor alone, of shape [channels, time, rows, columns]. Shapes come from headers; values are
read when a sample is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by its name from here on)
import numpy as np
from safetensors import safe_open

from dflop_jax.data.bounds import MAX_LIST_BYTES, errors_as, parse_json, read_bounded
from dflop_jax.data.datasets.blob import MediaRoots

TENSOR = "latents"
FLOATS = ("float16", "bfloat16", "float32", "F16", "BF16", "F32")


class _Clip(NamedTuple):
    caption: str
    file: Path
    tensor: str  # "": the file is an array
    shape: tuple[int, ...]
    label: str


class ClipFiles:
    """The clips of one split of a list.

    Raises:
      ValueError: the list or a header cannot be read, a record lacks its caption or file, or no
        record is of the split.
    """

    def __init__(self, path: str, roots: Sequence[str], split: str) -> None:
        file = Path(path)
        resolve = MediaRoots(roots or [file.parent]).resolve
        try:
            records = parse_json(read_bounded(file, MAX_LIST_BYTES), list[dict[str, Any]])
        except ValueError as e:
            message = str(e) if str(file) in str(e) else f"{file}: {e}"
            raise ValueError(f"{message}; data.path names a JSON list of clips") from None
        self.name = path if split == "train" else f"{path} ({split})"
        self._clips = []
        for k, record in enumerate(records):
            if record.get("split", "train") == split:
                self._clips.append(_clip(f"{file.name}[{k}]", record, resolve))
        if not self._clips:
            raise ValueError(f'{path}: no clip has "split": "{split}"; give some records that')

    def __len__(self) -> int:
        return len(self._clips)

    def caption(self, index: int) -> str:
        return self._clips[index].caption

    def shape(self, index: int) -> tuple[int, ...]:
        return self._clips[index].shape

    def label(self, index: int) -> str:
        return self._clips[index].label

    def latents(self, index: int) -> np.ndarray:
        clip = self._clips[index]
        with errors_as(f"{clip.label}: {clip.file} cannot be read"):
            if clip.tensor:
                with safe_open(clip.file, framework="numpy") as opened:
                    values = opened.get_tensor(clip.tensor)
            else:
                values = np.load(clip.file, allow_pickle=False)
            if values.shape != clip.shape:
                raise ValueError(f"it now has shape {list(values.shape)}")
            if not np.isfinite(latents := np.asarray(values, np.float32)).all():
                raise ValueError("values that are not finite")
        return latents


def _clip(label: str, record: Mapping[str, Any], resolve: Any) -> _Clip:
    """A record, checked, with the shape from its file's header."""
    caption, name = record.get("caption"), record.get("latents")
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f'{label}: no "caption"; say what the clip shows')
    if not isinstance(name, str) or not name:
        raise ValueError(f'{label}: no "latents"; name the .npy or .safetensors file of the clip')
    with errors_as(f"{label}"):
        file = resolve(name)
        tensor, shape, dtype = _header(file)
        if dtype not in FLOATS:
            raise ValueError(f"{file} holds {dtype}; save the latents as float32")
    return _Clip(caption, file, tensor, shape, label)


def _header(file: Path) -> tuple[str, tuple[int, ...], str]:
    """(name of the tensor, shape, type) of a file; nothing of its values is read."""
    if file.suffix == ".npy":
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return "", tuple(array.shape), str(array.dtype)
    with safe_open(file, framework="numpy") as opened:
        names = list(opened.keys())
        tensor = TENSOR if TENSOR in names else names[0] if len(names) == 1 else ""
        if not tensor:
            raise ValueError(f"{file} has no tensor {TENSOR!r} and not one alone")
        values = opened.get_slice(tensor)
        return tensor, tuple(values.get_shape()), str(values.get_dtype())
