"""From pieces of text and headers of media to the exact shape of a sample, and to its arrays.

`lay_out` decides before decoding how many tiles each medium gives and how much text stays;
`assemble` builds the sample from decoded tiles by the same decision, so shapes always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.data.media.tiling import count_tiles
from dflop_jax.data.media.token_sources import plain
from dflop_jax.data.sample import Limits, MediaSpec, Sample
from dflop_jax.data.text.pieces import Piece
from dflop_jax.records import SampleShape

# a cut sample keeps so much of its first answer, else there would be little to learn from it
ANSWER_TOKENS = 32


class OversizeError(ValueError):
    """A sample that does not fit the limits and may not, or cannot, be cut."""


@dataclass(frozen=True)
class Header:
    """What is known of a medium before it is decoded: upright size, and frames of a clip (or 0)."""

    width: int
    height: int
    frames: int = 0

    def tiles(self, tile_px: int, max_tiles: int, cap: int) -> int:
        """Tiles under the AnyRes limit (grid tiles) and a cap on all tiles of this medium."""
        if self.frames:
            return min(self.frames, cap)
        return count_tiles(self.width, self.height, tile_px, min(max_tiles, cap - 1))


@dataclass(frozen=True)
class Layout:
    """Tiles of each medium, text tokens kept (from the front), and the cap that gave the tiles."""

    tiles: tuple[int, ...]
    cap: int
    shape: SampleShape


def lay_out(
    pieces: Sequence[Piece], media: Sequence[Header], spec: MediaSpec, limits: Limits
) -> Layout:
    """The layout of a sample within `limits`.

    A sample longer than `max_tokens` is, by `oversize`, refused (drop, error) or cut: text goes
    from the end, visual tokens never; when they leave no room for ANSWER_TOKENS of the first
    answer, every medium is capped to the largest number of tiles that does.

    Raises:
      OversizeError: refused, or too long even with one tile for each medium.
    """
    text = sum(len(p.ids) for p in pieces)
    first = next((k for k, p in enumerate(pieces) if p.supervised), len(pieces))
    needed = sum(len(p.ids) for p in pieces[:first])
    needed += min(ANSWER_TOKENS, sum(len(p.ids) for p in pieces[first:] if p.supervised))
    most = max([limits.max_tiles + 1, *(m.frames for m in media)])
    for cap in range(most, 0, -1):
        tiles = tuple(m.tiles(spec.tile_px, limits.max_tiles, cap) for m in media)
        visual = sum(tiles) * spec.tokens_per_tile
        full = visual + text
        if cap == most and full > limits.max_tokens and limits.oversize != "truncate":
            raise OversizeError(
                f"{full} LLM tokens exceed data.max_tokens={limits.max_tokens}; "
                "raise it, or set data.oversize to truncate or drop"
            )
        if visual + needed <= limits.max_tokens:
            kept = min(text, limits.max_tokens - visual)
            frames = sum(n for n, m in zip(tiles, media, strict=True) if m.frames)
            return Layout(tiles, cap, SampleShape(sum(tiles), kept, kept + visual, frames))
    raise OversizeError(
        f"{needed} text tokens up to the answer and one tile for each of {len(media)} pictures "
        f"do not fit data.max_tokens={limits.max_tokens}; raise it"
    )


def assemble(
    pieces: Sequence[Piece],
    layout: Layout,
    tiles: Sequence[np.ndarray],
    spec: MediaSpec,
    visual_id: int,
) -> Sample:
    """The sample of `layout` from the decoded tiles uint8 [n, px, px, 3] of each medium.

    ValueError when a medium gave another number of tiles than its header promised.
    """
    found = tuple(len(t) for t in tiles)
    if found != layout.tiles:
        raise ValueError(f"decoded to {found} tiles where the headers promised {layout.tiles}")
    first = np.concatenate([[0], np.cumsum(layout.tiles)]).astype(np.int64) * spec.tokens_per_tile
    tokens: list[np.ndarray] = []
    visual: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    room = layout.shape.text_tokens
    for p in pieces:
        if p.medium >= 0:
            index = np.arange(first[p.medium], first[p.medium + 1])
            ids = np.full(len(index), visual_id)
        else:
            ids = np.asarray(p.ids[:room], np.int64)
            room -= len(ids)
            index = np.full(len(ids), -1)
        tokens.append(ids)
        visual.append(index)
        supervised.append(np.full(len(ids), p.supervised))
    px = spec.tile_px
    sample = Sample(
        tokens=np.concatenate(tokens).astype(np.int32),
        supervised=np.concatenate(supervised).astype(bool),
        tiles=np.concatenate([np.zeros((0, px, px, 3), np.uint8), *tiles]),
        visual=plain(np.concatenate(visual)),
        frames=layout.shape.frames,
    )
    assert sample.shape == layout.shape, (sample.shape, layout.shape)
    return sample


def grey_tiles(n: int, spec: MediaSpec) -> np.ndarray:
    """Tiles that show nothing, uint8 [n, tile_px, tile_px, 3]."""
    return np.full((n, spec.tile_px, spec.tile_px, 3), 128, np.uint8)


def empty_sample() -> Sample:
    """In place of a sample that cannot be decoded: one token of text, which nothing supervises."""
    return Sample(
        tokens=np.zeros(1, np.int32),
        supervised=np.zeros(1, bool),
        tiles=np.zeros((0, 1, 1, 3), np.uint8),
        visual=plain(np.full(1, -1)),
    )
