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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params, adapter_of
from dflop_jax.runtime import shards
from dflop_jax.runtime.parameter_layout import held_cuts, split_cuts
from dflop_jax.runtime.residuals import REMAT, Piece, Recorded
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.token_split import run_part

Tree = Any
Rows = Mapping[str, int | Array]  # by kind a place in its stack: a number, or a traced one


@dataclass(frozen=True)
class Loop:
    """Layers from number `start` on: `repeats` times those of `period`."""

    start: int
    period: tuple[Any, ...]
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + len(self.period) * self.repeats

    def rows(self, kinds: Sequence[Any]) -> tuple[range, ...]:
        """Of each layer of the period the places of its repeats among those layers of the sequence
        `kinds` that are of its kind."""
        rows = []
        for j, kind in enumerate(self.period):
            step, first = self.period.count(kind), kinds[: self.start + j].count(kind)
            rows.append(range(first, first + step * self.repeats, step))
        return tuple(rows)


@lru_cache(maxsize=1024)
def loops_over(kinds: Sequence[Any]) -> tuple[Loop, ...]:
    """Loops that go through layers of these kinds in their order: the sum of their periods is as
    small as it can be, and of such the loops are few.

    By the shortest path from cut to cut, O(n^2 log n) comparisons of periods.
    """
    kinds, n = tuple(kinds), len(kinds)
    # By cut: (layers that are compiled, loops) of the best way there, and its last loop.
    best: list[tuple[int, int, Loop | None]] = [(0, 0, None)]
    best += [(n + 1, n + 1, None)] * n
    for i in range(n):
        layers, loops, _ = best[i]
        for size in range(1, n - i + 1):
            period = kinds[i : i + size]
            stop = i + size
            while kinds[stop - size : stop] == period:
                way = layers + size, loops + 1
                if way < best[stop][:2]:
                    best[stop] = (*way, Loop(i, period, (stop - i) // size))
                stop += size
                if stop > n:
                    break
    path: list[Loop] = []
    while n:
        last = best[n][2]
        assert last is not None
        path.append(last)
        n = last.start
    return tuple(reversed(path))


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
        self, segment: Segment, params: Params, x: Tree, fields: Tree, h: Tree, *, records: bool
    ):
        self.segment, self.records = segment, records
        self.unrolled = records and segment.unrolls
        plan, wanted = segment.plan, segment.wants_gradient
        self.runs = tuple(_runs(segment))
        of_entry = (
            wanted & {*segment.entry_inputs},
            segment.trainable & {"entry", adapter_of("entry")},
        )
        before = any(of_entry) if plan.first else "hidden" in wanted
        between = wanted & {name for name, _ in segment.inlets}
        # Whether hidden states get a gradient.
        self.active = bool(before or between or segment.trainable & {*segment.stacked})
        self._recorded: dict[str, Recorded] = {}
        if not records:
            return
        if plan.first:
            self._record("entry", params, None, x, fields)
        for kind in dict.fromkeys(segment.chunk_kinds):
            layer = self._layer(params, kind, 0)
            self._record(kind, layer, h, x, self._numbered(kind, 0, fields))
        for run in self.runs:
            for name in (*run.taps, *run.inlets):
                self._record(name, params, h, x, fields)
        if plan.last and not segment.has_loss:
            self._record("exit", params, h, x, fields)

    def _over_layers(
        self,
        visit: Any,
        carry: Any,
        params: Params,
        run: LayerRun,
        first: Rows,
        residuals: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Visit a run's layers, of those whose rows begin with `first`, by `visit(kind, carry, a
        layer's whole parameters, (its row, what is kept of it))`: (carry, what the visits gave).
        That and `residuals` are lists by layer where layers are unrolled, else lists by loop of
        tuples by layer of the period, stacked as `lax.scan` does it."""
        every, stacks = self.segment.chunk_kinds, {p: params[p] for p in self.segment.stacked}
        kinds, before = every[run.start : run.stop], Counter(every[: run.start])
        given: dict[int, Any] = {}
        steps = range(len(kinds)) if self.unrolled else range(len(loops_over(kinds)))
        for i in reversed(steps) if reverse else steps:
            kept = None if residuals is None else residuals[i]
            if self.unrolled:
                # Else the compiler would begin early what a later layer needs, such as what is to
                # be computed again, and merge that with what forward computed.
                carry, kept, stacks = lax.optimization_barrier((carry, kept, stacks))
                kind = kinds[i]
                row = first[kind] + (before[kind] + kinds[:i].count(kind))
                carry, given[i] = visit(kind, carry, self._layer(stacks, kind, row), (row, kept))
            else:
                loop = loops_over(kinds)[i]
                places = zip(loop.period, loop.rows(kinds), strict=True)
                rows = tuple(
                    first[k] + before[k] + jnp.arange(p.start, p.stop, p.step) for k, p in places
                )
                carry, given[i] = self._over_loop(
                    visit, carry, stacks, loop.period, rows, kept, reverse=reverse
                )
        return carry, [given[i] for i in steps]

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
        layers = [partial(self._layer, stacks, kind) for kind in period]

        def turn(
            state: tuple[Any, Params | None], now: tuple[tuple[Array, ...], Any]
        ) -> tuple[Any, Any]:
            (carry, layer), (here, every) = state, now
            given, following = {}, None
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
                carry, given[j] = visit(period[j], carry, layer, (here[j], kept))
                layer = following
            return (carry, layer), tuple(given[j] for j in sorted(order))

        start = carry, layers[head](first) if gathers_ahead else None
        (carry, _), given = lax.scan(turn, start, (rows, residuals), reverse=reverse)
        return carry, given

    def _layer(self, stacks: Params, kind: str, row: int | Array) -> Params:
        """The parameters of a layer of the stage, gathered where they are split over data ranks."""
        own = {p: stacks[p] for p, of_kind in self.segment.stacked.items() if of_kind == kind}
        layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, 0, keepdims=False), own)
        cuts = held_cuts(self.segment)
        return shards.gather(self.segment.mesh, {part: cuts[part] for part in layer}, layer)

    def _numbered(self, kind: str, row: int | Array, fields: Tree) -> Tree:
        """The fields that a layer in a row of the stage's stack reads."""
        if not getattr(self.segment.module, "numbers_layers", False):
            return fields
        every = self.segment.held_rows[kind]
        place = lax.axis_index("stage") * (len(every) // self.segment.stages) + row
        number = jnp.take(jnp.array(every, jnp.int32), place)
        return {**fields, "layer": lax.pcast(number, "data", to="varying")}

    def _record(self, name: str, params: Params, h: Tree, x: Tree, fields: Tree) -> None:
        remat = REMAT[self.segment.plan.remat]
        free, placed, given = self._split(name, params, x, fields)
        wants = self.active and h is not None
        self._recorded[name] = Recorded(
            remat, self._piece(name), free, h, placed, given, wants_hidden=wants
        )

    # ---- what a piece is ----

    def _piece(self, name: str) -> Piece:
        module, ways = self.segment.module, self.segment.tensor_ranks

        def piece(free: Tree, h: Tree, placed: Tree, given: Tree) -> Tree:
            frozen, x, fields = given
            return run_part(module, name, ways, {**frozen, **free}, h, {**x, **placed}, fields)

        return piece

    def _split(self, name: str, params: Params, x: Tree, fields: Tree) -> tuple[Tree, Tree, Tree]:
        """(parameters that train, inputs that get a gradient, all else) of what a piece reads."""
        reads = {name, adapter_of(name)}
        if name == "exit" and self.segment.module.tied:
            reads |= {"entry"}
        inputs = self.segment.entry_inputs if name == "entry" else (name,)
        read = {k: v for k, v in params.items() if k in reads}
        here = {k: v for k, v in x.items() if k in inputs}
        free = {k: v for k, v in read.items() if k in self.segment.trainable}
        placed = {k: v for k, v in here.items() if k in self.segment.wants_gradient}
        frozen = {k: v for k, v in read.items() if k not in free}
        return free, placed, (frozen, {k: v for k, v in here.items() if k not in placed}, fields)

    # ---- forward ----

    def forward(
        self, name: str, params: Params, h: Tree, x: Tree, fields: Tree
    ) -> tuple[Tree, list[Array]]:
        """One piece: (what it gives, what backward needs)."""
        free, placed, given = self._split(name, params, x, fields)
        if not self.records:
            return self._piece(name)(free, h, placed, given), []
        return self._recorded[name].forward(free, h, placed, given)

    def run_layers(
        self, params: Params, h: Tree, x: Tree, fields: Tree, first: Rows
    ) -> tuple[Tree, dict[str, Array], Tree]:
        """The stage's layers of a round, whose rows begin with `first`: (hidden states, outputs of
        the segment's taps, what backward needs)."""
        tapped: dict[str, Array] = {}
        residuals: dict[str, Any] = {}
        for run in self.runs:

            def one(kind: str, h: Tree, layer: Params, now: Any) -> tuple[Tree, list[Array]]:
                return self.forward(kind, layer, h, {}, self._numbered(kind, now[0], fields))

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
    ) -> tuple[Tree, Tree, Tree]:  # fmt: skip
        """The gradient of one piece but a layer: (of hidden states, of inputs, grads + its own)."""
        args = self._split(name, params, x, fields)
        dfree, dh, dplaced = self._recorded[name].backward(residuals, *args, dout)
        return dh, dplaced, {**grads, **added(self.segment, {k: grads[k] for k in dfree}, dfree)}

    def run_layers_back(
        self, residuals: Tree, params: Params, x: Tree, fields: Tree, dh: Tree, dtapped: Tree,
        grads: Tree, first: Rows,
    ) -> tuple[Tree, Tree, Tree]:  # fmt: skip
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
                dh = dh if more is None else jax.tree.map(jnp.add, dh, more)
            if run.stop > run.start and self.active:
                layers = residuals[f"layers {run.start}"]
                dh, grads = self._layers_back(layers, params, fields, dh, grads, run, first)
        return dh, dx, grads

    def _layers_back(
        self, residuals: Tree, params: Params, fields: Tree, dh: Tree, grads: Tree, run: LayerRun,
        first: Rows,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        trained = {k: grads[k] for k in self.segment.stacked if k in self.segment.trainable}

        def one(
            kind: str, carry: tuple[Tree, Tree], layer: Params, now: tuple[int | Array, Any]
        ) -> tuple[tuple[Tree, Tree], None]:
            (dh, totals), (row, of_layer) = carry, now
            args = self._split(kind, layer, {}, self._numbered(kind, row, fields))
            dfree, dh, _ = self._recorded[kind].backward(of_layer, *args, dh)
            more = _added_at(self.segment, {k: totals[k] for k in dfree}, row, dfree)
            return (dh, {**totals, **more}), None

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
