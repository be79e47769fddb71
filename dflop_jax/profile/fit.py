"""From timings at a few shapes to seconds and bytes at any shape, for any plan's tasks.

Time is fitted as overhead + a * size + b * size * tokens (size = items * tokens): launch cost, the
linear parts and attention over a row. Coefficients are not negative and errors are relative, so
small shapes count as much as large ones. Where only the number of items varies (an encoder's
tiles), what the fit misses is interpolated between the timings: caches make large shapes dearer.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
from scipy.optimize import nnls

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    ModelProfile,
    ModuleShape,
    Plan,
    SegmentPlan,
    SubmeshPlan,
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


def _features(shape: ModuleShape) -> tuple[float, float, float]:
    return 1.0, float(shape.size), float(shape.size) * shape.tokens


class CostModel:
    """Predicts from a ModelProfile. Methods are pure; fits are cached."""

    def __init__(self, profile: ModelProfile):
        self.profile = profile
        self._fit = cache(self._fit_uncached)
        self._missed = cache(self._missed_uncached)

    def _fit_uncached(self, module: str, model: int, kind: str) -> np.ndarray:
        rows = [t for t in self.profile.timings if t.module == module and t.model == model]
        if not rows:
            known = sorted({t.model for t in self.profile.timings if t.module == module})
            raise ValueError(
                f"the profile has no timing of {module!r} at tensor-parallel degree {model} "
                f"(it has {known}); profile again with a larger plan.max_model"
            )
        values = np.array([getattr(t, _KINDS[kind]) for t in rows])
        weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
        features = np.array([_features(t.shape) for t in rows])
        scale = features.max(axis=0)
        solution, _ = nnls(features / scale * weights[:, None], values * weights)
        return solution / scale

    def _missed_uncached(self, module: str, model: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(sizes, rising; timed over fitted at each), a single 1 where tokens vary."""
        rows = [t for t in self.profile.timings if t.module == module and t.model == model]
        if len({t.shape.tokens for t in rows}) > 1:
            return np.ones(1), np.ones(1)
        rows.sort(key=lambda t: t.shape.size)
        fitted = np.array([_features(t.shape) for t in rows]) @ self._fit(module, model, kind)
        values = np.array([getattr(t, _KINDS[kind]) for t in rows])
        ratio = np.divide(values, fitted, out=np.ones(len(rows)), where=fitted > 0)
        return np.array([float(t.shape.size) for t in rows]), ratio

    def predict(self, module: str, model: int, shape: ModuleShape, kind: str) -> float:
        """A quantity (seconds or bytes) of one layer, or of both ends, at a shape."""
        fitted = self._fit(module, model, kind) @ np.array(_features(shape))
        sizes, ratio = self._missed(module, model, kind)
        return float(fitted * np.interp(np.log(shape.size), np.log(sizes), ratio))

    def work(self, module: str, model: int, kind: str, lengths: np.ndarray) -> float:
        """Seconds of items of these token counts if nothing were padded or launched twice: a
        floor of what any packing of them into rows costs on one rank."""
        _, linear, quadratic = self._fit(module, model, kind)
        least = self._missed(module, model, kind)[1].min()
        return float(least * (linear * lengths.sum() + quadratic * (lengths**2).sum()))

    def slowdown(self, mesh: SubmeshPlan) -> float:
        """How much longer a submesh's devices take together than a rank took when it was timed,
        because they share cores (`ModelProfile.concurrency`)."""
        # One rank was timed with its `model` devices computing together already.
        timed = max(1.0, mesh.model / self.profile.concurrency)
        return max(1.0, mesh.n_devices / self.profile.concurrency) / timed

    def segment_s(self, plan: Plan, segment: SegmentPlan, bucket: Bucket, direction: str) -> float:
        """Seconds of one task of a group, run alone on its submesh.

        A segment of S stages takes M + S - 1 ticks for M microbatches; its ends are shared by the
        stages.
        """
        shape = bucket.shape_of(segment.module, self.profile.item_tokens)
        if shape.items == 0:
            return 0.0
        mesh = plan.submesh(segment.submesh)
        kind = "backward" if direction == BACKWARD else "forward"
        layer_s = self.predict(segment.module, mesh.model, shape, f"layer_{kind}")
        ends_s = self.predict(segment.module, mesh.model, shape, f"ends_{kind}")
        share = self.profile.entry_share[segment.module]
        ends_s *= share * segment.first + (1.0 - share) * segment.last
        ticks = plan.group_size + mesh.stage - 1
        per_tick = layer_s * segment.n_layers / mesh.stage
        alone = ticks * per_tick + ends_s * plan.group_size / mesh.stage
        return self.profile.task_overhead_s + alone * self.slowdown(mesh)

    def task_seconds(self, plan: Plan) -> dict[Task, float]:
        """Seconds of every (segment, bucket, direction); a task's `group` is the bucket's index."""
        return {
            Task(s.name, b, d): self.segment_s(plan, s, bucket, d)
            for b, bucket in enumerate(plan.buckets)
            for s in plan.segments
            for d in (FORWARD, BACKWARD)
        }

    def peak_bytes(self, plan: Plan, in_flight: dict[str, int]) -> dict[str, float]:
        """Bytes per device of each submesh: parameters, gradients and AdamW state in float32, the
        largest program's temporaries, and the inputs kept for `in_flight[segment]` groups."""
        total: dict[str, float] = {}
        for s in plan.segments:
            mesh = plan.submesh(s.submesh)
            ends = (s.first + s.last) / 2
            params = self.profile.layer_param_bytes[s.module] * s.n_layers / mesh.stage
            params += self.profile.ends_param_bytes[s.module] * ends
            state = params / mesh.model * (2.0 + 2.0 / mesh.data)
            work = 0.0
            for bucket in plan.buckets:
                shape = bucket.shape_of(s.module, self.profile.item_tokens)
                if shape.items == 0:
                    continue
                get = partial(self.predict, s.module, mesh.model, shape)
                kept = get("hidden") * plan.group_size * in_flight[s.name]
                temp = get("layer_temp") * s.n_layers / mesh.stage + get("ends_temp")
                ticks = plan.group_size + mesh.stage - 1  # backward keeps each tick's
                work = max(work, kept + temp * ticks)
            total[s.submesh] = total.get(s.submesh, 0.0) + state + work
        return total
