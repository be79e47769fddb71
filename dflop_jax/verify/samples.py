"""Random samples of pictures, clips, audio and text for a model, as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.media.compose import compose_sample, decode_opened
from dflop_jax.data.media.kind import Header
from dflop_jax.data.media.medium import DecodedMedium, Preparation, module_of
from dflop_jax.data.media.video import Frames
from dflop_jax.data.text.tokenize import ByteTokenizer, TokenRun

MEDIA_MIXES = (("image", "video"), ("image", "image"), ("audio", "audio"), ("audio",), ())
TEXTS = (6, 150)  # supervised tokens: few, and more than a chunk or attention window
FRAMES, MAX_TILES = 4, 4  # frames per clip, tiles per picture
FRAME_PX = 64  # side of a frame
FIRST_WORD = 2  # first id of text; smaller ids are media placeholders


@dataclass(frozen=True, eq=False)
class RandomMedium:
    """A random medium, decoded."""

    kind: str
    size: tuple[int, int]  # (width, height) of a picture or clip; (0, 0) for audio
    medium: DecodedMedium


@dataclass(frozen=True, eq=False)
class MixedSample:
    """A sample with its media."""

    sample: Sample
    media: tuple[RandomMedium, ...]  # in the order of the text
    kinds: tuple[str, ...]  # kind of medium of each token; "" for text


def mixed_samples(model: MultimodalModel, seed: int = 0) -> list[MixedSample]:
    """Return small samples of the mixes of media that the model takes, of text only, and a longer
    one of text only."""
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    rng = np.random.default_rng(seed)
    preparation = spec.prepared(small_limits(spec), StampedTokenizer())
    mixes = [m for m in MEDIA_MIXES if all(module_of(preparation, kind) for kind in m)]
    return [
        random_sample(kinds, n_text, preparation, model.vocab_size, sizes=rng, values=rng)
        for kinds, n_text in (*((mix, TEXTS[0]) for mix in mixes), ((), TEXTS[1]))
    ]


class StampedTokenizer(ByteTokenizer):
    """A tokenizer that encodes any text as one token, since vocabularies may be small."""

    def encode(self, text: str) -> list[int]:
        return [FIRST_WORD]


def small_limits(spec: MediaSpec) -> DataConfig:
    """Return a configuration with small media limits, also for media at native resolution."""
    sides = (f.get("patch_px", 1) * f.get("merge", 1) for f in spec.media.values())
    block = max(sides, default=1) ** 2
    return DataConfig(
        max_tiles=MAX_TILES, max_frames=FRAMES, min_pixels=4 * block, max_pixels=64 * block
    )


def random_sample(
    kinds: Sequence[str],
    n_text: int,
    preparation: Preparation,
    vocab: int,
    *,
    sizes: np.random.Generator,
    values: np.random.Generator,
) -> MixedSample:
    """Return a sample with media of these kinds, text before and between them, and `n_text`
    supervised tokens at its end. Its lengths depend on `sizes` only."""

    def text(n: int, *, supervised: bool = False) -> TokenRun:
        return TokenRun(tuple(values.integers(FIRST_WORD, vocab, n).tolist()), supervised)

    headers = [_header(kind, preparation, sizes) for kind in kinds]
    opened = [(k, _noise(k, values), h) for k, h in zip(kinds, headers, strict=True)]
    decoded = decode_opened(opened, preparation)
    media = tuple(
        RandomMedium(kind, (h.get("width", 0), h.get("height", 0)), medium)
        for kind, h, (_, medium) in zip(kinds, headers, decoded.values(), strict=True)
    )
    pieces, token_kinds = [text(5)], [""] * 5
    for i, drawn in enumerate(media):
        pieces += [TokenRun(medium=i), text(3, supervised=True)]
        token_kinds += [drawn.kind if id_ < 0 else "" for id_ in drawn.medium.ids] + [""] * 3
    pieces.append(text(n_text, supervised=True))
    sample = compose_sample(pieces, decoded, preparation, placeholder=0)
    return MixedSample(sample, media, (*token_kinds, *[""] * n_text))


def _header(kind: str, preparation: Preparation, rng: np.random.Generator) -> Header:
    """Return the header of a small medium: a picture of half to twice a unit's sides, a clip of a
    few such frames, or audio from a third of a window to the maximum length."""
    medium: Any = preparation[module_of(preparation, kind)]
    if kind == "audio":
        low, high = medium.spec.window_samples // 3, medium.spec.max_samples
        return {"samples": int(rng.integers(low, high + 1))}
    px = medium.unit_px
    width, height = rng.integers(px // 2 + 1, 2 * px + 1, 2).tolist()
    frames = {"frames": FRAMES, "total": FRAMES, "rate_num": 2, "rate_den": 1}
    columns = next(k.columns for k in medium.kinds if k.name == kind)
    size = {"width": width, "height": height}
    return dict.fromkeys(columns, 0) | size | (frames if kind == "video" else {})


def _noise(kind: str, rng: np.random.Generator) -> Any:
    """Return random noise in the form in which `Kind.opened` returns a file's contents."""

    def picture(size: tuple[int, int], least: object = None) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), np.uint8))

    def spread(n: int, convert: Callable[[Image.Image], np.ndarray], *_: int) -> np.ndarray:
        return np.stack([convert(picture((FRAME_PX, FRAME_PX))) for _ in range(n)])

    def sound(n_samples: int, rate_hz: int) -> np.ndarray:
        return rng.uniform(-1, 1, n_samples).astype(np.float32)

    frames = Frames(spread, lambda numbers, convert: spread(len(numbers), convert))
    return {"image": picture, "video": frames, "audio": sound}[kind]
