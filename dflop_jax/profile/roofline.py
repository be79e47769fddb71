"""Roofline timings in the same records as measured ones: for a model on absent hardware, and for
recompute policies of measured timings.

A kernel takes max(FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) plus its launch.
Kernels come from traces of the module's functions (`traced_parts`, `kernels`), so any model works.
Products with few rows, columns or depth per device, as with small batches and high tensor-parallel
degrees, reach a smaller share of the peak. Modules are adapted to the chip (`contract.on_chip`).
Attention kernels that skip other pieces cost the FLOPs of their content at attention's share of the
peak, plus a fixed number of token pairs per token.

The trace of backward under a policy shows its recomputation. Measurements cover only forward and
the gradient; a policy then adds the share of forward that the roofline predicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from dflop_jax import contract, records
from dflop_jax.hardware import TASK_HOST_S
from dflop_jax.profile import traced_parts
from dflop_jax.profile.fit import round_to_24_bits
from dflop_jax.profile.kernels import ATTENTION_PRODUCTS, Efficiency, Kind, program_s
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.traced_parts import ENDS, Names, TraceSpec, divides, trace_kernels
from dflop_jax.records import BACKWARD, FORWARD, Direction, Hardware, Remat, Shape

POLICIES: tuple[Remat, ...] = ("none", "dots", "named", "layers")
# Memory passes per residual byte: residuals are written to a stack of all layers and read from it.
# About half (results and operands of products) is copied; the rest is accessed in place.
_STACK_PASSES = 2
_UNIT_SHAPE = Shape(1, 1024)  # features are scaled by those of this shape to be about 1


def build_profile(
    model: contract.MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    timings: Sequence[records.LayerTiming],
    **facts: Any,
) -> records.ModelProfile:
    """Return a profile of timings with the model's sizes; `facts`: other `ModelProfile` fields."""
    modules = model.modules
    ends = {
        m: [traced_parts.forward_flops(TraceSpec(module, e, shapes[m][-1])) for e in ENDS]
        for m, module in modules.items()
    }
    of_model: dict[str, Any] = {
        **traced_parts.parameter_dims(model),
        "n_layers": {m: module.n_layers for m, module in modules.items()},
        "entry_share": {m: entry / max(entry + exit_, 1.0) for m, (entry, exit_) in ends.items()},
        "host_s": TASK_HOST_S,
        "edges": contract.edges_of(model),
        "tied": tuple(m for m, module in modules.items() if module.tied),
        "piece_tokens": dict(model.piece_tokens),
        "kinds": {
            m: contract.layer_kinds_of(o) for m, o in modules.items() if hasattr(o, "layer_kinds")
        },
        "content": {
            m: tuple(contract.content_of(o, 1)) for m, o in modules.items() if hasattr(o, "content")
        },
    }
    return records.ModelProfile(timings=tuple(timings), **{**of_model, **facts})


def roofline_profile(
    model: contract.MultimodalModel,
    hardware: Hardware,
    shapes: Mapping[str, Sequence[Shape]],
    model_degrees: Sequence[int],
    *,
    n_devices: int,
) -> records.ModelProfile:
    """Compute a profile like a measured one for `n_devices`, without devices and weights.

    Args:
      shapes: per-rank shapes of every module to predict times for.
      model_degrees: tensor-parallel degrees. Degrees that do not divide a module's sizes, or exceed
        a node, are left out for the module; ValueError if none is left.
    """
    efficiency, timings, entry_share = Efficiency(), list[records.LayerTiming](), {}
    for name, module in model.modules.items():
        module = contract.on_chip(module, hardware.chip)
        degrees = [
            d
            for d in sorted(set(model_degrees))
            if d <= hardware.devices_per_node and divides(module, d)
        ]
        if not degrees:
            raise ValueError(
                f"none of the tensor-parallel degrees {list(model_degrees)} divides the sizes of "
                f"{name!r} and fits into a node of {hardware.devices_per_node}; add 1"
            )
        edge_names, one_piece_rows = edge_fields(model, name), name in model.piece_tokens
        for kind, kind_module in single_kind_modules(module).items():
            predictors = [Predictor(kind_module, edge_names, tp, hardware) for tp in degrees]
            timings += [
                replace(t, module=name, kind=kind)
                for predictor in predictors
                for t in predictor.timings(shapes[name], one_piece_rows=one_piece_rows)
            ]
        both_ends_s = [
            sum(predictors[0].part_s(e, d, shapes[name][-1]) for d in (FORWARD, BACKWARD))
            for e in ENDS
        ]
        entry_share[name] = both_ends_s[0] / sum(both_ends_s)
    facts = model.modules, contract.edges_of(model), asdict(hardware), asdict(efficiency)
    key_text = repr((*facts, sorted(shapes.items())))
    return build_profile(
        model,
        shapes,
        timings,
        key="roofline-" + hashlib.sha256(key_text.encode()).hexdigest()[:16],
        device=hardware.name,
        concurrency=float(n_devices),
        task_overhead_s=efficiency.task_s,
        priced_by=f"the data sheet of {hardware.name}",
        entry_share=entry_share,
        computed=True,
        hardware=hardware,
    )


