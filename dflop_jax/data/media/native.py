"""Pictures and clips at native resolution, as Qwen3-VL takes them.

A picture, or a pair of frames of a clip, is one piece: its sides rounded to whole blocks of patches
within a range of pixels. Every pair stands in the text behind the time at which it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, floor, sqrt
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from dflop_jax.data.media.kind import Columns, Header, Kinds
from dflop_jax.data.media.limits import CLIP_PIXELS, PICTURE_PIXELS, Limits
from dflop_jax.data.media.media_keys import MICRO
from dflop_jax.data.media.medium import (
    DecodedMedium,
    Facts,
    Form,
    Grid,
    MediaCounts,
    Medium,
    integer_facts,
)
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.token_sources import copied_sources
from dflop_jax.data.media.video import VIDEO, Clip
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import Tokenizer

MAX_RATIO = 200  # of a picture's sides
MIN_FRAMES = 4  # sampled from a clip that has them
MIN_CLIP_PIXELS = 4096  # of all frames of a clip
CAP_SLACK = 1.05  # least pixels of a frame, over those of a clip, where each frame is capped
# Blocks at least and at most where a medium has keys of its own, as qwen-vl-utils has them: of a
# picture, of a frame, and of all frames at most.
KEYED_BLOCKS, KEYED_FRAME_BLOCKS, KEYED_CLIP_BLOCKS = (4, 16384), (128, 768), 115_200
GREY = 128  # of blank pictures, in 0 to 255
VISION_MARKERS = ("<|vision_start|>", "<|vision_end|>")  # tokens around a pair of frames
CLIP_FACTS = (
    "min_frames", "num_frames", "min_clip_pixels", "cap_pixels_per_frame", "max_video_tokens"
)  # fmt: skip
UNIT_BLOCKS = 3  # sides of the smallest picture that is worth drawing


# Ids of the text before and after a pair of frames, by the second at which it is seen.
StampIds = tuple[tuple[int, ...], tuple[int, ...]]
Stamp = Callable[[float], StampIds]


class ClipLayout(NamedTuple):
    """How a clip is seen: numbers of its frames, in pairs; the second of each pair; patches of
    every frame."""

    frames: tuple[int, ...]
    seconds: tuple[float, ...]
    grid: Grid


@dataclass(frozen=True)
class Native:
    """Sizes of patches and ranges of pixels.

    Attributes:
      patch_px: side of a patch.
      merge: `merge` x `merge` patches are a block, which becomes one LLM token.
      frames: of a clip in one patch; a picture is repeated so often.
      min_pixels, max_pixels: of a resized picture.
      max_clip_pixels: of all frames of a clip.
      max_frames: sampled from a clip, at `frames_per_s`, at least `min_frames` where it has them;
        `num_frames`: always so many instead, where it is not 0.
      min_clip_pixels: of all frames of a clip.
      max_video_tokens: of a frame at most under `cap_pixels_per_frame`, which gives every frame an
        equal share of `max_clip_pixels`.
    """

    patch_px: int = 16
    merge: int = 2
    frames: int = 2
    min_pixels: int = PICTURE_PIXELS[0]
    max_pixels: int = PICTURE_PIXELS[1]
    max_clip_pixels: int = CLIP_PIXELS
    max_frames: int = 768
    frames_per_s: float = 2.0
    min_frames: int = MIN_FRAMES
    num_frames: int = 0
    min_clip_pixels: int = MIN_CLIP_PIXELS
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    def __post_init__(self) -> None:
        if not self.block_px**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"data.min_pixels={self.min_pixels} is not between {self.block_px**2}, a block, "
                f"and data.max_pixels={self.max_pixels}"
            )
        if self.max_clip_pixels < self.min_clip_pixels:
            raise ValueError(f"data.max_clip_pixels must be at least {self.min_clip_pixels}")

    @property
    def block_px(self) -> int:
        return self.patch_px * self.merge

    def max_clip_pixels_of(self, n: int) -> int:
        """Of all n frames of a clip."""
        if not self.cap_pixels_per_frame:
            return self.max_clip_pixels
        max_frame_pixels = min(self.max_video_tokens * self.block_px**2, self.max_clip_pixels // n)
        return n * max(max_frame_pixels, int(self.min_clip_pixels * CAP_SLACK))

    def tokens(self, grid: Grid) -> int:
        """LLM tokens of a piece."""
        return grid[0] * grid[1] // self.merge**2

    def grid(self, header: Header) -> Grid:
        """Patches of a picture; rows and columns are 0 where it is too thin."""
        rows, cols = self.blocks({name: np.array([n]) for name, n in header.items()})
        return int(rows[0]) * self.merge, int(cols[0]) * self.merge

    def blocks(self, headers: Columns) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of blocks of pictures, int64 [n] each; 0 of those that are too thin."""
        px = self.block_px
        true, requested = (
            np.stack([headers[f"{prefix}height"], headers[f"{prefix}width"]]).astype(np.int64)
            for prefix in ("", "resized_")
        )
        limits = np.stack([headers["min_pixels"], headers["max_pixels"]]) * (requested[0] == 0)
        has_keys = (requested[0] > 0) | (limits > 0).any(axis=0)
        usual = np.array([[self.min_pixels, self.max_pixels]]).T
        published = np.array([[n * px**2 for n in KEYED_BLOCKS]]).T
        low, high = np.where(limits > 0, limits, np.where(has_keys, published, usual))
        sides = np.where(requested > 0, requested, true)
        is_thin = sides.max(axis=0) > MAX_RATIO * sides.min(axis=0)
        area = sides[0] * sides[1]
        blocks = np.round(sides / px).astype(np.int64)  # half to even
        blocks = np.maximum(blocks, has_keys)
        pixels = blocks[0] * blocks[1] * px * px
        shrink, grow = np.sqrt(area / high), np.sqrt(low / area)
        smaller = np.maximum(1, np.floor(sides / shrink / px)).astype(np.int64)
        larger = np.ceil(sides * grow / px).astype(np.int64)
        rows, cols = np.where(pixels > high, smaller, np.where(pixels < low, larger, blocks))
        return np.where(is_thin, 0, rows), np.where(is_thin, 0, cols)

    def clip(self, clip: Clip) -> ClipLayout | None:
        """How a clip is seen; None: it has too few frames or is too thin."""
        return _clip_layout(self, clip)

    def resized(self, image: Image.Image, grid: Grid) -> np.ndarray:
        """An RGB picture or frame as uint8 [height, width, 3] of a grid's size."""
        size = grid[1] * self.patch_px, grid[0] * self.patch_px
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.uint8)

    def patches(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [n, height, width, 3], n a multiple of `frames`, as patches uint8 [p, colours x
        frames x patch_px x patch_px]: pair by pair, block by block, patch by patch."""
        n, height, width, colours = frames.shape
        px, m = self.patch_px, self.merge
        rows, cols = height // self.block_px, width // self.block_px
        split = frames.reshape(n // self.frames, self.frames, rows, m, px, cols, m, px, colours)
        patches = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return patches.reshape(-1, colours * self.frames * px * px)


@lru_cache(maxsize=65536)
def _clip_layout(native: Native, clip: Clip) -> ClipLayout | None:
    rate = clip.rate_num / clip.rate_den
    n = frame_count(native, clip)
    grid = clip_grid(native, n, clip)
    if grid is None:
        return None
    last = clip.first + clip.total - 1
    frames = np.linspace(clip.first, last, n).round().astype(int).tolist()
    frames += frames[-1:] * (-n % native.frames)
    first, last = frames[:: native.frames], frames[native.frames - 1 :: native.frames]
    seconds = tuple((a / rate + b / rate) / 2 for a, b in zip(first, last, strict=True))
    return ClipLayout(tuple(frames), seconds, grid)


def frame_count(native: Native, clip: Clip) -> int:
    """How many frames of a clip are seen; 0 where it has fewer than its record asks for."""
    pair, seconds = native.frames, clip.total * clip.rate_den / clip.rate_num
    if clip.nframes:
        n = round(clip.nframes / pair) * pair
        return n if n <= clip.total else 0
    if clip.fps or clip.min_frames or clip.max_frames:
        n_min = ceil((clip.min_frames or native.min_frames) / pair) * pair
        n_max = floor((clip.max_frames or min(native.max_frames, clip.total)) / pair) * pair
        frames_per_s = clip.fps / MICRO or native.frames_per_s
        return floor(min(max(seconds * frames_per_s, n_min), n_max, clip.total) / pair) * pair
    if native.num_frames:
        return min(native.num_frames, native.max_frames)
    wanted = int(clip.total / (clip.rate_num / clip.rate_den) * native.frames_per_s)
    return min(max(wanted, native.min_frames), native.max_frames, clip.total)


def clip_grid(native: Native, n: int, clip: Clip) -> Grid | None:
    """Patches of each of n frames; None: too few of them, or too thin."""
    px, width, height = native.block_px, clip.width, clip.height
    if n < native.frames:
        return None
    if clip.min_pixels or clip.max_pixels or clip.total_pixels or clip.resized_width:
        low = clip.min_pixels or KEYED_FRAME_BLOCKS[0] * px**2
        total_pixels = clip.total_pixels or KEYED_CLIP_BLOCKS * px**2
        high = max(
            min(KEYED_FRAME_BLOCKS[1] * px**2, total_pixels / n * native.frames),
            int(low * CAP_SLACK),
        )
        keys = clip._replace(min_pixels=low, max_pixels=int(min(clip.max_pixels or high, high)))
        return keyed if min(keyed := native.grid(keys._asdict())) else None
    if min(width, height) < px:
        scale = max(px / height, px / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_RATIO * min(height, width):
        return None
    sides = (height, width)
    blocks = [round(side / px) for side in sides]
    pixels = round(n / native.frames) * native.frames * blocks[0] * blocks[1] * px * px
    if pixels > (max_pixels := native.max_clip_pixels_of(n)):
        shrink = sqrt(n * height * width / max_pixels)
        blocks = [max(1, floor(side / shrink / px)) for side in sides]
    elif pixels < native.min_clip_pixels:
        grow = sqrt(native.min_clip_pixels / (n * height * width))
        blocks = [ceil(side * grow / px) for side in sides]
    return blocks[0] * native.merge, blocks[1] * native.merge


def patch_places(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """int32 [patches, 4]: row and column of each patch in its piece, in the order of
    `Native.patches`, and the rows and columns of the piece."""
    pieces_of_grid = [np.zeros((0, 4), np.int32)]
    for rows, cols in grids:
        positions = np.moveaxis(np.indices((rows, cols)), 0, -1)
        blocks = positions.reshape(rows // merge, merge, cols // merge, merge, 2).swapaxes(1, 2)
        whole = np.broadcast_to((rows, cols), (rows * cols, 2))
        pieces_of_grid.append(np.concatenate([blocks.reshape(-1, 2), whole], 1).astype(np.int32))
    return np.concatenate(pieces_of_grid)


def token_positions(runs: Sequence[int | Grid]) -> np.ndarray:
    """int32 [tokens, 3], (time, row, column) of runs of tokens: so many of text, or a piece's rows
    and columns of blocks. Text counts on; a piece that begins at n goes on at n + its longer side.
    """
    positions, start = [np.zeros((0, 3), np.int32)], 0
    for run in runs:
        if isinstance(run, int):
            positions.append(
                np.repeat(np.arange(start, start + run, dtype=np.int32)[:, None], 3, 1)
            )
            start += run
        else:
            rows, cols = np.mgrid[: run[0], : run[1]].reshape(2, -1)
            positions.append((start + np.stack([0 * rows, rows, cols], -1)).astype(np.int32))
            start += max(run)
    return np.concatenate(positions)


def runs_of(stand: np.ndarray, grids: Sequence[Grid], merge: int) -> list[int | Grid]:
    """The runs of `token_positions` of a text of whose tokens those of the grids' blocks `stand`,
    bool [t]."""
    runs: list[int | Grid] = []
    end = 0
    blocks = [(rows // merge, cols // merge) for rows, cols in grids]
    sizes = [rows * cols for rows, cols in blocks]
    firsts = np.flatnonzero(stand)[np.cumsum([0, *sizes])[:-1]].tolist()
    for first, size, block in zip(firsts, sizes, blocks):
        runs += [first - end, block]
        end = first + size
    return [*runs, len(stand) - end]


@dataclass(frozen=True)
class NativeMedium(Medium):
    """Pictures and clips at native resolution; `stamp` gives the text around a pair of frames."""

    native: Native
    stamp: Stamp

    kinds: ClassVar[Kinds] = (IMAGE, VIDEO)
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({"patches": GREY})
    piece_tokens: ClassVar[int] = 0
    uses_keys: ClassVar[bool] = True

    @property
    def unit_px(self) -> int:
        """Side of the smallest picture that is worth drawing."""
        return UNIT_BLOCKS * self.native.block_px

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        if kind == IMAGE.name:
            rows, cols = self.native.blocks(headers)
            tokens = rows * cols
            return MediaCounts(rows > 0, np.ones(len(rows), np.int64), tokens, longest=tokens)
        clips = zip(*(headers[name].tolist() for name in Clip._fields))
        counts = [self._clip_counts(Clip(*facts)) for facts in clips]
        usable, n_pieces, tokens, between = np.array(counts, np.int64).reshape(-1, 4).T
        return MediaCounts(usable > 0, n_pieces, tokens, between, tokens // np.maximum(n_pieces, 1))

    def stamps(self, seconds: Sequence[float]) -> list[StampIds]:
        """The text around each piece of a clip."""
        return [self.stamp(second) for second in seconds]

    def _clip_counts(self, clip: Clip) -> tuple[int, int, int, int]:
        """(usable, pairs of frames, their tokens, tokens of their stamps)."""
        layout = self.native.clip(clip)
        if layout is None:
            return 0, 0, 0, 0
        n_pairs = len(layout.seconds)
        text = sum(len(ids) for stamp in self.stamps(layout.seconds) for ids in stamp)
        return 1, n_pairs, n_pairs * self.native.tokens(layout.grid), text

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        if kind == IMAGE.name:
            rows, cols = self.native.grid(header)
            return (rows * cols,)
        layout = self._layout(header)
        return (layout.grid[0] * layout.grid[1],) * len(layout.seconds)

    def _layout(self, header: Header) -> ClipLayout:
        layout = self.native.clip(Clip(*(header[name] for name in Clip._fields)))
        assert layout is not None, f"a clip that is not usable: {header}"
        return layout

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        native = self.native
        if kind == IMAGE.name:
            image = opened((header["width"], header["height"]))
            grid = native.grid(header)
            frames = np.stack([native.resized(image, grid)] * native.frames)
            return self._decoded(frames, (grid,), np.full(native.tokens(grid), -1))
        layout = self._layout(header)
        frames = opened.numbered(layout.frames, partial(native.resized, grid=layout.grid))
        id_runs: list[np.ndarray] = []
        for ids_before, ids_after in self.stamps(layout.seconds):
            id_runs += [
                np.array(ids_before),
                np.full(native.tokens(layout.grid), -1),
                np.array(ids_after),
            ]
        ids = np.concatenate(id_runs).astype(np.int64)
        return self._decoded(frames, (layout.grid,) * len(layout.seconds), ids)

    def _decoded(
        self, frames: np.ndarray, grids: tuple[Grid, ...], ids: np.ndarray
    ) -> DecodedMedium:
        patches, merge = self.native.patches(frames), self.native.merge
        stand = ids < 0
        return DecodedMedium(
            {"patches": patches, "grid": patch_places(grids, merge)},
            tuple(rows * cols for rows, cols in grids),
            len(patches) // merge**2,
            copied_sources(np.where(stand, np.cumsum(stand) - 1, -1)),
            ids,
            grids,
        )

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        grids = [grid for medium in media for grid in medium.grids]
        return {"positions": token_positions(runs_of(stand, grids, self.native.merge))}


def stamp_of(
    tokenizer: Tokenizer | ChatTokenizer | None,
    spelled: Callable[[float], str],
    ends: Sequence[tuple[int, ...]],
) -> Stamp:
    """Return what gives the text around frames: a time as `spelled`, and the tokens that begin and
    end a picture."""
    begin_ids, end_ids = ends

    @lru_cache(maxsize=65536)
    def ids(text: str) -> tuple[int, ...]:
        return (*(tokenizer.encode(text) if tokenizer else ()), *begin_ids)

    return lambda second: (ids(spelled(second)), end_ids)


def _build(
    facts: Facts, limits: Limits, tokenizer: Tokenizer | ChatTokenizer | None
) -> NativeMedium:
    clip_facts = {name: facts[name] for name in CLIP_FACTS if name in facts}
    patch_px, merge, frames = integer_facts(facts, *CLIP_FACTS, patch_px=None, merge=1, frames=1)
    native = Native(
        patch_px, merge, frames, limits.min_pixels, limits.max_pixels, limits.max_clip_pixels,
        max(frames, limits.max_frames), limits.frames_per_s, **clip_facts,
    )  # fmt: skip
    ends = [tokenizer.ids_of(token) if isinstance(tokenizer, ChatTokenizer) else ()
            for token in VISION_MARKERS]  # fmt: skip
    return NativeMedium(native, stamp_of(tokenizer, "<{:.1f} seconds>".format, ends))


FORM = Form(NativeMedium.kinds, _build)
