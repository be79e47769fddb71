"""The pieces of a segment that run on one microbatch, forward and backward: entry, layers with
taps and inlets between them, exit.

Gradients of parameters are added into float32 accumulators as they come, those of a layer into its
place of the stack, so that no gradients of all layers stand beside them. Accumulators have a
leading dim of 1 here: gradients of ranks are kept apart until the step's single reduction, or, if
accumulators are split over data ranks, added up as they come.

Layers run in a loop, or unrolled where the segment says so. Those whose parameters are split over
data ranks are gathered one ahead of their use, forward and backward; the ends are whole here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params
from dflop_jax.pipeline import shards
from dflop_jax.pipeline.held import held_cuts, split_cuts
from dflop_jax.pipeline.parts import STACKED
from dflop_jax.pipeline.residuals import REMAT, Piece, Recorded
from dflop_jax.pipeline.segment import Segment
from dflop_jax.pipeline.token_split import run_part

Tree = Any


@dataclass(frozen=True)
class LayerRun:
    """Layers [start, stop) of a stage, of a round's chunk where there are several, and what follows
    the last of them."""

    start: int
    stop: int
    taps: tuple[str, ...]
    inlets: tuple[str, ...]


def added(segment: Segment, grads: Tree, more: Tree) -> Tree:
    """`grads`, with their leading dim of 1, plus `more`."""
    more = _own(segment, more)
    return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), grads, more)


def _own(segment: Segment, grads: Tree) -> Tree:
    """This rank's gradients by part, or its pieces of all data ranks' where accumulators are
    split."""
    if segment.plan.zero == 1:
        return grads
    cuts = split_cuts(segment)
    return shards.scatter(segment.mesh, {part: cuts[part] for part in grads}, grads)


def _added_at(segment: Segment, grads: Tree, layer: int | Array, more: Tree) -> Tree:
    """Stacked `grads` plus a layer's, in place."""

    def one(stack: Array, g: Array) -> Array:
        # With its two leading dims of 1: without them the compiler would copy what is read first.
        so_far = lax.dynamic_slice_in_dim(stack, layer, 1, axis=1)
        added = so_far + g[None, None].astype(stack.dtype)
        return lax.dynamic_update_slice_in_dim(stack, added, layer, axis=1)

    return jax.tree.map(one, grads, _own(segment, more))


