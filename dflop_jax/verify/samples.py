"""Samples of what a model takes: random pictures, clips, sounds and text, as training has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.datasets.compose import compose
from dflop_jax.data.datasets.counts import Preprocessing, VisionLayout
from dflop_jax.data.datasets.fitting import preprocessing
from dflop_jax.data.media.decode import (
    DecodedMedium,
    NativePictures,
    Pictures,
    Sound,
    native_clip,
    native_picture,
)
from dflop_jax.data.media.mel import MelSpec, sound_counts
from dflop_jax.data.media.native import ClipLayout, Native
from dflop_jax.data.sample import Limits
from dflop_jax.data.text.pieces import Piece

SEEN = (("image", "video"), ("image", "image"), ())
HEARD = (("audio", "audio"), ("audio",), ())
FRAMES, MAX_TILES = 4, 4
FIRST_WORD = 2  # ids of text begin here; the ones below stand where media are


@dataclass(frozen=True, eq=False)
class Drawn:
    """A medium: its kind, its (width, height) where it is a picture, and what was made of it."""

    kind: str
    size: tuple[int, int]
    medium: DecodedMedium

    @property
    def text(self) -> np.ndarray:
        """int [t]: ids of what is text among its tokens, -1 of the others."""
        if isinstance(self.medium, NativePictures):
            return self.medium.text
        if isinstance(self.medium, Sound):
            return np.full(self.medium.tokens, -1)
        return np.full(len(self.medium.tokens), -1)


@dataclass(frozen=True, eq=False)
class MixedSample:
    """A sample; what it was made of in the order of the text; and the kind of medium that each
    token stands for, "" for text."""

    sample: Sample
    media: tuple[Drawn, ...]
    kinds: tuple[str, ...]


def mixed_samples(model: MultimodalModel, seed: int = 0) -> list[MixedSample]:
    """Return small samples of all that the model takes: alone, several together, and none."""
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    rng = np.random.default_rng(seed)

    def stamp(second: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (FIRST_WORD + round(second),), ()

    how = preprocessing(spec, _limits(spec), stamp=stamp)
    contents = (SEEN if spec.sees else ()) + (HEARD if spec.sound else ())
    return [_sample(kinds, how, spec, model.vocab_size, rng) for kinds in contents]


def _limits(spec: MediaSpec) -> Limits:
    block = (spec.patch_px * spec.merge) ** 2
    return Limits(MAX_TILES, FRAMES, min_pixels=4 * block, max_pixels=64 * block)


def _sample(
    kinds: Sequence[str],
    how: Preprocessing,
    spec: MediaSpec,
    vocab: int,
    rng: np.random.Generator,
) -> MixedSample:
    def text(n: int, *, supervised: bool = False) -> Piece:
        return Piece(tuple(rng.integers(FIRST_WORD, vocab, n).tolist()), supervised)

    alone = kinds.count("image") == 1
    media = tuple(_draw(kind, how, alone, rng) for kind in kinds)
    pieces, of_tokens = [text(5)], [""] * 5
    for i, drawn in enumerate(media):
        pieces += [Piece(medium=i), text(3, supervised=True)]
        of_tokens += [drawn.kind if id_ < 0 else "" for id_ in drawn.text] + [""] * 3
    pieces.append(text(6, supervised=True))
    sample = compose(pieces, [m.medium for m in media], spec, placeholder=0)
    return MixedSample(sample, media, (*of_tokens, *[""] * 6))


def _draw(kind: str, how: Preprocessing, alone: bool, rng: np.random.Generator) -> Drawn:
    if kind == "audio":
        assert how.sound is not None
        return Drawn(kind, (0, 0), _sound(how.sound, rng))
    assert how.vision is not None
    if isinstance(how.vision, Native):
        return Drawn(kind, *_native(kind, how, how.vision, rng))
    return Drawn(kind, *_tiles(kind, how.vision, alone, rng))


def _sound(spec: MelSpec, rng: np.random.Generator) -> Sound:
    """Anything from a third of a window to all of the windows that are used."""
    n = int(rng.integers(spec.window_samples // 3, spec.max_samples + 1))
    (windows,), (frames,), (tokens,) = sound_counts(np.array([n]), spec)
    mel = rng.normal(size=(windows, spec.n_mels, spec.window_frames)).astype(np.float32)
    return Sound(mel, int(tokens), int(frames))


def _picture(side: int, rng: np.random.Generator) -> Image.Image:
    """From half to twice as high and as wide as a side."""
    height, width = rng.integers(side // 2 + 1, 2 * side + 1, 2)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def _tiles(
    kind: str, vision: VisionLayout, alone: bool, rng: np.random.Generator
) -> tuple[tuple[int, int], Pictures]:
    px = vision.tile_px
    if kind == "video":
        frames = rng.integers(0, 256, (FRAMES, px, px, 3), np.uint8)
        return (0, 0), Pictures(frames, vision.place_clip(FRAMES))
    image = _picture(px, rng)
    return image.size, Pictures(vision.cut(image, alone), vision.place(*image.size, alone))


def _native(
    kind: str, how: Preprocessing, vision: Native, rng: np.random.Generator
) -> tuple[tuple[int, int], NativePictures]:
    if kind == "image":
        image = _picture(4 * vision.block_px, rng)
        return image.size, native_picture(image, vision)
    assert how.stamp is not None
    grid = 3 * vision.merge, 2 * vision.merge
    seconds = tuple(float(k) for k in range(FRAMES // vision.frames))
    sides = (n * vision.patch_px for n in grid)
    frames = rng.integers(0, 256, (FRAMES, *sides, 3), np.uint8)
    layout = ClipLayout(tuple(range(FRAMES)), seconds, grid)
    return (0, 0), native_clip(frames, layout, vision, how.stamp)
