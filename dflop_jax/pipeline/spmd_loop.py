"""The loop inside a segment: per-device code under `shard_map`, manual over (stage, data).

A group's microbatches flow through the stages: at tick t stage s works on microbatch t - s and
passes its activations on with `ppermute`. The axis "model" stays automatic, so tensor parallelism
comes from the parameters' shardings alone. With one stage the same code is a plain scan.

A segment takes `x`, arrays [M, rows, tokens, width] by name: "hidden" from the segment before it
and what edges bring, by their names. It gives `y`: {"next": hidden states for the segment after it,
"exit": features, "taps": {name: features}, "sums": {name: scalars of the loss}}, as far as it has
them. M counts microbatches in a group, S stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Params

if TYPE_CHECKING:
    from dflop_jax.pipeline.segment import Segment

Tree = Any
PARTS = ("entry", "layers", "exit")  # of every module
ADAPTER = "adapter"  # of some
STACKED = frozenset({"layers", ADAPTER})  # with a leading dim of layers, over the stages
# What a layer keeps for its backward; the rest is computed again.
REMAT: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda layer: layer,  # everything
    "layers": jax.checkpoint,  # its input
    "dots": partial(  # and the products with its weights
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def _at(tree: Tree, i: Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def _varying(tree: Tree, *axes: str) -> Tree:
    """Mark as differing along mesh axes, so that gradients stay unreduced along them."""
    return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), tree)


def _scan_layers(segment: Segment, layers: Params, h: Array, fields: Tree) -> Array:
    layer = REMAT[segment.plan.remat](segment.module.layer)
    return lax.scan(lambda x, p: (layer(p, x, fields), None), h, layers)[0]


def layer_params(params: Params) -> Params:
    """What a layer gets: its parameters, with its adapter among them."""
    if ADAPTER not in params:
        return params["layers"]
    return {**params["layers"], ADAPTER: params[ADAPTER]}


def _run_layers(
    segment: Segment, params: Params, h: Array, x: Tree, fields: Tree
) -> tuple[Array, dict[str, Array]]:
    """The segment's layers on hidden states: (hidden states, outputs of its taps)."""
    layers = layer_params(params)
    tapped: dict[str, Array] = {}
    if not (segment.taps or segment.inlets):
        return _scan_layers(segment, layers, h, fields), tapped
    n_layers = jax.tree.leaves(layers)[0].shape[0]
    done = 0
    for stop in sorted({n for _, n in (*segment.taps, *segment.inlets)} | {n_layers}):
        if stop > done:
            part = jax.tree.map(lambda a, lo=done, hi=stop: a[lo:hi], layers)
            h, done = _scan_layers(segment, part, h, fields), stop
        for name in (name for name, n in segment.taps if n == stop):
            tapped[name] = segment.module.tap(name, params.get(name), h, fields)  # type: ignore[attr-defined]
        for name in (name for name, n in segment.inlets if n == stop):
            h = segment.module.inlet(name, h, x[name], fields)  # type: ignore[attr-defined]
    return h, tapped


def _first_input(segment: Segment, params: Params, x: Tree, fields: Tree) -> Array:
    """Hidden states at the top of the segment: the entry's, or those received."""
    if not segment.plan.first:
        return x["hidden"]
    placed = {name: x[name] for name in segment.entry_inputs}
    return segment.module.entry(params["entry"], {**fields, **placed})


def _scatter_over_stages(segment: Segment, outs: Array) -> Array:
    """[M, ...] valid on the last stage -> [M / S, ...] on each, so that ends use all stages."""
    if segment.stages == 1:
        return outs
    mine = lax.axis_index("stage") == segment.stages - 1
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    masked = jnp.where(mine, outs, jnp.zeros_like(outs)).astype(jnp.float32)
    return lax.psum_scatter(masked, "stage", scatter_dimension=0, tiled=True).astype(outs.dtype)