def edge_fields(model: contract.MultimodalModel, module: str) -> Names:
    """Return the fields of a module's entry that edges fill."""
    entering = (e for e in contract.edges_of(model) if e.target == module and e.enters < 0)
    return tuple(dict.fromkeys(e.name for e in entering))


@dataclass(frozen=True)
class Predictor:
    """Roofline predictor of a module's time and bytes at one tensor-parallel degree; edges fill
    `edge_fields` of its entry. `half_bytes`: see `traced_parts`."""

    module: contract.Module
    edge_fields: Names
    tp: int
    hardware: Hardware
    half_bytes: int = 2

    def timings(
        self, shapes: Sequence[Shape], *, one_piece_rows: bool
    ) -> list[records.LayerTiming]:
        """Return timings in the form of measured ones. `one_piece_rows`: each row is one piece, so
        padding costs as much as content, and attention is part of the layers' time."""
        costs, e = self.policy_costs(shapes), Efficiency()
        recomputed = {remat: self.recomputed_attention(shapes[-1], remat) for remat in POLICIES}
        # Each of the gradient's two kernels computes the scores that it needs.
        n = {k.removeprefix("packed_attention_"): v for k, v in ATTENTION_PRODUCTS.items()}
        products_ratio = (n["kv_gradient"] + n["q_gradient"]) / n["forward"]
        backward_ratio = products_ratio * e.attention / e.attention_back
        attention_flops, timings = contract.content_flops_of(self.module), []
        for shape in shapes:
            kernels = trace_kernels(self._spec("layers", shape), FORWARD)
            dtype = next((k.dtype for k in kernels if k.kind == Kind.MATMUL), "float32")
            reached = self.hardware.peak_flops(dtype) * e.attention
            # Seconds of forward attention per unit of each content feature.
            unit_s = {name: f / self.tp / reached for name, f in attention_flops.items()}
            full_s = 0.0
            if one_piece_rows:
                content = contract.content_of(self.module, shape.tokens)
                full_s = shape.rows * sum(s * content[name] for name, s in unit_s.items())
                unit_s = {}
            recompute = {
                remat: replace(
                    cost,
                    layer_s=cost.layer_s + recomputed[remat] * full_s,
                    content_s=records.scale_coefficients(recomputed[remat], unit_s),
                )
                for remat, cost in costs[shape].items()
            }
            backward_s = self.part_s("layers", BACKWARD, shape) + backward_ratio * full_s
            timings.append(
                records.LayerTiming(
                    module="",
                    model=self.tp,
                    shape=shape,
                    layer_forward_s=self.part_s("layers", FORWARD, shape) + full_s,
                    layer_backward_s=backward_s,
                    ends_forward_s=self.ends_s(FORWARD, shape),
                    ends_backward_s=self.ends_s(BACKWARD, shape),
                    hidden_bytes=traced_parts.hidden_bytes(self.module, shape),
                    output_bytes=traced_parts.output_bytes(self.module, shape),
                    content_forward_s=unit_s,
                    content_backward_s=records.scale_coefficients(backward_ratio, unit_s),
                    recompute=recompute,
                )
            )
        return timings

    def _spec(self, part: str, shape: Shape, remat: Remat = "none") -> TraceSpec:
        return TraceSpec(self.module, part, shape, self.tp, self.edge_fields, remat)

    def part_s(
        self,
        part: str,
        direction: Direction,
        shape: Shape,
        remat: Remat = "none",
    ) -> float:
        """Return the seconds of one part ("layers": one layer)."""
        kernels = trace_kernels(self._spec(part, shape, remat), direction)
        return program_s(kernels, self.tp, self.hardware)

    def ends_s(self, direction: Direction, shape: Shape) -> float:
        """Return the seconds of entry, exit and taps."""
        return sum(self.part_s(p, direction, shape) for p in traced_parts.end_parts(self.module))

    def _policy_cost(self, shape: Shape, remat: Remat) -> records.Recompute:
        loss = traced_parts.has_loss(self.module, shape)
        # The gradient of a loss is computed with the loss, so it is not recomputed.
        ends = [p for p in traced_parts.end_parts(self.module) if not (loss and p == "exit")]
        layer_bytes, ends_bytes, temp_bytes = traced_parts.program_bytes(
            self._spec("layers", shape, remat), self.half_bytes, loss=loss
        )
        stack_s = (
            _STACK_PASSES * layer_bytes / (self.hardware.memory_bandwidth * Efficiency().bandwidth)
        )
        return records.Recompute(
            layer_s=self._recomputed_s("layers", shape, remat) + stack_s,
            ends_s=sum(self._recomputed_s(p, shape, remat) for p in ends),
            layer_bytes=layer_bytes,
            ends_bytes=ends_bytes,
            temp_bytes=temp_bytes,
        )

    def _recomputed_s(self, part: str, shape: Shape, remat: Remat) -> float:
        """Return the seconds of recomputation in a part's backward."""
        without_s = self.part_s(part, BACKWARD, shape)
        return max(0.0, self.part_s(part, BACKWARD, shape, remat) - without_s)

    def recomputed_attention(self, shape: Shape, remat: Remat) -> float:
        """Return the share of forward's attention that backward recomputes."""

        def products(direction: Direction, remat: Remat = "none") -> int:
            kernels = trace_kernels(self._spec("layers", shape, remat), direction)
            return sum(k.repeats for k in kernels if k.kind == Kind.ATTENTION)

        recomputed = products(BACKWARD, remat) - products(BACKWARD)
        return min(1.0, max(0.0, recomputed / max(products(FORWARD), 1)))

    def policy_costs(self, shapes: Sequence[Shape]) -> dict[Shape, dict[Remat, records.Recompute]]:
        """Return the costs of every policy at shapes, without content. A few shapes are traced;
        costs at the others are interpolated, since costs are linear in the shape's features."""
        traced_shapes = shapes_to_trace(shapes)
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

    def add_policies(self, timings: Sequence[records.LayerTiming]) -> list[records.LayerTiming]:
        """Return timings of programs without recomputation, with the costs of every policy added.
        Recomputation takes a predicted share of the forward seconds; residual bytes beyond those of
        "layers" are a predicted share of the measured ones."""
        largest = max((t.shape for t in timings), key=lambda s: s.size)
        layer_s, ends_s = (
            self.part_s("layers", FORWARD, largest),
            self.ends_s(FORWARD, largest),
        )
        ends_in_loss = traced_parts.has_loss(self.module, largest)
        traced = self.policy_costs([t.shape for t in timings])
        layer_ratio = {r: self._recomputed_s("layers", largest, r) / layer_s for r in POLICIES}
        ends_ratio = {r: c.ends_s / ends_s if ends_s else 0.0 for r, c in traced[largest].items()}
        content_ratio = {r: self.recomputed_attention(largest, r) for r in POLICIES}
        with_policies = []
        for t in timings:
            costs, compiled = traced[t.shape], t.recompute["none"]
            compiled_extra = compiled.temp_bytes - costs["none"].temp_bytes
            min_bytes, max_bytes = (costs[r].layer_bytes for r in ("layers", "none"))
            bytes_ratio = 1.0
            if max_bytes > min_bytes:
                bytes_ratio = max(0.0, compiled.layer_bytes - min_bytes) / (max_bytes - min_bytes)
            if ends_in_loss:  # other temporaries may hide the layers' residuals
                bytes_ratio = max(bytes_ratio, 1.0)
            recompute = {
                r: replace(
                    cost,
                    layer_s=min(1.0, layer_ratio[r]) * t.layer_forward_s,
                    ends_s=min(1.0, ends_ratio[r]) * t.ends_forward_s,
                    content_s=records.scale_coefficients(content_ratio[r], t.content_forward_s),
                    layer_bytes=min_bytes + bytes_ratio * (cost.layer_bytes - min_bytes),
                    temp_bytes=max(0.0, compiled_extra + cost.temp_bytes),
                )
                for r, cost in costs.items()
            }
            with_policies.append(replace(t, recompute=recompute))
        return with_policies


