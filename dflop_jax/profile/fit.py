"""Fits of time and bytes of a module's layers and ends, from timings at a few shapes.

A quantity is fitted as a linear combination of the features of a static shape (`records.data`): a
constant (launch cost), tokens (linear layers) and token pairs (attention), or fewer terms if the
timings do not determine all of them. Coefficients are nonnegative and errors are relative, so small
shapes count as much as large ones. The times of layers and ends are fitted jointly to the programs
of all timed depths, since a single difference of two programs is noisy. If only the number of rows
varies (modules with one piece per row), the ratio of timed to fitted values is interpolated, since
large shapes do not fit into caches.

Fitted numbers are rounded to 24 bits (seven digits), because the last bits of a least-squares fit
differ between linear algebra libraries and must not change plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, reduce
from typing import Any

import numpy as np

from dflop_jax.profile.state import Array
from dflop_jax.records import (
    LAYERS,
    REMAT,
    ModelProfile,
    layer_key,
    order_coefficients,
    shape_features,
    tp_share,
)

# Numbers of layers in the timed programs; their difference gives the time of a layer. Deeper
# programs take longer to compile and to run, but are more precise.
DEPTHS = (1, 3)
# Names of quantities in bytes -> fields of `LayerTiming`.
_BYTES = {"hidden": "hidden_bytes", "output": "output_bytes"}


def round_to_24_bits(values: Array) -> Array:
    """Round values to 24 bits, so that they are equal on every machine."""
    n_bits = np.finfo(np.float32).nmant + 1
    mantissa, exponent = np.frexp(np.asarray(values, float))
    return np.ldexp(np.rint(mantissa * 2.0**n_bits), exponent - n_bits)


def fit_nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the nonnegative coefficients with the least squared relative error."""
    from scipy.optimize import nnls  # imported here, since it loads for 0.5 s

    weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], values * weights)
    solution[solution < solution.max() * 1e-9] = 0.0  # rounding residue of absent terms
    return round_to_24_bits(solution / scale)