def forward(segment: Segment, params: Params, x: Tree, fields: Tree, *, sums: bool) -> Tree:
    """Run a group; returns per-rank outputs `y` with a leading dim of M / S microbatches, those of
    taps M; `sums` says whether the loss's sums [M / S, 1] are wanted."""
    m, s = segment.microbatches, segment.stages
    stage = lax.axis_index("stage")

    def tick(carry: Array | None, t: Array) -> tuple[Array | None, tuple[Array, Tree]]:
        i = jnp.clip(t - stage, 0, m - 1)
        now, here = _at(fields, i), _at(x, i)
        h = _first_input(segment, params, here, now)
        if carry is not None:
            h = jnp.where(stage == 0, h, carry)
        h, tapped = _run_layers(segment, params, h, here, now)
        if carry is None:
            return None, (h, tapped)
        return lax.ppermute(h, "stage", [(j, j + 1) for j in range(s - 1)]), (h, tapped)

    if s == 1 and m == 1:
        hs, tapped = jax.tree.map(lambda a: a[None], tick(None, jnp.int32(0))[1])
    elif s == 1:
        hs, tapped = lax.scan(tick, None, jnp.arange(m))[1]
    else:
        zero = jnp.int32(0)
        like = jax.eval_shape(
            lambda: _first_input(segment, params, _at(x, zero), _at(fields, zero))
        )
        start = _varying(jnp.zeros(like.shape, like.dtype), "stage", "data")
        hs, tapped = lax.scan(tick, start, jnp.arange(m + s - 1))[1]
        hs = hs[s - 1 :]
    y: dict[str, Tree] = {"taps": tapped} if segment.taps else {}
    outs = _scatter_over_stages(segment, hs)
    if not segment.plan.last:
        return {**y, "next": outs}
    if segment.loss_sums and not sums:
        return y
    entry = params.get("entry") if segment.module.tied else None
    per_stage = m // s
    mine = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, stage * per_stage, per_stage), fields)

    def finish(_: None, now: tuple[Array, Tree]) -> tuple[None, Tree]:
        return None, segment.module.exit(params["exit"], now[0], now[1], entry)

    ends = lax.scan(finish, None, (outs, mine))[1]
    if segment.loss_sums:
        return {**y, "sums": jax.tree.map(lambda a: a[:, None], ends)}
    return {**y, "exit": ends}


def _prepared(params: Params) -> Params:
    """Parameters marked as differing per rank: layers along data, ends along stage too."""
    return {
        part: _varying(tree, "data") if part in STACKED else _varying(tree, "stage", "data")
        for part, tree in params.items()
    }


def _enter(x: Tree) -> Tree:
    return _varying(x, "stage")


def forward_program(segment: Segment, params: Params, x: Tree, fields: Tree, *, sums: bool) -> Tree:
    return forward(segment, _prepared(params), _enter(x), _enter(fields), sums=sums)


def backward_program(
    segment: Segment, params: Params, x: Tree, fields: Tree, dy: Tree, grads: Tree
) -> tuple[Tree, Tree, Tree, Array]:
    """Recompute the forward, then its gradient: (sums, dx, grads + gradient, done).

    `dy` is the cotangent of `forward`'s output; for the loss's sums it is one scalar, the scale of
    "loss_sum". `grads` has a leading dim of 1 here: gradients of ranks are kept apart until the
    step's single reduction. `done` is a small output to wait for, since `grads` is donated onwards.
    """
    params, x, fields = _prepared(params), _enter(x), _enter(fields)
    frozen = {k: v for k, v in params.items() if k not in segment.trainable}
    free = {k: v for k, v in params.items() if k in segment.trainable}
    wanted = {k: v for k, v in x.items() if k in segment.wants_gradient}
    fixed = {k: v for k, v in x.items() if k not in segment.wants_gradient}

    def run(free: Params, wanted: Tree) -> Tree:
        return forward(segment, {**frozen, **free}, {**fixed, **wanted}, fields, sums=True)

    y, vjp = jax.vjp(run, free, wanted)
    if segment.loss_sums:
        scale = _varying(dy["sums"], "stage", "data")
        dsums = {
            k: jnp.broadcast_to(scale, v.shape) if k == "loss_sum" else jnp.zeros_like(v)
            for k, v in y["sums"].items()
        }
        dy = {**dy, "sums": dsums}
    dparams, dx = vjp(dy)
    grads = jax.tree.map(lambda a, g: a + g[None], grads, dparams)
    # Only stage 0 read x, so its gradient is zero elsewhere: the sum broadcasts it.
    dx = jax.tree.map(lambda a: lax.psum(a.astype(jnp.float32), "stage").astype(a.dtype), dx)
    done = _varying(jnp.zeros((1, 1), jnp.float32), "stage", "data")
    return y.get("sums", {}), dx, grads, done
