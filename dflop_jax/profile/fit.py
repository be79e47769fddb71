"""From timings at a few shapes to seconds and bytes of a module's layers and ends at any shapes.

A quantity is fitted as a sum of the features of a static shape (`records.features`): launch cost,
the linear parts and attention over a row, or fewer of these terms where the timings cannot tell
them apart. Coefficients are not negative and errors are relative, so small shapes count as much as
large ones. A layer's seconds and the ends' are fitted together, to whole programs of the depths
that were timed: the split of one noisy difference of two programs is never believed alone. Where
only the number of rows varies (a module that takes one piece a row), what the fit of whole programs
misses is interpolated between the timings: caches make large shapes dearer.

Shapes are `rows` rows of `tokens`, arrays or numbers; so are data-parallel degrees. Fitted numbers
keep 24 bits (seven digits): the last bits of a least-squares fit differ from one linear algebra
library to the next, and no plan may hang on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args

import numpy as np

from dflop_jax.profile.state import Array
from dflop_jax.records import (
    REMAT,
    LayerTiming,
    ModelProfile,
    Remat,
    Shape,
    by_feature,
    shape_features,
)

# Layers of the programs that are timed, whose difference is what a layer takes; deeper ones take
# longer to compile and to run, and tell it more exactly.
DEPTHS = (1, 3)
_KEPT_BITS = 24


def rounded(values: Array) -> Array:
    """The values with their first 24 bits, the same on every machine."""
    mantissa, exponent = np.frexp(np.asarray(values, float))
    return np.ldexp(np.rint(mantissa * 2.0**_KEPT_BITS), exponent - _KEPT_BITS)


def nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of least squared relative error, none below zero."""
    from scipy.optimize import nnls  # loads for half a second, which others need not wait for

    weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], values * weights)
    solution[solution < solution.max() * 1e-9] = 0.0  # what is left of a term that is not there
    return rounded(solution / scale)


def _terms(timings: Sequence[LayerTiming]) -> list[int]:
    """Features that timings can tell apart: tokens alone from one shape, a constant from two, what
    rows hold from as many shapes as there are features, whose rows differ in length."""
    shapes = {t.shape for t in timings}
    lengths = {s.tokens for s in shapes}
    if len(shapes) < 2:
        return [1]
    n_features = _of_shapes(shapes).shape[-1]
    return list(range(min(len(shapes), n_features) if len(lengths) > 1 else 2))


def _of_shapes(shapes: Iterable[Shape]) -> np.ndarray:
    rows, tokens = np.array([(s.rows, s.tokens) for s in shapes]).T
    return shape_features(rows, tokens)


def _programs_s(timings: Sequence[LayerTiming], direction: str, depth: int) -> np.ndarray:
    """Seconds of programs of so many layers with both ends, by timing."""
    return np.array(
        [
            depth * getattr(t, f"layer_{direction}_s") + getattr(t, f"ends_{direction}_s")
            for t in timings
        ]
    )


