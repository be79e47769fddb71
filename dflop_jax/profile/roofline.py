"""Predicted timings of models and hardware that are not at hand, as measuring would give them.

A kernel takes max(FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) plus its launch;
kernels come from the module's own functions (`parts`, `kernels`), so any model works. A product
reaches less of the peak the fewer rows, columns or depth it has on one device, which is what small
batches and high degrees of tensor parallelism cost. Modules are taken as the chip runs them
(`contract.on_chip`). Attention whose kernel skips what is not in a piece costs its pairs' FLOPs, at
the share of the peak that attention reaches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dflop_jax.contract import Module, MultimodalModel, edges_of, on_chip, pair_flops_of
from dflop_jax.hardware import Hardware
from dflop_jax.profile.efficiency import Efficiency, Table
from dflop_jax.profile.kernels import MATMUL, Kernel
from dflop_jax.profile.measure import assembled
from dflop_jax.profile.memory import work_of
from dflop_jax.profile.parts import (
    ENDS,
    Names,
    divides,
    end_names,
    hidden_bytes,
    part_kernels,
)
from dflop_jax.records import BACKWARD, FORWARD, LayerTiming, ModelProfile, Shape


def roofline_profile(
    model: MultimodalModel,
    hardware: Hardware,
    shapes: Mapping[str, Sequence[Shape]],
    model_degrees: Sequence[int],
    *,
    n_devices: int,
    efficiency: Efficiency | None = None,
) -> ModelProfile:
    """A profile like a measured one, computed: no device, no weights.

    Args:
      shapes: per-rank shapes of every module to predict at.
      model_degrees: tensor-parallel degrees; those that a module's sizes do not divide by, or that
        do not fit into a node, are left out for it.
      n_devices: devices that plans made from the profile may use; all compute at once.

    Raises:
      ValueError: no shapes for a module, no usable degree, or a degree below 1.
    """
    e = efficiency or Efficiency()
    if n_devices < 1 or not model_degrees or min(model_degrees) < 1:
        raise ValueError(
            f"n_devices={n_devices} and model_degrees={list(model_degrees)}: give at least one "
            "degree, and nothing below 1"
        )
    timings: list[LayerTiming] = []
    entry_share: dict[str, float] = {}
    for name, module in model.modules.items():
        module = on_chip(module, hardware.chip)
        if not shapes.get(name):
            raise ValueError(f"give at least one shape of the module {name!r}")
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
        into = (edge for edge in edges_of(model) if edge.target == name and edge.enters < 0)
        placed = tuple(dict.fromkeys(edge.name for edge in into))
        alone = name in model.piece_tokens
        predictors = [_Predictor(module, placed, ways, hardware, e, alone) for ways in degrees]
        timings += [p.timing(name, shape) for p in predictors for shape in shapes[name]]
        entry_share[name] = predictors[0].entry_share(shapes[name][-1])
    facts = (model.modules, edges_of(model), asdict(hardware), asdict(e), sorted(shapes.items()))
    profile = assembled(
        model,
        shapes,
        timings,
        key="roofline-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
        device=hardware.name,
        concurrency=float(n_devices),
        task_overhead_s=e.task_s,
    )
    return replace(profile, entry_share=entry_share)


# Backward of attention: its forward's two products again, and five more (arXiv 2205.14135).
_PAIR_BACKWARD = 3.5


@dataclass(frozen=True)
class _Predictor:
    """Seconds and bytes of one module at one tensor-parallel degree; edges fill the fields `placed`
    of its entry, and `alone` says whether a row is one piece: what pads rows then costs as much."""

    module: Module
    placed: Names
    ways: int
    hardware: Hardware
    efficiency: Efficiency
    alone: bool = False

    def part_s(self, part: str, direction: str, shape: Shape) -> float:
        kernels = part_kernels(self.module, part, direction, shape, self.ways, self.placed)
        return self._kernels_s(kernels)

    def _kernels_s(self, kernels: Iterable[Kernel]) -> float:
        table = Table.of([kernels], [self.ways], self.hardware)
        return float(table.seconds(self.efficiency)[0])

    def layer_s(self, direction: str, shape: Shape) -> float:
        """Seconds of a layer; of attention by pairs, only what padding costs as much as content."""
        times = _PAIR_BACKWARD if direction == BACKWARD else 1.0
        pairs = shape.size * shape.tokens if self.alone else 0
        return self.part_s("layers", direction, shape) + times * pairs * self.pair_s(shape)

    def pair_s(self, shape: Shape) -> float:
        """Seconds of forward attention for a pair of tokens of one piece."""
        flops = pair_flops_of(self.module) / self.ways
        kernels = part_kernels(self.module, "layers", FORWARD, shape, self.ways)
        dtype = next((k.dtype for k in kernels if k.kind == MATMUL), "float32")
        return flops / (self.hardware.peak_flops(dtype) * self.efficiency.attention)

    def entry_share(self, shape: Shape) -> float:
        entry, exit_ = (self.part_s(p, BACKWARD, shape) for p in ENDS)
        return entry / (entry + exit_)

    def ends_s(self, direction: str, shape: Shape) -> float:
        return sum(self.part_s(p, direction, shape) for p in end_names(self.module))

    def timing(self, name: str, shape: Shape) -> LayerTiming:
        work = work_of(self.module, shape, self.ways, placed=self.placed)
        pair_s = 0.0 if self.alone else self.pair_s(shape)
        return LayerTiming(
            module=name,
            model=self.ways,
            shape=shape,
            layer_forward_s=self.layer_s(FORWARD, shape),
            layer_backward_s=self.layer_s(BACKWARD, shape),
            ends_forward_s=self.ends_s(FORWARD, shape),
            ends_backward_s=self.ends_s(BACKWARD, shape),
            layer_temp_bytes=work.activations + work.casts + work.gradients,
            ends_temp_bytes=work.alive,
            hidden_bytes=hidden_bytes(self.module, shape),
            pair_forward_s=pair_s,
            pair_backward_s=_PAIR_BACKWARD * pair_s,
        )
