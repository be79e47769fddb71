"""The pieces of a segment that run on one microbatch, forward and backward: entry, layers with
taps and inlets between them, exit.

Gradients of parameters are added into float32 accumulators as they come, those of a layer into its
place of the stack, so that no gradients of all layers stand beside them. Accumulators have a
leading dim of 1 here: gradients of ranks are kept apart until the step's single reduction, or, if
accumulators are split over data ranks, added up as they come.

Layers run in loops over the period of their kinds, so that what is compiled grows with the pattern
of the layers, not with their number, or unrolled where the segment says so. Those
whose parameters are split over data ranks are gathered one ahead of their use, forward and
backward; the ends are whole here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params, adapter_of
from dflop_jax.runtime import shards
from dflop_jax.runtime.layer_loops import split_into_loops
from dflop_jax.runtime.parameter_layout import param_zero_specs, state_zero_specs
from dflop_jax.runtime.residuals import REMAT, SplitFunction, SplitVjp
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.token_split import run_module_part

Tree = Any
StackRows = Mapping[str, int | Array]  # by kind a place in its stack: a number, or a traced one


@dataclass(frozen=True)
class LayerSpan:
    """Layers [start, stop) of a stage, of a round's chunk where there are several, and what follows
    the last of them."""

    start: int
    stop: int
    taps: tuple[str, ...]
    inlets: tuple[str, ...]


def add_gradients(segment: Segment, grads: Tree, more_grads: Tree) -> Tree:
    """`grads`, with their leading dim of 1, plus `more`."""
    more_grads = _reduce_to_shards(segment, more_grads)
    return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), grads, more_grads)


def _reduce_to_shards(segment: Segment, grads: Tree) -> Tree:
    """This rank's gradients by part, or its pieces of all data ranks' where accumulators are
    split."""
    if segment.plan.zero == 1:
        return grads
    zero_specs = state_zero_specs(segment)
    return shards.reduce_scatter(segment.mesh, {part: zero_specs[part] for part in grads}, grads)


def _add_layer_gradients(
    segment: Segment, grads: Tree, layer: int | Array, layer_grads: Tree
) -> Tree:
    """Stacked `grads` plus a layer's, in place."""

    def one(stack: Array, g: Array) -> Array:
        # With its two leading dims of 1: without them the compiler would copy what is read first.
        previous = lax.dynamic_slice_in_dim(stack, layer, 1, axis=1)
        total = previous + g[None, None].astype(stack.dtype)
        return lax.dynamic_update_slice_in_dim(stack, total, layer, axis=1)

    return jax.tree.map(one, grads, _reduce_to_shards(segment, layer_grads))


