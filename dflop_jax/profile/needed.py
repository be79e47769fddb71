"""FLOPs that a training step needs for a piece of a module, and a segment's program at its static
shape, padding included: whatever programs compute.

Counted are the matrix products of the module's own forward functions (a multiply-add counts two),
and of their gradients one product for each operand that a gradient reaches: nothing for frozen
parameters before which nothing trains, nothing for what the data give. Padding, recomputation and
elementwise work count nothing. A product with parameters grows with a piece's tokens, one of two
activations (attention) with its pairs, unless the module says what its attention needs
(`attention_flops` in the contract). Kernels that are no jaxpr are only counted so, a `while` counts
one turn, and of a choice between branches nothing counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import jax.numpy as jnp

from dflop_jax.contract import (
    ADAPTER,
    Module,
    MultimodalModel,
    adapter_of,
    attention_flops_of,
    content_of,
    edges_of,
    layer_kinds_of,
    taps_of,
)
from dflop_jax.profile.kernels import kernels_of
from dflop_jax.profile.shallow import kinds_apart
from dflop_jax.profile.sharded_trace import Op, Region, Value, trace
from dflop_jax.profile.traced_parts import Names, Part, traced_forward
from dflop_jax.records import BACKWARD, LAYERS, TOKEN, Shape, content_s, pairs
from dflop_jax.runtime.module_parts import kinds_of
from dflop_jax.runtime.segment import Kind, Segment

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class PieceFlops:
    """FLOPs of one step, forward and backward, for a piece of a module.

    Attributes:
      per_token: products with parameters, and what attention needs of a token.
      per_pair: products of two activations, for each pair of tokens, where the module does not tell
        its attention.
      content: what it tells, for a unit of each feature of the module's content.
    """

    per_token: float
    per_pair: float = 0.0
    content: tuple[float, ...] = ()

    def __call__(self, tokens: int, content: Sequence[int] | None = None) -> float:
        """FLOPs of a piece of so many tokens; `content` as a load has it, None: of a module that
        names no features."""
        square = pairs(tokens)
        told = content_s(self.content, (square,) if content is None else content)
        return self.per_token * tokens + self.per_pair * square + float(told)


@dataclass(frozen=True)
class Products:
    """FLOPs of products with parameters and of products of two activations: forward, and of the
    gradients that are needed of them."""

    weights: float = 0.0
    weights_gradient: float = 0.0
    activations: float = 0.0
    activations_gradient: float = 0.0

    def plus(self, other: Products, times: float = 1.0) -> Products:
        """Return the sum with `times` the other."""
        both = zip(astuple(self), astuple(other), strict=True)
        return Products(*(a + times * b for a, b in both))


def needed_flops(
    model: MultimodalModel, row_tokens: Mapping[str, int], frozen: Collection[str] = ()
) -> dict[str, PieceFlops]:
    """What a piece needs, by module.

    Args:
      row_tokens: of each module to count, tokens of a row that its functions take; those of a piece
        where a row holds one.
      frozen: freeze groups that do not train.
    """
    reached: dict[tuple[str, str], bool] = {}  # (module, tap): whether its outputs need a gradient
    by_module = {}
    for name, module in model.modules.items():
        if name in row_tokens:
            into = [e for e in edges_of(model) if e.target == name and e.source in row_tokens]
            enters = {(e.name, e.enters) for e in into if reached[e.source, e.tap]}
            trains = frozenset(p for p, g in module.freeze_groups.items() if g not in frozen)
            shape = Shape(1, row_tokens[name])
            count, outputs = _count_module(module, shape, trains, enters)
            by_module[name] = count
            reached |= {(name, tap): needs for tap, needs in outputs.items()}
    return by_module


def _count_module(
    module: Module, shape: Shape, trains: frozenset[str], enters: Collection[tuple[str, int]]
) -> tuple[PieceFlops, dict[str, bool]]:
    """FLOPs of a piece, and whether the exit ("") and each tap give something that needs a
    gradient; `enters` are the fields that bring such, and after how many layers."""
    placed = tuple(sorted({field for field, after in enters if after < 0}))
    kinds, taps = layer_kinds_of(module), taps_of(module)
    needs = _gradient_needs(kinds, trains, {after for _, after in enters}, first=True)
    every = untold = _ends(module, shape, trains, needs, taps.items(), placed)
    told: Counter[str] = Counter()
    for apart, layers, n, n_back in _layers(module, shape, trains, zip(kinds, needs)):
        every = every.plus(layers)
        attention = getattr(apart, "attention_flops", None)
        if attention is not None:  # needed once forward and twice backward
            told.update({name: (n + 2 * n_back) * f for name, f in attention.items()})
        else:
            untold = untold.plus(layers)
    count = PieceFlops(
        per_token=(every.weights + every.weights_gradient) / shape.tokens + told[TOKEN],
        per_pair=(untold.activations + untold.activations_gradient) / pairs(shape.tokens),
        content=tuple(told[name] for name in content_of(module, 1)),
    )
    exit_trains = _trains(trains, "exit") or (module.tied and "entry" in trains)
    tapped = {tap: needs[after] or _trains(trains, tap) for tap, after in taps.items()}
    return count, {"": needs[-1] or exit_trains, **tapped}


def segment_flops(segment: Segment, shape: Shape, kind: Kind, *, with_forward: bool) -> float:
    """FLOPs that a segment's program needs of each device of its submesh.

    Args:
      shape: per-rank shape of a microbatch.
      with_forward: whether a backward is also the segment's only forward.
    """
    module, plan, trains = segment.module, segment.plan, frozenset(segment.trainable)
    wanted = segment.wants_gradient
    placed = tuple(sorted(wanted & set(segment.entry_inputs)))
    enters = {after for name, after in segment.inlets if name in wanted}
    enters |= {-1} if placed or "hidden" in wanted else set()
    kinds = kinds_of(plan, module)
    needs = _gradient_needs(kinds, trains, enters, first=plan.first)
    taps = [(tap, after) for tap, after in segment.taps if tap in taps_of(module)]
    total = _ends(module, shape, trains, needs, taps, placed, first=plan.first, last=plan.last)
    for apart, layers, n, n_back in _layers(module, shape, trains, zip(kinds, needs)):
        if attention := attention_flops_of(apart):
            told = shape.rows * attention(shape.tokens)
            layers = replace(layers, activations=n * told, activations_gradient=2.0 * n_back * told)
        total = total.plus(layers)
    flops = 0.0
    if kind != BACKWARD or with_forward:
        flops += total.weights + total.activations
    if kind == BACKWARD:
        flops += total.weights_gradient + total.activations_gradient
    return flops * segment.microbatches / (segment.stages * segment.mesh.shape["model"])


def seen_pairs(module: Module, tokens: int) -> float:
    """Share of a row's pairs of tokens that see each other, in the mean of the layers of which the
    module says it; 1 where it says it of none."""
    shares = []
    for kind, apart in kinds_apart(module).items():
        if attention := attention_flops_of(apart):
            share = attention(tokens) / (pairs(tokens) * attention(1))
            shares += [share] * layer_kinds_of(module).count(kind)
    return sum(shares) / len(shares) if shares else 1.0


def _gradient_needs(
    kinds: Sequence[str], trains: Collection[str], enters: Collection[int], *, first: bool
) -> list[bool]:
    """Whether hidden states need a gradient, before each layer and behind the last. `enters`: after
    how many layers such come that do, -1: before all; `first`: the entry runs."""
    hidden, needs = -1 in enters or (first and _trains(trains, "entry")), []
    for i in range(len(kinds) + 1):
        hidden |= i in enters
        needs.append(hidden)
        hidden |= i < len(kinds) and _trains(trains, kinds[i])
    return needs


def _trains(trains: Collection[str], part: str) -> bool:
    """Whether a part (also layers of a kind), or its adapters, are among the parts that train."""
    return part in trains or adapter_of(part) in trains


def _ends(
    module: Module,
    shape: Shape,
    trains: frozenset[str],
    needs: Sequence[bool],
    taps: Iterable[tuple[str, int]],
    placed: Names,
    *,
    first: bool = True,
    last: bool = True,
) -> Products:
    """Products of the ends and taps that run; `placed`: fields that need a gradient."""
    inputs = [("entry", placed)] * first + [("exit", _hidden(needs[-1]))] * last
    inputs += [(tap, _hidden(needs[after])) for tap, after in taps]
    total = Products()
    for part, reached in inputs:
        total = total.plus(part_products(module, part, shape, trains, reached))
    return total


def _layers(
    module: Module, shape: Shape, trains: frozenset[str], needs: Iterable[tuple[str, bool]]
) -> Iterator[tuple[Module, Products, int, int]]:
    """By kind: the module with layers of that kind alone, their products as written, how many
    layers there are, and of how many the attention needs a gradient.

    Args:
      needs: of each layer its kind, and whether the hidden states before it need a gradient.
    """
    before: dict[str, list[bool]] = {}
    for kind, hidden in needs:
        before.setdefault(kind, []).append(hidden)
    for kind, of_kind in before.items():
        apart = kinds_apart(module)[kind]
        names = {kind: LAYERS, adapter_of(kind): ADAPTER}
        own = frozenset(names.get(part, part) for part in trains)
        layers = Products()
        for hidden in (False, True):
            one = part_products(apart, "layers", shape, own, _hidden(hidden))
            layers = layers.plus(one, of_kind.count(hidden))
        trained = _trains(trains, kind)
        yield apart, layers, len(of_kind), sum(hidden or trained for hidden in of_kind)


def _hidden(needs_gradient: bool) -> Names:
    return ("hidden",) if needs_gradient else ()


@lru_cache(maxsize=1024)
def part_products(
    module: Module, part: str, shape: Shape, trains: frozenset[str], reached: Names
) -> Products:
    """Products of a part (of one layer for "layers", its adapter with it) at a shape.

    Args:
      trains: names of the parts that train.
      reached: its inputs that need a gradient: "hidden", or fields of the entry that edges bring.
    """
    placed = reached if part == "entry" else ()
    closed, inputs = traced_forward(Part(module, part, shape, placed=placed))
    region = trace(closed, [None] * len(inputs), 1)
    active_names = {"params": trains, "x": frozenset(reached), "fields": frozenset[str]()}
    of_inputs = list(zip(region.ins, inputs, strict=True))
    data = {v for v, (kind, _) in of_inputs if kind != "params"}
    return _count(region, data, {v for v, (kind, name) in of_inputs if name in active_names[kind]})


def _count(region: Region, data: set[Value], active: set[Value]) -> Products:
    """Products of a region; `data` are the values that depend on the batch, `active` those that
    need a gradient. Both grow by what the region makes."""
    total = Products()
    for op in region.ops:
        is_data, is_active = (any(v in those for v in op.ins) for those in (data, active))
        if op.body is not None:
            data.update(_entering(op, data, is_data))
            active.update(_entering(op, active, is_active))
            total = total.plus(_count(op.body, data, active), op.repeats)
        elif op.name in _PRODUCTS:
            lhs, rhs = op.ins[:2]
            flops = sum(k.flops for k in kernels_of(Region(ops=[op])))
            both = flops, flops * ((lhs in active) + (rhs in active))
            if lhs in data and rhs in data:
                total = total.plus(Products(0.0, 0.0, *both))
            elif is_data:
                total = total.plus(Products(*both))
        if is_data:
            data.update(op.outs)
        if is_active and op.name != "stop_gradient":
            active.update(v for v in op.outs if jnp.issubdtype(v.dtype, jnp.inexact))
    return total


def _entering(op: Op, marked: Collection[Value], any_marked: bool) -> list[Value]:
    """Inputs of a loop's body that are marked: where they come from is, or, of what goes from turn
    to turn, where anything is that the loop reads."""
    assert op.body is not None
    n = len(op.body.ins)
    outside = op.ins[len(op.ins) - n :]
    both = zip(op.body.ins, outside, strict=True)
    return [v for v, o in both if o in marked or (any_marked and o in op.carry)]
