"""Costs of recompute policies: predicted from the module's functions, or partly measured.

The trace of a backward under a policy shows what it recomputes. For timed programs only forward and
the gradient are measured; a policy then takes the share of forward that the roofline predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from dflop_jax.contract import Module, MultimodalModel, edges_of
from dflop_jax.profile.efficiency import Efficiency, program_s
from dflop_jax.profile.fit import round_to_float32
from dflop_jax.profile.kernels import ATTENTION
from dflop_jax.profile.traced_parts import (
    Names,
    TraceSpec,
    end_parts,
    has_loss,
    program_bytes,
    trace_kernels,
)
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Direction,
    Hardware,
    LayerTiming,
    Recompute,
    Remat,
    Shape,
    scale_coefficients,
    shape_features,
)

POLICIES: tuple[Remat, ...] = ("none", "dots", "named", "layers")
# What is kept goes into a stack of all layers and out of it. About half of it is copied for that
# (results and operands of products), the rest is read and written where it is computed.
_STACK_PASSES = 2
_UNIT_SHAPE = Shape(1, 1024)  # whose features others are given in units of, to be about one


@dataclass(frozen=True)
class Predictor:
    """Seconds and bytes of one module at one tensor-parallel degree, by the roofline; edges fill
    `edge_fields` of its entry."""

    module: Module
    edge_fields: Names
    tp: int
    hardware: Hardware
    half_bytes: int = 2

    def trace_spec(self, name: str, shape: Shape, remat: Remat = "none") -> TraceSpec:
        """A part of the module, a layer for "layers"."""
        edge_names = self.edge_fields if name == "entry" else ()
        return TraceSpec(self.module, name, shape, self.tp, edge_names, remat)

    def part_s(self, name: str, direction: Direction, shape: Shape, remat: Remat = "none") -> float:
        """Seconds of one part."""
        kernels = trace_kernels(self.trace_spec(name, shape, remat), direction)
        return program_s(kernels, self.tp, self.hardware)

    def ends_s(self, direction: Direction, shape: Shape) -> float:
        """Seconds of entry, exit and taps."""
        return sum(self.part_s(p, direction, shape) for p in end_parts(self.module))

    def _policy_cost(self, shape: Shape, remat: Remat) -> Recompute:
        loss = has_loss(self.module, shape)
        # A loss has its gradient where it is computed.
        ends = [p for p in end_parts(self.module) if not (loss and p == "exit")]
        whole = replace(self.trace_spec("layers", shape, remat), edge_fields=self.edge_fields)
        layer_bytes, ends_bytes, temp_bytes = program_bytes(whole, self.half_bytes, loss=loss)
        reached = self.hardware.memory_bandwidth * Efficiency().bandwidth
        return Recompute(
            layer_s=self._recomputed_s("layers", shape, remat)
            + _STACK_PASSES * layer_bytes / reached,
            ends_s=sum(self._recomputed_s(p, shape, remat) for p in ends),
            layer_bytes=layer_bytes,
            ends_bytes=ends_bytes,
            temp_bytes=temp_bytes,
        )

    def _recomputed_s(self, name: str, shape: Shape, remat: Remat) -> float:
        """Seconds of a part's forward that backward computes again."""
        without_s = self.part_s(name, BACKWARD, shape)
        return max(0.0, self.part_s(name, BACKWARD, shape, remat) - without_s)

    def recomputed_attention(self, shape: Shape, remat: Remat) -> float:
        """Share of forward's attention that backward computes again."""

        def products(direction: Direction, remat: Remat = "none") -> int:
            kernels = trace_kernels(self.trace_spec("layers", shape, remat), direction)
            return sum(k.repeats for k in kernels if k.kind == ATTENTION)

        recomputed = products(BACKWARD, remat) - products(BACKWARD)
        return min(1.0, max(0.0, recomputed / max(products(FORWARD), 1)))

    def policy_costs(self, shapes: Sequence[Shape]) -> dict[Shape, dict[Remat, Recompute]]:
        """Costs of every policy at shapes, without the cost of content.

        At most as many shapes are traced as a shape has features; costs at the others follow, since
        they are sums of these features.
        """
        traced_shapes = _shapes_to_trace(shapes)
        traced = {s: {r: self._policy_cost(s, r) for r in POLICIES} for s in traced_shapes}
        traced_features = _features(traced_shapes)[:, : len(traced_shapes)]
        by_shape = {}
        for s in shapes:
            features = _features([s])[0, : len(traced_shapes)]
            weights = np.linalg.lstsq(traced_features.T, features, rcond=None)[0]
            by_shape[s] = traced.get(s) or {
                r: _weighted_sum([traced[t][r] for t in traced_shapes], weights) for r in POLICIES
            }
        return by_shape

    def add_policies(self, timings: Sequence[LayerTiming]) -> list[LayerTiming]:
        """Timings of programs that recompute nothing, with costs of every policy added. Recomputed
        seconds are a predicted share of the forward seconds; residual bytes beyond those of
        "layers" are a predicted share of the measured ones."""
        largest = max((t.shape for t in timings), key=lambda s: s.size)
        layer_s, ends_s = self.part_s("layers", FORWARD, largest), self.ends_s(FORWARD, largest)
        ends_in_loss = has_loss(self.module, largest)
        traced = self.policy_costs([t.shape for t in timings])
        layer_ratio = {r: self._recomputed_s("layers", largest, r) / layer_s for r in POLICIES}
        ends_ratio = {r: c.ends_s / ends_s if ends_s else 0.0 for r, c in traced[largest].items()}
        content_ratio = {r: self.recomputed_attention(largest, r) for r in POLICIES}
        with_policies = []
        for t in timings:
            costs, compiled = traced[t.shape], t.recompute["none"]
            compiled_extra = compiled.temp_bytes - costs["none"].temp_bytes
            min_bytes, max_bytes = (costs[r].layer_bytes for r in ("layers", "none"))
            bytes_ratio = _ratio(compiled.layer_bytes - min_bytes, max_bytes - min_bytes)
            if ends_in_loss:  # other temporaries may hide what layers keep
                bytes_ratio = max(bytes_ratio, 1.0)
            recompute = {
                r: replace(
                    cost,
                    layer_s=min(1.0, layer_ratio[r]) * t.layer_forward_s,
                    ends_s=min(1.0, ends_ratio[r]) * t.ends_forward_s,
                    content_s=scale_coefficients(content_ratio[r], t.content_forward_s),
                    layer_bytes=min_bytes + bytes_ratio * (cost.layer_bytes - min_bytes),
                    temp_bytes=max(0.0, compiled_extra + cost.temp_bytes),
                )
                for r, cost in costs.items()
            }
            with_policies.append(replace(t, recompute=recompute))
        return with_policies


