"""FLOPs that a segment's program has to compute, whatever it was compiled to.

Counted are matrix products: those with parameters as the module's functions have them, and
attention at the program's static shape, for the pairs of tokens that may see each other
(`attention_flops` of the contract; of a module without it, as its functions have it). A gradient
needs one product more for each operand that it reaches: nothing for frozen parameters before which
nothing trains. Padding of heads, and what is computed again, is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from dflop_jax.contract import Module, taps_of
from dflop_jax.pipeline.segment import Kind, Segment
from dflop_jax.pipeline.spmd_loop import ADAPTER
from dflop_jax.profile.kernels import ATTENTION, MATMUL
from dflop_jax.profile.parts import part_kernels, part_structs
from dflop_jax.records import BACKWARD, FORWARD, Shape


@dataclass(frozen=True)
class _Part:
    """Forward FLOPs of a part's products with parameters, and of products of activations; whether
    its parameters train, and whether something before it does."""

    dense: float
    attention: float
    trains: bool
    after_trained: bool

    @property
    def forward(self) -> float:
        return self.dense + self.attention

    @property
    def gradient(self) -> float:
        reached = self.trains or self.after_trained
        return (self.trains + self.after_trained) * self.dense + 2.0 * reached * self.attention


def needed_flops(segment: Segment, shape: Shape, kind: Kind, *, with_forward: bool) -> float:
    """FLOPs that a program needs of each device of its submesh.

    Args:
      shape: per-rank shape of a microbatch.
      with_forward: whether a backward is also the segment's only forward.
    """
    parts = _parts(segment, shape)
    total = 0.0
    if kind != BACKWARD or with_forward:
        total += sum(part.forward for part in parts)
    if kind == BACKWARD:
        total += sum(part.gradient for part in parts)
    return total * segment.microbatches / (segment.stages * segment.mesh.shape["model"])


def seen_pairs(module: Module, tokens: int) -> float:
    """Share of a row's pairs of tokens that see each other; 1 where the module does not say."""
    attention = _attention_flops(module)
    return attention(tokens) / (tokens**2 * attention(1)) if attention else 1.0


def _attention_flops(module: Module) -> Callable[[int], float] | None:
    return getattr(module, "attention_flops", None)


def _parts(segment: Segment, shape: Shape) -> list[_Part]:
    """Parts in the order in which they run, all layers as one."""
    module, trainable = segment.module, segment.trainable
    brought = set(segment.wants_gradient)
    reached = bool(brought & {"hidden", *segment.entry_inputs})
    parts = []
    if segment.plan.first:
        parts.append(_Part(*_products(module, "entry", shape), "entry" in trainable, reached))
        reached |= "entry" in trainable
    dense, attention = (segment.plan.n_layers * f for f in _products(module, "layers", shape))
    layers_train = bool(trainable & {"layers", ADAPTER})
    reached |= layers_train or bool(brought & {name for name, _ in segment.inlets})
    parts.append(_Part(dense, attention, "layers" in trainable, reached))
    if ADAPTER in segment.own_parts:
        # Its parameters are matrices that every token is multiplied by.
        numbers = sum(a.size for a in jax.tree.leaves(part_structs(module, ADAPTER)))
        low = 2.0 * segment.plan.n_layers * shape.size * numbers
        parts.append(_Part(low, 0.0, ADAPTER in trainable, reached))
    for tap, _ in segment.taps:
        if tap in taps_of(module):
            parts.append(_Part(*_products(module, tap, shape), tap in trainable, reached))
    if segment.plan.last:
        trains = "exit" in trainable or (module.tied and "entry" in trainable)
        parts.append(_Part(*_products(module, "exit", shape), trains, reached))
    return parts


def _products(module: Module, part: str, shape: Shape) -> tuple[float, float]:
    """Forward FLOPs of a part's products with parameters, and of two activations."""
    kernels = part_kernels(module, part, FORWARD, shape, 1)
    dense, attention = (
        sum(k.repeats * k.flops for k in kernels if k.kind == kind) for kind in (MATMUL, ATTENTION)
    )
    told = _attention_flops(module)
    if told and part == "layers":
        attention = shape.rows * told(shape.tokens)
    return dense, attention