def shapes_to_trace(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes that determine the costs of all others: the largest, the smallest and, if
    rows differ in length, a large one whose rows differ from the largest's."""
    by_size = sorted(set(shapes), key=lambda s: (s.size, s))
    other_lengths = [s for s in by_size[1:-1] if s.tokens != by_size[-1].tokens]
    return list(dict.fromkeys([by_size[-1], by_size[0], *other_lengths[-1:]]))


def _features(shapes: Sequence[Shape]) -> np.ndarray:
    """Return features of shapes in units of `_UNIT_SHAPE`, [n_shapes, n_features]."""
    rows, tokens = np.array([(s.rows, s.tokens) for s in shapes]).T
    return records.shape_features(rows, tokens) / records.shape_features(
        _UNIT_SHAPE.rows, _UNIT_SHAPE.tokens
    )


def _weighted_sum(costs: Sequence[records.Recompute], weights: np.ndarray) -> records.Recompute:
    """Return the weighted sum of costs, at least 0."""
    names = [f.name for f in fields(records.Recompute) if f.name != "content_s"]
    rows = np.array([[getattr(c, name) for name in names] for c in costs])
    mixed = np.maximum(0.0, round_to_24_bits(weights @ rows)).tolist()
    return records.Recompute(**dict(zip(names, mixed, strict=True)))
