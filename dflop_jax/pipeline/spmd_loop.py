"""The loop inside a segment: per-device code under `shard_map`, manual over (stage, data).

A group's microbatches flow through the stages: at tick t stage s works on microbatch t - s and
passes its activations on with `ppermute`. The axis "model" stays automatic, so tensor parallelism
comes from the parameters' shardings alone. With one stage the same code is a plain scan.

Shapes: M microbatches in a group, S stages; x is [M, items, tokens, width] on a data rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflop_jax.contract import Array, Module, Params

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


@dataclass(frozen=True)
class SegmentLoop:
    """What the loop has to know of a segment; `trainable` are parts that get gradients."""

    module: Module
    first: bool
    last: bool
    stages: int
    microbatches: int
    trainable: frozenset[str]
    sends_gradient: bool
    remat: str
    exit_keys: tuple[str, ...]

    @property
    def is_llm_end(self) -> bool:
        return "loss_sum" in self.exit_keys


def _at(tree: Tree, i: Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def _varying(tree: Tree, *axes: str) -> Tree:
    """Mark as differing along mesh axes, so that gradients stay unreduced along them."""
    return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), tree)


def _stack(loop: SegmentLoop, layers: Params, x: Array, fields: Tree) -> Array:
    layer = REMAT[loop.remat](loop.module.layer)
    return lax.scan(lambda h, p: (layer(p, h, fields), None), x, layers)[0]


def _layers(params: Params) -> Params:
    """What a layer gets: its parameters, with its adapter among them."""
    if ADAPTER not in params:
        return params["layers"]
    return {**params["layers"], ADAPTER: params[ADAPTER]}


def _first_input(loop: SegmentLoop, params: Params, x: Tree, fields: Tree) -> Array:
    """Hidden states at the top of the segment: the entry's, or those received."""
    if not loop.first:
        return x["hidden"]
    if x:  # every encoder's tokens stand in places of their own, with zeros elsewhere
        fields = {**fields, "visual": sum(x.values())}
    return loop.module.entry(params["entry"], fields)


def _scatter_over_stages(loop: SegmentLoop, outs: Array) -> Array:
    """[M, ...] valid on the last stage -> [M / S, ...] on each, so that ends use all stages."""
    if loop.stages == 1:
        return outs
    mine = lax.axis_index("stage") == loop.stages - 1
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    masked = jnp.where(mine, outs, jnp.zeros_like(outs)).astype(jnp.float32)
    return lax.psum_scatter(masked, "stage", scatter_dimension=0, tiled=True).astype(outs.dtype)


def forward(loop: SegmentLoop, params: Params, x: Tree, fields: Tree) -> Tree:
    """Run a group; returns per-rank outputs with a leading dim of M / S microbatches.

    Hidden states or features [M / S, items, tokens, width]; for the LLM's end a dict of sums
    [M / S, 1]. `x` is {}, {"hidden": ...} or features by encoder, leading dim M.
    """
    m, s = loop.microbatches, loop.stages
    stage = lax.axis_index("stage")

    def tick(carry: Array | None, t: Array) -> tuple[Array | None, Array]:
        i = jnp.clip(t - stage, 0, m - 1)
        now = _at(fields, i)
        h = _first_input(loop, params, _at(x, i), now)
        if carry is not None:
            h = jnp.where(stage == 0, h, carry)
        h = _stack(loop, _layers(params), h, now)
        if carry is None:
            return None, h
        return lax.ppermute(h, "stage", [(j, j + 1) for j in range(s - 1)]), h

    if s == 1:
        hs = lax.scan(tick, None, jnp.arange(m))[1] if m > 1 else tick(None, jnp.int32(0))[1][None]
    else:
        zero = jnp.int32(0)
        like = jax.eval_shape(lambda: _first_input(loop, params, _at(x, zero), _at(fields, zero)))
        start = _varying(jnp.zeros(like.shape, like.dtype), "stage", "data")
        hs = lax.scan(tick, start, jnp.arange(m + s - 1))[1][s - 1 :]
    outs = _scatter_over_stages(loop, hs)
    if not loop.last:
        return outs
    entry = params.get("entry") if loop.module.tied else None
    per_stage = m // s
    mine = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, stage * per_stage, per_stage), fields)

    def finish(_: None, at: tuple[Array, Tree]) -> tuple[None, Tree]:
        return None, loop.module.exit(params["exit"], at[0], at[1], entry)

    ys = lax.scan(finish, None, (outs, mine))[1]
    return jax.tree.map(lambda a: a[:, None], ys) if loop.exit_keys else ys


def _prepared(params: Params) -> Params:
    """Parameters marked as differing per rank: layers along data, ends along stage too."""
    return {
        part: _varying(tree, "data") if part in STACKED else _varying(tree, "stage", "data")
        for part, tree in params.items()
    }


def _enter(x: Tree) -> Tree:
    return _varying(x, "stage")


def forward_program(loop: SegmentLoop, params: Params, x: Tree, fields: Tree) -> Tree:
    return forward(loop, _prepared(params), _enter(x), _enter(fields))


def backward_program(
    loop: SegmentLoop, params: Params, x: Tree, fields: Tree, dy: Tree, grads: Tree
) -> tuple[Tree, Tree, Tree, Array]:
    """Recompute the forward, then its gradient: (outputs, dx, grads + gradient, done).

    `dy` is the cotangent of `forward`'s output; for the LLM's end it is a scalar scale of the loss
    sum. `grads` has a leading dim of 1 here: gradients of ranks are kept apart until the step's
    single reduction. `done` is a small output to wait for, since `grads` is donated onwards.
    """
    params, x, fields = _prepared(params), _enter(x), _enter(fields)
    frozen = {k: v for k, v in params.items() if k not in loop.trainable}
    free = {k: v for k, v in params.items() if k in loop.trainable}
    wanted = x if loop.sends_gradient else {}
    fixed = {} if loop.sends_gradient else x

    def run(free: Params, wanted: Tree) -> Tree:
        return forward(loop, {**frozen, **free}, {**fixed, **wanted}, fields)

    y, vjp = jax.vjp(run, free, wanted)
    if loop.is_llm_end:
        scale = _varying(dy, "stage", "data")
        dy = {
            k: jnp.broadcast_to(scale, v.shape) if k == "loss_sum" else jnp.zeros_like(v)
            for k, v in y.items()
        }
    dparams, dx = vjp(dy)
    grads = jax.tree.map(lambda a, g: a + g[None], grads, dparams)
    # Only stage 0 read x, so its gradient is zero elsewhere: the sum broadcasts it.
    dx = jax.tree.map(lambda a: lax.psum(a.astype(jnp.float32), "stage").astype(a.dtype), dx)
    done = _varying(jnp.zeros((1, 1), jnp.float32), "stage", "data")
    return (y if loop.is_llm_end else {}), dx, grads, done
