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
    order_coefficients,
    shape_features,
)

# Layers of the programs that are timed, whose difference is what a layer takes; deeper ones take
# longer to compile and to run, and tell it more exactly.
DEPTHS = (1, 3)
_MANTISSA_BITS = 24


def round_to_float32(values: Array) -> Array:
    """The values with their first 24 bits, the same on every machine."""
    mantissa, exponent = np.frexp(np.asarray(values, float))
    return np.ldexp(np.rint(mantissa * 2.0**_MANTISSA_BITS), exponent - _MANTISSA_BITS)


def fit_nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of least squared relative error, none below zero."""
    from scipy.optimize import nnls  # loads for half a second, which others need not wait for

    weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], values * weights)
    solution[solution < solution.max() * 1e-9] = 0.0  # what is left of a term that is not there
    return round_to_float32(solution / scale)


def _distinguishable_features(timings: Sequence[LayerTiming]) -> list[int]:
    """Features that timings can tell apart: tokens alone from one shape, a constant from two, what
    rows hold from as many shapes as there are features, whose rows differ in length."""
    shapes = {t.shape for t in timings}
    lengths = {s.tokens for s in shapes}
    if len(shapes) < 2:
        return [1]
    n_features = _features_at(shapes).shape[-1]
    return list(range(min(len(shapes), n_features) if len(lengths) > 1 else 2))


def _features_at(shapes: Iterable[Shape]) -> np.ndarray:
    rows, tokens = np.array([(s.rows, s.tokens) for s in shapes]).T
    return shape_features(rows, tokens)


def _program_seconds(timings: Sequence[LayerTiming], direction: str, depth: int) -> np.ndarray:
    """Seconds of programs of so many layers with both ends, by timing."""
    return np.array(
        [
            depth * getattr(t, f"layer_{direction}_s") + getattr(t, f"ends_{direction}_s")
            for t in timings
        ]
    )


class Fits:
    """The fits of all modules of a ModelProfile, each computed once; methods are pure. `layers`
    names a module with layers of one kind (`layer_key`)."""

    def __init__(self, profile: ModelProfile):
        self.profile = profile
        self._timings = cache(self._timings_uncached)
        self._fit = cache(self._fit_uncached)
        self._corrections = cache(self._corrections_uncached)
        self.content_s = cache(self._content_s_uncached)

    def _timings_uncached(self, layers: str, tp: int) -> list[LayerTiming]:
        timings = [t for t in self.profile.timings if t.layers == layers and t.model == tp]
        if not timings:
            timed_degrees = sorted({t.model for t in self.profile.timings if t.layers == layers})
            raise ValueError(
                f"the profile has no timing of {layers!r} at tensor-parallel degree {tp} "
                f"(it has {timed_degrees}); profile again with a larger plan.max_model"
            )
        return sorted(timings, key=lambda t: (t.shape.size, t.shape))

    def priced_policies(self, module: str) -> tuple[Remat, ...]:
        """Recompute policies that the profile has prices of, in the order of `REMAT`."""
        policies = [t.recompute for t in self.profile.timings if t.module == module]
        return tuple(r for r in get_args(Remat) if r == "segment" or all(r in k for k in policies))

    def _fit_uncached(self, layers: str, tp: int, quantity: str) -> np.ndarray:
        """A coefficient for each feature, 0 for those that are left out."""
        timings = self._timings(layers, tp)
        terms = _distinguishable_features(timings)
        features_at = _features_at(t.shape for t in timings)
        shapes, coefficients = features_at[:, terms], np.zeros(features_at.shape[-1])
        if _is_direct(quantity):
            coefficients[terms] = fit_nonnegative(shapes, _measured_values(timings, quantity))
            return coefficients
        term, _, direction = quantity.partition("_")
        features = np.vstack([np.hstack([d * shapes, shapes]) for d in DEPTHS])
        values = np.concatenate([_program_seconds(timings, direction, d) for d in DEPTHS])
        layer, ends = np.split(fit_nonnegative(features, values), 2)
        coefficients[terms] = ends if term == "ends" else layer
        return coefficients

    def _fitted(self, layers: str, tp: int, quantity: str, features: np.ndarray) -> np.ndarray:
        constant, *slopes = self._fit(layers, tp, quantity).tolist()
        fitted = np.full(features.shape[:-1], constant)
        for i, a in enumerate(slopes, 1):
            fitted += a * features[..., i]
        return fitted

    def _corrections_uncached(
        self, layers: str, tp: int, quantity: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log sizes, rising; timed over fitted value at each); a single 1 where tokens vary."""
        timings = self._timings(layers, tp)
        if len({t.shape.tokens for t in timings}) > 1:
            return np.zeros(1), np.ones(1)
        features = _features_at(t.shape for t in timings)
        if _is_direct(quantity):
            fitted = self._fitted(layers, tp, quantity, features)
            values = _measured_values(timings, quantity)
        else:
            direction = quantity.partition("_")[2]
            layer, ends = (
                self._fitted(layers, tp, f"{term}_{direction}", features)
                for term in ("layer", "ends")
            )
            fitted = DEPTHS[-1] * layer + ends
            values = _program_seconds(timings, direction, DEPTHS[-1])
        ratio = np.divide(values, fitted, out=np.ones(len(timings)), where=fitted > 0)
        return np.log([float(t.shape.size) for t in timings]), round_to_float32(ratio)

    def _content_s_uncached(self, layers: str, tp: int, quantity: str) -> np.ndarray:
        """Seconds of one layer for a unit of each feature of content, [features]: "forward",
        "backward" or what a recompute policy adds to it; large shapes, of which noise hides little,
        count most."""
        timings = self._timings(layers, tp)
        weights = _features_at(t.shape for t in timings)[:, 2:]
        if quantity in REMAT:
            unit_seconds = _recompute_values(timings, quantity, "content_s")
        else:
            unit_seconds = [getattr(t, f"content_{quantity}_s") for t in timings]
        names = self.profile.features(timings[0].module)
        seconds = np.array([order_coefficients(n, names) for n in unit_seconds])
        return round_to_float32((seconds * weights).sum(axis=0) / weights.sum(axis=0))

    def predict(self, layers: str, tp: int, features: np.ndarray, quantity: str) -> np.ndarray:
        """A quantity (seconds without content, or bytes) of one layer, or of both ends, at shapes
        with these features; 0 without rows."""
        sizes, ratio = self._corrections(layers, tp, quantity)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, self._fitted(layers, tp, quantity, features) * factor, 0.0)


def _is_direct(quantity: str) -> bool:
    """Whether a quantity is fitted to its own measured values, not to whole programs."""
    return quantity == "hidden" or "." in quantity


def _measured_values(timings: Sequence[LayerTiming], quantity: str) -> np.ndarray:
    """A directly measured quantity: "hidden", or POLICY.FIELD of `Recompute`."""
    if quantity == "hidden":
        return np.array([t.hidden_bytes for t in timings])
    remat, _, name = quantity.partition(".")
    return np.array(_recompute_values(timings, remat, name))


def _recompute_values(timings: Sequence[LayerTiming], remat: str, name: str) -> list[Any]:
    """A field of a recompute policy by timing; ValueError where one lacks the policy."""
    if any(remat not in t.recompute for t in timings):
        raise ValueError(
            f"the profile has no price of the recompute policy {remat!r} for "
            f"{timings[0].module!r}; profile again, or take another (train.remat)"
        )
    return [getattr(t.recompute[remat], name) for t in timings]  # type: ignore[index]
