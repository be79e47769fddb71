"""Tiles, windows and tokens of samples under a model's preprocessing, from header tables alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from dflop_jax.data.datasets.llava_records import KINDS
from dflop_jax.data.datasets.shape_index import ShapeTable
from dflop_jax.data.media.mel import MelSpec, sound_counts
from dflop_jax.data.media.native import Clip, Native
from dflop_jax.data.media.token_sources import TokenSources
from dflop_jax.data.text.stamps import Stamp


class VisionLayout(Protocol):
    """How a model sees pictures and clips: `AnyRes`, `DynamicTiling`, or one of a user's own.

    `alone` says whether a picture is the only one of its sample.
    """

    @property
    def tile_px(self) -> int: ...

    def count(
        self, widths: np.ndarray, heights: np.ndarray, alone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(usable bool, tiles, LLM tokens), each [n], of n upright pictures."""
        ...

    def count_clips(self, frames: np.ndarray) -> np.ndarray:
        """LLM tokens of clips of int [n] frames, one tile each."""
        ...

    def least_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Pixels that tiles of a picture of this size need at least, so that a larger one may be
        decoded at a smaller scale; None where it is to be decoded whole."""
        ...

    def cut(
        self, image: Image.Image, alone: bool, size: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Tiles uint8 [n, tile_px, tile_px, 3] of an upright RGB picture; `size` is its true
        (width, height) where it was decoded at a smaller scale."""
        ...

    def place(self, width: int, height: int, alone: bool) -> TokenSources:
        """Where each LLM token of a picture comes from, over its tiles."""
        ...

    def place_clip(self, frames: int) -> TokenSources:
        """The same for a clip."""
        ...


@dataclass(frozen=True)
class Preprocessing:
    """How a model takes media; None: it takes no such media.

    `between_frames`: token ids of the text that follows each frame of a clip but the last, for
    max_frames - 1 of them; () if there is none. `stamp`: those before and after a pair of frames at
    native resolution, by the second at which it is seen.
    """

    vision: VisionLayout | Native | None = None
    sound: MelSpec | None = None
    max_frames: int = 32
    between_frames: tuple[tuple[int, ...], ...] = ()
    stamp: Stamp | None = None

    def __post_init__(self) -> None:
        if self.max_frames < 1:
            raise ValueError(f"max_frames={self.max_frames} must be at least 1")
        assert len(self.between_frames) in (0, self.max_frames - 1)


class SampleCount(NamedTuple):
    """Tiles and windows of one sample, and its LLM tokens by their origin."""

    tiles: int
    frames: int
    windows: int
    audio_frames: int
    text_tokens: int
    visual_tokens: int
    audio_tokens: int
    frame_text_tokens: int
    longest_piece: int

    @property
    def llm_tokens(self) -> int:
        media = self.visual_tokens + self.audio_tokens
        return self.text_tokens + media + self.frame_text_tokens


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Counts of n samples, each field int64 [n].

    tiles: pictures' tiles and clips' frames; frames: of those, the frames. windows: of sound, 30 s
    each; audio_frames: mel frames in them that are no padding. frame_text_tokens: text between a
    clip's frames, which is not among text_tokens. longest_piece: LLM tokens of the largest picture
    or pair of frames at native resolution; 0 of tiles, which are all alike.
    """

    tiles: np.ndarray
    frames: np.ndarray
    windows: np.ndarray
    audio_frames: np.ndarray
    text_tokens: np.ndarray
    visual_tokens: np.ndarray
    audio_tokens: np.ndarray
    frame_text_tokens: np.ndarray
    longest_piece: np.ndarray

    @classmethod
    def of_one(cls, **counts: int) -> SampleCounts:
        """Return the counts of a single sample; those that are not named are 0."""
        return cls(**{name: np.array([counts.get(name, 0)]) for name in SampleCount._fields})

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def llm_tokens(self) -> np.ndarray:
        media = self.visual_tokens + self.audio_tokens
        return self.text_tokens + media + self.frame_text_tokens

    def taken(self, rows: np.ndarray) -> SampleCounts:
        """Return the counts of the given rows, in that order."""
        return SampleCounts(**{f: getattr(self, f)[rows] for f in SampleCount._fields})

    def where(self, keep: np.ndarray, other: SampleCounts) -> SampleCounts:
        """Return these counts where `keep` bool [n], elsewhere those of `other`."""
        return SampleCounts(**{
            f: np.where(keep, getattr(self, f), getattr(other, f)) for f in SampleCount._fields
        })  # fmt: skip

    def __getitem__(self, i: int) -> SampleCount:
        return SampleCount(*(int(getattr(self, f)[i]) for f in SampleCount._fields))


def _tiled_clips(table: ShapeTable, clips: np.ndarray, how: Preprocessing) -> np.ndarray:
    """int64 [5, n] of clips: usable, frames, tiles, LLM tokens, and tokens of text among frames."""
    assert how.vision is not None
    assert not isinstance(how.vision, Native)
    frames = np.minimum(table.frames[clips], how.max_frames).astype(np.int64)
    between = np.zeros_like(frames)
    if how.between_frames:
        between = np.cumsum([0, *map(len, how.between_frames)])[frames - 1]
    return np.stack([frames > 0, frames, frames, how.vision.count_clips(frames), between])


def _native_clips(table: ShapeTable, clips: np.ndarray, how: Preprocessing) -> np.ndarray:
    """The same at native resolution."""
    vision, stamp = how.vision, how.stamp
    assert isinstance(vision, Native)
    assert stamp is not None
    counts = np.zeros((5, len(clips)), np.int64)
    for k, medium in enumerate(clips.tolist()):
        layout = vision.clip(clip_of(table, medium))
        if layout is not None:
            pairs = len(layout.seconds)
            text = sum(len(ids) for second in layout.seconds for ids in stamp(second))
            counts[:, k] = (
                1,
                len(layout.frames),
                pairs,
                pairs * vision.tokens(layout.grid),
                text,
            )
    return counts


def clip_of(table: ShapeTable, medium: int) -> Clip:
    """The header of a medium of the table that is a clip."""
    return Clip(*(int(getattr(table, name)[medium]) for name in Clip._fields))


def piece_lengths(table: ShapeTable, row: int, vision: Native) -> tuple[int, ...]:
    """Patches of each of a record's pieces at native resolution."""
    lengths: list[int] = []
    for m in range(table.media_start[row], table.media_start[row + 1]):
        kind = KINDS[table.kind[m]]
        if kind == "image":
            rows, cols = vision.grid(int(table.width[m]), int(table.height[m]))
            lengths.append(rows * cols)
        elif kind == "video":
            layout = vision.clip(clip_of(table, m))
            assert layout is not None
            lengths += [layout.grid[0] * layout.grid[1]] * len(layout.seconds)
    return tuple(lengths)


