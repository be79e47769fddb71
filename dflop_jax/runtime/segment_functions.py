"""The functions of a segment on one microbatch, forward and backward: entry, layers with the taps
and inlets between them, and exit.

Parameter gradients are added to float32 accumulators as they are computed, a layer's into its row
of the stack, so that memory never holds the gradients of all layers twice. Accumulators have a
leading dim of 1 here: the ranks' gradients stay separate until the step's single reduction. If
accumulators are split over data ranks, gradients are reduced as they are computed.

Layers run in loops over the period of their kinds, so that compile time grows with the period, not
with the number of layers; `Segment.unrolls_layers` unrolls them instead. Layers whose parameters
are split over data ranks are gathered one layer ahead, forward and backward. Entry and exit are
already gathered here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params, adapter_of
from dflop_jax.runtime import shards
from dflop_jax.runtime.module_parts import split_into_loops
from dflop_jax.runtime.parameter_layout import param_zero_specs, state_zero_specs
from dflop_jax.runtime.residuals import REMAT, SplitFunction, SplitVjp
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.token_split import run_module_part

Tree = Any
StackRows = Mapping[str, int | Array]  # by kind, a row of its stack; a number or a traced one


class LayerSpan(NamedTuple):
    """Layers [start, stop) of a stage in a round, and the taps and inlets that follow them."""

    start: int
    stop: int
    taps: tuple[str, ...]
    inlets: tuple[str, ...]


def subset(tree: Mapping[str, Tree], names: Collection[str]) -> dict[str, Tree]:
    """Return the entries of these names, in the order of the tree."""
    return {name: entry for name, entry in tree.items() if name in names}


def add_gradients(segment: Segment, grads: Tree, more: Tree) -> Tree:
    """Add the gradients of the parts in `more` to `grads`, which have a leading dim of 1."""
    sums = jax.tree.map(
        lambda total, g: total + g[None].astype(total.dtype),
        subset(grads, more),
        _reduce_to_shards(segment, more),
    )
    return {**grads, **sums}


def _add_layer_gradients(segment: Segment, grads: Tree, row: int | Array, more: Tree) -> Tree:
    """Add the gradients `more` of one layer to `grads`, in place: to its row of a stack, or to its
    array if each layer has its own."""

    def add(g: Array, total: Any) -> Any:
        # Keeps both leading dims of 1: without them the compiler would first copy the row.
        g = g[None, None].astype(jnp.float32)
        if isinstance(total, tuple):
            assert isinstance(row, int)
            return (*total[:row], total[row] + g, *total[row + 1 :])
        g += lax.dynamic_slice_in_dim(total, row, 1, axis=1)
        return lax.dynamic_update_slice_in_dim(total, g, row, axis=1)

    return grads | jax.tree.map(add, _reduce_to_shards(segment, more), subset(grads, more))


def _reduce_to_shards(segment: Segment, grads: Tree) -> Tree:
    """Return gradients by part; if data ranks split accumulators, this rank's shard of the sum."""
    if segment.plan.zero == 1:
        return grads
    return shards.reduce_scatter(segment.mesh, subset(state_zero_specs(segment), grads), grads)


