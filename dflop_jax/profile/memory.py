"""Bytes of a backward program's temporaries, traced and counted: nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dflop_jax.contract import Module
from dflop_jax.profile.parts import (
    Names,
    hidden_bytes,
    part_kept,
    part_names,
    part_param_bytes,
    part_work,
)
from dflop_jax.records import BACKWARD, Shape


@dataclass(frozen=True)
class Work:
    """Temporaries of backward on one device.

    Of each layer: `activations` kept (of one microbatch), parameters cast for computing, and
    gradients before they are added up. Once: what is `alive` in the largest layer or end.
    """

    activations: float
    casts: float
    gradients: float
    alive: float

    def temporaries(self, layers: float, ticks: int) -> float:
        """Bytes of a program whose stage has `layers` and whose loop has `ticks`; with more than
        one tick, a tick's are copied into those of all."""
        copies, casts = (1, 1) if ticks == 1 else (ticks + 1, 2)
        a_layer = self.activations * copies + self.casts * casts + self.gradients
        return layers * a_layer + self.alive


def work_of(
    module: Module,
    shape: Shape,
    ways: int,
    *,
    placed: Names = (),
    parts: Sequence[str] | None = None,
    half_bytes: int = 2,
    remat: bool = False,
) -> Work:
    """Work of a segment that holds `parts` of a module (None: all), at a per-rank shape.

    Args:
      ways: tensor-parallel degree.
      placed: fields of the entry that edges fill.
      half_bytes: what an element of a half-precision activation takes: 2 on accelerators, 4 in
        programs of XLA's CPU compiler.
      remat: whether a layer keeps its input only.
    """
    parts = part_names(module) if parts is None else parts
    size = partial(part_param_bytes, module, ways=ways)
    alive = {p: part_work(module, p, BACKWARD, shape, ways, half_bytes, placed) for p in parts}
    # The exit comes first; its gradients stay until they are added up.
    alive["layers"] += size("exit") if "exit" in parts else 0.0
    once = max(alive.values()) + (size("entry") if "entry" in parts else 0.0)
    if remat:
        return Work(hidden_bytes(module, shape, half_bytes), 0.0, size("layers"), once)
    kept = part_kept(module, "layers", shape, ways, half_bytes)
    return Work(kept.activations, kept.parameters, size("layers"), once)
