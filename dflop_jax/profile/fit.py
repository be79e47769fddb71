"""From timings at a few shapes to seconds and bytes at any shapes, for any plan's segments.

A quantity is fitted as overhead + a * size + b * size * tokens (size = rows * tokens): launch cost,
the linear parts and attention over a row, or fewer of these terms where the timings cannot tell
them apart. Coefficients are not negative and errors are relative, so small shapes count as much as
large ones. A layer's seconds and the ends' are fitted together, to whole programs of the depths
that were timed: the split of one noisy difference of two programs is never believed alone. Where
only the number of rows varies (a module that takes one piece a row), what the fit of whole programs
misses is interpolated between the timings: caches make large shapes dearer.

Fitted numbers keep 24 bits (seven digits): the last bits of a least-squares fit differ from one
linear algebra library to the next, and no plan may hang on them.

Shapes are `rows` rows of `tokens`, arrays or numbers; so are data-parallel degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dflop_jax.records import BACKWARD, LayerTiming, ModelProfile, SegmentPlan

DEPTHS = (1, 3)  # layers of the programs that are timed
_BYTES = {
    "layer_temp": "layer_temp_bytes",
    "ends_temp": "ends_temp_bytes",
    "hidden": "hidden_bytes",
}
_KEPT_BITS = 24

Array = Any  # a float array, or one number
Mesh = tuple[int, Array, int]  # (stage, data, model)
# Forwards of a layer that backward runs once more. "dots" repeats only what is cheap; it is
# predicted as if it repeated all, and kept all: too careful both times.
_REPEATED = {"none": 0.0, "segment": 0.0, "layers": 1.0, "dots": 1.0, "named": 1.0}


def rounded(values: Array) -> Array:
    """The values with their first 24 bits, the same on every machine."""
    mantissa, exponent = np.frexp(np.asarray(values, float))
    return np.ldexp(np.rint(mantissa * 2.0**_KEPT_BITS), exponent - _KEPT_BITS)


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


def least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x of least |matrix x - values| with no entry below zero, by the active sets of Lawson and
    Hanson; scipy's takes half a second to load, which is long for the start of a run."""
    x, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    least = 1e-13 * max(np.abs(matrix.T @ values).max(), 1e-300)
    for _ in range(3 * len(x)):
        gain = np.where(free, 0.0, matrix.T @ (values - matrix @ x))
        if gain.max() <= least:
            break
        free[gain.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            # As far as the first entry that would fall below zero, which then is out.
            step = (x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min()
            x += step * (wanted - x)
            free &= x > 1e-14 * x.max()
            x[~free] = 0.0
        x = wanted
    return x


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


def parameter_bytes(segment: SegmentPlan, mesh: Mesh, profile: ModelProfile) -> float:
    """Bytes of a segment's parameters on one device. Each end counts as half of both; where the
    ends are tied and apart, both segments hold what they share, so each counts as both."""
    stages, _, model = mesh
    layers = profile.layer_param_bytes[segment.module] * segment.n_layers / stages
    ends = (segment.first + segment.last) / 2
    if segment.module in profile.tied:
        ends = float(segment.first or segment.last)
    return (layers + profile.ends_param_bytes[segment.module] * ends) / model


@dataclass(frozen=True)
class SegmentBytes:
    """state: parameters, gradients and AdamW's moments, in float32, the moments over the data
    ranks. kept: the input of one group in flight. temporaries: of its backward."""

    state: Array
    kept: Array
    temporaries: Array


class CostModel:
    """Predicts from a ModelProfile. Methods are pure; fits are cached."""

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

    def _fit_uncached(self, module: str, model: int, kind: str) -> np.ndarray:
        """The three coefficients, 0 of terms that are left out."""
        timings = self._timings(module, model)
        terms = _terms(timings)
        shapes = np.array([_features(t.shape.rows, t.shape.tokens) for t in timings])[:, terms]
        coefficients = np.zeros(3)
        if kind in _BYTES:
            values = np.array([getattr(t, _BYTES[kind]) for t in timings])
            coefficients[terms] = _nonnegative(shapes, values)
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
        if kind in _BYTES:
            fitted = self._fitted(module, model, kind, features)
            values = np.array([getattr(t, _BYTES[kind]) for t in timings])
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

    def _pair_s_uncached(self, module: str, model: int, direction: str) -> float:
        """Seconds of one layer for each pair of tokens of one piece; large shapes, of which noise
        hides little, count most."""
        timings = self._timings(module, model)
        kind = "pair_backward_s" if direction == BACKWARD else "pair_forward_s"
        weights = [float(t.shape.size * t.shape.tokens) for t in timings]
        total_s = sum(getattr(t, kind) * w for t, w in zip(timings, weights, strict=True))
        return float(rounded(total_s / sum(weights)))

    def predict(self, module: str, model: int, rows: Array, tokens: Array, kind: str) -> Array:
        """A quantity (seconds without content, or bytes) of one layer, or of both ends, at shapes;
        0 without rows."""
        features = _features(rows, tokens)
        sizes, ratio = self._missed(module, model, kind)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, self._fitted(module, model, kind, features) * factor, 0.0)

    def work(self, module: str, model: int, kind: str, lengths: np.ndarray) -> float:
        """Seconds of pieces of these token counts if nothing were padded or launched twice: a
        floor of what any packing of them into rows costs on one rank."""
        _, linear, quadratic = self._fit(module, model, kind)
        least = self._missed(module, model, kind)[1].min()
        pairs = float((lengths**2).sum())
        content_s = 0.0
        if kind in ("layer_forward", "layer_backward"):
            content_s = self.pair_s(module, model, kind.removeprefix("layer_")) * pairs
        return float(least * (linear * lengths.sum() + quadratic * pairs)) + content_s

    def slowdown(self, mesh: Mesh) -> Array:
        """How much longer a submesh's devices take together than a rank took when it was timed,
        because they share cores (`ModelProfile.concurrency`)."""
        stage, data, model = mesh
        # One rank was timed with its `model` devices computing together already.
        timed = max(1.0, model / self.profile.concurrency)
        return np.maximum(1.0, stage * data * model / self.profile.concurrency) / timed

    def group_s(
        self,
        segment: SegmentPlan,
        mesh: Mesh,
        group_size: int,
        rows: Array,
        tokens: Array,
        direction: str,
    ) -> Array:
        """Seconds of a segment's task on a group of microbatches of these per-rank shapes, run
        alone and without content (see `group_pair_s`); 0 without rows.

        A segment of S stages takes M + S - 1 ticks for M microbatches; its ends are shared by the
        stages.
        """
        module, back, (stages, _, model) = segment.module, direction == BACKWARD, mesh
        kind = "backward" if back else "forward"
        layer_s = self.predict(module, model, rows, tokens, f"layer_{kind}")
        if back and (again := _REPEATED[segment.remat]):
            layer_s = layer_s + again * self.predict(module, model, rows, tokens, "layer_forward")
        ends_s = self.predict(module, model, rows, tokens, f"ends_{kind}")
        ends_s = ends_s * self.ends_share(segment)
        ticks = group_size + stages - 1
        alone = (ticks * segment.n_layers * layer_s + group_size * ends_s) / stages
        one = self.profile.task_overhead_s + alone * self.slowdown(mesh)
        return np.where(np.asarray(rows) > 0, one, 0.0)

    def group_pair_s(
        self, segment: SegmentPlan, mesh: Mesh, group_size: int, direction: str
    ) -> Array:
        """Seconds that a group's task takes more for each of the group's `pairs`.

        A stage sees every microbatch once, and S - 1 more times one of mean content: what it
        computes while the pipeline inside the segment fills and drains.
        """
        stages, _, model = mesh
        layer_s = self.pair_s(segment.module, model, direction)
        if direction == BACKWARD and (again := _REPEATED[segment.remat]):
            layer_s += again * self.pair_s(segment.module, model, "forward")
        ticks = group_size + stages - 1
        return layer_s * segment.n_layers / stages * ticks / group_size * self.slowdown(mesh)

    def ends_share(self, segment: SegmentPlan) -> float:
        """Share of the time of a module's ends that falls to the segment."""
        share = self.profile.entry_share[segment.module]
        return share * segment.first + (1.0 - share) * segment.last

    def inputs_kept(self, segment: SegmentPlan) -> int:
        """Arrays of the hidden states' size that a segment keeps from forward to backward: what
        every edge brings, and the hidden states of the segment before it; of a first segment that
        no edge enters, its fields."""
        entering = sum(segment.reads(e) for e in self.profile.edges)
        return max(1, entering + (not segment.first))

    def segment_bytes(
        self,
        segment: SegmentPlan,
        mesh: Mesh,
        group_size: int,
        rows: Array,
        tokens: Array,
        *,
        trained: bool = True,
    ) -> SegmentBytes:
        """Bytes per device of a segment, by shape."""
        module, (stages, data, model) = segment.module, mesh
        layer = self.profile.layer_param_bytes[module] / model
        parameters = parameter_bytes(segment, mesh, self.profile)

        def bytes_of(kind: str) -> Array:
            return self.predict(module, model, rows, tokens, kind)

        ticks = group_size + stages - 1
        copies = ticks + (ticks > 1)  # a tick's temporaries are copied into those of all
        layer_temp, hidden = bytes_of("layer_temp"), bytes_of("hidden")
        gradients = np.minimum(layer * trained, layer_temp)  # are there once, whatever the ticks
        own = layer_temp - gradients
        once = bytes_of("ends_temp")
        if segment.remat == "layers":  # a layer keeps its input; one at a time is computed again
            once, own = once + own, hidden
        return SegmentBytes(
            state=parameters * (1.0 + trained * (1.0 + 2.0 / data)),
            kept=hidden * group_size * self.inputs_kept(segment),
            temporaries=(own * copies + gradients) * segment.n_layers / stages + once,
        )
