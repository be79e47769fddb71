"""Lists of clips: precomputed latents in files, or the built-in moving scenes.

A list of files is JSON: records {"caption": TEXT, "latents": FILE, "split": "train" or "eval"}. A
file is .npy or .safetensors (with the tensor "latents" or one tensor alone) of shape [channels,
time, rows, columns]. A built-in clip shows two shapes that cross a small picture; its caption
names the shapes and their directions. An invertible transform turns the pixels of each block into
the channels of a latent. Held-out pairs of shapes are never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by its name from here on)
import numpy as np
from safetensors import safe_open

from dflop_jax.data.bounds import MAX_LIST_BYTES, errors_as, parse_json, read_bounded
from dflop_jax.data.datasets.blob import MediaRoots
from dflop_jax.data.datasets.scenes import COLOURS, SHAPES, DrawnShape, Picture
from dflop_jax.data.media.native import GREY
from dflop_jax.data.sample import STREAMS

TENSOR = "latents"
FLOATS = ("float16", "bfloat16", "float32", "F16", "BF16", "F32")
SIDE_PX = 16  # pixels of a frame's side
SHAPE_PX = SIDE_PX // 2 - 1  # pixels of a shape's side; two shapes fit above each other
SCALE = 2.0  # latents have a variance of about one
FRAMES = (2, 3, 3, 4, 4, 6)  # frame counts of clips, drawn at random
DIRECTIONS = ("left", "right")
HELD_OUT_PERIOD = 6  # one of 6 pairs is held out


class Clip(NamedTuple):
    label: str
    caption: str
    shape: tuple[int, ...]  # shape of the latents
    read: Callable[[], np.ndarray]  # returns float32 latents; ValueError: they cannot be read


def list_files(path: str, roots: Sequence[str], split: str) -> list[Clip]:
    """Return the clips of one split of a list. ValueError: they cannot be read, or none exists."""
    file = Path(path)
    resolve = MediaRoots(roots or [file.parent]).resolve
    try:
        records = parse_json(read_bounded(file, MAX_LIST_BYTES), list[dict[str, Any]])
    except ValueError as e:
        message = str(e) if str(file) in str(e) else f"{file}: {e}"
        raise ValueError(f"{message}; data.path names a JSON list of clips") from None
    clips = [
        _file_clip(f"{file.name}[{k}]", record, resolve)
        for k, record in enumerate(records)
        if record.get("split", "train") == split
    ]
    if not clips:
        raise ValueError(f'{path}: no clip has "split": "{split}"; give some records that')
    return clips


def _file_clip(label: str, record: Mapping[str, Any], resolve: Callable[[str], Path]) -> Clip:
    """Return the clip of a record; its shape is read from the file's header."""
    caption, name = record.get("caption"), record.get("latents")
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f'{label}: no "caption"; say what the clip shows')
    if not isinstance(name, str) or not name:
        raise ValueError(f'{label}: no "latents"; name the .npy or .safetensors file of the clip')
    with errors_as(f"{label}"):
        file = resolve(name)
        tensor, shape, dtype = _read_header(file)
        if dtype not in FLOATS:
            raise ValueError(f"{file} holds {dtype}; save the latents as float32")
    return Clip(label, caption, shape, partial(_read_latents, label, file, tensor, shape))


def _read_header(file: Path) -> tuple[str, tuple[int, ...], str]:
    """Return the tensor's name ("" in a .npy), its shape and its dtype."""
    if file.suffix == ".npy":
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return "", tuple(array.shape), str(array.dtype)
    with safe_open(file, framework="numpy") as opened:
        names = list(opened.keys())
        tensor = TENSOR if TENSOR in names else names[0] if len(names) == 1 else ""
        if not tensor:
            raise ValueError(f"{file} needs a tensor {TENSOR!r} or exactly one tensor")
        values = opened.get_slice(tensor)
        return tensor, tuple(values.get_shape()), str(values.get_dtype())


