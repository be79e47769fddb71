"""The embedded dataset of drawn scenes as a source of samples."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dflop_jax.data.datasets.compose import blanked, compose
from dflop_jax.data.datasets.counts import Preprocessing, SampleCounts
from dflop_jax.data.datasets.fitting import Fitted, fit, preparations
from dflop_jax.data.datasets.scenes import Picture, Scene, draw_scene
from dflop_jax.data.media.decode import NativePictures, Pictures, native_clip, native_picture
from dflop_jax.data.media.native import Clip, ClipLayout, Native
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.tiling import resize
from dflop_jax.data.sample import Limits, Sample
from dflop_jax.data.text.pieces import Piece, Tokenizer, chat_pieces, text_counts
from dflop_jax.data.text.stamps import stamp_of
from dflop_jax.records import Load

STREAMS = {"train": 0, "eval": 1}
MAX_REDRAWS = 100
KEPT = 4096  # scenes that were drawn last: loads are asked for several times before pixels are
UNIT_BLOCKS = 3  # sides of what is drawn in place of a tile, in blocks, at native resolution


class SceneSource:
    """`n` drawn scenes. Index i of (seed, split) is always the same scene; the splits never meet.

    A scene longer than `limits.max_tokens` is cut (truncate, see `fitting`), drawn anew (drop, or
    where it cannot be smaller), or refused (error). `blank_images` shows grey tiles of the same
    loads instead.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        spec: MediaSpec,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        *,
        split: str = "train",
        blank_images: bool = False,
    ) -> None:
        if split not in STREAMS:
            raise ValueError(f"split {split!r} is not train or eval")
        if n < 1 or seed < 0:
            raise ValueError(f"n_samples={n} must be at least 1 and seed={seed} at least 0")
        self.name = f"scenes(n={n}, seed={seed}, {split})"
        self._n, self._key = n, (seed, STREAMS[split])
        self.spec, self._tokenizer = spec, tokenizer
        self._limits, self._blank = limits or Limits(), blank_images
        self._ways = preparations(spec, self._limits, stamp=stamp_of(tokenizer))
        self._unit_px = spec.tile_px or UNIT_BLOCKS * spec.patch_px * spec.merge
        self._draw = lru_cache(KEPT)(self._drawn)

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def scene(self, index: int) -> Scene:
        """Return what sample `index` shows, asks and answers."""
        return self._draw(index)[0]

    def load(self, index: int) -> Load:
        scene, _, fitted = self._draw(index)
        vision = self._ways[int(fitted.way[0])].vision
        tiles: int | tuple[int, ...] = fitted.counts[0].tiles
        if isinstance(vision, Native):
            tiles = tuple(n for p in scene.pictures for n in _lengths(p, vision))
        return self.spec.load(tiles, 0, int(fitted.llm_tokens[0]))

    def sample(self, index: int) -> Sample:
        scene, pieces, fitted = self._draw(index)
        how = self._ways[int(fitted.way[0])]
        alone = sum(not p.frames for p in scene.pictures) == 1
        sample = compose(
            pieces,
            [_render(picture, how, alone) for picture in scene.pictures],
            self.spec,
            placeholder=self._tokenizer.visual_id,
            text_tokens=int(fitted.text_tokens[0]),
        )
        return blanked(sample) if self._blank else sample

    def _drawn(self, index: int) -> tuple[Scene, tuple[Piece, ...], Fitted]:
        if not 0 <= index < self._n:
            raise IndexError(f"{self.name} holds no sample {index}")
        rng = np.random.default_rng((*self._key, index))
        for _ in range(1 if self._limits.oversize == "error" else MAX_REDRAWS):
            scene = draw_scene(rng, self._unit_px, self._limits)
            pieces = chat_pieces(scene.turns, self._tokenizer)
            fitted = self._fitted(scene, pieces)
            if fitted.fits[0]:
                return scene, pieces, fitted
        raise ValueError(
            f"{self.label(index)}: {int(fitted.counts.llm_tokens[0])} LLM tokens exceed "
            f"data.max_tokens={self._limits.max_tokens}; raise it, or set data.oversize to "
            "truncate or drop"
        )

    def _fitted(self, scene: Scene, pieces: tuple[Piece, ...]) -> Fitted:
        text = text_counts(pieces)
        prompt = np.array([text["prompt_tokens"]])
        return fit(
            lambda how: _counts(scene, text["text_tokens"], how), prompt, self._ways, self._limits
        )


