"""From timings at a few shapes to seconds and bytes at any shapes, for any plan's tasks.

Time is fitted as overhead + a * size + b * size * tokens (size = items * tokens): launch cost, the
linear parts and attention over a row. Coefficients are not negative and errors are relative, so
small shapes count as much as large ones. Where only the number of items varies (an encoder's
tiles), what the fit misses is interpolated between the timings: caches make large shapes dearer.

Shapes are `items` rows of `tokens`, arrays or numbers; so are data-parallel degrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    LayerTiming,
    ModelProfile,
    Plan,
    SegmentPlan,
    Task,
)

_KINDS = {
    "layer_forward": "layer_forward_s",
    "layer_backward": "layer_backward_s",
    "ends_forward": "ends_forward_s",
    "ends_backward": "ends_backward_s",
    "layer_temp": "layer_temp_bytes",
    "ends_temp": "ends_temp_bytes",
    "hidden": "hidden_bytes",
}


Array = Any  # a float array, or one number
Mesh = tuple[int, Array, int]  # (stage, data, model)
# Forwards of a layer that backward runs once more. "dots" repeats only what is cheap; it is
# predicted as if it repeated all, and kept all: too careful both times.
_REPEATED = {"none": 0.0, "layers": 1.0, "dots": 1.0}


def _features(items: Array, tokens: Array) -> np.ndarray:
    """[..., 3] of shapes."""
    size = np.asarray(items, float) * tokens
    return np.stack([np.ones_like(size), size, size * tokens], -1)


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
        self._fit = cache(self._fit_uncached)
        self._missed = cache(self._missed_uncached)

    def _rows(self, module: str, model: int) -> list[LayerTiming]:
        return [t for t in self.profile.timings if t.module == module and t.model == model]

    def _fit_uncached(self, module: str, model: int, kind: str) -> np.ndarray:
        rows = self._rows(module, model)
        if not rows:
            known = sorted({t.model for t in self.profile.timings if t.module == module})
            raise ValueError(
                f"the profile has no timing of {module!r} at tensor-parallel degree {model} "
                f"(it has {known}); profile again with a larger plan.max_model"
            )
        values = np.array([getattr(t, _KINDS[kind]) for t in rows])
        weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
        features = np.array([_features(t.shape.items, t.shape.tokens) for t in rows])
        scale = features.max(axis=0)
        solution, _ = nnls(features / scale * weights[:, None], values * weights)
        return solution / scale

    def _missed_uncached(self, module: str, model: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(log sizes, rising; timed over fitted at each), a single 1 where tokens vary."""
        rows = self._rows(module, model)
        if len({t.shape.tokens for t in rows}) > 1:
            return np.zeros(1), np.ones(1)
        rows.sort(key=lambda t: t.shape.size)
        features = np.array([_features(t.shape.items, t.shape.tokens) for t in rows])
        fitted = features @ self._fit(module, model, kind)
        values = np.array([getattr(t, _KINDS[kind]) for t in rows])
        ratio = np.divide(values, fitted, out=np.ones(len(rows)), where=fitted > 0)
        return np.log([float(t.shape.size) for t in rows]), ratio

    def predict(self, module: str, model: int, items: Array, tokens: Array, kind: str) -> Array:
        """A quantity (seconds or bytes) of one layer, or of both ends, at shapes; 0 without
        items."""
        features = _features(items, tokens)
        sizes, ratio = self._missed(module, model, kind)
        size = features[..., 1]
        factor = np.interp(np.log(np.maximum(size, 1.0)), sizes, ratio)
        return np.where(size > 0, features @ self._fit(module, model, kind) * factor, 0.0)

    def work(self, module: str, model: int, kind: str, lengths: np.ndarray) -> float:
        """Seconds of items of these token counts if nothing were padded or launched twice: a
        floor of what any packing of them into rows costs on one rank."""
        _, linear, quadratic = self._fit(module, model, kind)
        least = self._missed(module, model, kind)[1].min()
        return float(least * (linear * lengths.sum() + quadratic * (lengths**2).sum()))

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
        items: Array,
        tokens: Array,
        direction: str,
    ) -> Array:
        """Seconds of a segment's task on a group of microbatches of these per-rank shapes, run
        alone; 0 without items.

        A segment of S stages takes M + S - 1 ticks for M microbatches; its ends are shared by the
        stages.
        """
        module, back, (stages, _, model) = segment.module, direction == BACKWARD, mesh
        kind = "backward" if back else "forward"
        layer_s = self.predict(module, model, items, tokens, f"layer_{kind}")
        if back and (again := _REPEATED[segment.remat]):
            layer_s = layer_s + again * self.predict(module, model, items, tokens, "layer_forward")
        ends_s = self.predict(module, model, items, tokens, f"ends_{kind}")
        ends_s = ends_s * self.ends_share(segment)
        ticks = group_size + stages - 1
        alone = (ticks * segment.n_layers * layer_s + group_size * ends_s) / stages
        one = self.profile.task_overhead_s + alone * self.slowdown(mesh)
        return np.where(np.asarray(items) > 0, one, 0.0)

    def ends_share(self, segment: SegmentPlan) -> float:
        """Share of the time of a module's ends that falls to the segment."""
        share = self.profile.entry_share[segment.module]
        return share * segment.first + (1.0 - share) * segment.last

    def task_seconds(self, plan: Plan) -> dict[Task, float]:
        """Seconds of every (segment, bucket, direction); a task's `group` is the bucket's index."""
        found: dict[Task, float] = {}
        for s in plan.segments:
            shapes = [b.shape_of(s.module, self.profile.item_tokens) for b in plan.buckets]
            items, tokens = np.array([(a.items, a.tokens) for a in shapes]).T
            mesh = plan.submesh(s.submesh).shape
            for d in (FORWARD, BACKWARD):
                every = self.group_s(s, mesh, plan.group_size, items, tokens, d)
                found |= {Task(s.name, b, d): float(v) for b, v in enumerate(every)}
        return found

    def segment_bytes(
        self,
        segment: SegmentPlan,
        mesh: Mesh,
        group_size: int,
        items: Array,
        tokens: Array,
        *,
        trained: bool = True,
    ) -> SegmentBytes:
        """Bytes per device of a segment whose buckets have these shapes."""
        module, (stages, data, model) = segment.module, mesh
        layer = self.profile.layer_param_bytes[module] / model
        ends = self.profile.ends_param_bytes[module] / model
        held = layer * segment.n_layers / stages + ends * (segment.first + segment.last) / 2

        def bytes_of(kind: str) -> Array:
            return self.predict(module, model, items, tokens, kind)

        ticks = group_size + stages - 1
        copies = ticks + (ticks > 1)  # a tick's temporaries are copied into those of all
        layer_temp, kept = bytes_of("layer_temp"), bytes_of("hidden")
        gradients = np.minimum(layer * trained, layer_temp)  # are there once, whatever the ticks
        own = layer_temp - gradients
        once = bytes_of("ends_temp")
        if segment.remat == "layers":  # a layer keeps its input; one at a time is computed again
            once, own = once + own, kept
        return SegmentBytes(
            state=held * (1.0 + trained * (1.0 + 2.0 / data)),
            kept=kept * group_size,
            temporaries=(own * copies + gradients) * segment.n_layers / stages + once,
        )