class SegmentFunctions:
    """A segment's pieces within one program.

    Args:
      params: the segment's, as `shard_map` gives them.
      x, fields: of one microbatch; examples, as all arrays here are only looked at for their types.
      h: hidden states.
      records: whether what a gradient needs is kept; else `forward` keeps nothing.
    """

    def __init__(
        self,
        segment: Segment,
        params: Params,
        x: Tree,
        fields: Tree,
        h: Tree,
        *,
        saves_residuals: bool,
    ):
        self.segment, self.saves_residuals = segment, saves_residuals
        self.unrolled = saves_residuals and segment.unrolls_layers
        plan, wanted = segment.plan, segment.wants_gradient
        self.spans = tuple(_layer_spans(segment))
        entry_gradients = (
            wanted & {*segment.entry_inputs},
            segment.trainable & {"entry", adapter_of("entry")},
        )
        first_differentiates = any(entry_gradients) if plan.first else "hidden" in wanted
        inlet_gradients = wanted & {name for name, _ in segment.inlets}
        # Whether hidden states get a gradient.
        self.differentiates_hidden = bool(
            first_differentiates or inlet_gradients or segment.trainable & {*segment.stacked}
        )
        self._vjps: dict[str, SplitVjp] = {}
        if not saves_residuals:
            return
        if plan.first:
            self._build_vjp("entry", params, None, x, fields)
        for kind in dict.fromkeys(segment.chunk_kinds):
            layer = self._layer_params(params, kind, 0)
            self._build_vjp(kind, layer, h, x, self._with_layer_number(kind, 0, fields))
        for run in self.spans:
            for name in (*run.taps, *run.inlets):
                self._build_vjp(name, params, h, x, fields)
        if plan.last and not segment.has_loss:
            self._build_vjp("exit", params, h, x, fields)

    def _over_layers(
        self,
        visit: Any,
        carry: Any,
        params: Params,
        run: LayerSpan,
        first: StackRows,
        residuals: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Visit a run's layers, of those whose rows begin with `first`, by `visit(kind, carry, a
        layer's whole parameters, (its row, what is kept of it))`: (carry, what the visits gave).
        That and `residuals` are lists by layer where layers are unrolled, else lists by loop of
        tuples by layer of the period, stacked as `lax.scan` does it."""
        kinds_of_chunk, stacks = (
            self.segment.chunk_kinds,
            {p: params[p] for p in self.segment.stacked},
        )
        kinds, kinds_before = (
            kinds_of_chunk[run.start : run.stop],
            Counter(kinds_of_chunk[: run.start]),
        )
        constants: dict[int, Any] = {}
        steps = range(len(kinds)) if self.unrolled else range(len(split_into_loops(kinds)))
        for i in reversed(steps) if reverse else steps:
            layer_residuals = None if residuals is None else residuals[i]
            if self.unrolled:
                # Else the compiler would begin early what a later layer needs, such as what is to
                # be computed again, and merge that with what forward computed.
                carry, layer_residuals, stacks = lax.optimization_barrier(
                    (carry, layer_residuals, stacks)
                )
                kind = kinds[i]
                row = first[kind] + (kinds_before[kind] + kinds[:i].count(kind))
                carry, constants[i] = visit(
                    kind, carry, self._layer_params(stacks, kind, row), (row, layer_residuals)
                )
            else:
                loop = split_into_loops(kinds)[i]
                period_rows = zip(loop.period, loop.rows(kinds), strict=True)
                rows = tuple(
                    first[k] + kinds_before[k] + jnp.arange(p.start, p.stop, p.step)
                    for k, p in period_rows
                )
                carry, constants[i] = self._over_loop(
                    visit, carry, stacks, loop.period, rows, layer_residuals, reverse=reverse
                )
        return carry, [constants[i] for i in steps]

    def _over_loop(
        self,
        visit: Any,
        carry: Any,
        stacks: Params,
        period: tuple[str, ...],
        rows: tuple[Array, ...],
        residuals: Any,
        *,
        reverse: bool,
    ) -> tuple[Any, Any]:
        """`_over_layers` of one loop; `rows` [repeats] of each layer of the period.

        Where parameters are split over data ranks, a layer is gathered while the one before it is
        visited; two layers are whole at a time. The loop is not differentiated: gradients would
        keep every gathered layer.
        """
        order = range(len(period))[:: -1 if reverse else 1]
        head = order[0]  # the layer that a period begins with
        first, last = (rows[head][i] for i in ((-1, 0) if reverse else (0, -1)))
        step = (-1 if reverse else 1) * period.count(period[head])
        gathers_ahead = self.segment.plan.zero == 3
        # By row: pieces of the stacks would be copied first.
        layers = [partial(self._layer_params, stacks, kind) for kind in period]

        def visit_period(
            state: tuple[Any, Params | None], now: tuple[tuple[Array, ...], Any]
        ) -> tuple[Any, Any]:
            (carry, layer), (here, every) = state, now
            constants, following = {}, None
            for j, after in zip(order, (*order[1:], head), strict=True):
                kept = None if every is None else every[j]
                if gathers_ahead:
                    row = here[after]
                    if j == order[-1]:  # of the next period; that of the last one is not used
                        row = jnp.where(row == last, row, row + step)
                    following = layers[after](row)
                else:
                    if j != head:  # as where layers are unrolled
                        carry, kept = lax.optimization_barrier((carry, kept))
                    layer = layers[j](here[j])
                carry, constants[j] = visit(period[j], carry, layer, (here[j], kept))
                layer = following
            return (carry, layer), tuple(constants[j] for j in sorted(order))

        start = carry, layers[head](first) if gathers_ahead else None
        (carry, _), constants = lax.scan(visit_period, start, (rows, residuals), reverse=reverse)
        return carry, constants

    def _layer_params(self, stacks: Params, kind: str, row: int | Array) -> Params:
        """The parameters of a layer of the stage, gathered where they are split over data ranks."""
        kind_stacks = {
            p: stacks[p] for p, of_kind in self.segment.stacked.items() if of_kind == kind
        }
        layer = jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, row, 0, keepdims=False), kind_stacks
        )
        zero_specs = param_zero_specs(self.segment)
        return shards.all_gather(
            self.segment.mesh, {part: zero_specs[part] for part in layer}, layer
        )

    def _with_layer_number(self, kind: str, row: int | Array, fields: Tree) -> Tree:
        """The fields that a layer in a row of the stage's stack reads."""
        if not getattr(self.segment.module, "numbers_layers", False):
            return fields
        layer_numbers = self.segment.layer_rows[kind]
        index = lax.axis_index("stage") * (len(layer_numbers) // self.segment.stages) + row
        number = jnp.take(jnp.array(layer_numbers, jnp.int32), index)
        return {**fields, "layer": lax.pcast(number, "data", to="varying")}

    def _build_vjp(self, name: str, params: Params, h: Tree, x: Tree, fields: Tree) -> None:
        remat = REMAT[self.segment.plan.remat]
        trained, edge_inputs, constants = self._split_arguments(name, params, x, fields)
        wants = self.differentiates_hidden and h is not None
        self._vjps[name] = SplitVjp(
            remat, self._function(name), trained, h, edge_inputs, constants, wants_hidden=wants
        )

    # ---- what a piece is ----

    def _function(self, name: str) -> SplitFunction:
        module, tp = self.segment.module, self.segment.tp

        def piece(trained: Tree, h: Tree, edge_inputs: Tree, constants: Tree) -> Tree:
            frozen, x, fields = constants
            return run_module_part(
                module, name, tp, {**frozen, **trained}, h, {**x, **edge_inputs}, fields
            )

        return piece

    def _split_arguments(
        self, name: str, params: Params, x: Tree, fields: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """(parameters that train, inputs that get a gradient, all else) of what a piece reads."""
        reads = {name, adapter_of(name)}
        if name == "exit" and self.segment.module.tied:
            reads |= {"entry"}
        inputs = self.segment.entry_inputs if name == "entry" else (name,)
        read = {k: v for k, v in params.items() if k in reads}
        inputs_read = {k: v for k, v in x.items() if k in inputs}
        trained = {k: v for k, v in read.items() if k in self.segment.trainable}
        edge_inputs = {k: v for k, v in inputs_read.items() if k in self.segment.wants_gradient}
        frozen = {k: v for k, v in read.items() if k not in trained}
        return (
            trained,
            edge_inputs,
            (frozen, {k: v for k, v in inputs_read.items() if k not in edge_inputs}, fields),
        )

    # ---- forward ----

    def forward(
        self, name: str, params: Params, h: Tree, x: Tree, fields: Tree
    ) -> tuple[Tree, list[Array]]:
        """One piece: (what it gives, what backward needs)."""
        trained, edge_inputs, constants = self._split_arguments(name, params, x, fields)
        if not self.saves_residuals:
            return self._function(name)(trained, h, edge_inputs, constants), []
        return self._vjps[name].forward(trained, h, edge_inputs, constants)

    def forward_layers(
        self, params: Params, h: Tree, x: Tree, fields: Tree, first_rows: StackRows
    ) -> tuple[Tree, dict[str, Array], Tree]:
        """The stage's layers of a round, whose rows begin with `first`: (hidden states, outputs of
        the segment's taps, what backward needs)."""
        tapped: dict[str, Array] = {}
        residuals: dict[str, Any] = {}
        for span in self.spans:

            def one(
                kind: str, h: Tree, layer: Params, row_and_residuals: Any
            ) -> tuple[Tree, list[Array]]:
                return self.forward(
                    kind, layer, h, {}, self._with_layer_number(kind, row_and_residuals[0], fields)
                )

            if span.stop > span.start:
                h, residuals[f"layers {span.start}"] = self._over_layers(
                    one, h, params, span, first_rows, None
                )
            for name in span.taps:
                tapped[name], residuals[name] = self.forward(name, params, h, x, fields)
            for name in span.inlets:
                h, residuals[name] = self.forward(name, params, h, x, fields)
        return h, tapped, residuals

    # ---- backward ----

    def backward(
        self, name: str, residuals: list[Array], params: Params, x: Tree, fields: Tree, dout: Tree,
        grads: Tree,
    ) -> tuple[Tree, Tree, Tree]:  # fmt: skip
        """The gradient of one piece but a layer: (of hidden states, of inputs, grads + its own)."""
        args = self._split_arguments(name, params, x, fields)
        dtrained, dh, dinputs = self._vjps[name].backward(residuals, *args, dout)
        return (
            dh,
            dinputs,
            {**grads, **add_gradients(self.segment, {k: grads[k] for k in dtrained}, dtrained)},
        )

    def backward_layers(
        self, residuals: Tree, params: Params, x: Tree, fields: Tree, dh: Tree, dtapped: Tree,
        grads: Tree, first_rows: StackRows,
    ) -> tuple[Tree, Tree, Tree]:  # fmt: skip
        """The gradient of `run_layers`: (of hidden states, of inputs, grads + parameters')."""
        dx: dict[str, Array] = {}
        for span in reversed(self.spans):
            for name in reversed(span.inlets):
                dhidden, dinputs, grads = self.backward(
                    name, residuals[name], params, x, fields, dh, grads
                )
                dx |= dinputs
                dh = dh if dhidden is None else dhidden
            for name in span.taps:
                dhidden, _, grads = self.backward(
                    name, residuals[name], params, x, fields, dtapped[name], grads
                )
                dh = dh if dhidden is None else jax.tree.map(jnp.add, dh, dhidden)
            if span.stop > span.start and self.differentiates_hidden:
                layers = residuals[f"layers {span.start}"]
                dh, grads = self._backward_layers(
                    layers, params, fields, dh, grads, span, first_rows
                )
        return dh, dx, grads

    def _backward_layers(
        self, residuals: Tree, params: Params, fields: Tree, dh: Tree, grads: Tree, span: LayerSpan,
        first_rows: StackRows,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        trained = {k: grads[k] for k in self.segment.stacked if k in self.segment.trainable}

        def one(
            kind: str,
            carry: tuple[Tree, Tree],
            layer: Params,
            row_and_residuals: tuple[int | Array, Any],
        ) -> tuple[tuple[Tree, Tree], None]:
            (dh, totals), (row, of_layer) = carry, row_and_residuals
            args = self._split_arguments(
                kind, layer, {}, self._with_layer_number(kind, row, fields)
            )
            dtrained, dh, _ = self._vjps[kind].backward(of_layer, *args, dh)
            layer_grads = _add_layer_gradients(
                self.segment, {k: totals[k] for k in dtrained}, row, dtrained
            )
            return (dh, {**totals, **layer_grads}), None

        (dh, totals), _ = self._over_layers(
            one, (dh, trained), params, span, first_rows, residuals, reverse=True
        )
        return dh, {**grads, **totals}


def _layer_spans(segment: Segment) -> Iterator[LayerSpan]:
    start = 0
    for stop in sorted({n for _, n in (*segment.taps, *segment.inlets)} | {segment.chunk_layers}):
        taps = tuple(name for name, n in segment.taps if n == stop)
        inlets = tuple(name for name, n in segment.inlets if n == stop)
        yield LayerSpan(start, stop, taps, inlets)
        start = stop