class SegmentFunctions:
    """The functions of a segment within one program, forward and backward.

    Each function takes the inputs `x` and the fields of one microbatch, and hidden states `h`; the
    arguments here are examples. A backward function takes the residuals that its forward function
    returned; without `saves_residuals`, forward functions return none. `params` are the segment's
    parameters, as `shard_map` passes them. `vjps` has what an earlier program of the segment traced
    at these shapes; more is added to it.
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
        vjps: dict[str, SplitVjp],
    ):
        self.segment, self.params, self.saves_residuals = segment, params, saves_residuals
        self.unrolled = saves_residuals and segment.unrolls_layers
        plan, wanted = segment.plan, segment.wants_gradient
        self.spans = tuple(_layer_spans(segment))
        # Whether hidden states get a gradient.
        self.differentiates_hidden = bool(
            segment.trainable & {*segment.stacked}
            or wanted & {name for name, _ in segment.inlets}
            or (not plan.first and "hidden" in wanted)
            or (plan.first and wanted & {*segment.entry_inputs})
            or (plan.first and segment.trainable & {"entry", adapter_of("entry")})
        )
        self._vjps = vjps
        if not saves_residuals:
            return
        if plan.first:
            self._build_vjp("entry", params, None, x, fields)
        for kind in dict.fromkeys(segment.chunk_kinds):
            layer = self._layer_params(kind, 0)
            self._build_vjp(kind, layer, h, x, self._with_layer_number(kind, 0, fields))
        ends = ["exit"] if plan.last and not segment.has_loss else []
        for name in [n for span in self.spans for n in (*span.taps, *span.inlets)] + ends:
            self._build_vjp(name, params, h, x, fields)

    # ---- one function: entry, a layer of a kind, a tap, an inlet or the exit ----

    def _build_vjp(self, name: str, params: Params, h: Tree, x: Tree, fields: Tree) -> None:
        if name in self._vjps:
            return
        trained, *others = self._split_arguments(name, params, x, fields)
        self._vjps[name] = SplitVjp(
            REMAT[self.segment.plan.remat],
            self._function(name),
            trained,
            h,
            *others,
            wants_hidden=self.differentiates_hidden and h is not None,
            # XLA's CPU backend lacks some products of bfloat16 in float32.
            wide_gradients=self.segment.sums_by_layer and self.segment.chip.startswith("sm_"),
        )

    def _function(self, name: str) -> SplitFunction:
        module, tp = self.segment.module, self.segment.tp

        def run(trained: Tree, h: Tree, edge_inputs: Tree, constants: Tree) -> Tree:
            frozen, x, fields = constants
            params = {**frozen, **trained}
            return run_module_part(module, name, tp, params, h, {**x, **edge_inputs}, fields)

        return run

    def _split_arguments(
        self, name: str, params: Params, x: Tree, fields: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Return (trained parameters, inputs with a gradient, other inputs) of a function."""
        reads_entry = name == "exit" and self.segment.module.tied
        read = subset(params, {name, adapter_of(name), "entry" if reads_entry else name})
        trained = subset(read, self.segment.trainable)
        x = subset(x, self.segment.entry_inputs if name == "entry" else (name,))
        edge_inputs = subset(x, self.segment.wants_gradient)
        frozen = subset(read, read.keys() - trained.keys())
        return trained, edge_inputs, (frozen, subset(x, x.keys() - edge_inputs.keys()), fields)

    def forward(
        self, name: str, h: Tree, x: Tree, fields: Tree, params: Params | None = None
    ) -> tuple[Tree, list[Array]]:
        """Run a function; return (output, residuals). `params`: one layer's, if it is a layer."""
        params = self.params if params is None else params
        trained, edge_inputs, constants = self._split_arguments(name, params, x, fields)
        if not self.saves_residuals:
            return self._function(name)(trained, h, edge_inputs, constants), []
        return self._vjps[name].forward(trained, h, edge_inputs, constants)

    def backward(
        self, name: str, residuals: list[Array], x: Tree, fields: Tree, dout: Tree, grads: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Return gradients of a function, not of a layer: (hidden, inputs, grads + parameters')."""
        args = self._split_arguments(name, self.params, x, fields)
        dtrained, dh, dinputs = self._vjps[name].backward(residuals, *args, dout)
        return dh, dinputs, add_gradients(self.segment, grads, dtrained)

    # ---- all layers of a stage in one round ----

    def forward_layers(
        self, h: Tree, x: Tree, fields: Tree, first_rows: StackRows
    ) -> tuple[Tree, dict[str, Array], Tree]:
        """Run layers from `first_rows` on; return (hidden states, outputs of taps, residuals)."""
        tapped: dict[str, Array] = {}
        residuals: dict[str, Any] = {}

        def visit(kind: str, h: Tree, layer: Params, row_and_residuals: Any) -> tuple[Tree, Any]:
            numbered = self._with_layer_number(kind, row_and_residuals[0], fields)
            return self.forward(kind, h, {}, numbered, layer)

        for span in self.spans:
            if span.stop > span.start:
                h, residuals[f"layers {span.start}"] = self._over_layers(visit, h, span, first_rows)
            for name in span.taps:
                tapped[name], residuals[name] = self.forward(name, h, x, fields)
            for name in span.inlets:
                h, residuals[name] = self.forward(name, h, x, fields)
        return h, tapped, residuals

    def backward_layers(
        self,
        residuals: Tree,
        x: Tree,
        fields: Tree,
        dh: Tree,
        dtapped: Tree,
        grads: Tree,
        first_rows: StackRows,
    ) -> tuple[Tree, Tree, Tree]:
        """Return gradients of `forward_layers`: (hidden states, inputs, grads + parameters')."""
        dx: dict[str, Array] = {}

        def visit(
            kind: str, carry: tuple[Tree, Tree], layer: Params, row_and_residuals: Any
        ) -> tuple[tuple[Tree, Tree], None]:
            (dh, totals), (row, of_layer) = carry, row_and_residuals
            numbered = self._with_layer_number(kind, row, fields)
            args = self._split_arguments(kind, layer, {}, numbered)
            dtrained, dh, _ = self._vjps[kind].backward(of_layer, *args, dh)
            return (dh, _add_layer_gradients(self.segment, totals, row, dtrained)), None

        for span in reversed(self.spans):
            for name in reversed(span.inlets):
                dhidden, dinputs, grads = self.backward(name, residuals[name], x, fields, dh, grads)
                dx |= dinputs
                dh = dh if dhidden is None else dhidden
            for name in span.taps:
                dout = dtapped[name]
                dhidden, _, grads = self.backward(name, residuals[name], x, fields, dout, grads)
                dh = dh if dhidden is None else jax.tree.map(jnp.add, dh, dhidden)
            if span.stop > span.start and self.differentiates_hidden:
                totals = subset(grads, {*self.segment.stacked} & self.segment.trainable)
                (dh, totals), _ = self._over_layers(
                    visit,
                    (dh, totals),
                    span,
                    first_rows,
                    residuals[f"layers {span.start}"],
                    reverse=True,
                )
                grads = {**grads, **totals}
        return dh, dx, grads

    def _over_layers(
        self,
        visit: Any,
        carry: Any,
        span: LayerSpan,
        first_rows: StackRows,
        residuals: Any = None,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Call `visit(kind, carry, parameters of the layer, (its row, its residuals))` for the
        layers of a span; return (carry, outputs of the visits).

        If layers are unrolled, outputs and `residuals` are lists by layer. If not, they are lists
        by loop of tuples by layer of the period, stacked as by `lax.scan`.
        """
        chunk = self.segment.chunk_kinds
        kinds, n_before = chunk[span.start : span.stop], Counter(chunk[: span.start])
        stacks = subset(self.params, self.segment.stacked)
        outputs: dict[int, Any] = {}
        steps: Sequence[Any] = kinds if self.unrolled else split_into_loops(kinds)
        for i, step in list(enumerate(steps))[:: -1 if reverse else 1]:
            saved = None if residuals is None else residuals[i]
            if self.unrolled:
                # The barrier keeps the compiler from starting the work of a later layer early, such
                # as recomputation, and from merging it with forward's work.
                carry, saved, stacks = lax.optimization_barrier((carry, saved, stacks))
                row = first_rows[step] + (n_before[step] + kinds[:i].count(step))
                layer = self._layer_params(step, row, stacks)
                carry, outputs[i] = visit(step, carry, layer, (row, saved))
                continue
            rows = tuple(
                first_rows[k] + n_before[k] + jnp.arange(p.start, p.stop, p.step)
                for k, p in zip(step.period, step.rows(kinds), strict=True)
            )
            carry, outputs[i] = self._over_loop(
                visit, carry, stacks, step.period, rows, saved, reverse=reverse
            )
        return carry, [outputs[i] for i in range(len(steps))]

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
        """Run `_over_layers` for one loop; `rows` [repeats] of each layer of the period. If data
        ranks split parameters, a layer is gathered while the previous one is visited, so memory
        holds two whole layers. The loop is not differentiated: gradients would keep every gathered
        layer."""
        order = range(len(period))[:: -1 if reverse else 1]
        head = order[0]  # the first layer of a period in visiting order
        first, last = (rows[head][i] for i in ((-1, 0) if reverse else (0, -1)))
        step = (-1 if reverse else 1) * period.count(period[head])
        gathers_ahead = self.segment.plan.zero == 3
        # By row: the compiler would copy slices of the stacks first.
        layers = [partial(self._layer_params, kind, stacks=stacks) for kind in period]

        def visit_period(state: tuple[Any, Params | None], scanned: Any) -> tuple[Any, Any]:
            (carry, layer), (period_rows, period_residuals) = state, scanned
            outputs, next_layer = {}, None
            for j, following in zip(order, (*order[1:], head), strict=True):
                saved = None if period_residuals is None else period_residuals[j]
                if gathers_ahead:
                    row = period_rows[following]
                    if j == order[-1]:  # the next period's layer; the last period ignores it
                        row = jnp.where(row == last, row, row + step)
                    next_layer = layers[following](row)
                else:
                    if j != head:  # as for unrolled layers
                        carry, saved = lax.optimization_barrier((carry, saved))
                    layer = layers[j](period_rows[j])
                carry, outputs[j] = visit(period[j], carry, layer, (period_rows[j], saved))
                layer = next_layer
            return (carry, layer), tuple(outputs[j] for j in sorted(order))

        start = carry, layers[head](first) if gathers_ahead else None
        (carry, _), outputs = lax.scan(visit_period, start, (rows, residuals), reverse=reverse)
        return carry, outputs

    def _layer_params(self, kind: str, row: int | Array, stacks: Params | None = None) -> Params:
        """Return the parameters of a layer of the stage, gathered if data ranks split them."""
        parts = {part for part, of_kind in self.segment.stacked.items() if of_kind == kind}
        own = subset(self.params if stacks is None else stacks, parts)
        layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, 0, keepdims=False), own)
        zero_specs = subset(param_zero_specs(self.segment), layer)
        return shards.all_gather(self.segment.mesh, zero_specs, layer)

    def _with_layer_number(self, kind: str, row: int | Array, fields: Tree) -> Tree:
        """Return a layer's fields, with its number as "layer" if the module numbers layers."""
        if not getattr(self.segment.module, "numbers_layers", False):
            return fields
        layer_numbers = self.segment.layer_rows[kind]
        index = lax.axis_index("stage") * (len(layer_numbers) // self.segment.stages) + row
        number = jnp.take(jnp.array(layer_numbers, jnp.int32), index)
        return {**fields, "layer": lax.pcast(number, "data", to="varying")}


def _layer_spans(segment: Segment) -> Iterator[LayerSpan]:
    start = 0
    for stop in sorted({n for _, n in (*segment.taps, *segment.inlets)} | {segment.chunk_layers}):
        taps = tuple(name for name, n in segment.taps if n == stop)
        inlets = tuple(name for name, n in segment.inlets if n == stop)
        yield LayerSpan(start, stop, taps, inlets)
        start = stop