class Pieces:
    """A segment's pieces within one program.

    Args:
      params: the segment's, as `shard_map` gives them.
      x, fields: of one microbatch; examples, as all arrays here are only looked at for their types.
      h: hidden states.
      records: whether what a gradient needs is kept; else `forward` keeps nothing.
    """

    def __init__(
        self, segment: Segment, params: Params, x: Tree, fields: Tree, h: Array, *, records: bool
    ):
        self.segment, self.records = segment, records
        self.unrolled = records and segment.unrolls
        plan, wanted = segment.plan, segment.wants_gradient
        self.runs = tuple(_runs(segment))
        entry_inputs = wanted & set(segment.entry_inputs)
        before = bool(entry_inputs or "entry" in segment.trainable) if plan.first else (
            "hidden" in wanted)  # fmt: skip
        between = wanted & {name for name, _ in segment.inlets}
        self.trains_layers = bool(STACKED & segment.trainable)
        # Whether hidden states get a gradient.
        self.active = before or bool(between) or self.trains_layers
        self._recorded: dict[str, Recorded] = {}
        if not records:
            return
        if plan.first:
            self._record("entry", params, None, x, fields)
        self._record("layer", self._layer(_stacks(params), 0), h, x, fields)
        for run in self.runs:
            for name in (*run.taps, *run.inlets):
                self._record(name, params, h, x, fields)
        if plan.last and not segment.has_loss:
            self._record("exit", params, h, x, fields)

    def _whole_layer(self, layer: Params) -> Params:
        """The stacked parts of one layer, gathered where they are split over data ranks."""
        cuts = held_cuts(self.segment)
        return shards.gather(self.segment.mesh, {part: cuts[part] for part in layer}, layer)

    def _over_layers(
        self,
        visit: Any,
        carry: Any,
        params: Params,
        run: LayerRun,
        first: int | Array,
        residuals: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Visit a run's layers, of those from place `first` on, by `visit(carry, a layer's whole
        parameters, (its place, what is kept of it))`: (carry, what the visits gave). That and
        `residuals` are lists by layer where layers are unrolled, else stacked as `lax.scan` does
        it."""
        layers, stacks = range(run.start, run.stop), _stacks(params)
        if self.unrolled:
            given: dict[int, Any] = {}
            for i in reversed(layers) if reverse else layers:
                of_layer = None if residuals is None else residuals[i - run.start]
                # Else the compiler would begin early what a later layer needs, such as what is to
                # be computed again, and merge that with what forward computed.
                carry, of_layer, stacks = lax.optimization_barrier((carry, of_layer, stacks))
                place = first + i
                carry, given[i] = visit(carry, self._layer(stacks, place), (place, of_layer))
            return carry, [given[i] for i in layers]
        # By place: pieces of the stacks would be copied first.
        layer, places = partial(self._layer, stacks), first + jnp.arange(run.start, run.stop)
        if self.segment.plan.zero == 3:
            return shards.scan_layers(layer, visit, carry, places, residuals, reverse=reverse)
        return lax.scan(
            lambda c, now: visit(c, layer(now[0]), now), carry, (places, residuals), reverse=reverse
        )

    def _layer(self, stacks: Params, i: int | Array) -> Params:
        """The whole parameters of a layer of the stage."""
        layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), stacks)
        return self._whole_layer(layer)

    def _record(self, name: str, params: Params, h: Array | None, x: Tree, fields: Tree) -> None:
        remat = REMAT[self.segment.plan.remat]
        free, placed, given = self._split(name, params, x, fields)
        wants = self.active and h is not None
        self._recorded[name] = Recorded(
            remat, self._piece(name), free, h, placed, given, wants_hidden=wants
        )

    # ---- what a piece is ----

    def _piece(self, name: str) -> Piece:
        module, ways = self.segment.module, self.segment.tensor_ranks

        def piece(free: Tree, h: Array | None, placed: Tree, given: Tree) -> Tree:
            frozen, x, fields = given
            return run_part(module, name, ways, {**frozen, **free}, h, {**x, **placed}, fields)

        return piece

    def _split(self, name: str, params: Params, x: Tree, fields: Tree) -> tuple[Tree, Tree, Tree]:
        """(parameters that train, inputs that get a gradient, all else) of what a piece reads."""
        reads = {"layer": STACKED, "exit": {"exit", "entry"} if self.segment.module.tied else
                 {"exit"}}.get(name, {name})  # fmt: skip
        inputs = self.segment.entry_inputs if name == "entry" else (name,)
        read = {k: v for k, v in params.items() if k in reads}
        here = {k: v for k, v in x.items() if k in inputs}
        free = {k: v for k, v in read.items() if k in self.segment.trainable}
        placed = {k: v for k, v in here.items() if k in self.segment.wants_gradient}
        frozen = {k: v for k, v in read.items() if k not in free}
        return free, placed, (frozen, {k: v for k, v in here.items() if k not in placed}, fields)

    # ---- forward ----

    def forward(
        self, name: str, params: Params, h: Array | None, x: Tree, fields: Tree
    ) -> tuple[Tree, list[Array]]:
        """One piece: (what it gives, what backward needs)."""
        free, placed, given = self._split(name, params, x, fields)
        if not self.records:
            return self._piece(name)(free, h, placed, given), []
        return self._recorded[name].forward(free, h, placed, given)

    def run_layers(
        self, params: Params, h: Array, x: Tree, fields: Tree, first: int | Array
    ) -> tuple[Array, dict[str, Array], Tree]:
        """The stage's layers from place `first` on, as many as a round goes through: (hidden
        states, outputs of the segment's taps, what backward needs)."""
        tapped: dict[str, Array] = {}
        residuals: dict[str, Any] = {}
        for run in self.runs:

            def one(h: Array, layer: Params, _: Any) -> tuple[Array, list[Array]]:
                return self.forward("layer", layer, h, {}, fields)

            if run.stop > run.start:
                h, residuals[f"layers {run.start}"] = self._over_layers(
                    one, h, params, run, first, None
                )
            for name in run.taps:
                tapped[name], residuals[name] = self.forward(name, params, h, x, fields)
            for name in run.inlets:
                h, residuals[name] = self.forward(name, params, h, x, fields)
        return h, tapped, residuals

    # ---- backward ----

    def backward(
        self, name: str, residuals: list[Array], params: Params, x: Tree, fields: Tree, dout: Tree,
        grads: Tree,
    ) -> tuple[Array | None, Tree, Tree]:  # fmt: skip
        """The gradient of one piece but a layer: (of hidden states, of inputs, grads + its own)."""
        args = self._split(name, params, x, fields)
        dfree, dh, dplaced = self._recorded[name].backward(residuals, *args, dout)
        return dh, dplaced, {**grads, **added(self.segment, {k: grads[k] for k in dfree}, dfree)}

    def run_layers_back(
        self, residuals: Tree, params: Params, x: Tree, fields: Tree, dh: Array, dtapped: Tree,
        grads: Tree, first: int | Array,
    ) -> tuple[Array, Tree, Tree]:  # fmt: skip
        """The gradient of `run_layers`: (of hidden states, of inputs, grads + parameters')."""
        dx: dict[str, Array] = {}
        for run in reversed(self.runs):
            for name in reversed(run.inlets):
                more, dplaced, grads = self.backward(
                    name, residuals[name], params, x, fields, dh, grads
                )
                dx |= dplaced
                dh = dh if more is None else more
            for name in run.taps:
                more, _, grads = self.backward(
                    name, residuals[name], params, x, fields, dtapped[name], grads
                )
                dh = dh if more is None else dh + more
            if run.stop > run.start and self._recorded["layer"].has_gradient:
                layers = residuals[f"layers {run.start}"]
                dh, grads = self._layers_back(layers, params, fields, dh, grads, run, first)
        return dh, dx, grads

    def _layers_back(
        self, residuals: Tree, params: Params, fields: Tree, dh: Array, grads: Tree, run: LayerRun,
        first: int | Array,
    ) -> tuple[Array, Tree]:  # fmt: skip
        trained = {k: grads[k] for k in params if k in STACKED & self.segment.trainable}

        def one(
            carry: tuple[Array, Tree], layer: Params, now: tuple[int | Array, list[Array]]
        ) -> tuple[tuple[Array, Tree], None]:
            (dh, totals), (i, of_layer) = carry, now
            args = self._split("layer", layer, {}, fields)
            dfree, dh, _ = self._recorded["layer"].backward(of_layer, *args, dh)
            return (dh, _added_at(self.segment, totals, i, dfree)), None

        (dh, totals), _ = self._over_layers(
            one, (dh, trained), params, run, first, residuals, reverse=True
        )
        return dh, {**grads, **totals}


def _runs(segment: Segment) -> Iterator[LayerRun]:
    start = 0
    for stop in sorted({n for _, n in (*segment.taps, *segment.inlets)} | {segment.chunk_layers}):
        taps = tuple(name for name, n in segment.taps if n == stop)
        inlets = tuple(name for name, n in segment.inlets if n == stop)
        yield LayerRun(start, stop, taps, inlets)
        start = stop


def _stacks(params: Params) -> Params:
    """The stacked parts."""
    return {k: v for k, v in params.items() if k in STACKED}