class Fits:
    """The fits of all modules of a ModelProfile, each made once; methods are pure. `layers` names a
    module with layers of one kind (`layer_key`)."""

    def __init__(self, profile: ModelProfile):
        self.profile = profile
        self._timings = cache(self._timings_uncached)
        self._fit = cache(self._fit_uncached)
        self._missed = cache(self._missed_uncached)
        self.content_s = cache(self._content_s_uncached)

    def _timings_uncached(self, layers: str, model: int) -> list[LayerTiming]:
        timings = [t for t in self.profile.timings if t.layers == layers and t.model == model]
        if not timings:
            known = sorted({t.model for t in self.profile.timings if t.layers == layers})
            raise ValueError(
                f"the profile has no timing of {layers!r} at tensor-parallel degree {model} "
                f"(it has {known}); profile again with a larger plan.max_model"
            )
        return sorted(timings, key=lambda t: (t.shape.size, t.shape))

    def known_policies(self, module: str) -> tuple[Remat, ...]:
        """Recompute policies that the profile has prices of, in the order of `REMAT`."""
        known = [t.recompute for t in self.profile.timings if t.module == module]
        return tuple(r for r in get_args(Remat) if r == "segment" or all(r in k for k in known))

    def _fit_uncached(self, layers: str, model: int, kind: str) -> np.ndarray:
        """A coefficient of each feature, 0 of those that are left out."""
        timings = self._timings(layers, model)
        terms = _terms(timings)
        every = _of_shapes(t.shape for t in timings)
        shapes, coefficients = every[:, terms], np.zeros(every.shape[-1])
        if _is_direct(kind):
            coefficients[terms] = nonnegative(shapes, _values(timings, kind))
            return coefficients
        part, _, direction = kind.partition("_")
        features = np.vstack([np.hstack([d * shapes, shapes]) for d in DEPTHS])
        values = np.concatenate([_programs_s(timings, direction, d) for d in DEPTHS])
        layer, ends = np.split(nonnegative(features, values), 2)
        coefficients[terms] = ends if part == "ends" else layer
        return coefficients

    def _fitted(self, layers: str, model: int, kind: str, features: np.ndarray) -> np.ndarray:
        constant, *others = self._fit(layers, model, kind).tolist()
        fitted = np.full(features.shape[:-1], constant)
        for i, a in enumerate(others, 1):
            fitted += a * features[..., i]
        return fitted

    def _missed_uncached(self, layers: str, model: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(log sizes, rising; timed over fitted at each), a single 1 where tokens vary."""
        timings = self._timings(layers, model)
        if len({t.shape.tokens for t in timings}) > 1:
            return np.zeros(1), np.ones(1)
        features = _of_shapes(t.shape for t in timings)
        if _is_direct(kind):
            fitted = self._fitted(layers, model, kind, features)
            values = _values(timings, kind)
        else:
            direction = kind.partition("_")[2]
            layer, ends = (
                self._fitted(layers, model, f"{part}_{direction}", features)
                for part in ("layer", "ends")
            )
            fitted = DEPTHS[-1] * layer + ends
            values = _programs_s(timings, direction, DEPTHS[-1])
        ratio = np.divide(values, fitted, out=np.ones(len(timings)), where=fitted > 0)
        return np.log([float(t.shape.size) for t in timings]), rounded(ratio)

    def _content_s_uncached(self, layers: str, model: int, kind: str) -> np.ndarray:
        """Seconds of one layer for a unit of each feature of content, [features]: "forward",
        "backward" or what a recompute policy adds to it; large shapes, of which noise hides little,
        count most."""
        timings = self._timings(layers, model)
        weights = _of_shapes(t.shape for t in timings)[:, 2:]
        if kind in REMAT:
            named = _recompute(timings, kind, "content_s")
        else:
            named = [getattr(t, f"content_{kind}_s") for t in timings]
        names = self.profile.features(timings[0].module)
        seconds = np.array([by_feature(n, names) for n in named])
        return rounded((seconds * weights).sum(axis=0) / weights.sum(axis=0))

    def at(self, layers: str, model: int, features: np.ndarray, kind: str) -> np.ndarray:
        """A quantity (seconds without content, or bytes) of one layer, or of both ends, at shapes
        of these features; 0 without rows."""
        sizes, ratio = self._missed(layers, model, kind)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, self._fitted(layers, model, kind, features) * factor, 0.0)


def _is_direct(kind: str) -> bool:
    """Whether a quantity is fitted as it was measured, not from whole programs."""
    return kind == "hidden" or "." in kind


def _values(timings: Sequence[LayerTiming], kind: str) -> np.ndarray:
    """A directly measured quantity: "hidden", or POLICY.FIELD of `Recompute`."""
    if kind == "hidden":
        return np.array([t.hidden_bytes for t in timings])
    remat, _, name = kind.partition(".")
    return np.array(_recompute(timings, remat, name))


def _recompute(timings: Sequence[LayerTiming], remat: str, name: str) -> list[Any]:
    """A field of a recompute policy by timing; ValueError where one lacks the policy."""
    if any(remat not in t.recompute for t in timings):
        raise ValueError(
            f"the profile has no price of the recompute policy {remat!r} for "
            f"{timings[0].module!r}; profile again, or take another (train.remat)"
        )
    return [getattr(t.recompute[remat], name) for t in timings]  # type: ignore[index]
