"""FLOPs that a segment's program has to compute, whatever it was compiled to: the products that its
parts need (`dflop_jax.profile.needed`) at the program's static shape, padding included."""

from __future__ import annotations

from collections.abc import Iterator

from dflop_jax.contract import Module, attention_flops_of, layer_kinds_of, taps_of
from dflop_jax.pipeline.parts import kinds_of
from dflop_jax.pipeline.segment import Kind, Segment
from dflop_jax.profile.needed import Products, layers_products, part_products, trains_part
from dflop_jax.profile.one_kind import kinds_apart
from dflop_jax.records import BACKWARD, Shape, pairs


def needed_flops(segment: Segment, shape: Shape, kind: Kind, *, with_forward: bool) -> float:
    """FLOPs that a program needs of each device of its submesh.

    Args:
      shape: per-rank shape of a microbatch.
      with_forward: whether a backward is also the segment's only forward.
    """
    needed = Products()
    for part in _parts(segment, shape):
        needed = needed.plus(part)
    total = 0.0
    if kind != BACKWARD or with_forward:
        total += needed.weights + needed.activations
    if kind == BACKWARD:
        total += needed.weights_gradient + needed.activations_gradient
    return total * segment.microbatches / (segment.stages * segment.mesh.shape["model"])


def seen_pairs(module: Module, tokens: int) -> float:
    """Share of a row's pairs of tokens that see each other, in the mean of the layers of which the
    module says it; 1 where it says it of none."""
    shares = []
    for kind, apart in kinds_apart(module).items():
        if attention := attention_flops_of(apart):
            share = attention(tokens) / (pairs(tokens) * attention(1))
            shares += [share] * layer_kinds_of(module).count(kind)
    return sum(shares) / len(shares) if shares else 1.0


def _parts(segment: Segment, shape: Shape) -> Iterator[Products]:
    """What the parts of a segment need, all layers as one, in the order in which they run."""
    module, trains = segment.module, frozenset(segment.trainable)
    placed = tuple(sorted(segment.wants_gradient & set(segment.entry_inputs)))
    hidden = bool(placed) or "hidden" in segment.wants_gradient
    if segment.plan.first:
        yield part_products(module, "entry", shape, trains, placed)
        hidden |= trains_part(trains, "entry")
    enters = [after for name, after in segment.inlets if name in segment.wants_gradient]
    needs = []
    for i, kind in enumerate(kinds_of(segment.plan, module)):
        hidden |= any(after <= i for after in enters)
        needs.append((kind, hidden))
        hidden |= trains_part(trains, kind)
    yield layers_products(module, shape, trains, needs)
    hidden |= bool(enters)
    reached = ("hidden",) if hidden else ()
    for tap, _ in segment.taps:
        if tap in taps_of(module):
            yield part_products(module, tap, shape, trains, reached)
    if segment.plan.last:
        yield part_products(module, "exit", shape, trains, reached)
