"""Embedded clips: two shapes that cross a small picture, and a caption that says which and where.

Clip i of (seed, split) is always the same, with nothing to download. Its frames become latents by
a fixed transform that can be undone: blocks of pixels side by side as channels. What is held out
are pairs of shapes that training never shows together.
"""

from __future__ import annotations

import numpy as np

from dflop_jax.data.datasets.scenes import COLOURS, SHAPES, DrawnShape, Picture
from dflop_jax.data.sample import STREAMS

SIDE_PX = 16  # pixels of a frame's side
SHAPE_PX = 7  # pixels of a shape's side
GREY = 128  # of the background, in 0 to 255
SCALE = 2.0  # latents have a variance of about one
FRAMES = (2, 3, 3, 4, 4, 6)  # of a clip, drawn
DIRECTIONS = ("left", "right")
HELD_OUT_PERIOD = 6  # one pair of so many


def latents_of(frames: np.ndarray, block: int) -> np.ndarray:
    """Pixels uint8 [time, height, width, 3] as latents float32 [3 block^2, time, height / block,
    width / block]."""
    n, height, width, _ = frames.shape
    values = SCALE * (frames.astype(np.float32) / np.float32(127.5) - 1.0)
    split = values.reshape(n, height // block, block, width // block, block, 3)
    rows = split.transpose(2, 4, 5, 0, 1, 3)
    return rows.reshape(3 * block**2, n, height // block, width // block)


def frames_of(latents: np.ndarray, block: int) -> np.ndarray:
    """The inverse of `latents_of`, to the nearest pixel value."""
    _, n, rows, columns = latents.shape
    split = latents.reshape(block, block, 3, n, rows, columns).transpose(3, 4, 0, 5, 1, 2)
    values = split.reshape(n, rows * block, columns * block, 3)
    return np.clip(np.rint((values / SCALE + 1.0) * 127.5), 0, 255).astype(np.uint8)


def block_of(channels: int) -> int:
    """Side of a block whose pixels are so many channels.

    Raises:
      ValueError: none has.
    """
    side = round((channels / 3) ** 0.5)
    if 3 * side**2 != channels or SIDE_PX % max(side, 1):
        raise ValueError(
            f"the embedded clips have 3 k k channels, k a divisor of {SIDE_PX}, not {channels}; "
            "choose a model with 48, or give data.path, a list of latents"
        )
    return side


class MovingScenes:
    """`n` clips of (seed, split). `shuffled_indices` gives each the caption of another (a control
    experiment)."""

    def __init__(
        self, n: int, seed: int, split: str, channels: int, *, shuffled: bool = False
    ) -> None:
        self.name = f"moving scenes(n={n}, seed={seed}, {split})"
        self._n, self._key, self._split = n, (seed, STREAMS[split]), split
        self._block, self._shuffled = block_of(channels), shuffled

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def caption(self, index: int) -> str:
        caption_index = (index + max(1, self._n // 2)) % self._n
        return _caption(self._draw(caption_index if self._shuffled else index)[0])

    def shape(self, index: int) -> tuple[int, ...]:
        side = SIDE_PX // self._block
        return 3 * self._block**2, self._draw(index)[1], side, side

    def latents(self, index: int) -> np.ndarray:
        return latents_of(self.frames(index), self._block)

    def frames(self, index: int) -> np.ndarray:
        """Pixels uint8 [time, height, width, 3]."""
        shapes, n = self._draw(index)
        picture = _picture(shapes)
        return np.stack([np.asarray(picture.render(t)) for t in np.linspace(0.0, 1.0, n)])

    def _draw(self, index: int) -> tuple[tuple[int, int], int]:
        """Which two shapes, upper and lower, and how many frames."""
        rng = np.random.default_rng((*self._key, index))
        kinds = len(SHAPES) * len(COLOURS) * len(DIRECTIONS)
        while True:
            upper, lower = (int(k) for k in rng.integers(kinds, size=2))
            if ((upper + lower) % HELD_OUT_PERIOD == 0) == (self._split == "eval"):
                return (upper, lower), FRAMES[rng.integers(len(FRAMES))]


def _decode_shape(number: int) -> tuple[str, str, str]:
    """Colour, kind and way of a shape by its number."""
    rest, direction = divmod(number, len(DIRECTIONS))
    colour, kind = divmod(rest, len(SHAPES))
    return tuple(COLOURS)[colour], SHAPES[kind], DIRECTIONS[direction]


def _caption(shapes: tuple[int, int]) -> str:
    return " over ".join(" ".join(_decode_shape(number)) for number in shapes)


def _picture(shapes: tuple[int, int]) -> Picture:
    drawn = []
    for row, number in enumerate(shapes):
        colour, kind, direction = _decode_shape(number)
        path = float(SIDE_PX - SHAPE_PX - 2)
        sign = 1.0 if direction == "right" else -1.0
        x, y = SIDE_PX / 2 - sign * path / 2, SIDE_PX * (0.25 + 0.5 * row)
        drawn.append(DrawnShape(kind, colour, x, y, SHAPE_PX, (sign * path, 0.0)))
    return Picture(SIDE_PX, SIDE_PX, GREY, tuple(drawn))
