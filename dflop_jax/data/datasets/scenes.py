"""The embedded dataset: scenes of coloured shapes, drawn by code, with questions about them.

Sample i of a seed is always the same, with nothing to download. Answers are one word and need the
pixels (except for text-only samples). The mixture is heavy-tailed as real data are: pictures of
1 to 10 tiles, 2 to 8 pictures, clips of 4 to 32 frames, and text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

from dflop_jax.data.media.limits import Limits

T = TypeVar("T")
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 170, 50),
    "blue": (40, 70, 230),
    "yellow": (240, 210, 30),
    "pink": (245, 90, 200),
    "cyan": (40, 200, 220),
}
SHAPES = ("circle", "square", "triangle")
POSITIONS = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
VOCABULARY = ("apple", "bird", "cloud", "door", "fish", "goat", "hat", "ink", "jar", "king", "lamp")
# share of each kind of sample
MIXTURE = {"picture": 0.66, "pictures": 0.1, "clip": 0.12, "text": 0.12}


@dataclass(frozen=True)
class DrawnShape:
    """A filled shape; centre and size in pixels; `move` is its path over a clip."""

    kind: str
    colour: str
    x: float
    y: float
    size: float
    move: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Picture:
    """A canvas of grey level `background` with shapes; `frames` > 0 makes it a clip."""

    width: int
    height: int
    background: int
    shapes: tuple[DrawnShape, ...]
    frames: int = 0

    def render(self, time: float = 0.0) -> Image.Image:
        """RGB image; `time` runs from 0 to 1 over a clip."""
        image = Image.new("RGB", (self.width, self.height), (self.background,) * 3)
        draw = ImageDraw.Draw(image)
        for s in self.shapes:
            x, y, r = s.x + s.move[0] * time, s.y + s.move[1] * time, s.size / 2
            if s.kind == "circle":
                draw.ellipse((x - r, y - r, x + r, y + r), COLOURS[s.colour])
            elif s.kind == "square":
                draw.rectangle((x - r, y - r, x + r, y + r), COLOURS[s.colour])
            else:
                draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], COLOURS[s.colour])
        return image


@dataclass(frozen=True)
class Scene:
    """One sample before rendering. `kind` names the form of question."""

    kind: str
    pictures: tuple[Picture, ...]
    question: str
    answer: str

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        tags = "".join("<video>" if p.frames else "<image>" for p in self.pictures)
        return (
            ("human", f"{tags}\n{self.question}" if tags else self.question),
            ("gpt", self.answer),
        )


def draw_scene(rng: np.random.Generator, tile_px: int, limits: Limits) -> Scene:
    """A random scene of the mixture; nothing is rendered."""
    group = _draw(rng, list(MIXTURE), list(MIXTURE.values()))
    forms: dict[str, list[Callable[[_Pen], Scene]]] = {
        "picture": [
            _colour_scene,
            _colour_scene,
            _colour_scene,
            _position_scene,
            _shape_scene,
            _count_scene,
        ],
        "pictures": [_more_shapes_scene, _same_colour_scene, _which_picture_scene],
        "clip": [_direction_scene, _moving_shape_scene],
        "text": [_sum_scene, _first_word_scene],
    }
    form = forms[group][rng.integers(len(forms[group]))]
    return form(_Pen(rng, tile_px, limits))


class _Pen:
    """Draws the random parts of scenes from one generator."""

    def __init__(self, rng: np.random.Generator, tile_px: int, limits: Limits) -> None:
        self.rng, self.px, self.limits = rng, tile_px, limits

    def size(self, max_tiles: int = 9) -> tuple[int, int]:
        """(width, height) that AnyRes gives 1, 3, 4, ... `max_tiles` + 1 tiles, few more often."""
        tiles = [1, *range(2, min(max_tiles, self.limits.max_tiles) + 1)]
        n = _draw(self.rng, tiles, [1.2, *(1.0 / t for t in tiles[1:])])
        rows = _draw(self.rng, [r for r in tiles if n % r == 0])
        width, height = (
            side * self.px - self.rng.integers(self.px // 4 + 1) for side in (n // rows, rows)
        )
        return int(width), int(height)

    def colour(self, *excluded: str) -> str:
        return _draw(self.rng, [c for c in COLOURS if c not in excluded])

    def kind(self, *excluded: str) -> str:
        return _draw(self.rng, [k for k in SHAPES if k not in excluded])

    def canvas(self, size: tuple[int, int], *shapes: DrawnShape, frames: int = 0) -> Picture:
        dark = self.rng.integers(10, 60) if self.rng.random() < 0.5 else self.rng.integers(200, 250)
        return Picture(*size, int(dark), shapes, frames)

    def single_shape(self, size: tuple[int, int], colour: str, kind: str) -> Picture:
        """A picture of one large shape anywhere."""
        d = float(self.rng.uniform(0.6, 0.9)) * min(size)
        x, y = (
            # In a tiny picture nowhere but in the middle.
            float(self.rng.uniform(min(d / 2 + 1, side / 2), max(side - d / 2 - 1, side / 2)))
            for side in size
        )
        return self.canvas(size, DrawnShape(kind, colour, x, y, d))

    def repeated_shape(self, size: tuple[int, int], n: int) -> Picture:
        """A picture of n <= 4 shapes of one colour and kind that do not touch."""
        cell = min(size) / 2
        cols, rows = int(size[0] / cell), int(size[1] / cell)
        cells = self.rng.choice(cols * rows, n, replace=False)
        colour, kind = self.colour(), self.kind()
        d = float(self.rng.uniform(0.6, 0.8)) * cell
        shapes = [
            DrawnShape(kind, colour, (c % cols + 0.5) * cell, (c // cols + 0.5) * cell, d)
            for c in map(int, cells)
        ]
        return self.canvas(size, *shapes)

    def heavy_tailed(self, shortest: int, longest: int) -> int:
        """A heavy-tailed whole number: density falls as n^-2 from `shortest`, cut at `longest`."""
        return int(min(longest, shortest / (1.0 - self.rng.random())))


def _colour_scene(pen: _Pen) -> Scene:
    colour = pen.colour()
    picture = pen.single_shape(pen.size(), colour, pen.kind())
    return Scene("colour", (picture,), "What colour is it?", colour)


def _shape_scene(pen: _Pen) -> Scene:
    kind = pen.kind()
    picture = pen.single_shape(pen.size(), pen.colour(), kind)
    return Scene("kind", (picture,), "Which shape is it?", kind)


def _count_scene(pen: _Pen) -> Scene:
    n = int(pen.rng.integers(1, 5))
    return Scene("count", (pen.repeated_shape(pen.size(), n),), "How many shapes?", str(n))


def _position_scene(pen: _Pen) -> Scene:
    position = _draw(pen.rng, list(POSITIONS))
    size = pen.size()
    d = float(pen.rng.uniform(0.35, 0.48)) * min(size)
    x, y = (f * side for f, side in zip(POSITIONS[position], size, strict=True))
    shape = DrawnShape(pen.kind(), pen.colour(), x, y, d)
    return Scene("place", (pen.canvas(size, shape),), "Where is the shape?", position)


def _more_shapes_scene(pen: _Pen) -> Scene:
    n_fewer, n_more = sorted(int(n) for n in pen.rng.choice(4, 2, replace=False) + 1)
    first = pen.rng.random() < 0.5
    pictures = tuple(
        pen.repeated_shape(pen.size(4), n)
        for n in ((n_more, n_fewer) if first else (n_fewer, n_more))
    )
    return Scene("more", pictures, "Which picture has more shapes?", "first" if first else "second")


def _same_colour_scene(pen: _Pen) -> Scene:
    colour = pen.colour()
    is_same = pen.rng.random() < 0.5
    second_colour = colour if is_same else pen.colour(colour)
    pictures = tuple(pen.single_shape(pen.size(4), c, pen.kind()) for c in (colour, second_colour))
    return Scene("same", pictures, "Is the colour the same?", "yes" if is_same else "no")


def _which_picture_scene(pen: _Pen) -> Scene:
    n = pen.heavy_tailed(2, 8)
    target, i_target = pen.colour(), int(pen.rng.integers(n))
    pictures = tuple(
        pen.single_shape(pen.size(4), target if k == i_target else pen.colour(target), pen.kind())
        for k in range(n)
    )
    return Scene("which", pictures, f"Which picture is {target}?", str(i_target + 1))


def _direction_scene(pen: _Pen) -> Scene:
    direction = _draw(pen.rng, list(MOVES))
    px, (dx, dy) = pen.px, MOVES[direction]
    d, path = float(pen.rng.uniform(0.3, 0.45)) * px, 0.5 * px
    across = float(pen.rng.uniform(-0.15, 0.15)) * px
    x = px / 2 - dx * path / 2 + (across if dx == 0 else 0.0)
    y = px / 2 - dy * path / 2 + (across if dy == 0 else 0.0)
    shape = DrawnShape(pen.kind(), pen.colour(), x, y, d, (dx * path, dy * path))
    clip = pen.canvas((px, px), shape, frames=_draw_frame_count(pen))
    return Scene("direction", (clip,), "Which way does it move?", direction)


def _moving_shape_scene(pen: _Pen) -> Scene:
    mover = pen.kind()
    still = pen.kind(mover)
    px, d = pen.px, float(pen.rng.uniform(0.32, 0.42)) * pen.px
    top, direction = pen.rng.random() < 0.5, 1 if pen.rng.random() < 0.5 else -1
    y_mover, y_still = (0.25 * px, 0.75 * px) if top else (0.75 * px, 0.25 * px)
    path = 0.5 * px
    shapes = (
        DrawnShape(
            mover, pen.colour(), px / 2 - direction * path / 2, y_mover, d, (direction * path, 0.0)
        ),
        DrawnShape(still, pen.colour(), float(pen.rng.uniform(0.25, 0.75)) * px, y_still, d),
    )
    clip = pen.canvas((px, px), *shapes, frames=_draw_frame_count(pen))
    return Scene("mover", (clip,), "Which shape moves?", mover)


def _draw_frame_count(pen: _Pen) -> int:
    return min(pen.heavy_tailed(4, 32), pen.limits.max_frames)


def _sum_scene(pen: _Pen) -> Scene:
    a, b = (int(n) for n in pen.rng.integers(1, 5, 2))
    return Scene("sum", (), f"{a}+{b}=?", str(a + b))


def _first_word_scene(pen: _Pen) -> Scene:
    drawn = [_draw(pen.rng, VOCABULARY) for _ in range(pen.heavy_tailed(4, 60))]
    return Scene("first word", (), f"First word: {' '.join(drawn)}", drawn[0])


def _draw(rng: np.random.Generator, items: Sequence[T], weights: Sequence[float] = ()) -> T:
    if not weights:
        return items[int(rng.integers(len(items)))]
    mark = rng.random() * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        mark -= weight
        if mark < 0:
            return item
    return items[-1]
