"""Pictures and clips of growing size, as loads: what a plan's shapes hold is found among them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt, sqrt

import numpy as np

from dflop_jax.data.datasets.counts import Preprocessing
from dflop_jax.data.media.native import Clip, Native
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.video import FRAMES_PER_S
from dflop_jax.records import Load

FRAME = (640, 360)  # pixels of a clip's frames, where they count
SIDES = range(1, 13)  # of pictures, in tiles


@dataclass(frozen=True)
class Picture:
    """A picture alone, and what it asks of the modules."""

    width: int
    height: int
    load: Load


@dataclass(frozen=True)
class LongClip:
    """A clip alone, whose frames are all seen, and what it asks of the modules."""

    frames: int
    seconds: float
    load: Load


def pictures(how: Preprocessing, spec: MediaSpec) -> list[Picture]:
    """Return pictures by their pixels, up to those that are scaled down; [] where none is taken."""
    if how.vision is None:
        return []
    if isinstance(how.vision, Native):
        px = how.vision.block_px
        blocks = range(ceil(sqrt(how.vision.min_pixels) / px), isqrt(how.vision.max_pixels) // px)
        sides = np.array([px * n for n in (*blocks, blocks.stop)])
        _, _, tokens = how.vision.count(sides, sides)
        patches = tokens * how.vision.merge**2
        loads = [spec.load((p,), 0, t) for p, t in zip(patches.tolist(), tokens.tolist())]
        return [Picture(n, n, load) for n, load in zip(sides.tolist(), loads, strict=True)]
    sizes = how.vision.tile_px * np.array([(c, r) for c in SIDES for r in SIDES])
    sizes = sizes[np.argsort(sizes.prod(axis=1), kind="stable")]
    widths, heights = sizes.T
    usable, tiles, tokens = how.vision.count(widths, heights, np.ones(len(sizes), bool))
    return [
        Picture(width, height, spec.load(n, 0, t))
        for (width, height), fine, n, t in zip(
            sizes.tolist(), usable, tiles.tolist(), tokens.tolist(), strict=True
        )
        if fine
    ]


def clips(how: Preprocessing, spec: MediaSpec) -> list[LongClip]:
    """Return clips by their frames, up to as many as are sampled; [] where none is taken."""
    if how.vision is None:
        return []
    if not isinstance(how.vision, Native):
        frames = np.arange(1, how.max_frames + 1)
        between = (
            np.cumsum([0, *map(len, how.between_frames)]) if how.between_frames else 0 * frames
        )
        tokens = how.vision.count_clips(frames) + between
        return [
            LongClip(n, n / FRAMES_PER_S, spec.load(n, 0, t))
            for n, t in zip(frames.tolist(), tokens.tolist(), strict=True)
        ]
    assert how.stamp is not None
    vision, rate = how.vision, how.vision.frames_per_s
    found = []
    for n in range(vision.frames, vision.max_frames + 1, vision.frames):
        layout = vision.clip(Clip(*FRAME, n, round(1000 * rate), 1000))
        if layout is not None:
            text = sum(len(ids) for second in layout.seconds for ids in how.stamp(second))
            pairs, tokens = len(layout.seconds), vision.tokens(layout.grid)
            lengths = (layout.grid[0] * layout.grid[1],) * pairs
            found.append(LongClip(n, n / rate, spec.load(lengths, 0, pairs * tokens + text)))
    return found
