"""Predicted timings of a model on hardware that is not on this machine, in the records of measured
ones.

A kernel takes max(FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) plus its launch.
Kernels come from traces of the module's own functions (`traced_parts`, `kernels`), so any model
works. Products with few rows, columns or depth on one device reach less of the peak, as small
batches and high tensor-parallel degrees have. Modules are those that the chip runs
(`contract.on_chip`). Attention whose kernel skips other pieces costs the FLOPs of its content at
the attention's share of the peak, and a fixed number of pairs for each token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from dflop_jax.contract import (
    MultimodalModel,
    content_flops_of,
    content_of,
    edges_of,
    on_chip,
)
from dflop_jax.profile.efficiency import Efficiency
from dflop_jax.profile.kernels import MATMUL
from dflop_jax.profile.measure import build_profile
from dflop_jax.profile.recompute import POLICIES, Predictor, edge_fields
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.traced_parts import ENDS, divides, hidden_bytes, trace_kernels
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Hardware,
    LayerTiming,
    ModelProfile,
    Shape,
    scale_coefficients,
)


def roofline_profile(
    model: MultimodalModel,
    hardware: Hardware,
    shapes: Mapping[str, Sequence[Shape]],
    model_degrees: Sequence[int],
    *,
    n_devices: int,
) -> ModelProfile:
    """A profile like a measured one, computed: no device, no weights.

    Args:
      shapes: per-rank shapes of every module to predict at.
      model_degrees: tensor-parallel degrees; those that a module's sizes do not divide by, or that
        do not fit into a node, are left out for it.
      n_devices: devices that plans made from the profile may use; all compute at once.

    Raises:
      ValueError: no degree is usable for a module.
    """
    e = Efficiency()
    timings: list[LayerTiming] = []
    entry_share: dict[str, float] = {}
    for name, module in model.modules.items():
        module = on_chip(module, hardware.chip)
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
        edge_names = edge_fields(model, name)
        one_piece_rows = name in model.piece_tokens
        for kind, kind_module in single_kind_modules(module).items():
            predictors = [Predictor(kind_module, edge_names, tp, hardware) for tp in degrees]
            kind_timings = [
                t
                for p in predictors
                for t in _predict_timings(p, name, shapes[name], one_piece_rows=one_piece_rows)
            ]
            timings += [replace(t, kind=kind) for t in kind_timings]
        entry_share[name] = _entry_share(predictors[0], shapes[name][-1])
    facts = (model.modules, edges_of(model), asdict(hardware), asdict(e), sorted(shapes.items()))
    return build_profile(
        model,
        shapes,
        timings,
        key="roofline-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
        device=hardware.name,
        concurrency=float(n_devices),
        task_overhead_s=e.task_s,
        priced_by=f"the data sheet of {hardware.name}",
        entry_share=entry_share,
        computed=True,
        hardware=hardware,
    )


# Attention's backward has seven products for its forward's two: each of its two kernels computes
# what it needs of the scores and of their gradients.
_CONTENT_BACKWARD = 3.5


def _predict_timings(
    predictor: Predictor, name: str, shapes: Sequence[Shape], *, one_piece_rows: bool
) -> list[LayerTiming]:
    """Timings as measuring a module at shapes would give them. `one_piece_rows`: each row is one
    piece, so padding costs as much as content, and attention is part of the layers' seconds."""
    costs, timings = predictor.policy_costs(shapes), []
    recomputed = {remat: predictor.recomputed_attention(shapes[-1], remat) for remat in POLICIES}
    backward_ratio = _CONTENT_BACKWARD * Efficiency().attention / Efficiency().attention_back
    for shape in shapes:
        unit_s, full_s = _content_s(predictor, shape), 0.0
        if one_piece_rows:
            content = content_of(predictor.module, shape.tokens)
            unit_s, full_s = {}, shape.rows * sum(s * content[name] for name, s in unit_s.items())
        recompute = {
            remat: replace(
                cost,
                layer_s=cost.layer_s + recomputed[remat] * full_s,
                content_s=scale_coefficients(recomputed[remat], unit_s),
            )
            for remat, cost in costs[shape].items()
        }
        timings.append(
            LayerTiming(
                module=name,
                model=predictor.tp,
                shape=shape,
                layer_forward_s=predictor.part_s("layers", FORWARD, shape) + full_s,
                layer_backward_s=predictor.part_s("layers", BACKWARD, shape)
                + backward_ratio * full_s,
                ends_forward_s=predictor.ends_s(FORWARD, shape),
                ends_backward_s=predictor.ends_s(BACKWARD, shape),
                hidden_bytes=hidden_bytes(predictor.module, shape),
                content_forward_s=unit_s,
                content_backward_s=scale_coefficients(backward_ratio, unit_s),
                recompute=recompute,
            )
        )
    return timings


def _content_s(predictor: Predictor, shape: Shape) -> dict[str, float]:
    """Seconds of forward attention for a unit of each feature of content."""
    kernels = trace_kernels(predictor.trace_spec("layers", shape), FORWARD)
    dtype = next((k.dtype for k in kernels if k.kind == MATMUL), "float32")
    reached = predictor.hardware.peak_flops(dtype) * Efficiency().attention
    return {
        name: flops / predictor.tp / reached
        for name, flops in content_flops_of(predictor.module).items()
    }


def _entry_share(predictor: Predictor, shape: Shape) -> float:
    entry, exit_ = (
        predictor.part_s(e, FORWARD, shape) + predictor.part_s(e, BACKWARD, shape) for e in ENDS
    )
    return entry / (entry + exit_)