def sample_counts(table: ShapeTable, how: Preprocessing) -> tuple[SampleCounts, np.ndarray]:
    """Return the counts of the records that the model can take, and which those are: bool
    [len(table)].

    Left out are media that the model does not take, pictures too thin for any grid, clips of one
    frame at native resolution, sounds too short for a token.
    """
    owner = np.repeat(np.arange(len(table)), np.diff(table.media_start))
    image, video, audio = (table.kind == k for k, _ in enumerate(KINDS))
    ok = np.ones(len(table.kind), bool)
    tiles, frames, visual, windows, mel, heard, between = np.zeros((7, len(ok)), np.int64)
    if how.vision is None:
        ok &= ~(image | video)
    else:
        pictures = np.bincount(owner[image], minlength=len(table))
        alone = pictures[owner[image]] == 1
        sides = table.width[image], table.height[image]
        if isinstance(how.vision, Native):
            ok[image], tiles[image], visual[image] = how.vision.count(*sides)
            clips = _native_clips(table, np.flatnonzero(video), how)
        else:
            ok[image], tiles[image], visual[image] = how.vision.count(*sides, alone)
            clips = _tiled_clips(table, np.flatnonzero(video), how)
        ok[video], frames[video], tiles[video], visual[video], between[video] = clips
    if how.sound is None:
        ok &= ~audio
    else:
        long_enough = table.samples > 2 * how.sound.hop
        ok &= ~audio | long_enough
        audio &= long_enough
        windows[audio], mel[audio], heard[audio] = sound_counts(table.samples[audio], how.sound)
    usable = np.bincount(owner[~ok], minlength=len(table)) == 0
    longest = np.zeros(len(table), np.int64)
    if isinstance(how.vision, Native):
        np.maximum.at(longest, owner, visual // np.maximum(tiles, 1))

    def summed(values: np.ndarray) -> np.ndarray:
        ends = np.concatenate([[0], np.cumsum(values)])
        return np.diff(ends[table.media_start])[usable]

    counts = SampleCounts(
        tiles=summed(tiles),
        frames=summed(frames),
        windows=summed(windows),
        audio_frames=summed(mel),
        text_tokens=table.text_tokens[usable].astype(np.int64),
        visual_tokens=summed(visual),
        audio_tokens=summed(heard),
        frame_text_tokens=summed(between),
        longest_piece=longest[usable],
    )
    return counts, usable


def described(table: ShapeTable, row: int) -> str:
    """What the headers of a record's media say."""
    said = []
    for m in range(table.media_start[row], table.media_start[row + 1]):
        kind, size = KINDS[table.kind[m]], f"{table.width[m]}x{table.height[m]} pixels"
        said.append(
            f"a picture of {size}" if kind == "image"
            else f"a clip of {table.total[m]} frames of {size}" if kind == "video"
            else f"a sound of {table.samples[m]:,} samples"
        )  # fmt: skip
    return ", ".join(said)


def most_demanding(asks: np.ndarray, most: int) -> list[int]:
    """Rows of int [n, kinds] such that every row asks for no more of any kind than one of them;
    the `most` greatest of them at most."""
    scaled = asks / np.maximum(asks.max(axis=0, initial=0), 1)
    left = np.arange(len(asks))
    chosen: list[int] = []
    while len(left) and len(chosen) < most:
        top = int(left[scaled[left].sum(axis=1).argmax()])
        chosen.append(top)
        left = left[(asks[left] > asks[top]).any(axis=1)]
    return chosen
