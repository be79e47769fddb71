"""The media of one sample, decoded to exactly what its index promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from dflop_jax.data.datasets.blob import Medium
from dflop_jax.data.datasets.counts import Preprocessing, VisionLayout
from dflop_jax.data.datasets.llava_records import Record
from dflop_jax.data.datasets.shape_index import MEDIA, ShapeTable
from dflop_jax.data.media.anyres import frame_tile
from dflop_jax.data.media.audio import read_sound
from dflop_jax.data.media.mel import MelSpec, log_mel, sound_counts
from dflop_jax.data.media.native import Clip, ClipLayout, Grid, Native
from dflop_jax.data.media.tiling import read_scaled
from dflop_jax.data.media.token_sources import TokenSources, with_text
from dflop_jax.data.media.video import read_frames, read_numbered
from dflop_jax.data.text.stamps import Stamp


@dataclass(frozen=True, eq=False)
class Pictures:
    """A picture or clip: tiles uint8 [n, px, px, 3] and its LLM tokens over those tiles. `text`
    int [t] are ids of what is text among those tokens, -1 of the others; None: nothing is."""

    tiles: np.ndarray
    tokens: TokenSources
    text: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class NativePictures:
    """A picture or clip at native resolution: patches uint8 [p, values], the grid of each of its
    pieces, and `text` int [t]: ids of what is text among its LLM tokens, -1 of the others, which
    are the blocks of the pieces in order."""

    patches: np.ndarray
    grids: tuple[Grid, ...]
    text: np.ndarray


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound: mel float32 [windows, n_mels, frames]; LLM tokens, and valid mel frames, in all."""

    mel: np.ndarray
    tokens: int
    frames: int


DecodedMedium = Pictures | NativePictures | Sound


def decode_media(
    record: Record, table: ShapeTable, row: int, how: Preprocessing
) -> tuple[DecodedMedium, ...]:
    """Return the decoded media of the record whose header is a row of `table`.

    Raises:
      ValueError: a file that cannot be decoded, or is not what it was when it was indexed, or that
        the model does not take.
    """
    first, last = (int(k) for k in table.media_start[row : row + 2])
    headers = [{n: int(getattr(table, n)[k]) for n in MEDIA} for k in range(first, last)]
    if len(headers) != len(record.media):
        raise ValueError(f"{record.name}: {len(record.media)} media, {len(headers)} in the index")
    alone = sum(kind == "image" for kind, _ in record.media) == 1
    media: list[DecodedMedium] = []
    for (kind, source), header in zip(record.media, headers, strict=True):
        if (how.sound if kind == "audio" else how.vision) is None:
            raise ValueError(f"{record.name}: the model takes no {kind}")
        if kind == "audio":
            assert how.sound is not None
            media.append(_sound(source, header["samples"], how.sound))
        else:
            assert how.vision is not None
            if isinstance(how.vision, Native):
                media.append(_native(kind, source, header, how))
            elif kind == "video":
                media.append(_clip(source, min(header["frames"], how.max_frames), how))
            else:
                size = header["width"], header["height"]
                media.append(_picture(source, size, alone, how.vision))
    return tuple(media)


def _sound(source: Medium, samples: int, spec: MelSpec) -> Sound:
    n = min(samples, spec.max_samples)
    _, (frames,), (tokens,) = sound_counts(np.array([n]), spec)
    return Sound(log_mel(read_sound(source, n, spec.sample_rate), spec), int(tokens), int(frames))


def _clip(source: Medium, frames: int, how: Preprocessing) -> Pictures:
    assert how.vision is not None
    assert not isinstance(how.vision, Native)
    tiles = read_frames(source, frames, partial(frame_tile, tile_px=how.vision.tile_px))
    tokens = how.vision.place_clip(frames)
    if not how.between_frames:
        return Pictures(tiles, tokens)
    between = how.between_frames[: frames - 1]
    at = np.repeat(np.arange(1, frames) * (len(tokens) // frames), [len(ids) for ids in between])
    text = np.insert(np.full(len(tokens), -1), at, [i for ids in between for i in ids])
    return Pictures(tiles, with_text(tokens, at), text)


def _native(
    kind: str, source: Medium, header: Mapping[str, int], how: Preprocessing
) -> NativePictures:
    native = how.vision
    assert isinstance(native, Native)
    if kind == "image":
        size = header["width"], header["height"]
        return native_picture(_read(source, size, native), native)
    layout = native.clip(Clip(*(header[name] for name in Clip._fields)))
    assert layout is not None
    assert how.stamp is not None
    frames = read_numbered(source, layout.frames, partial(native.resized, grid=layout.grid))
    return native_clip(frames, layout, native, how.stamp)


def native_clip(
    frames: np.ndarray, layout: ClipLayout, native: Native, stamp: Stamp
) -> NativePictures:
    """A clip at native resolution, of frames uint8 [n, height, width, 3] as large as its layout
    says; each pair stands between the ids that its stamp gives."""
    parts: list[np.ndarray] = []
    for second in layout.seconds:
        before, after = stamp(second)
        parts += [np.array(before), np.full(native.tokens(layout.grid), -1), np.array(after)]
    grids = (layout.grid,) * len(layout.seconds)
    return NativePictures(native.patches(frames), grids, np.concatenate(parts).astype(np.int64))


def native_picture(image: Image.Image, native: Native) -> NativePictures:
    """An upright RGB picture at native resolution. ValueError: it is too thin."""
    grid = native.grid(*image.size)
    frames = np.stack([native.resized(image, grid)] * native.frames)
    return NativePictures(native.patches(frames), (grid,), np.full(native.tokens(grid), -1))


def _read(source: Medium, size: tuple[int, int], vision: VisionLayout | Native) -> Image.Image:
    image, true_size = read_scaled(source, vision.least_size(*size))
    if true_size != size:
        raise ValueError(f"{source}: {true_size} pixels, {size} when indexed; delete the index")
    return image


def _picture(source: Medium, size: tuple[int, int], alone: bool, vision: VisionLayout) -> Pictures:
    image = _read(source, size, vision)
    return Pictures(vision.cut(image, alone, size), vision.place(*size, alone))
