"""Model FLOPs: the FLOPs that a training step needs for a piece of a module, or for a segment's
program at its static shape including padding, regardless of what programs compute.

Counts the matrix products of the module's forward functions (2 FLOPs per multiply-add), and in
backward one product per operand that needs a gradient: none for input data, nor for frozen
parameters if nothing before them trains. Padding (of pieces), recomputation and elementwise work
count 0. Products with parameters grow with a piece's tokens, products of two activations
(attention) with its token pairs, unless the module declares the FLOPs of its attention
(`attention_flops` in the contract), the only way to count kernels without a jaxpr. A `while` counts
one iteration, and branches of a `cond` count 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax import contract
from dflop_jax.contract import Module, adapter_of, attention_flops_of, layer_kinds_of, taps_of
from dflop_jax.profile.kernels import kernels_of
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.sharded_trace import Op, Region, Value, trace
from dflop_jax.profile.traced_parts import ENDS, Names, TraceSpec, traced_forward
from dflop_jax.records import BACKWARD, LAYERS, TOKEN, Shape, content_seconds, token_pairs
from dflop_jax.runtime.module_parts import segment_layer_kinds
from dflop_jax.runtime.segment import ProgramKind, Segment

_PRODUCT_OPS = ("dot_general", "conv_general_dilated")
# FLOPs of matrix products, [2, 2]: (activations with parameters, two activations) by (forward,
# needed gradients).
Products = np.ndarray
_WITH_PARAMETERS, _OF_ACTIVATIONS = range(2)


@dataclass(frozen=True)
class PieceFlops:
    """FLOPs of a training step, forward and backward, for a piece of a module."""

    per_token: float  # products with parameters, and attention's declared FLOPs per token
    per_pair: float = 0.0  # products of two activations, if attention's FLOPs are not declared
    content: tuple[float, ...] = ()  # attention's declared FLOPs per unit of each content feature

    def __call__(self, tokens: int, content: Sequence[int] | None = None) -> float:
        """Return the FLOPs of a piece with this content; None: the module names no features."""
        n_pairs = token_pairs(tokens)
        content_flops = content_seconds(self.content, (n_pairs,) if content is None else content)
        return self.per_token * tokens + self.per_pair * n_pairs + float(content_flops)


def needed_flops(
    model: contract.MultimodalModel, row_tokens: Mapping[str, int], frozen: Collection[str] = ()
) -> dict[str, PieceFlops]:
    """Return the FLOPs of a piece by module. `row_tokens`: tokens per row of each module to count;
    `frozen`: freeze groups that do not train."""
    has_gradient: dict[tuple[str, str], bool] = {}  # (module, tap) -> output needs a gradient
    by_module = {}
    for name, module in model.modules.items():
        if name not in row_tokens:
            continue
        entering = [
            e for e in contract.edges_of(model) if e.target == name and e.source in row_tokens
        ]
        edges = {e.name: e.enters for e in entering if has_gradient[e.source, e.tap]}
        trains = frozenset(p for p, g in module.freeze_groups.items() if g not in frozen)
        taps, kinds, shape = taps_of(module), layer_kinds_of(module), Shape(1, row_tokens[name])
        edge_fields = tuple(sorted(edge for edge, depth in edges.items() if depth < 0))
        needed = _needed_products(
            module, kinds, shape, trains, edge_fields, edges.values(), taps.items()
        )
        content_flops: Counter[str] = Counter()
        for kind_module, n, n_gradient in needed.attention:  # backward has twice forward's FLOPs
            attention = kind_module.attention_flops.items()
            content_flops.update({key: (n + 2 * n_gradient) * f for key, f in attention})
        with_parameters, of_activations = needed.products.sum(axis=1).tolist()
        by_module[name] = PieceFlops(
            with_parameters / shape.tokens + content_flops[TOKEN],
            of_activations / token_pairs(shape.tokens),
            tuple(content_flops[key] for key in contract.content_of(module, 1)),
        )
        exit_trains = _has_trainable(trains, "exit") or (module.tied and "entry" in trains)
        has_gradient[name, ""] = needed.gradient[-1] or exit_trains
        for tap, n in taps.items():
            has_gradient[name, tap] = needed.gradient[n] or _has_trainable(trains, tap)
    return by_module


def segment_flops(
    segment: Segment, shape: Shape, kind: ProgramKind, *, with_forward: bool
) -> float:
    """Return the FLOPs per device that a segment's program needs, at the per-rank shape of a
    microbatch. `with_forward`: whether backward is also the segment's only forward."""
    module, plan, with_gradient = segment.module, segment.plan, segment.wants_gradient
    edge_fields = tuple(sorted(with_gradient & set(segment.entry_inputs)))
    enters = {depth for name, depth in segment.inlets if name in with_gradient}
    enters |= {-1} if edge_fields or "hidden" in with_gradient else set()
    needed = _needed_products(
        module,
        segment_layer_kinds(plan, module),
        shape,
        frozenset(segment.trainable),
        edge_fields,
        enters,
        [(tap, depth) for tap, depth in segment.taps if tap in taps_of(module)],
        ["entry"] * plan.first + ["exit"] * plan.last,
    )
    forward, gradient = needed.products.sum(axis=0).tolist()
    for kind_module, n, n_gradient in needed.attention:
        attention = attention_flops_of(kind_module)
        row_flops = shape.rows * attention(shape.tokens) if attention else 0.0
        forward, gradient = forward + n * row_flops, gradient + 2.0 * n_gradient * row_flops
    flops = forward if kind != BACKWARD else gradient + forward * with_forward
    return flops * segment.microbatches / (segment.stages * segment.mesh.shape["model"])


