"""The embedded dataset of drawn scenes as a source of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from dflop_jax.data.datasets.fitting import Fitted, fit, preparations
from dflop_jax.data.datasets.scenes import Picture, Scene, draw_scene
from dflop_jax.data.datasets.shape_index import ShapeTable, table_of
from dflop_jax.data.media.compose import blanked, compose
from dflop_jax.data.media.counts import load_of, sample_counts
from dflop_jax.data.media.decode import decode_opened
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import module_of
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.video import VIDEO, Frames
from dflop_jax.data.sample import Sample
from dflop_jax.data.text.pieces import TextPiece, Tokenizer, chat_pieces, text_counts
from dflop_jax.records import Load

Convert = Callable[[Image.Image], np.ndarray]
STREAMS = {"train": 0, "eval": 1}
MAX_REDRAWS = 100  # of a scene that is too large, before it is an error
KEPT_SCENES = 4096  # drawn last: loads are asked for several times before pixels are
FRAMES_PER_S = 2  # of a drawn clip


class SceneSource:
    """`n` drawn scenes. Index i of (seed, split) is always the same scene; the splits never meet.

    A scene longer than `limits.max_tokens` is cut (truncate, see `fitting`), drawn anew (drop, or
    where it cannot be smaller), or refused (error). `blank_images` shows grey of the same loads
    instead.

    Raises:
      ValueError: arguments that cannot be, or a model that takes no pictures.
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
        self._tokenizer, self._limits, self._blank = tokenizer, limits or Limits(), blank_images
        how = spec.prepared(self._limits, tokenizer)
        shown: Any = how.get(module_of(how, IMAGE.name))
        if shown is None:
            raise ValueError("the embedded scenes are pictures, which this model does not take; "
                             "give data.path")  # fmt: skip
        self._unit_px = shown.unit_px
        self._ways = preparations(how, self._limits.oversize)
        self._draw = lru_cache(KEPT_SCENES)(self._drawn)

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def scene(self, index: int) -> Scene:
        """Return what sample `index` shows, asks and answers."""
        return self._draw(index)[0]

    def load(self, index: int) -> Load:
        _, _, table, fitted = self._draw(index)
        how = self._ways[int(fitted.way[0])]
        return load_of(table, 0, how, fitted.counts.pieces[0], int(fitted.all_tokens[0]))

    def sample(self, index: int) -> Sample:
        scene, pieces, table, fitted = self._draw(index)
        how = self._ways[int(fitted.way[0])]
        shown = zip(scene.pictures, table.headers(0), strict=True)
        sample = compose(
            pieces,
            decode_opened([(kind.name, _opened(p), header) for p, (kind, header) in shown], how),
            how,
            placeholder=self._tokenizer.placeholder_id,
            text_tokens=int(fitted.text_tokens[0]),
        )
        return blanked(sample, how) if self._blank else sample

    def _drawn(self, index: int) -> tuple[Scene, tuple[TextPiece, ...], ShapeTable, Fitted]:
        """A scene, its text, what an index would hold of both, and how it fits the limits."""
        if not 0 <= index < self._n:
            raise IndexError(f"{self.name} holds no sample {index}")
        rng = np.random.default_rng((*self._key, index))
        for _ in range(1 if self._limits.oversize == "error" else MAX_REDRAWS):
            scene = draw_scene(rng, self._unit_px, self._limits)
            pieces = chat_pieces(scene.turns, self._tokenizer)
            headers = [_header(picture) for picture in scene.pictures]
            table = table_of([text_counts(pieces)], [headers])
            fitted = self._fitted(table)
            if fitted.fits[0]:
                return scene, pieces, table, fitted
        raise ValueError(
            f"{self.label(index)}: {int(fitted.counts.all_tokens[0])} tokens exceed "
            f"data.max_tokens={self._limits.max_tokens}; raise it, or set data.oversize to "
            "truncate or drop"
        )

    def _fitted(self, table: ShapeTable) -> Fitted:
        prompt = table.prompt_tokens.astype(np.int64)
        return fit(lambda how: sample_counts(table, how)[0], prompt, self._ways, self._limits)


def _header(picture: Picture) -> dict[str, int]:
    kind = VIDEO if picture.frames else IMAGE
    rate = {"rate_num": FRAMES_PER_S, "rate_den": 1} if picture.frames else {}
    size = {"width": picture.width, "height": picture.height}
    frames = {"frames": picture.frames, "total": picture.frames}
    return {"kind": BUILT_IN.index(kind), **size, **frames, **rate}


def _opened(picture: Picture) -> Any:
    """A picture or clip of a scene, as `Kind.opened` gives those of files."""

    def spread(n: int, convert: Convert) -> np.ndarray:
        moments = np.linspace(0.0, 1.0, n).tolist()
        return np.stack([convert(picture.render(t)) for t in moments])

    def numbered(numbers: Sequence[int], convert: Convert) -> np.ndarray:
        last = max(1, picture.frames - 1)
        return np.stack([convert(picture.render(k / last)) for k in numbers])

    return Frames(spread, numbered) if picture.frames else lambda *_: picture.render()
