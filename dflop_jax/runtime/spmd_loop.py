"""The loop inside a segment: per-device code under `shard_map`, manual over (stage, data).

The loop is a pipeline: at tick t, stage s works on slot t - s and sends its activations on with
`ppermute`. A slot is a microbatch; with several rounds (interleaving), a slot is a microbatch in a
round, and each stage holds different layers in each round. With R rounds and S stages, S
microbatches go round the ring R times before the next S enter. Slots are numbered in this order:
the first stage reads in its next tick what the last stage computed in the round before.

The axis "model" stays automatic: tensor parallelism follows from the shardings of parameters and of
activations (`token_split`). With one stage the same code is a plain scan. Backward runs the ticks
in reverse on the residuals of each slot. A stage that has no slot yet computes a value that its
first slot overwrites; a stage that has no slot left repeats its last slot on equal inputs. The
gradients of such ticks are zeros.

A segment takes `x`, arrays [M, rows, tokens, ...] by name: "hidden" from the previous segment (an
array or a tree of arrays) and one array per edge. It returns `y`: {"next": hidden states for the
next segment, "exit": features, "taps": {name: features}, "sums": {name: scalars of the loss},
"residuals": input of its backward}; each key may be absent. M counts microbatches in a group, S
stages.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params, adapter_of
from dflop_jax.runtime import shards
from dflop_jax.runtime.parameter_layout import param_zero_specs
from dflop_jax.runtime.residuals import SplitVjp
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.segment_functions import SegmentFunctions, add_gradients
from dflop_jax.runtime.token_split import run_module_part, run_per_tensor_rank, shard_tokens
from dflop_jax.runtime.zero_sharding import ZeroSpec

Tree = Any
Vjps = dict[str, SplitVjp]  # of a segment's functions, by name: traced once for all its programs


def forward_program(
    segment: Segment, vjps: Vjps, params: Params, x: Tree, fields: Tree, *, sums: bool
) -> Tree:
    """Run a group; return per-rank outputs `y` with a leading dim of M / S microbatches, or M for
    taps. `sums`: whether to return the loss's sums [M / S, 1] and no residuals."""
    saves_residuals = segment.saves_residuals and not sums
    loop = _StageLoop(segment, vjps, params, x, fields, saves_residuals=saves_residuals)
    y, outs, residuals = loop.forward()
    if not segment.plan.last:
        y["next"] = outs
    elif not segment.has_loss:
        y["exit"], residuals["exit"] = loop.forward_exit(outs)
    elif sums:
        y["sums"] = jax.tree.map(lambda a: a[:, None], loop.forward_exit(outs)[0])
    else:
        residuals["outs"] = outs
    if saves_residuals:
        y["residuals"] = jax.tree.map(lambda a: a[None, None], residuals)
    return y


def backward_program(
    segment: Segment,
    vjps: Vjps,
    params: Params,
    x: Tree,
    fields: Tree,
    dy: Tree,
    grads: Tree,
    residuals: Tree,
) -> tuple[Tree, Tree, Tree, Array]:
    """Return the gradient of a group: (sums, dx, grads + gradient, completion).

    `dy` is the cotangent of `y`; for the loss's sums it is one scalar, the scale of "loss_sum".
    `residuals` come from `forward_program`; if the segment saves none, forward runs here.
    `completion` is a small output to wait for, since `grads` is donated to the next program.
    """
    loop = _StageLoop(segment, vjps, params, x, fields, saves_residuals=True)
    if segment.saves_residuals:
        saved = jax.tree.map(lambda a: a[0, 0], residuals)
    else:
        _, outs, saved = loop.forward()
        if segment.has_loss:
            saved["outs"] = outs
        elif segment.plan.last:
            saved["exit"] = loop.forward_exit(outs)[1]
    sums: Tree = {}
    if segment.has_loss:
        scale = _mark_varying(dy["sums"], "stage", "data")
        sums, douts, grads = loop.backward_loss(saved["outs"], scale, grads)
    elif segment.plan.last:
        douts, grads = loop.backward_exit(saved["exit"], dy["exit"], grads)
    else:
        douts = dy["next"]
    dx: Tree = {}
    if loop.functions.differentiates_hidden or segment.taps:
        dx, grads = loop.backward(saved, douts, dy.get("taps", {}), grads)
    # Only stage 0 reads x, so its gradient is zero on other stages, and the sum broadcasts it.
    for name, a in dx.items():
        tp = segment.tp if name == "hidden" else 1  # other inputs are not sharded
        dx[name] = _in_float32(partial(lax.psum, axis_name="stage"), a, tp)
    completion = _mark_varying(jnp.zeros((1, 1), jnp.float32), "stage", "data")
    return sums, dx, grads, completion


