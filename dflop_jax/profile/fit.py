"""From timings at a few shapes to seconds and bytes of a module's layers and ends at any shapes.

A quantity is fitted as overhead + a * size + b * size * tokens (size = rows * tokens): launch cost,
the linear parts and attention over a row, or fewer of these terms where the timings cannot tell
them apart. Coefficients are not negative and errors are relative, so small shapes count as much as
large ones. A layer's seconds and the ends' are fitted together, to whole programs of the depths
that were timed: the split of one noisy difference of two programs is never believed alone. Where
only the number of rows varies (a module that takes one piece a row), what the fit of whole programs
misses is interpolated between the timings: caches make large shapes dearer.

Shapes are `rows` rows of `tokens`, arrays or numbers; so are data-parallel degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import get_args

import numpy as np

from dflop_jax.profile.least_squares import least_squares, rounded
from dflop_jax.profile.state import Array
from dflop_jax.records import REMAT, LayerTiming, ModelProfile, Remat

DEPTHS = (1, 3)  # layers of the programs that are timed


def _features(rows: Array, tokens: Array) -> np.ndarray:
    """What a fit's terms multiply, by shape: [..., 3]."""
    size = np.asarray(rows, float) * tokens
    return np.stack([np.ones_like(size), size, size * tokens], -1)


def _terms(timings: Sequence[LayerTiming]) -> list[int]:
    """Terms that timings can tell apart: size alone from one shape, an overhead from two, attention
    from three shapes whose rows differ in length."""
    shapes = {t.shape for t in timings}
    lengths = {s.tokens for s in shapes}
    if len(shapes) < 2:
        return [1]
    return [0, 1, 2] if len(shapes) > 2 and len(lengths) > 1 else [0, 1]


def _nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of least squared relative error, none below zero."""
    weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
    scale = features.max(axis=0)
    solution = least_squares(features / scale * weights[:, None], values * weights)
    solution[solution < solution.max() * 1e-9] = 0.0  # what is left of a term that is not there
    return rounded(solution / scale)


def _programs_s(timings: Sequence[LayerTiming], direction: str, depth: int) -> np.ndarray:
    """Seconds of programs of so many layers with both ends, by timing."""
    return np.array(
        [
            depth * getattr(t, f"layer_{direction}_s") + getattr(t, f"ends_{direction}_s")
            for t in timings
        ]
    )


class Fits:
    """Of all modules of a ModelProfile, each made once; methods are pure."""

    def __init__(self, profile: ModelProfile):
        self.profile = profile
        self._timings = cache(self._timings_uncached)
        self._fit = cache(self._fit_uncached)
        self._missed = cache(self._missed_uncached)
        self.pair_s = cache(self._pair_s_uncached)

    def _timings_uncached(self, module: str, model: int) -> list[LayerTiming]:
        timings = [t for t in self.profile.timings if t.module == module and t.model == model]
        if not timings:
            known = sorted({t.model for t in self.profile.timings if t.module == module})
            raise ValueError(
                f"the profile has no timing of {module!r} at tensor-parallel degree {model} "
                f"(it has {known}); profile again with a larger plan.max_model"
            )
        return sorted(timings, key=lambda t: (t.shape.size, t.shape))

    def known_policies(self, module: str) -> tuple[Remat, ...]:
        """Recompute policies that the profile has prices of, in the order of `REMAT`."""
        known = [t.recompute for t in self.profile.timings if t.module == module]
        return tuple(r for r in get_args(Remat) if r == "segment" or all(r in k for k in known))

    def _fit_uncached(self, module: str, model: int, kind: str) -> np.ndarray:
        """The three coefficients, 0 of terms that are left out."""
        timings = self._timings(module, model)
        terms = _terms(timings)
        shapes = np.array([_features(t.shape.rows, t.shape.tokens) for t in timings])[:, terms]
        coefficients = np.zeros(3)
        if _is_direct(kind):
            coefficients[terms] = _nonnegative(shapes, _values(timings, kind))
            return coefficients
        part, _, direction = kind.partition("_")
        features = np.vstack([np.hstack([d * shapes, shapes]) for d in DEPTHS])
        values = np.concatenate([_programs_s(timings, direction, d) for d in DEPTHS])
        layer, ends = np.split(_nonnegative(features, values), 2)
        coefficients[terms] = ends if part == "ends" else layer
        return coefficients

    def _fitted(self, module: str, model: int, kind: str, features: np.ndarray) -> np.ndarray:
        overhead, linear, quadratic = self._fit(module, model, kind)
        return overhead + linear * features[..., 1] + quadratic * features[..., 2]

    def _missed_uncached(self, module: str, model: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(log sizes, rising; timed over fitted at each), a single 1 where tokens vary."""
        timings = self._timings(module, model)
        if len({t.shape.tokens for t in timings}) > 1:
            return np.zeros(1), np.ones(1)
        features = np.array([_features(t.shape.rows, t.shape.tokens) for t in timings])
        if _is_direct(kind):
            fitted = self._fitted(module, model, kind, features)
            values = _values(timings, kind)
        else:
            direction = kind.partition("_")[2]
            layer, ends = (
                self._fitted(module, model, f"{part}_{direction}", features)
                for part in ("layer", "ends")
            )
            fitted = DEPTHS[-1] * layer + ends
            values = _programs_s(timings, direction, DEPTHS[-1])
        ratio = np.divide(values, fitted, out=np.ones(len(timings)), where=fitted > 0)
        return np.log([float(t.shape.size) for t in timings]), rounded(ratio)

    def _pair_s_uncached(self, module: str, model: int, kind: str) -> float:
        """Seconds of one layer for each pair of tokens of one piece, "forward", "backward" or what
        a recompute policy adds to it; large shapes, of which noise hides little, count most."""
        timings = self._timings(module, model)
        weights = [float(t.shape.size * t.shape.tokens) for t in timings]
        if kind in REMAT:
            seconds = _values(timings, f"{kind}.pair_s")
        else:
            seconds = np.array([getattr(t, f"pair_{kind}_s") for t in timings])
        return float(rounded((seconds * weights).sum() / sum(weights)))

    def predict(self, module: str, model: int, rows: Array, tokens: Array, kind: str) -> Array:
        """A quantity (seconds without content, or bytes) of one layer, or of both ends, at shapes;
        0 without rows."""
        features = _features(rows, tokens)
        sizes, ratio = self._missed(module, model, kind)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, self._fitted(module, model, kind, features) * factor, 0.0)


def _is_direct(kind: str) -> bool:
    """Whether a quantity is fitted as it was measured, not from whole programs."""
    return kind == "hidden" or "." in kind


def _values(timings: Sequence[LayerTiming], kind: str) -> np.ndarray:
    """A directly measured quantity: "hidden", or POLICY.FIELD of `Recompute`."""
    if kind == "hidden":
        return np.array([t.hidden_bytes for t in timings])
    remat, _, name = kind.partition(".")
    if any(remat not in t.recompute for t in timings):
        raise ValueError(
            f"the profile has no price of the recompute policy {remat!r} for "
            f"{timings[0].module!r}; profile again, or take another (train.remat)"
        )
    return np.array([getattr(t.recompute[remat], name) for t in timings])  # type: ignore[index]
