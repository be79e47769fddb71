"""The loop inside a segment: per-device code under `shard_map`, manual over (stage, data).

A group's microbatches flow through the stages: at tick t stage s takes its turn number t - s and
passes its activations on with `ppermute`. A turn is a microbatch, or, where microbatches go round
the stages several times, a microbatch in a round; in each round a stage has other layers. With R
rounds S microbatches go round the ring of S stages R times, then the next S do, and turns are
numbered in this order, so that what the last stage makes in a round is what the first one reads in
its next tick.

The axis "model" stays automatic: tensor parallelism comes from the parameters' shardings and from
how activations are laid out (`token_split`). With one stage the same code is a plain scan. Backward
runs the ticks in reverse, on what forward kept of each turn. Where a stage has no turn yet, what it
computes is overwritten by its first one; where it has none left, it takes its last one again, on
equal inputs; the gradients of such ticks are zeros.

A segment takes `x`, arrays [M, rows, tokens, ...] by name: "hidden" from the segment before it, an
array or a tree of them, and what edges bring, by their names. It gives `y`: {"next": hidden states
for the segment after it, "exit": features, "taps": {name: features}, "sums": {name: scalars of the
loss}, "residuals": what its backward needs}, as far as it has them. M counts microbatches in a
group, S stages.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params, adapter_of, with_adapter
from dflop_jax.runtime import shards
from dflop_jax.runtime.parameter_layout import held_cuts
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.segment_functions import Pieces, added
from dflop_jax.runtime.token_split import before_exit, by_tensor_rank, split
from dflop_jax.runtime.zero_sharding import Cut

Tree = Any


def forward_program(segment: Segment, params: Params, x: Tree, fields: Tree, *, sums: bool) -> Tree:
    """Run a group; returns per-rank outputs `y` with a leading dim of M / S microbatches, those of
    taps M; `sums` says whether the loss's sums [M / S, 1] are wanted, and no residuals."""
    loop = _Loop(segment, params, x, fields, records=segment.hands_over and not sums)
    y, outs, residuals = loop.run()
    if not segment.plan.last:
        y["next"] = outs
    elif not segment.has_loss:
        y["exit"], residuals["exit"] = loop.run_exit(outs)
    elif sums:
        ends = loop.run_exit(outs)[0]
        y["sums"] = jax.tree.map(lambda a: a[:, None], ends)
    else:
        residuals["outs"] = outs
    if segment.hands_over and not sums:
        y["residuals"] = jax.tree.map(lambda a: a[None, None], residuals)
    return y


def backward_program(
    segment: Segment, params: Params, x: Tree, fields: Tree, dy: Tree, grads: Tree, residuals: Tree
) -> tuple[Tree, Tree, Tree, Array]:
    """The gradient of a group: (sums, dx, grads + gradient, done).

    `dy` is the cotangent of `y`; for the loss's sums it is one scalar, the scale of "loss_sum".
    `residuals` are those of `forward_program`; a segment that hands none over runs forward here.
    `done` is a small output to wait for, since `grads` is donated onwards.
    """
    loop = _Loop(segment, params, x, fields, records=True)
    if segment.hands_over:
        held = jax.tree.map(lambda a: a[0, 0], residuals)
    else:
        _, outs, held = loop.run()
        if segment.has_loss:
            held["outs"] = outs
        elif segment.plan.last:
            held["exit"] = loop.run_exit(outs)[1]
    sums: Tree = {}
    if segment.has_loss:
        scale = _varying(dy["sums"], "stage", "data")
        sums, douts, grads = loop.run_loss_back(held["outs"], scale, grads)
    elif segment.plan.last:
        douts, grads = loop.run_exit_back(held["exit"], dy["exit"], grads)
    else:
        douts = dy["next"]
    dx: Tree = {}
    if loop.pieces.active or segment.taps:
        dx, grads = loop.run_back(held, douts, dy.get("taps", {}), grads)
    # Only stage 0 read x, so its gradient is zero elsewhere: the sum broadcasts it.
    total = partial(lax.psum, axis_name="stage")
    for name, a in dx.items():
        ways = segment.tensor_ranks if name == "hidden" else 1  # all else is whole
        dx[name] = _in_float32(total, a, ways)
    done = _varying(jnp.zeros((1, 1), jnp.float32), "stage", "data")
    return sums, dx, grads, done


class Turn(NamedTuple):
    """A microbatch in a round. The round is a plain 0 where it is the only one, so that nothing is
    computed from it."""

    number: Array
    round: int | Array
    microbatch: Array