def _counts(scene: Scene, text_tokens: int, how: Preprocessing) -> SampleCounts:
    """Return what `sample_counts` would say of a table of this scene, which is not worth making."""
    if isinstance(how.vision, Native):
        return _native_counts(scene, text_tokens, how)
    assert how.vision is not None
    still = [p for p in scene.pictures if not p.frames]
    frames = np.array([min(p.frames, how.max_frames) for p in scene.pictures if p.frames], int)
    widths, heights = np.array([(p.width, p.height) for p in still], int).reshape(-1, 2).T
    _, tiles, tokens = how.vision.count(widths, heights, np.full(len(still), len(still) == 1))
    return SampleCounts.of_one(
        tiles=int(tiles.sum() + frames.sum()),
        frames=int(frames.sum()),
        text_tokens=text_tokens,
        visual_tokens=int(tokens.sum() + how.vision.count_clips(frames).sum()),
    )


def _native_counts(scene: Scene, text_tokens: int, how: Preprocessing) -> SampleCounts:
    vision, stamp = how.vision, how.stamp
    assert isinstance(vision, Native)
    assert stamp is not None
    seconds = [s for p in scene.pictures if p.frames for s in _layout(p, vision).seconds]
    lengths = [n for p in scene.pictures for n in _lengths(p, vision)]
    return SampleCounts.of_one(
        tiles=len(lengths),
        frames=len(seconds) * vision.frames,
        text_tokens=text_tokens,
        visual_tokens=sum(lengths) // vision.merge**2,
        frame_text_tokens=sum(len(ids) for second in seconds for ids in stamp(second)),
        longest_piece=max(lengths, default=0) // vision.merge**2,
    )


def _layout(picture: Picture, vision: Native) -> ClipLayout:
    """How a clip is seen that has two frames a second."""
    layout = vision.clip(Clip(picture.width, picture.height, picture.frames, 2, 1))
    assert layout is not None, "a clip of a scene has several frames"
    return layout


def _lengths(picture: Picture, vision: Native) -> tuple[int, ...]:
    """Patches of each piece of a picture or clip."""
    if not picture.frames:
        rows, cols = vision.grid(picture.width, picture.height)
        return (rows * cols,)
    layout = _layout(picture, vision)
    return (layout.grid[0] * layout.grid[1],) * len(layout.seconds)


def _render(picture: Picture, how: Preprocessing, alone: bool) -> Pictures | NativePictures:
    if isinstance(how.vision, Native):
        if not picture.frames:
            return native_picture(picture.render(), how.vision)
        layout = _layout(picture, how.vision)
        times = [n / max(1, picture.frames - 1) for n in layout.frames]
        shown = np.stack([how.vision.resized(picture.render(t), layout.grid) for t in times])
        assert how.stamp is not None
        return native_clip(shown, layout, how.vision, how.stamp)
    assert how.vision is not None
    if not picture.frames:
        place = how.vision.place(picture.width, picture.height, alone)
        return Pictures(how.vision.cut(picture.render(), alone), place)
    n, px = min(picture.frames, how.max_frames), how.vision.tile_px
    moments = np.linspace(0.0, 1.0, n).tolist() if n > 1 else [0.0]
    tiles = np.stack([resize(picture.render(t), px, px) for t in moments])
    return Pictures(tiles, how.vision.place_clip(n))