def _ratio(value: float, whole: float) -> float:
    return max(0.0, value) / whole if whole > 0 else 1.0


def _shapes_to_trace(shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes whose costs determine all others: the largest, the smallest, and, if rows differ
    in length, a large one whose rows are not as long as the largest's."""
    by_size = sorted(set(shapes), key=lambda s: (s.size, s))
    other_lengths = [s for s in by_size[1:-1] if s.tokens != by_size[-1].tokens]
    return list(dict.fromkeys([by_size[-1], by_size[0], *other_lengths[-1:]]))


def _features(shapes: Sequence[Shape]) -> np.ndarray:
    """Features of shapes in units of a usual shape, [n_shapes, n_features]."""
    rows, tokens = np.array([(s.rows, s.tokens) for s in shapes]).T
    return shape_features(rows, tokens) / shape_features(_UNIT_SHAPE.rows, _UNIT_SHAPE.tokens)


def _weighted_sum(costs: Sequence[Recompute], weights: np.ndarray) -> Recompute:
    """The weighted sum of costs, at least 0."""
    names = [f.name for f in fields(Recompute) if f.name != "content_s"]
    rows = np.array([[getattr(c, name) for name in names] for c in costs])
    mixed = np.maximum(0.0, round_to_float32(weights @ rows)).tolist()
    return Recompute(**dict(zip(names, mixed, strict=True)))


def edge_fields(model: MultimodalModel, module: str) -> Names:
    """Fields of a module's entry that edges fill."""
    entering = (e for e in edges_of(model) if e.target == module and e.enters < 0)
    return tuple(dict.fromkeys(e.name for e in entering))
