"""The embedded dataset of drawn scenes as a source of samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dflop_jax.data.datasets.fitting import Fitted, fit, preparations
from dflop_jax.data.datasets.scenes import Picture, Scene, draw_scene
from dflop_jax.data.datasets.shape_index import ShapeTable, table_of
from dflop_jax.data.media.compose import blanked, compose, media_fields
from dflop_jax.data.media.counts import load_of, sample_counts
from dflop_jax.data.media.decode import decode_opened
from dflop_jax.data.media.kind import Kind
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import TEXT_MODULE, module_of
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.video import VIDEO, Frames
from dflop_jax.data.sample import Sample
from dflop_jax.data.text.pieces import TextPiece, Tokenizer, chat_pieces, text_counts
from dflop_jax.records import Load

Headers = list[tuple[Kind, dict[str, int]]]
Convert = Callable[[Image.Image], np.ndarray]
STREAMS = {"train": 0, "eval": 1}
MAX_REDRAWS = 100  # of a scene that is too large, before it is an error
KEPT_SCENES = 4096  # drawn last: loads are asked for several times before pixels are
FRAMES_PER_S = 2  # of a drawn clip


class Drawn(NamedTuple):
    """A scene and its text, what headers of its pictures would say, and how it fits the limits:
    by which preparation, with how many text tokens, and what it asks for then."""

    scene: Scene
    pieces: tuple[TextPiece, ...]
    headers: Headers
    way: int
    text_tokens: int
    load: Load


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
        self._drawn: dict[int, Drawn] = {}
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
        """Return the loads of some samples, for less work than one by one."""
        return [drawn.load for drawn in self._draw(indices)]

    def sample(self, index: int) -> Sample:
        return self.sample_for(index, None)

    def sample_for(self, index: int, modules: Collection[str] | None) -> Sample:
        (drawn,) = self._draw([index])
        how = self._ways[drawn.way]
        shown = zip(drawn.scene.pictures, drawn.headers, strict=True)
        opened = [(kind.name, _opened(p), header) for p, (kind, header) in shown]
        media = decode_opened(opened, how, modules)
        if modules is None or TEXT_MODULE in modules:
            sample = compose(
                drawn.pieces,
                media,
                how,
                placeholder=self._tokenizer.placeholder_id,
                text_tokens=drawn.text_tokens,
            )
        else:
            takes = {m: [d for module, d in media if module == m] for m in modules}
            sample = Sample({m: media_fields(d) for m, d in takes.items() if d}, {}, drawn.load)
        return blanked(sample, how) if self._blank else sample

    def _draw(self, indices: Sequence[int]) -> list[Drawn]:
        """Return the scenes, those that are not kept drawn together."""
        kept = {i: self._drawn.get(i) for i in indices}
        if fresh := [i for i, drawn in kept.items() if drawn is None]:
            kept |= (new := self._fitting(fresh))
            with self._lock:
                self._drawn |= new
                for i in [*self._drawn][:-KEPT_SCENES]:
                    del self._drawn[i]
        return [drawn for i in indices if (drawn := kept[i]) is not None]

    def _fitting(self, indices: Sequence[int]) -> dict[int, Drawn]:
        """Draw scenes until each fits the limits."""
        fitting: dict[int, Drawn] = {}
        if outside := [i for i in indices if not 0 <= i < self._n]:
            raise IndexError(f"{self.name} holds no sample {outside[0]}")
        rngs = {i: np.random.default_rng((*self._key, i)) for i in indices}
        for _ in range(1 if self._limits.oversize == "error" else MAX_REDRAWS):
            left = [i for i in indices if i not in fitting]
            scenes = [draw_scene(rngs[i], self._unit_px, self._limits) for i in left]
            texts = [chat_pieces(scene.turns, self._tokenizer) for scene in scenes]
            headers = [[_header(picture) for picture in scene.pictures] for scene in scenes]
            table = table_of([text_counts(pieces) for pieces in texts], headers)
            fitted = self._fitted(table)
            for row in np.flatnonzero(fitted.fits).tolist():
                way, asked = int(fitted.way[row]), fitted.counts.pieces[row]
                load = load_of(table, row, self._ways[way], asked, int(fitted.all_tokens[row]))
                fitting[left[row]] = Drawn(
                    scenes[row], texts[row], table.headers(row), way, int(fitted.text_tokens[row]),
                    load,
                )  # fmt: skip
            if fitted.fits.all():
                return fitting
        row = int(np.flatnonzero(~fitted.fits)[0])
        raise ValueError(
            f"{self.label(left[row])}: {int(fitted.counts.all_tokens[row])} tokens exceed "
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