def _read_latents(label: str, file: Path, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    with errors_as(f"{label}: {file} cannot be read"):
        if tensor:
            with safe_open(file, framework="numpy") as opened:
                values = opened.get_tensor(tensor)
        else:
            values = np.load(file, allow_pickle=False)
        if values.shape != shape:
            raise ValueError(f"it now has shape {list(values.shape)}")
        if not np.isfinite(latents := np.asarray(values, np.float32)).all():
            raise ValueError("values that are not finite")
    return latents


def draw_clips(name: str, n: int, seed: int, split: str, channels: int) -> list[Clip]:
    """Return `n` moving scenes of (seed, split); `name` is the list's name in labels."""
    block = block_side(channels)
    n_kinds = len(SHAPES) * len(COLOURS) * len(DIRECTIONS)
    clips = []
    for i in range(n):
        rng = np.random.default_rng((seed, STREAMS[split], i))
        is_eval_pair = split != "eval"
        while is_eval_pair != (split == "eval"):
            upper, lower = (int(k) for k in rng.integers(n_kinds, size=2))
            is_eval_pair = (upper + lower) % HELD_OUT_PERIOD == 0
        n_frames = FRAMES[rng.integers(len(FRAMES))]
        shapes = [_decode_shape(upper), _decode_shape(lower)]
        caption = " over ".join(map(" ".join, shapes))
        shape = (channels, n_frames, SIDE_PX // block, SIDE_PX // block)
        clips.append(
            Clip(f"{name}[{i}]", caption, shape, partial(_render, shapes, n_frames, block))
        )
    return clips


def _decode_shape(number: int) -> tuple[str, str, str]:
    """Return colour, kind and direction of the shape with this number."""
    rest, direction = divmod(number, len(DIRECTIONS))
    colour, kind = divmod(rest, len(SHAPES))
    return tuple(COLOURS)[colour], SHAPES[kind], DIRECTIONS[direction]


def _render(shapes: Sequence[tuple[str, str, str]], n_frames: int, block: int) -> np.ndarray:
    drawn = []
    path = float(SIDE_PX - SHAPE_PX - 2)
    for row, (colour, kind, direction) in enumerate(shapes):
        sign = 1.0 if direction == "right" else -1.0
        x, y = SIDE_PX / 2 - sign * path / 2, SIDE_PX * (0.25 + 0.5 * row)
        drawn.append(DrawnShape(kind, colour, x, y, SHAPE_PX, (sign * path, 0.0)))
    picture = Picture(SIDE_PX, SIDE_PX, GREY, tuple(drawn))
    frames = [np.asarray(picture.render(t)) for t in np.linspace(0.0, 1.0, n_frames)]
    return frames_to_latents(np.stack(frames), block)


def frames_to_latents(frames: np.ndarray, block: int) -> np.ndarray:
    """Return float32 latents [channels, time, rows, columns] of pixels uint8 [time, y, x, 3]."""
    n, height, width, _ = frames.shape
    values = SCALE * (frames.astype(np.float32) / np.float32(127.5) - 1.0)
    split = values.reshape(n, height // block, block, width // block, block, 3)
    rows = split.transpose(2, 4, 5, 0, 1, 3)
    return rows.reshape(3 * block**2, n, height // block, width // block)


def latents_to_frames(latents: np.ndarray, block: int) -> np.ndarray:
    """Return the frames of latents (the inverse of `frames_to_latents`), rounded to integers."""
    _, n, rows, columns = latents.shape
    split = latents.reshape(block, block, 3, n, rows, columns).transpose(3, 4, 0, 5, 1, 2)
    values = split.reshape(n, rows * block, columns * block, 3)
    return np.clip(np.rint((values / SCALE + 1.0) * 127.5), 0, 255).astype(np.uint8)


def block_side(channels: int) -> int:
    """Return the side of a pixel block with `channels` values. ValueError: no block has as many."""
    side = round((channels / 3) ** 0.5)
    if 3 * side**2 != channels or SIDE_PX % max(side, 1):
        raise ValueError(
            f"the built-in clips have 3 * k**2 channels, k a divisor of {SIDE_PX}, not {channels}; "
            "choose a model with 48, or give a list of latents as data.path"
        )
    return side
