"""The embedded dataset of drawn scenes as a source of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dflop_jax.data.datasets.record_table import build_table
from dflop_jax.data.datasets.scenes import Picture, Scene, draw_scene
from dflop_jax.data.media.compose import blank_media, compose, decode_opened
from dflop_jax.data.media.counts import fit_samples, sample_load
from dflop_jax.data.media.kind import Kind
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import module_of
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.video import VIDEO, Frames
from dflop_jax.data.sample import STREAMS, Sample
from dflop_jax.data.text.tokenize import (
    Tokenizer,
    TokenRun,
    count_text_tokens,
    encode_chatml,
    truncate_runs,
)
from dflop_jax.records import Load

Headers = list[tuple[Kind, dict[str, int]]]
Convert = Callable[[Image.Image], np.ndarray]
MAX_REDRAWS = 100  # of a scene that is too large, before it is an error
MAX_CACHED_SCENES = 4096  # drawn last: loads are asked for several times before pixels are
FRAMES_PER_S = 2  # of a drawn clip


class DrawnScene(NamedTuple):
    """A scene, its text cut by the limits, what headers of all its pictures would say, and what it
    asks for."""

    scene: Scene
    runs: list[TokenRun]
    headers: Headers
    load: Load


class SceneSource:
    """`n` drawn scenes. Index i of (seed, split) is always the same scene; the splits never meet.

    A scene longer than `limits.max_tokens` is cut (truncate, see `counts.fit_samples`), drawn anew
    (drop, or where too little is left), or refused (error). `blank_images` shows grey of the same
    loads instead.

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
        self._preparation = preparation = spec.prepared(self._limits, tokenizer)
        picture_medium: Any = preparation.get(module_of(preparation, IMAGE.name))
        if picture_medium is None:
            raise ValueError("the embedded scenes are pictures, which this model does not take; "
                             "give data.path")  # fmt: skip
        self._unit_px = picture_medium.unit_px
        self._drawn: dict[int, DrawnScene] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return self._n

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def scene(self, index: int) -> Scene:
        """Return what sample `index` shows, asks and answers."""
        return self._draw([index])[0].scene

    def load(self, index: int) -> Load:
        return self._draw([index])[0].load

    def loads(self, indices: Sequence[int]) -> list[Load]:
        """Return the loads of some samples, for a third of the work of one by one."""
        return [drawn.load for drawn in self._draw(indices)]

    def sample(self, index: int) -> Sample:
        (drawn,) = self._draw([index])
        picture_headers = zip(drawn.scene.pictures, drawn.headers, strict=True)
        opened = [(kind.name, _open_picture(p), header) for p, (kind, header) in picture_headers]
        media = decode_opened(opened, self._preparation, {p.medium for p in drawn.runs})
        placeholder = self._tokenizer.placeholder_id
        sample = compose(drawn.runs, media, self._preparation, placeholder=placeholder)
        return blank_media(sample, self._preparation) if self._blank else sample

    def _draw(self, indices: Sequence[int]) -> list[DrawnScene]:
        """Return the scenes, those that are not kept drawn together."""
        scenes = {i: self._drawn.get(i) for i in indices}
        if missing := [i for i, drawn in scenes.items() if drawn is None]:
            scenes |= (drawn_scenes := self._draw_fitting(missing))
            with self._lock:
                self._drawn |= drawn_scenes
                for i in [*self._drawn][:-MAX_CACHED_SCENES]:
                    del self._drawn[i]
        return [drawn for i in indices if (drawn := scenes[i]) is not None]

    def _draw_fitting(self, indices: Sequence[int]) -> dict[int, DrawnScene]:
        """Draw scenes until each fits the limits."""
        fitting: dict[int, DrawnScene] = {}
        if outside := [i for i in indices if not 0 <= i < self._n]:
            raise IndexError(f"{self.name} holds no sample {outside[0]}")
        rngs = {i: np.random.default_rng((*self._key, i)) for i in indices}
        for _ in range(1 if self._limits.oversize == "error" else MAX_REDRAWS):
            pending = [i for i in indices if i not in fitting]
            scenes = [draw_scene(rngs[i], self._unit_px, self._limits) for i in pending]
            texts = [encode_chatml(scene.turns, self._tokenizer) for scene in scenes]
            records, text_positions = zip(*map(count_text_tokens, texts), strict=True)
            headers = [
                [
                    _picture_header(p) | text_position
                    for p, text_position in zip(scene.pictures, of_scene, strict=True)
                ]
                for scene, of_scene in zip(scenes, text_positions, strict=True)
            ]
            table = build_table(records, headers)
            counts, fits = fit_samples(table, self._preparation, self._limits)
            for row in np.flatnonzero(fits).tolist():
                row_counts = counts.select(slice(row, row + 1))
                runs = truncate_runs(
                    texts[row], int(row_counts.text_tokens[0] + row_counts.n_media[0])
                )
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
    """A picture or clip of a scene, as `Kind.opened` gives those of files."""

    def spread(n: int, convert: Convert, *_: int) -> np.ndarray:
        moments = np.linspace(0.0, 1.0, n).tolist()
        return np.stack([convert(picture.render(t)) for t in moments])

    def numbered(numbers: Sequence[int], convert: Convert) -> np.ndarray:
        last = max(1, picture.frames - 1)
        return np.stack([convert(picture.render(k / last)) for k in numbers])

    return Frames(spread, numbered) if picture.frames else lambda *_: picture.render()
