"""The built-in dataset: scenes of coloured shapes, drawn by code, with questions about them.

Sample i of a seed is always the same. Nothing is downloaded. Answers are one word and need the
pixels, except in text-only samples. Sizes are heavy-tailed like real data: pictures of 1 to 10
tiles, 2 to 8 pictures, clips of 4 to 32 frames, and text only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.record_table import build_table
from dflop_jax.data.media.compose import blank_media, compose_sample, decode_opened
from dflop_jax.data.media.counts import fit_samples, sample_load
from dflop_jax.data.media.kind import BUILT_IN, IMAGE, VIDEO, Kind
from dflop_jax.data.media.medium import module_of
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.video import Frames
from dflop_jax.data.sample import MAX_CANDIDATES, STREAMS, Sample
from dflop_jax.data.text import tokenize
from dflop_jax.data.text.tokenize import Tokenizer, TokenRun
from dflop_jax.records import Load

T = TypeVar("T")
Convert = Callable[[Image.Image], np.ndarray]
MAX_CACHED_SCENES = 4096  # the last drawn; loads are read several times before pixels
FRAMES_PER_S = 2  # frame rate of a drawn clip
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


@dataclass(frozen=True)
class DrawnShape:
    kind: str
    colour: str
    x: float  # centre, in pixels
    y: float
    size: float  # in pixels
    move: tuple[float, float] = (0.0, 0.0)  # pixels moved over a clip


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    background: int  # grey level
    shapes: tuple[DrawnShape, ...]
    frames: int = 0  # above 0: a clip

    def render(self, time: float = 0.0) -> Image.Image:
        """Return an RGB image; `time` runs from 0 to 1 over a clip."""
        image = Image.new("RGB", (self.width, self.height), (self.background,) * 3)
        draw = ImageDraw.Draw(image)
        for s in self.shapes:
            x, y, r = s.x + s.move[0] * time, s.y + s.move[1] * time, s.size / 2
            box, colour = (x - r, y - r, x + r, y + r), COLOURS[s.colour]
            if s.kind == "circle":
                draw.ellipse(box, colour)
            elif s.kind == "square":
                draw.rectangle(box, colour)
            else:
                draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], colour)
        return image


@dataclass(frozen=True)
class Scene:
    """A sample before rendering."""

    kind: str  # kind of the question
    pictures: tuple[Picture, ...]
    question: str
    answer: str

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        tags = "".join("<video>" if p.frames else "<image>" for p in self.pictures)
        question = f"{tags}\n{self.question}" if tags else self.question
        return ("human", question), ("gpt", self.answer)


class _Pen:
    """Draws the parts of a scene from one random generator."""

    def __init__(self, rng: np.random.Generator, tile_px: int, limits: DataConfig) -> None:
        self.rng, self.px, self.limits = rng, tile_px, limits

    def size(self, max_tiles: int = 9) -> tuple[int, int]:
        """Return (width, height) for which AnyRes makes 1, 3, 4, ... `max_tiles` + 1 tiles."""
        tiles = [1, *range(2, min(max_tiles, self.limits.max_tiles) + 1)]
        n = _draw(self.rng, tiles, [1.2, *(1.0 / t for t in tiles[1:])])
        rows = _draw(self.rng, [r for r in tiles if n % r == 0])
        sides = (n // rows, rows)
        width, height = (k * self.px - int(self.rng.integers(self.px // 4 + 1)) for k in sides)
        return width, height

    def colour(self, *excluded: str) -> str:
        return _draw(self.rng, [c for c in COLOURS if c not in excluded])

    def kind(self, *excluded: str) -> str:
        return _draw(self.rng, [k for k in SHAPES if k not in excluded])

    def draw_picture(self, size: tuple[int, int], *shapes: DrawnShape, frames: int = 0) -> Picture:
        dark = self.rng.integers(10, 60) if self.rng.random() < 0.5 else self.rng.integers(200, 250)
        return Picture(*size, int(dark), shapes, frames)

    def draw_shape(self, size: tuple[int, int], colour: str, kind: str) -> Picture:
        """Return a picture of one large shape, in the middle if the picture is tiny."""
        d = float(self.rng.uniform(0.6, 0.9)) * min(size)
        x, y = (
            float(self.rng.uniform(min(d / 2 + 1, side / 2), max(side - d / 2 - 1, side / 2)))
            for side in size
        )
        return self.draw_picture(size, DrawnShape(kind, colour, x, y, d))

    def draw_shapes(self, size: tuple[int, int], n: int) -> Picture:
        """Return a picture of n <= 4 equal shapes that do not touch."""
        cell = min(size) / 2
        cols, rows = int(size[0] / cell), int(size[1] / cell)
        cells = self.rng.choice(cols * rows, n, replace=False)
        colour, kind = self.colour(), self.kind()
        d = float(self.rng.uniform(0.6, 0.8)) * cell
        shapes = [
            DrawnShape(kind, colour, (c % cols + 0.5) * cell, (c // cols + 0.5) * cell, d)
            for c in map(int, cells)
        ]
        return self.draw_picture(size, *shapes)

    def draw_heavy_tailed(self, shortest: int, longest: int) -> int:
        """Return a random integer n >= `shortest` of density n^-2, clipped to `longest`."""
        return int(min(longest, shortest / (1.0 - self.rng.random())))

    def frame_count(self) -> int:
        return min(self.draw_heavy_tailed(4, 32), self.limits.max_frames)


def _colour_scene(pen: _Pen) -> Scene:
    colour = pen.colour()
    picture = pen.draw_shape(pen.size(), colour, pen.kind())
    return Scene("colour", (picture,), "What colour is it?", colour)


def _shape_scene(pen: _Pen) -> Scene:
    kind = pen.kind()
    picture = pen.draw_shape(pen.size(), pen.colour(), kind)
    return Scene("kind", (picture,), "Which shape is it?", kind)


def _count_scene(pen: _Pen) -> Scene:
    n = int(pen.rng.integers(1, 5))
    return Scene("count", (pen.draw_shapes(pen.size(), n),), "How many shapes?", str(n))


def _position_scene(pen: _Pen) -> Scene:
    position = _draw(pen.rng, list(POSITIONS))
    size = pen.size()
    d = float(pen.rng.uniform(0.35, 0.48)) * min(size)
    x, y = (f * side for f, side in zip(POSITIONS[position], size, strict=True))
    shape = DrawnShape(pen.kind(), pen.colour(), x, y, d)
    return Scene("place", (pen.draw_picture(size, shape),), "Where is the shape?", position)


def _more_shapes_scene(pen: _Pen) -> Scene:
    n_fewer, n_more = sorted(int(n) for n in pen.rng.choice(4, 2, replace=False) + 1)
    first = pen.rng.random() < 0.5
    counts = (n_more, n_fewer) if first else (n_fewer, n_more)
    pictures = tuple(pen.draw_shapes(pen.size(4), n) for n in counts)
    return Scene("more", pictures, "Which picture has more shapes?", "first" if first else "second")


def _same_colour_scene(pen: _Pen) -> Scene:
    colour = pen.colour()
    is_same = pen.rng.random() < 0.5
    second_colour = colour if is_same else pen.colour(colour)
    pictures = tuple(pen.draw_shape(pen.size(4), c, pen.kind()) for c in (colour, second_colour))
    return Scene("same", pictures, "Is the colour the same?", "yes" if is_same else "no")


def _which_picture_scene(pen: _Pen) -> Scene:
    n = pen.draw_heavy_tailed(2, 8)
    target, i_target = pen.colour(), int(pen.rng.integers(n))
    pictures = tuple(
        pen.draw_shape(pen.size(4), target if k == i_target else pen.colour(target), pen.kind())
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
    clip = pen.draw_picture((px, px), shape, frames=pen.frame_count())
    return Scene("direction", (clip,), "Which way does it move?", direction)


def _moving_shape_scene(pen: _Pen) -> Scene:
    kind = pen.kind()
    still_kind = pen.kind(kind)
    px, d = pen.px, float(pen.rng.uniform(0.32, 0.42)) * pen.px
    top, direction = pen.rng.random() < 0.5, 1 if pen.rng.random() < 0.5 else -1
    y, y_still = (0.25 * px, 0.75 * px) if top else (0.75 * px, 0.25 * px)
    path = direction * 0.5 * px
    mover = DrawnShape(kind, pen.colour(), px / 2 - path / 2, y, d, (path, 0.0))
    still_colour, x_still = pen.colour(), float(pen.rng.uniform(0.25, 0.75)) * px
    still = DrawnShape(still_kind, still_colour, x_still, y_still, d)
    clip = pen.draw_picture((px, px), mover, still, frames=pen.frame_count())
    return Scene("mover", (clip,), "Which shape moves?", kind)


def _sum_scene(pen: _Pen) -> Scene:
    a, b = (int(n) for n in pen.rng.integers(1, 5, 2))
    return Scene("sum", (), f"{a}+{b}=?", str(a + b))


def _first_word_scene(pen: _Pen) -> Scene:
    drawn = [_draw(pen.rng, VOCABULARY) for _ in range(pen.draw_heavy_tailed(4, 60))]
    return Scene("first word", (), f"First word: {' '.join(drawn)}", drawn[0])


MIXTURE = {"picture": 0.66, "pictures": 0.1, "clip": 0.12, "text": 0.12}  # share of each group
GROUPS: dict[str, list[Callable[[_Pen], Scene]]] = {
    "picture": [*[_colour_scene] * 3, _position_scene, _shape_scene, _count_scene],
    "pictures": [_more_shapes_scene, _same_colour_scene, _which_picture_scene],
    "clip": [_direction_scene, _moving_shape_scene],
    "text": [_sum_scene, _first_word_scene],
}


def draw_scene(rng: np.random.Generator, tile_px: int, limits: DataConfig) -> Scene:
    """Return a random scene, not rendered."""
    scenes = GROUPS[_draw(rng, list(MIXTURE), list(MIXTURE.values()))]
    return scenes[rng.integers(len(scenes))](_Pen(rng, tile_px, limits))


def _draw(rng: np.random.Generator, items: Sequence[T], weights: Sequence[float] = ()) -> T:
    if not weights:
        return items[int(rng.integers(len(items)))]
    mark = rng.random() * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        mark -= weight
        if mark < 0:
            return item
    return items[-1]


class DrawnScene(NamedTuple):
    scene: Scene
    runs: list[TokenRun]  # its text, cut to the limits
    headers: list[tuple[Kind, dict[str, int]]]  # kind and header of each picture
    load: Load


class SceneSource:
    """A source of `n` drawn scenes. Scene i of (seed, split) is always the same.

    `limits.oversize` decides about a scene longer than `limits.max_tokens`: it is cut (truncate,
    see `counts.fit_samples`), drawn again (drop, or if too little is left), or refused (error).
    `blank_images` makes all pictures grey. ValueError: wrong arguments, or a model without
    pictures.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        spec: MediaSpec,
        tokenizer: Tokenizer,
        limits: DataConfig | None = None,
        *,
        split: str = "train",
        blank_images: bool = False,
    ) -> None:
        if n < 1 or seed < 0:
            raise ValueError(f"n_samples={n} must be at least 1 and seed={seed} at least 0")
        self.name = f"scenes(n={n}, seed={seed}, {split})"
        self._n, self._key = n, (seed, STREAMS[split])
        self._tokenizer, self._limits, self._blank = tokenizer, limits or DataConfig(), blank_images
        self._preparation = preparation = spec.prepared(self._limits, tokenizer)
        picture_medium: Any = preparation.get(module_of(preparation, IMAGE.name))
        if picture_medium is None:
            raise ValueError("the built-in scenes need a model that takes pictures; give data.path")
        self._unit_px = picture_medium.unit_px
        self._drawn: dict[int, DrawnScene] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def scene(self, index: int) -> Scene:
        return self._draw([index])[0].scene

    def load(self, index: int) -> Load:
        return self._draw([index])[0].load

    def loads(self, indices: Sequence[int]) -> list[Load]:
        """Return the loads of some samples, in a third of the time of `load` one by one."""
        return [drawn.load for drawn in self._draw(indices)]

    def sample(self, index: int) -> Sample:
        (drawn,) = self._draw([index])
        picture_headers = zip(drawn.scene.pictures, drawn.headers, strict=True)
        opened = [(kind.name, _open_picture(p), header) for p, (kind, header) in picture_headers]
        media = decode_opened(opened, self._preparation, {p.medium for p in drawn.runs})
        placeholder = self._tokenizer.placeholder_id
        sample = compose_sample(drawn.runs, media, self._preparation, placeholder=placeholder)
        return blank_media(sample, self._preparation) if self._blank else sample

    def _draw(self, indices: Sequence[int]) -> list[DrawnScene]:
        """Return the scenes of the indices from the cache, or else drawn."""
        scenes = {i: self._drawn.get(i) for i in indices}
        if missing := [i for i, drawn in scenes.items() if drawn is None]:
            scenes |= (drawn_scenes := self._draw_fitting(missing))
            with self._lock:
                self._drawn |= drawn_scenes
                for i in [*self._drawn][:-MAX_CACHED_SCENES]:
                    del self._drawn[i]
        return [drawn for i in indices if (drawn := scenes[i]) is not None]

    def _draw_fitting(self, indices: Sequence[int]) -> dict[int, DrawnScene]:
        """Return a scene that fits the limits for each index; others are drawn again."""
        fitting: dict[int, DrawnScene] = {}
        if outside := [i for i in indices if not 0 <= i < self._n]:
            raise IndexError(f"{self.name} holds no sample {outside[0]}")
        rngs = {i: np.random.default_rng((*self._key, i)) for i in indices}
        for _ in range(1 if self._limits.oversize == "error" else MAX_CANDIDATES):
            pending = [i for i in indices if i not in fitting]
            scenes = [draw_scene(rngs[i], self._unit_px, self._limits) for i in pending]
            texts = [tokenize.encode_chatml(scene.turns, self._tokenizer) for scene in scenes]
            records, text_positions = zip(*map(tokenize.count_text_tokens, texts), strict=True)
            headers = [
                [
                    _picture_header(p) | position
                    for p, position in zip(scene.pictures, positions, strict=True)
                ]
                for scene, positions in zip(scenes, text_positions, strict=True)
            ]
            table = build_table(records, headers)
            counts, fits = fit_samples(table, self._preparation, self._limits)
            for row in np.flatnonzero(fits).tolist():
                runs = tokenize.truncate_runs(
                    texts[row], int(counts.text_tokens[row] + counts.n_media[row])
                )
                row_counts = counts.select(slice(row, row + 1))
                load = sample_load(table, row, self._preparation, row_counts)
                fitting[pending[row]] = DrawnScene(scenes[row], runs, table.headers(row), load)
            if fits.all():
                return fitting
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"{self.label(pending[row])}: {int(counts.all_tokens[row])} tokens exceed "
            f"data.max_tokens={self._limits.max_tokens}; raise it, or set data.oversize to "
            "truncate or drop"
        )


def _picture_header(picture: Picture) -> dict[str, int]:
    kind = VIDEO if picture.frames else IMAGE
    rate = {"rate_num": FRAMES_PER_S, "rate_den": 1} if picture.frames else {}
    size = {"width": picture.width, "height": picture.height}
    frames = {"frames": picture.frames, "total": picture.frames}
    return {"kind": BUILT_IN.index(kind), **size, **frames, **rate}


def _open_picture(picture: Picture) -> Any:
    """Return a picture or clip of a scene like `Kind.opened` does for a file."""

    def spread(n: int, convert: Convert, *_: int) -> np.ndarray:
        moments = np.linspace(0.0, 1.0, n).tolist()
        return np.stack([convert(picture.render(t)) for t in moments])

    def numbered(numbers: Sequence[int], convert: Convert) -> np.ndarray:
        last = max(1, picture.frames - 1)
        return np.stack([convert(picture.render(k / last)) for k in numbers])

    return Frames(spread, numbered) if picture.frames else lambda *_: picture.render()