class LoopSlot(NamedTuple):
    """A microbatch in a round. With one round, `round` is the integer 0, to avoid computations."""

    number: Array
    round: int | Array
    microbatch: Array


def slot_at(tick: Array, stage: Array, *, microbatches: int, stages: int, rounds: int) -> LoopSlot:
    """Return a stage's slot at a tick: before its start the first slot, after its end the last."""
    number = jnp.clip(tick - stage, 0, rounds * microbatches - 1)
    if rounds == 1:
        return LoopSlot(number, 0, number)
    ring_pass, position = jnp.divmod(number, rounds * stages)
    return LoopSlot(number, position // stages, ring_pass * stages + position % stages)


class _StageLoop:
    """The pipeline loop of a group on a segment's stages, forward and backward."""

    def __init__(
        self,
        segment: Segment,
        vjps: Vjps,
        params: Params,
        x: Tree,
        fields: Tree,
        *,
        saves_residuals: bool,
    ):
        self.segment = segment
        self.params = _prepare_params(segment, params)
        self.x, self.fields = _mark_varying(x, "stage"), _mark_varying(fields, "stage")
        self.m, self.s, self.rounds = segment.microbatches, segment.stages, segment.plan.rounds
        self.n_slots = self.rounds * self.m
        self.n_ticks = segment.plan.ticks(self.s, self.m)
        self.stage = lax.axis_index("stage")
        # A stage sends to the next one; with several rounds, the last stage sends to the first one.
        self.ring = [(j, (j + 1) % self.s) for j in range(self.s - (self.rounds == 1))]
        first_x, first_fields = _index_tree((self.x, self.fields), jnp.int32(0))
        hidden = first_x.get("hidden")
        if segment.plan.first:
            inputs = {**first_fields, **first_x}
            hidden = jax.eval_shape(segment.module.entry, self.params["entry"], inputs)
        zero_hidden = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), hidden)
        self.zero_hidden = shard_tokens(_mark_varying(zero_hidden, "stage", "data"), segment.tp)
        examples = self.params, first_x, first_fields, self.zero_hidden
        self.functions = SegmentFunctions(
            segment, *examples, saves_residuals=saves_residuals, vjps=vjps
        )

    def _slot(self, t: Array) -> LoopSlot:
        return slot_at(t, self.stage, microbatches=self.m, stages=self.s, rounds=self.rounds)

    def _is_entering(self, slot: LoopSlot) -> Array:
        """Return whether a slot reads an input of the loop."""
        first = self.stage == 0
        return first if self.rounds == 1 else first & (slot.round == 0)

    def _first_rows(self, slot: LoopSlot) -> dict[str, int | Array]:
        """Return, by kind, the row of the first layer of a slot."""
        return {kind: slot.round * n for kind, n in Counter(self.segment.chunk_kinds).items()}

    # ---- layers ----

    def forward(self) -> tuple[Tree, Tree, Tree]:
        """Run a group up to the exit: ({"taps": ...} if there are any, hidden states [M / S, ...],
        {"slots": residuals of layers [slots, ...], "entry": residuals of the entry [M, ...]})."""
        ticks = jnp.arange(self.n_ticks)
        if self.s == 1:
            _, (by_microbatch, by_slot) = _scan_ticks(self._tick, None, ticks)
        else:
            _, shapes = jax.eval_shape(self._tick, self.zero_hidden, ticks[0])
            stacks = _zero_stack(self.m, shapes[0]), _zero_stack(self.n_slots, shapes[1])
            carry = self.zero_hidden, stacks
            (_, (by_microbatch, by_slot)), _ = _scan_ticks(self._tick_into, carry, ticks)
        hs, tapped, of_entry = by_microbatch
        y = {"taps": tapped} if self.segment.taps else {}
        if self.s > 1:  # [M, ...] valid on the last stage -> [M / S, ...] on each, for the exit
            scatter = partial(lax.psum_scatter, axis_name="stage", scatter_dimension=0, tiled=True)
            hs = _in_float32(scatter, self._on_last_stage(hs), self.segment.tp)
        return y, hs, {"entry": of_entry, "slots": by_slot}

    def _tick_into(self, carry: tuple[Tree, Tree], t: Array) -> tuple[Tree, None]:
        """Run one tick and write its outputs into the stacks, over those of earlier rounds."""
        passed, (by_microbatch, by_slot) = carry
        passed, (of_microbatch, of_slot) = self._tick(passed, t)
        slot = self._slot(t)
        by_microbatch = _update_tree(by_microbatch, of_microbatch, slot.microbatch)
        return (passed, (by_microbatch, _update_tree(by_slot, of_slot, slot.number))), None

    def _tick(self, carry: Tree, t: Array) -> tuple[Tree, tuple[Tree, Tree]]:
        slot = self._slot(t)
        x, fields = _index_tree((self.x, self.fields), slot.microbatch)
        of_entry: list[Array] = []
        if self.segment.plan.first:
            h, of_entry = self.functions.forward("entry", None, x, fields)
        else:
            h = x["hidden"]
        if carry is not None:
            h = _select(self._is_entering(slot), h, carry)
        first, read = self._first_rows(slot), h
        h, tapped, slot_residuals = self.functions.forward_layers(h, x, fields, first)
        if carry is not None:
            carry = lax.ppermute(h, "stage", self.ring)
            if self.rounds > 1:  # a stage that has ended repeats its last slot
                carry = _select(t - self.stage < self.n_slots - 1, carry, read)
        return carry, ((h, tapped, of_entry), slot_residuals)

    def backward(
        self, residuals: Tree, douts: Tree, dtapped: Tree, grads: Tree
    ) -> tuple[Tree, Tree]:
        """Return the gradient of `forward`: (gradient of x [M, ...], grads + parameters')."""
        ticks, of_entry, by_slot = jnp.arange(self.n_ticks), residuals["entry"], residuals["slots"]
        if self.s == 1:
            scanned, carry = (ticks, of_entry, by_slot, douts, dtapped), (None, grads)
            (_, grads), dx = _scan_ticks(self._backward_tick, carry, scanned, reverse=True)
            return dx, grads
        gather = partial(lax.all_gather, axis_name="stage", tiled=True)
        douts = self._on_last_stage(_in_float32(gather, douts, self.segment.tp))
        by_microbatch = of_entry, douts, dtapped

        def tick_back(carry: tuple[Tree, Tree], t: Array) -> tuple[Tree, None]:
            state, every_dx = carry
            slot = self._slot(t)
            entry, dh, more = _index_tree(by_microbatch, slot.microbatch)
            leaves = t >= self.stage  # whether a slot of the last stage may return an output
            if self.rounds > 1:
                leaves &= slot.round == self.rounds - 1
            dh = _select(leaves, dh, jax.tree.map(jnp.zeros_like, dh))
            scanned = t, entry, _index_tree(by_slot, slot.number), dh, more
            state, dx = self._backward_tick(state, scanned)
            # Only the first slot of a microbatch reads x; in reverse order it comes last.
            return (state, _update_tree(every_dx, dx, slot.microbatch)), None

        reads = self.segment.entry_inputs if self.segment.plan.first else ("hidden",)
        wanted = self.segment.wants_gradient & {*reads}
        inputs_like = jax.tree.map(lambda a: a[0], {k: a for k, a in self.x.items() if k in wanted})
        start = (self.zero_hidden, grads), _zero_stack(self.m, inputs_like)
        ((_, grads), dx), _ = _scan_ticks(tick_back, start, ticks, reverse=True)
        return dx, grads

    def _backward_tick(self, carry: tuple[Tree, Tree], scanned: Tree) -> tuple[Tree, Tree]:
        (passed, grads), (t, of_entry, slot_residuals, dh, dtapped) = carry, scanned
        slot = self._slot(t)
        x, fields = _index_tree((self.x, self.fields), slot.microbatch)
        if passed is not None:
            reverse_ring = [(b, a) for a, b in self.ring]
            dh = jax.tree.map(jnp.add, dh, lax.ppermute(passed, "stage", reverse_ring))
        dh, dx, grads = self.functions.backward_layers(
            slot_residuals, x, fields, dh, dtapped, grads, self._first_rows(slot)
        )
        if passed is not None:
            zeros, enters = jax.tree.map(jnp.zeros_like, dh), self._is_entering(slot)
            dh, passed = _select(enters, dh, zeros), _select(enters, zeros, dh)
        if self.segment.plan.first:
            _, dinputs, grads = self.functions.backward("entry", of_entry, x, fields, dh, grads)
            dx |= dinputs
        elif "hidden" in self.segment.wants_gradient:
            dx["hidden"] = dh
        return (passed, grads), dx

    # ---- exits ----

    def _stage_fields(self) -> Tree:
        """Return the fields of the M / S microbatches whose exits this stage runs."""
        n = self.m // self.s
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.stage * n, n), self.fields)

    def forward_exit(self, outs: Tree) -> tuple[Tree, Tree]:
        """Run the exit; return (its outputs, residuals), both [M / S, ...]."""

        def visit(_: None, scanned: tuple[Tree, Tree]) -> tuple[None, tuple[Tree, Tree]]:
            return None, self.functions.forward("exit", scanned[0], {}, scanned[1])

        return lax.scan(visit, None, (outs, self._stage_fields()))[1]

    def backward_exit(self, residuals: Tree, dexit: Array, grads: Tree) -> tuple[Tree, Tree]:
        """Return (gradient of `forward_exit`'s hidden states, grads + parameters')."""

        def visit(grads: Tree, scanned: Tree) -> tuple[Tree, Tree]:
            of_microbatch, fields, dout = scanned
            dh, _, grads = self.functions.backward("exit", of_microbatch, {}, fields, dout, grads)
            return grads, self.zero_hidden if dh is None else dh

        grads, douts = lax.scan(visit, grads, (residuals, self._stage_fields(), dexit))
        return douts, grads

    def backward_loss(self, outs: Tree, scale: Array, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """Return (the loss's sums, the gradient of `outs`, grads + parameters'). A visit computes
        one microbatch's loss and gradient, so memory holds the exit's residuals only once."""
        module, tp = self.segment.module, self.segment.tp
        reads = ("exit", adapter_of("exit"), *(("entry",) if module.tied else ()))
        trained = {k: self.params[k] for k in reads if k in self.segment.trainable}

        def visit(totals: Tree, scanned: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
            def loss(trained: Params, h: Tree) -> Tree:
                params = {**self.params, **trained}
                entry = {} if module.tied else {"entry": None}
                return run_module_part(module, "exit", tp, {**params, **entry}, h, {}, scanned[1])

            sums, vjp = jax.vjp(loss, trained, scanned[0])
            scales = {k: jnp.zeros_like(v) for k, v in sums.items()} | {"loss_sum": scale}
            dtrained, dh = vjp(scales)
            return add_gradients(self.segment, totals, dtrained), (sums, dh)

        totals = {k: grads[k] for k in trained}
        totals, (sums, douts) = lax.scan(visit, totals, (outs, self._stage_fields()))
        return jax.tree.map(lambda a: a[:, None], sums), douts, {**grads, **totals}

    def _on_last_stage(self, tree: Tree) -> Tree:
        return _select(self.stage == self.s - 1, tree, jax.tree.map(jnp.zeros_like, tree))


def _scan_ticks(
    body: Any, carry: Tree, scanned: Tree, *, reverse: bool = False
) -> tuple[Tree, Tree]:
    """Run `lax.scan`, without a loop if there is a single tick."""
    if jax.tree.leaves(scanned)[0].shape[0] > 1:
        return lax.scan(body, carry, scanned, reverse=reverse)
    carry, outputs = body(carry, jax.tree.map(lambda a: a[0], scanned))
    return carry, jax.tree.map(lambda a: a[None], outputs)


def _select(condition: Array, tree: Tree, otherwise: Tree) -> Tree:
    return jax.tree.map(partial(jnp.where, condition), tree, otherwise)


def _in_float32(collective: Any, tree: Tree, tp: int) -> Tree:
    """Run a collective per tensor rank in float32: in bfloat16 it aborts on CPU."""
    return jax.tree.map(
        lambda a: run_per_tensor_rank(collective, a.astype(jnp.float32), tp).astype(a.dtype), tree
    )


def _index_tree(tree: Tree, i: Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def _update_tree(stack: Tree, tree: Tree, i: Array) -> Tree:
    return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b, i, 0), stack, tree)


def _zero_stack(n: int, struct: Tree) -> Tree:
    """Return a stack of zeros [n, ...]."""
    zeros = jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), struct)
    return _mark_varying(zeros, "stage", "data")


def _mark_varying(tree: Tree, *axes: str) -> Tree:
    """Mark arrays as differing along mesh axes, so that gradients stay unreduced along them."""
    return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), tree)


def _prepare_params(segment: Segment, params: Params) -> Params:
    """Mark parameters as differing per rank: layers along data, entry and exit along stage, too. If
    data ranks split entry and exit, they are gathered here; layers are gathered before they run."""
    zero_specs = param_zero_specs(segment)

    def mark_varying(part: str, array: Array, zero_spec: ZeroSpec) -> Array:
        axes = () if part in segment.stacked else ("stage",)
        if not zero_spec.is_split:  # if split, it already differs along data
            axes = (*axes, "data")
        return lax.pcast(array, axes, to="varying") if axes else array

    varying = {p: jax.tree.map(partial(mark_varying, p), params[p], zero_specs[p]) for p in params}
    ends = {part: tree for part, tree in varying.items() if part not in segment.stacked}
    gathered = shards.all_gather(segment.mesh, {part: zero_specs[part] for part in ends}, ends)
    return {**varying, **gathered}
