"""Pictures and clips at native resolution, for Qwen3-VL.

A picture, or a pair of a clip's frames, is one piece. Its sides are rounded to whole blocks of
patches within a range of pixels. In the text, each pair of frames follows its time.
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

from dflop_jax.config import DataConfig
from dflop_jax.data.media.kind import IMAGE, MICRO, VIDEO, Columns, Header, Kinds
from dflop_jax.data.media.medium import (
    GREY,
    DecodedMedium,
    Facts,
    Form,
    Grid,
    MediaCounts,
    Medium,
    integer_facts,
)
from dflop_jax.data.media.pictures import BICUBIC
from dflop_jax.data.media.token_sources import copied_sources
from dflop_jax.data.media.video import ClipHeader
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer

MAX_RATIO = 200  # maximum ratio of a picture's sides
CAP_SLACK = 1.05  # a frame's pixel limit is at least the minimum pixels times this
# Minimum and maximum blocks of a picture and of a frame, and maximum of all frames, if a record
# sets keys of the medium; as in qwen-vl-utils.
KEYED_BLOCKS, KEYED_FRAME_BLOCKS, KEYED_CLIP_BLOCKS = (4, 16384), (128, 768), 115_200
VISION_MARKERS = ("<|vision_start|>", "<|vision_end|>")  # tokens around a pair of frames
CLIP_FACTS = (
    "min_frames",
    "num_frames",
    "min_clip_pixels",
    "cap_pixels_per_frame",
    "max_video_tokens",
)
UNIT_BLOCKS = 3  # blocks per side of the smallest drawn picture

Ids = tuple[int, ...]


class ClipLayout(NamedTuple):
    """Sampled frames of a clip."""

    frames: tuple[int, ...]  # numbers of the frames, in pairs
    seconds: tuple[float, ...]  # time of each pair
    grid: Grid  # patches of each frame


@dataclass(frozen=True)
class Native:
    """Settings of patch sizes and pixel ranges; defaults are the published configuration."""

    patch_px: int = 16  # side of a patch
    merge: int = 2  # patches per side of a block, which becomes one LLM token
    frames: int = 2  # frames of a clip in one patch; a picture is repeated this often
    min_pixels: int = DataConfig.min_pixels  # of a resized picture
    max_pixels: int = DataConfig.max_pixels
    max_clip_pixels: int = DataConfig.max_clip_pixels  # of all frames of a clip
    max_frames: int = 768  # sampled from a clip
    frames_per_s: float = 2.0
    min_frames: int = 4  # sampled from a clip, if it has as many
    num_frames: int = 0  # above 0: a fixed number of frames instead
    min_clip_pixels: int = 4096  # of all frames of a clip
    cap_pixels_per_frame: bool = False  # each frame gets an equal share of `max_clip_pixels`
    max_video_tokens: int = 768  # maximum tokens of a frame in that case

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

    def tokens(self, grid: Grid) -> int:
        """Return the LLM tokens of a piece."""
        return grid[0] * grid[1] // self.merge**2

    def grid(self, header: Header) -> Grid:
        """Return a picture's rows and columns of patches; 0 if it is too thin."""
        rows, cols = self.blocks({name: np.array([n]) for name, n in header.items()})
        return int(rows[0]) * self.merge, int(cols[0]) * self.merge

    def blocks(self, headers: Columns) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and columns of pictures' blocks, int64 [n]; 0 if one is too thin."""
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

    def clip(self, clip: ClipHeader) -> ClipLayout | None:
        """Return the sampled frames of a clip; None: it has too few frames or is too thin."""
        rate = clip.rate_num / clip.rate_den
        n = self._frame_count(clip)
        grid = self._clip_grid(n, clip) if n >= self.frames else None
        if grid is None:
            return None
        last = clip.first + clip.total - 1
        frames = np.linspace(clip.first, last, n).round().astype(int).tolist()
        frames += frames[-1:] * (-n % self.frames)
        pairs = zip(frames[:: self.frames], frames[self.frames - 1 :: self.frames], strict=True)
        return ClipLayout(tuple(frames), tuple((a / rate + b / rate) / 2 for a, b in pairs), grid)

    def _frame_count(self, clip: ClipHeader) -> int:
        """Return the number of sampled frames; 0 if the clip has fewer than its record requests."""
        pair, seconds = self.frames, clip.total * clip.rate_den / clip.rate_num
        if clip.nframes:
            n = round(clip.nframes / pair) * pair
            return n if n <= clip.total else 0
        if clip.fps or clip.min_frames or clip.max_frames:
            n_min = ceil((clip.min_frames or self.min_frames) / pair) * pair
            n_max = floor((clip.max_frames or min(self.max_frames, clip.total)) / pair) * pair
            frames_per_s = clip.fps / MICRO or self.frames_per_s
            return floor(min(max(seconds * frames_per_s, n_min), n_max, clip.total) / pair) * pair
        if self.num_frames:
            return min(self.num_frames, self.max_frames)
        wanted = int(clip.total / (clip.rate_num / clip.rate_den) * self.frames_per_s)
        return min(max(wanted, self.min_frames), self.max_frames, clip.total)

    def _clip_grid(self, n: int, clip: ClipHeader) -> Grid | None:
        """Return the patch grid of each of n frames; None: the frames are too thin."""
        px, width, height = self.block_px, clip.width, clip.height
        if clip.min_pixels or clip.max_pixels or clip.total_pixels or clip.resized_width:
            low = clip.min_pixels or KEYED_FRAME_BLOCKS[0] * px**2
            total_pixels = clip.total_pixels or KEYED_CLIP_BLOCKS * px**2
            frame_pixels = min(KEYED_FRAME_BLOCKS[1] * px**2, total_pixels / n * self.frames)
            high = max(frame_pixels, int(low * CAP_SLACK))
            keys = clip._replace(min_pixels=low, max_pixels=int(min(clip.max_pixels or high, high)))
            return keyed if min(keyed := self.grid(keys._asdict())) else None
        if min(width, height) < px:
            scale = max(px / height, px / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_RATIO * min(height, width):
            return None
        max_pixels = self.max_clip_pixels
        if self.cap_pixels_per_frame:
            frame_pixels = min(self.max_video_tokens * px**2, max_pixels // n)
            max_pixels = n * max(frame_pixels, int(self.min_clip_pixels * CAP_SLACK))
        rows, cols = round(height / px), round(width / px)
        pixels = round(n / self.frames) * self.frames * rows * cols * px * px
        if pixels > max_pixels:
            shrink = sqrt(n * height * width / max_pixels)
            rows, cols = (max(1, floor(side / shrink / px)) for side in (height, width))
        elif pixels < self.min_clip_pixels:
            grow = sqrt(self.min_clip_pixels / (n * height * width))
            rows, cols = (ceil(side * grow / px) for side in (height, width))
        return rows * self.merge, cols * self.merge

    def resized(self, image: Image.Image, grid: Grid) -> np.ndarray:
        """Return an RGB picture or frame in the size of a patch grid, uint8 [height, width, 3]."""
        size = grid[1] * self.patch_px, grid[0] * self.patch_px
        return np.asarray(image.resize(size, BICUBIC), np.uint8)

    def patches(self, frames: np.ndarray) -> np.ndarray:
        """Return patches uint8 [p, colours x frames x patch_px x patch_px] of frames uint8 [n,
        height, width, 3], n a multiple of `frames`: in the order of pairs, blocks, patches."""
        n, height, width, colours = frames.shape
        px, m = self.patch_px, self.merge
        rows, cols = height // self.block_px, width // self.block_px
        split = frames.reshape(n // self.frames, self.frames, rows, m, px, cols, m, px, colours)
        patches = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return patches.reshape(-1, colours * self.frames * px * px)


def patch_places(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """Return int32 [patches, 4]: row and column of each patch in its piece, in the order of
    `Native.patches`, and the rows and columns of the piece."""
    pieces_of_grid = [np.zeros((0, 4), np.int32)]
    for rows, cols in grids:
        positions = np.moveaxis(np.indices((rows, cols)), 0, -1)
        blocks = positions.reshape(rows // merge, merge, cols // merge, merge, 2).swapaxes(1, 2)
        whole = np.broadcast_to((rows, cols), (rows * cols, 2))
        pieces_of_grid.append(np.concatenate([blocks.reshape(-1, 2), whole], 1).astype(np.int32))
    return np.concatenate(pieces_of_grid)


def token_positions(stand: np.ndarray, blocks: Sequence[Grid]) -> np.ndarray:
    """Return the (time, row, column) positions of a text's tokens, int32 [t, 3]. The mask `stand`
    marks the tokens of pieces, `blocks` has their rows and columns. After a piece at position n
    the text continues at n plus its longer side."""
    positions = np.zeros((len(stand), 3), np.int32)
    stand_at = np.flatnonzero(stand)
    end = n_placed = start = 0
    for rows, cols in blocks:
        first = int(stand_at[n_placed])
        positions[end:first] = np.arange(start, start + first - end)[:, None]
        start += first - end
        n_placed, end = n_placed + rows * cols, first + rows * cols
        positions[first:end] = start + np.indices((1, rows, cols)).reshape(3, -1).T
        start += max(rows, cols)
    positions[end:] = np.arange(start, start + len(stand) - end)[:, None]
    return positions


@dataclass(frozen=True)
class NativeMedium(Medium):
    """Preparation of pictures and clips at native resolution."""

    native: Native
    encode: Callable[[str], Ids]
    frame_ends: tuple[Ids, Ids]  # tokens that begin and end a pair of frames

    kinds: ClassVar[Kinds] = (IMAGE, VIDEO)
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({"patches": GREY})
    piece_tokens = 0
    uses_keys: ClassVar[bool] = True

    @property
    def unit_px(self) -> int:
        """Side of the smallest drawn picture, in pixels."""
        return UNIT_BLOCKS * self.native.block_px

    def stamps(self, seconds: Sequence[float]) -> list[tuple[Ids, Ids]]:
        """Return the ids of the text before and after each piece of a clip."""
        begin_ids, end_ids = self.frame_ends
        times = [self.encode(self.time_text(i, second)) for i, second in enumerate(seconds)]
        return [((*ids, *begin_ids), end_ids) for ids in times]

    def time_text(self, index: int, second: float) -> str:
        """Return the text before the piece at this time."""
        return f"<{second:.1f} seconds>"

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        if kind == IMAGE.name:
            rows, cols = self.native.blocks(headers)
            tokens = rows * cols
            return MediaCounts(rows > 0, np.ones(len(rows), np.int64), tokens, longest=tokens)
        clips = zip(*(headers[name].tolist() for name in ClipHeader._fields))
        counts = [self._clip_counts(ClipHeader(*facts)) for facts in clips]
        usable, n_pieces, tokens, between = np.array(counts, np.int64).reshape(-1, 4).T
        return MediaCounts(usable > 0, n_pieces, tokens, between, tokens // np.maximum(n_pieces, 1))

    def _clip_counts(self, clip: ClipHeader) -> tuple[int, int, int, int]:
        """Return (usable, pairs of frames, tokens of pairs, tokens of time stamps)."""
        layout = self.native.clip(clip)
        if layout is None:
            return 0, 0, 0, 0
        n_pairs = len(layout.seconds)
        text = sum(len(ids) for stamp in self.stamps(layout.seconds) for ids in stamp)
        return 1, n_pairs, n_pairs * self.native.tokens(layout.grid), text

    def _layout(self, header: Header) -> ClipLayout:
        layout = self.native.clip(ClipHeader(*(header[name] for name in ClipHeader._fields)))
        assert layout is not None, f"an unusable clip: {header}"
        return layout

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        if kind == IMAGE.name:
            n, (rows, cols) = 1, self.native.grid(header)
        else:
            _, seconds, (rows, cols) = self._layout(header)
            n = len(seconds)
        return (rows * cols,) * n

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        native = self.native
        if kind == IMAGE.name:
            image, grid, n = opened((header["width"], header["height"])), native.grid(header), 1
            frames = np.stack([native.resized(image, grid)] * native.frames)
            ids = np.full(native.tokens(grid), -1)
        else:
            numbers, seconds, grid = self._layout(header)
            frames, n = opened.numbered(numbers, partial(native.resized, grid=grid)), len(seconds)
            media_ids = [-1] * native.tokens(grid)
            runs = ([*head, *media_ids, *tail] for head, tail in self.stamps(seconds))
            ids = np.array([i for run in runs for i in run], np.int64)
        stand = ids < 0
        return DecodedMedium(
            {"patches": native.patches(frames), "grid": patch_places((grid,) * n, native.merge)},
            (grid[0] * grid[1],) * n,
            n * native.tokens(grid),
            copied_sources(np.where(stand, np.cumsum(stand) - 1, -1)),
            ids,
            (grid,) * n,
        )

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        merge = self.native.merge
        blocks = [(rows // merge, cols // merge) for medium in media for rows, cols in medium.grids]
        return {"positions": token_positions(stand, blocks)}


def cached_encode(tokenizer: AnyTokenizer | None) -> Callable[[str], Ids]:
    """Return a cached function from text to ids; without a tokenizer it returns no ids."""
    return lru_cache(65536)(lambda text: tuple(tokenizer.encode(text)) if tokenizer else ())


def _build(facts: Facts, limits: DataConfig, tokenizer: AnyTokenizer | None) -> NativeMedium:
    clip_facts = {name: facts[name] for name in CLIP_FACTS if name in facts}
    patch_px, merge, frames = integer_facts(facts, *CLIP_FACTS, patch_px=None, merge=1, frames=1)
    pixels = limits.min_pixels, limits.max_pixels, limits.max_clip_pixels
    n = max(frames, limits.max_frames)
    native = Native(patch_px, merge, frames, *pixels, n, limits.frames_per_s, **clip_facts)
    begin_ids, end_ids = (
        tokenizer.ids_of(token) if isinstance(tokenizer, ChatTokenizer) else ()
        for token in VISION_MARKERS
    )
    return NativeMedium(native, cached_encode(tokenizer), (begin_ids, end_ids))


FORM = Form(NativeMedium.kinds, _build)