def visible_pair_share(module: Module, tokens: int) -> float:
    """Return the mean share of a row's token pairs that attention computes; 1 if not declared."""
    visible_shares = []
    for kind, kind_module in single_kind_modules(module).items():
        if attention := attention_flops_of(kind_module):
            visible_share = attention(tokens) / (token_pairs(tokens) * attention(1))
            visible_shares += [visible_share] * layer_kinds_of(module).count(kind)
    return sum(visible_shares) / len(visible_shares) if visible_shares else 1.0


@dataclass(frozen=True)
class _Needed:
    """FLOPs and gradients that consecutive layers of a module and its ends need."""

    products: Products  # traced FLOPs, without attention that the module declares
    # (module with one kind of layers, number of layers, number of layers whose attention needs a
    # gradient), for each kind with declared attention.
    attention: list[tuple[Any, int, int]]
    gradient: list[bool]  # whether hidden states need a gradient, before each layer and at the end


def _needed_products(
    module: Module,
    kinds: Sequence[str],
    shape: Shape,
    trains: frozenset[str],
    edge_fields: Names,
    enters: Collection[int],
    taps: Iterable[tuple[str, int]],
    ends: Sequence[str] = ENDS,
) -> _Needed:
    """Return what layers of these kinds and the given `ends` need. `edge_fields`: entry fields that
    need a gradient; `enters`: numbers of layers before inputs that need a gradient (-1: at the
    entry); `taps`: (name, number of layers before it) of each tap that runs."""
    needs = -1 in enters or ("entry" in ends and _has_trainable(trains, "entry"))
    gradient = []
    for i in range(len(kinds) + 1):
        needs |= i in enters
        gradient.append(needs)
        needs |= i < len(kinds) and _has_trainable(trains, kinds[i])
    inputs_of = {"entry": edge_fields, "exit": _hidden_input(gradient[-1])}
    inputs_of |= {tap: _hidden_input(gradient[depth]) for tap, depth in taps}
    total, attention = np.zeros((2, 2)), []
    for part in inputs_of:
        if part in ends or part not in ENDS:
            total = total + part_products(module, part, shape, trains, inputs_of[part])
    for kind in dict.fromkeys(kinds):
        layer_needs = [g for k, g in zip(kinds, gradient) if k == kind]
        kind_module = single_kind_modules(module)[kind]
        names = {kind: LAYERS, adapter_of(kind): contract.ADAPTER}
        kind_trains = frozenset(names.get(part, part) for part in trains)
        declared = attention_flops_of(kind_module) is not None
        for needs in {*layer_needs}:
            inputs = _hidden_input(needs)
            layer = part_products(kind_module, "layers", shape, kind_trains, inputs).copy()
            if declared:
                layer[_OF_ACTIVATIONS] = 0.0
            total = total + layer_needs.count(needs) * layer
        if declared:
            trained = _has_trainable(trains, kind)
            n_gradient = sum(g or trained for g in layer_needs)
            attention.append((kind_module, len(layer_needs), n_gradient))
    return _Needed(total, attention, gradient)


