"""From timings at a few shapes to seconds and bytes at any shapes, for any plan's segments.

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
from functools import cache, partial
from typing import get_args

import numpy as np

from dflop_jax.profile.least_squares import least_squares, rounded
from dflop_jax.profile.state import (
    Array,
    Mesh,
    Moved,
    SegmentBytes,
    end_bytes,
    state_bytes,
    whole_bytes,
)
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REMAT,
    LayerTiming,
    ModelProfile,
    Remat,
    SegmentPlan,
)

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


_AT_HAND = Moved()


class Figures:
    """Quantities of a module at shapes, each predicted once: see `CostModel.predict`."""

    def __init__(self, costs: CostModel, module: str, model: int, rows: Array, tokens: Array):
        self.is_there = np.asarray(rows) > 0
        self._predict = cache(partial(costs.predict, module, model, rows, tokens))

    def __getitem__(self, kind: str) -> Array:
        return self._predict(kind)


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

    def slowdown(self, mesh: Mesh) -> Array:
        """How much longer a submesh's devices take together than a rank took when it was timed,
        because they share cores (`ModelProfile.concurrency`)."""
        stage, data, model = mesh
        # One rank was timed with its `model` devices computing together already.
        timed = max(1.0, model / self.profile.concurrency)
        return np.maximum(1.0, stage * data * model / self.profile.concurrency) / timed

    def at(self, module: str, model: int, rows: Array, tokens: Array) -> Figures:
        """The quantities of a module at shapes."""
        return Figures(self, module, model, rows, tokens)

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
        alone and without content (see `group_pair_s`); 0 without rows."""
        figures = self.at(segment.module, mesh[2], rows, tokens)
        return self.task_s(segment, mesh, group_size, figures, direction)

    def task_s(
        self,
        segment: SegmentPlan,
        mesh: Mesh,
        group_size: int,
        figures: Figures,
        direction: str,
        moved: Moved = _AT_HAND,
    ) -> Array:
        """`group_s` from figures at hand, with what is moved between data ranks meanwhile.

        A segment of S stages takes M + S - 1 ticks for M microbatches; its ends are shared by the
        stages. A backward task that has no forward task before it, or repeats it, runs the layers
        twice in all.
        """
        stages, slow = mesh[0], self.slowdown(mesh)
        ticks, layers = group_size + stages - 1, segment.n_layers / stages
        share = self.ends_share(segment) * group_size / stages
        loops, again = self.loops(segment, direction), _again(segment)
        seconds = self.profile.task_overhead_s + moved.ends_gather_s
        for loop in loops:
            layer_s, ends_s = figures[f"layer_{loop}"], figures[f"ends_{loop}"]
            moved_s = moved.layer_gather_s
            if loop == BACKWARD:
                layer_s = layer_s + figures[f"{again}.layer_s"]
                ends_s = ends_s + figures[f"{again}.ends_s"]
                moved_s = moved_s + moved.layer_scatter_s
                seconds = seconds + ticks * moved.ends_scatter_s
            # A layer's parameters come while the one before is computed; the first layer waits.
            layers_s = layers * np.maximum(layer_s * slow, moved_s) + moved_s
            seconds = seconds + ticks * layers_s + share * ends_s * slow
        return np.where(figures.is_there, seconds, 0.0)

    def group_pair_s(
        self, segment: SegmentPlan, mesh: Mesh, group_size: int, direction: str
    ) -> Array:
        """Seconds that a group's task takes more for each of the group's `pairs`.

        A stage sees every microbatch once, and S - 1 more times one of mean content: what it
        computes while the pipeline inside the segment fills and drains.
        """
        stages, _, model = mesh
        kinds = [*self.loops(segment, direction), *[_again(segment)] * (direction == BACKWARD)]
        layer_s = sum(self.pair_s(segment.module, model, kind) for kind in kinds)
        ticks = group_size + stages - 1
        return layer_s * segment.n_layers / stages * ticks / group_size * self.slowdown(mesh)

    def hands_over(self, segment: SegmentPlan) -> bool:
        """Whether a segment has a forward task, whose results its backward task begins with: not
        one that nobody reads (see `pipeline.order`)."""
        return not segment.last or any(segment.sends(e) for e in self.profile.edges)

    def loops(self, segment: SegmentPlan, direction: str) -> tuple[str, ...]:
        """How a task goes through the segment's layers."""
        if direction != BACKWARD:
            return (FORWARD,)
        if segment.remat == "segment" or not self.hands_over(segment):
            return (FORWARD, BACKWARD)
        return (BACKWARD,)

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
        backward: bool = True,
    ) -> SegmentBytes:
        """Bytes per device of a segment, by shape.

        Args:
          trained: whether it has trainable parameters.
          backward: whether it has backward tasks.
        """
        figures = self.at(segment.module, mesh[2], rows, tokens)
        return self.bytes_of(segment, mesh, group_size, figures, trained=trained, backward=backward)

    def bytes_of(
        self,
        segment: SegmentPlan,
        mesh: Mesh,
        group_size: int,
        figures: Figures,
        *,
        trained: bool,
        backward: bool,
    ) -> SegmentBytes:
        """`segment_bytes` from figures at hand.

        What forward keeps is there for every tick of the loop over stages, those included in which
        a stage has nothing of its own to do. A task that runs forward and backward holds it among
        its temporaries, with the hidden states after the last layer and their gradients.
        """
        stages, again = mesh[0], _again(segment)
        ticks, layers = group_size + stages - 1, segment.n_layers / stages
        inputs = figures["hidden"] * group_size * self.inputs_kept(segment)
        kept = ticks * layers * figures[f"{again}.layer_bytes"]
        kept = kept + ticks * self.ends_share(segment) * figures[f"{again}.ends_bytes"]
        temporaries = figures[f"{again}.temp_bytes"] + layers * figures[f"{again}.layer_temp_bytes"]
        temporaries = temporaries + whole_bytes(segment, mesh, self.profile, trained=trained)
        if not backward:
            kept = np.zeros_like(inputs)
        elif FORWARD in self.loops(segment, BACKWARD):
            temporaries = temporaries + kept + 2 * ticks * figures["hidden"]
            if not self.hands_over(segment):
                temporaries = temporaries + figures[f"{again}.loss_bytes"]
            kept = np.zeros_like(inputs)
        temporaries = np.where(figures.is_there, temporaries, 0.0)
        if trained:
            temporaries = np.maximum(temporaries, end_bytes(segment, mesh, self.profile))
        return SegmentBytes(
            state=state_bytes(segment, mesh, self.profile, trained=trained),
            kept=inputs + kept,
            temporaries=temporaries,
        )


def _again(segment: SegmentPlan) -> Remat:
    """The policy of a segment's loop over layers in backward; one that is computed again as a whole
    then has everything."""
    return "none" if segment.remat == "segment" else segment.remat


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
