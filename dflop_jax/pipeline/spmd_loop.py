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
    y, outs = run_layers(segment, params, x, fields)
    if not segment.plan.last:
        return {**y, "next": outs}
    if segment.loss_sums and not sums:
        return y

    def finish(_: None, now: tuple[Array, Tree]) -> tuple[None, Tree]:
        return None, _exit(segment, params, *now)

    ends = lax.scan(finish, None, (outs, _own_share(segment, fields)))[1]
    if segment.loss_sums:
        return {**y, "sums": jax.tree.map(lambda a: a[:, None], ends)}
    return {**y, "exit": ends}


def run_layers(segment: Segment, params: Params, x: Tree, fields: Tree) -> tuple[Tree, Array]:
    """Run a group up to the exit: ({"taps": ...} if there are any, hidden states [M / S, ...])."""
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
    return y, _scatter_over_stages(segment, hs)


def _own_share(segment: Segment, fields: Tree) -> Tree:
    """Fields of the M / S microbatches whose ends are this stage's."""
    n = segment.microbatches // segment.stages
    first = lax.axis_index("stage") * n
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, n), fields)


def _exit(segment: Segment, params: Params, h: Array, fields: Tree) -> Tree:
    """The exit of one microbatch."""
    entry = params.get("entry") if segment.module.tied else None
    return segment.module.exit(params["exit"], h, fields, entry)


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
    ends_in_loss = bool(segment.loss_sums)
    # Parts that only the loss reads get their gradient where the loss is computed.
    later = {"exit"} if segment.plan.first else {"exit", "entry"}
    free = {k: params[k] for k in segment.trainable if not (ends_in_loss and k in later)}
    wanted = {k: x[k] for k in segment.wants_gradient}

    def run(free: Params, wanted: Tree) -> Any:
        run_to = run_layers if ends_in_loss else partial(forward, sums=True)
        return run_to(segment, {**params, **free}, {**x, **wanted}, fields)

    y, vjp = jax.vjp(run, free, wanted)
    sums: Tree = {}
    if ends_in_loss:
        scale = _varying(dy["sums"], "stage", "data")
        sums, douts, grads = _loss_gradient(segment, params, y[1], fields, scale, grads)
        dy = ({k: v for k, v in dy.items() if k != "sums"}, douts)
    dparams, dx = vjp(dy)
    grads = {**grads, **_added({k: grads[k] for k in free}, dparams)}
    # Only stage 0 read x, so its gradient is zero elsewhere: the sum broadcasts it.
    dx = jax.tree.map(lambda a: lax.psum(a.astype(jnp.float32), "stage").astype(a.dtype), dx)
    done = _varying(jnp.zeros((1, 1), jnp.float32), "stage", "data")
    return sums, dx, grads, done


def _loss_gradient(
    segment: Segment, params: Params, outs: Array, fields: Tree, scale: Array, grads: Tree
) -> tuple[Tree, Array, Tree]:
    """(the loss's sums, the gradient of `outs`, grads + gradient): each microbatch's gradient in
    the visit that computes its loss, so that the exit's is never held for several."""
    reads = ("exit", "entry") if segment.module.tied else ("exit",)
    free = {k: params[k] for k in reads if k in segment.trainable}

    def visit(totals: Tree, now: tuple[Array, Tree]) -> tuple[Tree, tuple[Tree, Array]]:
        def loss(free: Params, h: Array) -> Tree:
            return _exit(segment, {**params, **free}, h, now[1])

        sums, vjp = jax.vjp(loss, free, now[0])
        dfree, dh = vjp({k: scale if k == "loss_sum" else jnp.zeros_like(v)
                         for k, v in sums.items()})  # fmt: skip
        return _added(totals, dfree), (sums, dh)

    totals, (sums, douts) = lax.scan(
        visit, {k: grads[k] for k in free}, (outs, _own_share(segment, fields))
    )
    return jax.tree.map(lambda a: a[:, None], sums), douts, {**grads, **totals}


def _added(grads: Tree, more: Tree) -> Tree:
    """`grads`, with their leading dim of 1, plus `more`."""
    return jax.tree.map(lambda a, g: a + g[None], grads, more)