def _has_trainable(trains: Collection[str], part: str) -> bool:
    """Return whether a part (or kind of layers) or its adapter is trained."""
    return part in trains or adapter_of(part) in trains


def _hidden_input(needs_gradient: bool) -> Names:
    return ("hidden",) if needs_gradient else ()


@lru_cache(maxsize=1024)
def part_products(
    module: Module, part: str, shape: Shape, trains: frozenset[str], with_gradient: Names
) -> Products:
    """Return the products of a part with its adapter ("layers": one layer) at a shape. `trains`:
    trained parts; `with_gradient`: inputs that need a gradient, "hidden" or entry fields that edges
    fill."""
    edge_fields = with_gradient if part == "entry" else ()
    module = contract.on_chip(module, "")  # a chip's variant may compute more tokens
    spec = TraceSpec(module, part, shape, edge_fields=edge_fields)
    closed, arguments = traced_forward(spec, adapter=True)
    region = trace(closed, [None] * len(closed.jaxpr.invars), 1)
    data, active, values = set[Value](), set[Value](), iter(region.inputs)
    for is_data, active_names, by_name in zip(
        (False, True, True), (trains, with_gradient, ()), arguments, strict=True
    ):
        for name in sorted(by_name):
            of_name = {next(values) for _ in jax.tree.leaves(by_name[name])}
            data |= of_name if is_data else set()
            active |= of_name if name in active_names else set()
    return _count_products(region, data, active)


def _count_products(region: Region, data: set[Value], active: set[Value]) -> Products:
    """Return the products of a region. `data` are values that depend on the batch, `active` values
    that need a gradient; the region's own values are added to both sets."""
    total = np.zeros((2, 2))
    for op in region.ops:
        is_data, is_active = (any(v in marked for v in op.inputs) for marked in (data, active))
        if op.body is not None:
            data.update(_marked_inputs(op, data, is_data))
            active.update(_marked_inputs(op, active, is_active))
            total += op.repeats * _count_products(op.body, data, active)
        elif op.name in _PRODUCT_OPS and is_data:
            lhs, rhs = op.inputs[:2]
            flops = sum(k.flops for k in kernels_of(Region(ops=[op])))
            row = _OF_ACTIVATIONS if lhs in data and rhs in data else _WITH_PARAMETERS
            total[row] += flops, flops * ((lhs in active) + (rhs in active))
        if is_data:
            data.update(op.outputs)
        if is_active and op.name != "stop_gradient":
            active.update(v for v in op.outputs if jnp.issubdtype(v.dtype, jnp.inexact))
    return total


def _marked_inputs(op: Op, marked: Collection[Value], any_marked: bool) -> list[Value]:
    """Return the marked inputs of a loop's body: inputs with a marked outer value and, if any input
    of the loop is marked, the loop's carries."""
    assert op.body is not None
    outer = op.inputs[len(op.inputs) - len(op.body.inputs) :]
    pairs = zip(op.body.inputs, outer, strict=True)
    return [v for v, o in pairs if o in marked or (any_marked and o in op.carry)]