def turn_at(tick: Array, stage: Array, *, microbatches: int, stages: int, rounds: int) -> Turn:
    """The turn of a stage at a tick; its first or its last one where it has none."""
    number = jnp.clip(tick - stage, 0, rounds * microbatches - 1)
    if rounds == 1:
        return Turn(number, 0, number)
    block, place = jnp.divmod(number, rounds * stages)
    return Turn(number, place // stages, block * stages + place % stages)


class _Loop:
    """A group on a segment's stages, forward and backward."""

    def __init__(self, segment: Segment, params: Params, x: Tree, fields: Tree, *, records: bool):
        self.segment = segment
        self.params = _prepared(segment, params)
        self.x, self.fields = _varying(x, "stage"), _varying(fields, "stage")
        self.m, self.s, self.rounds = segment.microbatches, segment.stages, segment.plan.rounds
        self.n_turns = self.rounds * self.m
        self.n_ticks = segment.plan.ticks(self.s, self.m)
        self.stage = lax.axis_index("stage")
        # Forward a stage passes on to the next one, the last to the first in all rounds but the
        # last one.
        self.ring = [(j, (j + 1) % self.s) for j in range(self.s - (self.rounds == 1))]
        here, now = _at(self.x, jnp.int32(0)), _at(self.fields, jnp.int32(0))
        like = here.get("hidden")
        if segment.plan.first:
            like = jax.eval_shape(segment.module.entry, self.params["entry"], {**now, **here})
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        self.no_hidden = split(_varying(nothing, "stage", "data"), segment.tensor_ranks)
        self.pieces = Pieces(segment, self.params, here, now, self.no_hidden, records=records)

    def _turn(self, t: Array) -> Turn:
        return turn_at(t, self.stage, microbatches=self.m, stages=self.s, rounds=self.rounds)

    def _now(self, turn: Turn) -> tuple[Tree, Tree]:
        """(x, fields) of a turn's microbatch."""
        return _at(self.x, turn.microbatch), _at(self.fields, turn.microbatch)

    def _enters(self, turn: Turn) -> Array:
        """Whether a turn begins with what comes into the loop."""
        first = self.stage == 0
        return first if self.rounds == 1 else first & (turn.round == 0)

    def _leaves(self, t: Array, turn: Turn) -> Array:
        """Whether what leaves the loop may come from a turn, of the last stage."""
        begun = t >= self.stage
        return begun if self.rounds == 1 else begun & (turn.round == self.rounds - 1)

    def _first_rows(self, turn: Turn) -> dict[str, int | Array]:
        """By kind, the row of the first layer that a turn goes through."""
        return {kind: turn.round * n for kind, n in Counter(self.segment.chunk_kinds).items()}

    # ---- layers ----

    def run(self) -> tuple[Tree, Tree, Tree]:
        """Run a group up to the exit: ({"taps": ...} if there are any, hidden states [M / S, ...],
        {"turns": what backward needs of layers [turns, ...], "entry": of the entry [M, ...]})."""
        ticks = jnp.arange(self.n_ticks)
        if self.s == 1:
            _, (of_microbatches, of_turns) = _ticks(self._tick, None, ticks)
        else:
            _, made = jax.eval_shape(self._tick, self.no_hidden, ticks[0])
            start = self.no_hidden, (_nothing(self.m, made[0]), _nothing(self.n_turns, made[1]))
            (_, (of_microbatches, of_turns)), _ = _ticks(self._tick_into, start, ticks)
        hs, tapped, of_entry = of_microbatches
        y = {"taps": tapped} if self.segment.taps else {}
        return y, self._scatter_over_stages(hs), {"entry": of_entry, "turns": of_turns}

    def _tick_into(self, carry: tuple[Tree, Tree], t: Array) -> tuple[Tree, None]:
        """A tick that writes what it makes to its places. Of what is kept for a microbatch, the
        last round's stays: hidden states that leave, and what is the same in every round."""
        passed, (of_microbatches, of_turns) = carry
        passed, (of_microbatch, of_turn) = self._tick(passed, t)
        turn = self._turn(t)
        every = (
            _put(of_microbatches, of_microbatch, turn.microbatch),
            _put(of_turns, of_turn, turn.number),
        )
        return (passed, every), None

    def _tick(self, carry: Tree, t: Array) -> tuple[Tree, tuple[Tree, Tree]]:
        turn = self._turn(t)
        x, fields = self._now(turn)
        of_entry: list[Array] = []
        if self.segment.plan.first:
            h, of_entry = self.pieces.forward("entry", self.params, None, x, fields)
        else:
            h = x["hidden"]
        if carry is not None:
            h = _where(self._enters(turn), h, carry)
        first, read = self._first_rows(turn), h
        h, tapped, of_turn = self.pieces.run_layers(self.params, h, x, fields, first)
        if carry is not None:
            carry = lax.ppermute(h, "stage", self.ring)
            if self.rounds > 1:  # without another turn, the last one is taken again
                carry = _where(t - self.stage < self.n_turns - 1, carry, read)
        return carry, ((h, tapped, of_entry), of_turn)

    def run_back(
        self, residuals: Tree, douts: Tree, dtapped: Tree, grads: Tree
    ) -> tuple[Tree, Tree]:
        """The gradient of `run`: (of x [M, ...], grads + parameters')."""
        ticks, of_entry, of_turns = jnp.arange(self.n_ticks), residuals["entry"], residuals["turns"]
        if self.s == 1:
            every = ticks, of_entry, of_turns, douts, dtapped
            (_, grads), dx = _ticks(self._tick_back, (None, grads), every, reverse=True)
            return dx, grads
        of_microbatches = of_entry, self._gather_from_stages(douts), dtapped

        def tick_back(carry: tuple[Tree, Tree], t: Array) -> tuple[Tree, None]:
            state, every_dx = carry
            turn = self._turn(t)
            entry, dh, more = _at(of_microbatches, turn.microbatch)
            dh = _where(self._leaves(t, turn), dh, jax.tree.map(jnp.zeros_like, dh))
            now = t, entry, _at(of_turns, turn.number), dh, more
            state, dx = self._tick_back(state, now)
            # Its first turn, which is a microbatch's only one that reads x, is its last one here.
            return (state, _put(every_dx, dx, turn.microbatch)), None

        reads = self.segment.entry_inputs if self.segment.plan.first else ("hidden",)
        wanted = self.segment.wants_gradient & {*reads}
        like = jax.tree.map(lambda a: a[0], {k: a for k, a in self.x.items() if k in wanted})
        start = (self.no_hidden, grads), _nothing(self.m, like)
        ((_, grads), dx), _ = _ticks(tick_back, start, ticks, reverse=True)
        return dx, grads

    def _tick_back(self, carry: tuple[Tree, Tree], now: Tree) -> tuple[Tree, Tree]:
        (passed, grads), (t, of_entry, of_turn, dh, dtapped) = carry, now
        turn = self._turn(t)
        x, fields = self._now(turn)
        if passed is not None:
            back = [(b, a) for a, b in self.ring]
            dh = jax.tree.map(jnp.add, dh, lax.ppermute(passed, "stage", back))
        dh, dx, grads = self.pieces.run_layers_back(
            of_turn, self.params, x, fields, dh, dtapped, grads, self._first_rows(turn)
        )
        if passed is not None:
            nothing, enters = jax.tree.map(jnp.zeros_like, dh), self._enters(turn)
            dh, passed = _where(enters, dh, nothing), _where(enters, nothing, dh)
        if self.segment.plan.first:
            _, dplaced, grads = self.pieces.backward(
                "entry", of_entry, self.params, x, fields, dh, grads
            )
            dx |= dplaced
        elif "hidden" in self.segment.wants_gradient:
            dx["hidden"] = dh
        return (passed, grads), dx

    # ---- exits ----

    def _own_share(self) -> Tree:
        """Fields of the M / S microbatches whose ends are this stage's."""
        n = self.m // self.s
        first = self.stage * n
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, n), self.fields)

    def run_exit(self, outs: Tree) -> tuple[Tree, Tree]:
        """(what the exit gives, what its backward needs), both [M / S, ...]."""

        def visit(_: None, now: tuple[Tree, Tree]) -> tuple[None, tuple[Tree, Tree]]:
            return None, self.pieces.forward("exit", self.params, now[0], {}, now[1])

        return lax.scan(visit, None, (outs, self._own_share()))[1]

    def run_exit_back(self, residuals: Tree, dexit: Array, grads: Tree) -> tuple[Tree, Tree]:
        """(the gradient of `run_exit`'s hidden states, grads + parameters')."""

        def visit(grads: Tree, now: Tree) -> tuple[Tree, Tree]:
            of_microbatch, fields, dout = now
            dh, _, grads = self.pieces.backward(
                "exit", of_microbatch, self.params, {}, fields, dout, grads
            )
            return grads, self.no_hidden if dh is None else dh

        grads, douts = lax.scan(visit, grads, (residuals, self._own_share(), dexit))
        return douts, grads

    def run_loss_back(self, outs: Tree, scale: Array, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """(the loss's sums, the gradient of `outs`, grads + parameters'): each microbatch's
        gradient in the visit that computes its loss, so that the exit's is never held for
        several."""
        reads = ("exit", adapter_of("exit"), *(("entry",) if self.segment.module.tied else ()))
        free = {k: self.params[k] for k in reads if k in self.segment.trainable}

        def visit(totals: Tree, now: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
            def loss(free: Params, h: Tree) -> Tree:
                params = {**self.params, **free}
                entry = params.get("entry") if self.segment.module.tied else None
                whole = before_exit(h, self.segment.tensor_ranks)
                return self.segment.module.exit(with_adapter("exit", params), whole, now[1], entry)

            sums, vjp = jax.vjp(loss, free, now[0])
            dfree, dh = vjp({k: scale if k == "loss_sum" else jnp.zeros_like(v)
                             for k, v in sums.items()})  # fmt: skip
            return added(self.segment, totals, dfree), (sums, dh)

        totals = {k: grads[k] for k in free}
        totals, (sums, douts) = lax.scan(visit, totals, (outs, self._own_share()))
        return jax.tree.map(lambda a: a[:, None], sums), douts, {**grads, **totals}

    def _scatter_over_stages(self, outs: Tree) -> Tree:
        """[M, ...] valid on the last stage -> [M / S, ...] on each, so that ends use all."""
        if self.s == 1:
            return outs
        scatter = partial(lax.psum_scatter, axis_name="stage", scatter_dimension=0, tiled=True)
        return _in_float32(scatter, self._on_last_stage(outs), self.segment.tensor_ranks)

    def _gather_from_stages(self, douts: Tree) -> Tree:
        """The transpose of `_scatter_over_stages`."""
        gather = partial(lax.all_gather, axis_name="stage", tiled=True)
        return self._on_last_stage(_in_float32(gather, douts, self.segment.tensor_ranks))

    def _on_last_stage(self, tree: Tree) -> Tree:
        return _where(self.stage == self.s - 1, tree, jax.tree.map(jnp.zeros_like, tree))


def _ticks(body: Any, carry: Tree, now: Tree, *, reverse: bool = False) -> tuple[Tree, Tree]:
    """`lax.scan`; a single tick runs without a loop."""
    if jax.tree.leaves(now)[0].shape[0] > 1:
        return lax.scan(body, carry, now, reverse=reverse)
    carry, out = body(carry, jax.tree.map(lambda a: a[0], now))
    return carry, jax.tree.map(lambda a: a[None], out)


def _where(condition: Array, tree: Tree, other: Tree) -> Tree:
    return jax.tree.map(partial(jnp.where, condition), tree, other)


def _in_float32(collective: Any, tree: Tree, ways: int) -> Tree:
    """`by_tensor_rank` of hidden states: a reduction of bfloat16 under partial-manual mode aborts
    on CPU."""
    return jax.tree.map(
        lambda a: by_tensor_rank(collective, a.astype(jnp.float32), ways).astype(a.dtype), tree
    )


def _at(tree: Tree, i: Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def _put(every: Tree, one: Tree, i: Array) -> Tree:
    return jax.tree.map(
        lambda a, b: lax.dynamic_update_index_in_dim(a, b, index=i, axis=0), every, one
    )


def _nothing(n: int, like: Tree) -> Tree:
    """Zeros [n, ...] to be written to."""
    zeros = jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), like)
    return _varying(zeros, "stage", "data")


def _varying(tree: Tree, *axes: str) -> Tree:
    """Mark as differing along mesh axes, so that gradients stay unreduced along them."""
    return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), tree)


def _prepared(segment: Segment, params: Params) -> Params:
    """Parameters marked as differing per rank: layers along data, ends along stage too. Ends are
    gathered where they are split over data ranks, layers when their turn comes."""
    cuts = held_cuts(segment)

    def mark(part: str, array: Array, cut: Cut) -> Array:
        axes = () if part in segment.stacked else ("stage",)
        if not cut.is_split:  # else it differs along data as it is
            axes = (*axes, "data")
        return lax.pcast(array, axes, to="varying") if axes else array

    marked = {part: jax.tree.map(partial(mark, part), params[part], cuts[part]) for part in params}
    ends = {part: tree for part, tree in marked.items() if part not in segment.stacked}
    whole = shards.gather(segment.mesh, {part: cuts[part] for part in ends}, ends)
    return {**marked, **whole}
