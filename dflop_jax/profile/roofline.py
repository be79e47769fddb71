"""Predicted timings of models and hardware that are not at hand, as measuring would give them.

A kernel takes max(FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) plus its launch;
kernels come from the module's own functions (`parts`, `kernels`), so any model works. A product
reaches less of the peak the fewer rows, columns or depth it has on one device, which is what small
encoder batches and high degrees of tensor parallelism cost. `fit_efficiency` takes the constants
from a profile that was measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dflop_jax.contract import Module, MultimodalModel
from dflop_jax.hardware import Hardware
from dflop_jax.profile.efficiency import Efficiency, Table
from dflop_jax.profile.measure import assembled
from dflop_jax.profile.memory import work_of
from dflop_jax.profile.parts import ENDS, divides, hidden_bytes, part_kernels
from dflop_jax.records import BACKWARD, FORWARD, LayerTiming, ModelProfile, ModuleShape


def roofline_profile(
    model: MultimodalModel,
    hardware: Hardware,
    shapes: Mapping[str, Sequence[ModuleShape]],
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
        for ways in degrees:
            one = _Predictor(module, ways, hardware, e)
            timings += [one.timing(name, shape) for shape in shapes[name]]
        entry_share[name] = _Predictor(module, degrees[0], hardware, e).entry_share(
            shapes[name][-1]
        )
    facts = (model.modules, asdict(hardware), asdict(e), sorted(shapes.items()))
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


@dataclass(frozen=True)
class _Predictor:
    """Seconds and bytes of one module at one tensor-parallel degree."""

    module: Module
    ways: int
    hardware: Hardware
    efficiency: Efficiency

    def part_s(self, part: str, direction: str, shape: ModuleShape) -> float:
        kernels = part_kernels(self.module, part, direction, shape, self.ways)
        table = Table.of([kernels], [self.ways], self.hardware)
        return float(table.seconds(self.efficiency)[0])

    def entry_share(self, shape: ModuleShape) -> float:
        entry, exit_ = (self.part_s(p, BACKWARD, shape) for p in ENDS)
        return entry / (entry + exit_)

    def timing(self, name: str, shape: ModuleShape) -> LayerTiming:
        if shape.items == 0:
            raise ValueError(f"a shape of {name!r} without items takes no time; leave it out")
        layer_f, layer_b = (self.part_s("layers", d, shape) for d in (FORWARD, BACKWARD))
        ends_f, ends_b = (sum(self.part_s(p, d, shape) for p in ENDS) for d in (FORWARD, BACKWARD))
        work = work_of(self.module, shape, self.ways)
        return LayerTiming(
            module=name,
            model=self.ways,
            shape=shape,
            layer_forward_s=layer_f,
            layer_backward_s=layer_b,
            ends_forward_s=ends_f,
            ends_backward_s=ends_b,
            layer_temp_bytes=work.activations + work.casts + work.gradients,
            ends_temp_bytes=work.alive,
            hidden_bytes=hidden_bytes(self.module, shape),
        )