class LayerFits:
    """Fits of a module's layers of one kind (`layers`: a `layer_key`) and of its ends, at a
    tensor-parallel degree; each fit is cached."""

    def __init__(self, profile: ModelProfile, layers: str, tp: int):
        of_layers = [t for t in profile.timings if t.layers == layers]
        timings = [t for t in of_layers if t.model == tp]
        if not timings:
            raise ValueError(
                f"the profile has no timing of {layers!r} at tensor-parallel degree {tp} "
                f"(it has {sorted({t.model for t in of_layers})}); profile again with a larger "
                "plan.max_model"
            )
        self._timings = sorted(timings, key=lambda t: (t.shape.size, t.shape))
        self._content_names = profile.features(timings[0].module)
        rows, tokens = np.array([(t.shape.rows, t.shape.tokens) for t in self._timings]).T
        self._features = shape_features(rows, tokens)  # [n_timings, n_features]
        self._same_tokens = len(set(tokens)) == 1
        self.coefficients = cache(self._fit_coefficients)
        self._corrections = cache(self._compute_corrections)
        self.content_s = cache(self._compute_content_s)

    def predict(self, features: np.ndarray, quantity: str) -> np.ndarray:
        """Predict a quantity of one layer, or of both ends, at shapes' features; 0 without rows."""
        sizes, ratio = self._corrections(quantity)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, self._fitted(quantity, features) * factor, 0.0)

    def _fitted(self, quantity: str, features: np.ndarray) -> np.ndarray:
        constant, *slopes = self.coefficients(quantity).tolist()
        fitted = np.full(features.shape[:-1], constant)
        for i, a in enumerate(slopes, 1):
            fitted += a * features[..., i]
        return fitted

    def _fit_coefficients(self, quantity: str) -> np.ndarray:
        """Fit the coefficient of each feature. Some are 0 if there are few shapes: one shape gives
        the coefficient of tokens, two also the constant, and three with different row lengths all.
        """
        n_shapes, n_features = len({t.shape for t in self._timings}), self._features.shape[-1]
        terms = list(range(2 if self._same_tokens else min(n_shapes, n_features)))
        if n_shapes == 1:
            terms = [1]
        features, coefficients = self._features[:, terms], np.zeros(n_features)
        if _is_direct(quantity):
            coefficients[terms] = fit_nonnegative(features, self._measured_values(quantity))
            return coefficients
        term, _, direction = quantity.partition("_")
        of_programs = np.vstack([np.hstack([d * features, features]) for d in DEPTHS])
        values = np.concatenate([self._program_seconds(direction, d) for d in DEPTHS])
        layer, ends = np.split(fit_nonnegative(of_programs, values), 2)
        coefficients[terms] = ends if term == "ends" else layer
        return coefficients

    def _compute_corrections(self, quantity: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ascending log sizes, ratios of timed to fitted values); ratio 1 if `tokens`
        varies."""
        if not self._same_tokens:
            return np.zeros(1), np.ones(1)
        if _is_direct(quantity):
            fitted = self._fitted(quantity, self._features)
            values = self._measured_values(quantity)
        else:
            direction = quantity.partition("_")[2]
            layer, ends = (
                self._fitted(f"{term}_{direction}", self._features) for term in ("layer", "ends")
            )
            fitted = DEPTHS[-1] * layer + ends
            values = self._program_seconds(direction, DEPTHS[-1])
        ratio = np.divide(values, fitted, out=np.ones(len(values)), where=fitted > 0)
        return np.log(self._features[:, 1]), round_to_24_bits(ratio)

    def _compute_content_s(self, quantity: str) -> np.ndarray:
        """Return a layer's seconds per unit of each content feature, for "forward", "backward" or
        the addition of a recompute policy. Large shapes, which have less noise, weigh most."""
        if quantity in REMAT:
            unit_seconds = self._recompute_values(quantity, "content_s")
        else:
            unit_seconds = [getattr(t, f"content_{quantity}_s") for t in self._timings]
        seconds = np.array([order_coefficients(n, self._content_names) for n in unit_seconds])
        weights = self._features[:, 2:]
        return round_to_24_bits((seconds * weights).sum(axis=0) / weights.sum(axis=0))

    def _program_seconds(self, direction: str, depth: int) -> np.ndarray:
        """Return the seconds of programs with `depth` layers and both ends, by timing."""
        layer, ends = f"layer_{direction}_s", f"ends_{direction}_s"
        return np.array([depth * getattr(t, layer) + getattr(t, ends) for t in self._timings])

    def _measured_values(self, quantity: str) -> np.ndarray:
        """Return a directly measured quantity of `_BYTES`, or POLICY.FIELD of `Recompute`."""
        if quantity in _BYTES:
            return np.array([getattr(t, _BYTES[quantity]) for t in self._timings])
        remat, _, name = quantity.partition(".")
        return np.array(self._recompute_values(remat, name))

    def _recompute_values(self, remat: Any, name: str) -> list[Any]:
        if any(remat not in t.recompute for t in self._timings):
            raise ValueError(
                f"the profile has no price of the recompute policy {remat!r} for "
                f"{self._timings[0].module!r}; profile again, or change train.remat"
            )
        return [getattr(t.recompute[remat], name) for t in self._timings]


def _is_direct(quantity: str) -> bool:
    """Return whether a quantity is fitted to its own measured values, not to whole programs."""
    return quantity in _BYTES or "." in quantity


class Predictions:
    """Predicted quantities of a module at shapes, cached by name (see `LayerFits.predict`). `fits`
    returns the fits of a `layer_key` and a tensor-parallel degree."""

    def __init__(
        self,
        profile: ModelProfile,
        fits: Callable[[str, int], LayerFits],
        module: str,
        tp: int,
        rows: Array,
        tokens: Array,
    ):
        self.has_rows = np.asarray(rows) > 0
        self.rank_share = tp_share(rows, tokens, tp)  # of hidden states, per tensor rank
        features = shape_features(rows, tokens)
        self._first_kind = profile.kinds.get(module, (LAYERS,))[0]
        self.layer = cache(
            lambda kind, name: fits(layer_key(module, kind), tp).predict(features, name)
        )

    def __getitem__(self, name: str) -> Array:
        return self.layer(self._first_kind, name)

    def max_layer(self, kinds: Iterable[str], name: str) -> Array:
        return reduce(np.maximum, (self.layer(kind, name) for kind in kinds))
