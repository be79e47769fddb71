"""The embedded dataset of drawn scenes as a source of samples."""

from __future__ import annotations

import numpy as np

from dflop_jax.data.datasets.layout import (
    Header,
    Layout,
    OversizeError,
    assemble,
    grey_tiles,
    lay_out,
)
from dflop_jax.data.datasets.scenes import Picture, Scene, draw_scene
from dflop_jax.data.media.tiling import picture_tiles, resize
from dflop_jax.data.sample import Limits, MediaSpec, Sample
from dflop_jax.data.text.pieces import Piece, Tokenizer, chat_pieces
from dflop_jax.records import SampleShape

STREAMS = {"train": 0, "eval": 1}
MAX_REDRAWS = 100


class SceneSource:
    """`n` drawn scenes. Index i of (seed, split) is always the same scene; the splits never meet.

    A scene longer than `limits.max_tokens` is laid out smaller (truncate), drawn anew (drop, or
    where it cannot be smaller), or refused (error). `blank_images` shows grey tiles of the same
    shapes instead.
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

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def scene(self, index: int) -> Scene:
        """What sample `index` shows, asks and answers."""
        return self._draw(index)[0]

    def shape(self, index: int) -> SampleShape:
        return self._draw(index)[2].shape

    def sample(self, index: int) -> Sample:
        scene, pieces, layout = self._draw(index)
        tiles = [
            grey_tiles(n, self.spec) if self._blank else self._render(picture, n, layout)
            for picture, n in zip(scene.pictures, layout.tiles, strict=True)
        ]
        return assemble(pieces, layout, tiles, self.spec, self._tokenizer.visual_id)

    def _draw(self, index: int) -> tuple[Scene, tuple[Piece, ...], Layout]:
        if not 0 <= index < self._n:
            raise IndexError(f"{self.name} holds no sample {index}")
        rng = np.random.default_rng((*self._key, index))
        redraws = 1 if self._limits.oversize == "error" else MAX_REDRAWS
        for _ in range(redraws):
            scene = draw_scene(rng, self.spec.tile_px, self._limits)
            pieces = chat_pieces(scene.turns, self._tokenizer)
            media = [Header(p.width, p.height, p.frames) for p in scene.pictures]
            try:
                return scene, pieces, lay_out(pieces, media, self.spec, self._limits)
            except OversizeError as e:
                reason = e
        raise ValueError(f"{self.label(index)}: {reason}")

    def _render(self, picture: Picture, n: int, layout: Layout) -> np.ndarray:
        px = self.spec.tile_px
        if picture.frames:
            times = np.linspace(0.0, 1.0, n) if n > 1 else [0.0]
            return np.stack([resize(picture.render(float(t)), px, px) for t in times])
        return picture_tiles(picture.render(), px, min(self._limits.max_tiles, layout.cap - 1))
