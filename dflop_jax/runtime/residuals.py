"""Splits a pure function and its gradient into two programs: `forward` also returns the residuals
that `backward` needs besides its arguments.

Residuals are the leaves of `jax.vjp`'s function, without those that backward has or can compute
from parameters and fields alone (weights in another dtype, rotary tables, masks).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from dflop_jax.contract import SAVED_NAMES, SUM_NAME
from dflop_jax.records import Remat
from dflop_jax.runtime.wide_products import widen_products

Array = jax.Array
Tree = Any
# (trained parameters, hidden states or None, inputs with a gradient, other inputs) -> output
SplitFunction = Callable[[Tree, Tree, Tree, Tree], Tree]

# Elementwise and layout operations, which a compiler fuses into the operation that reads them.
_ELEMENTWISE = """
    abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy copy_p cos
    div dynamic_slice eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota
    is_finite le log log1p logistic lt max min mul ne neg not one_minus_square or pad pcast pow
    pvary reduce_precision rem reshape rev round rsqrt select_n sign sin slice split sqrt square
    squeeze stop_gradient sub tanh transpose xor
"""
_CHEAP_PRIMITIVES = frozenset(_ELEMENTWISE.split())


def _is_expensive(primitive: Any, *_: Any, **params: Any) -> bool:
    if primitive.name == "name":
        return bool(params["name"] == SUM_NAME)
    if primitive.name == "sharding_constraint":  # backward gathers replicated arrays again
        return any(axis is not None for axis in params["sharding"].spec)
    if primitive.name == "custom_jvp_call":
        return any(_is_expensive(e.primitive, **e.params) for e in params["call_jaxpr"].eqns)
    return primitive.name not in _CHEAP_PRIMITIVES


_checkpoint = partial(jax.checkpoint, prevent_cse=False)  # scans prevent merging anyway
_policies = jax.checkpoint_policies
_save_expensive = partial(_checkpoint, policy=_is_expensive)
# How backward recomputes a function, by recompute policy.
REMAT: dict[Remat, Callable[[SplitFunction], SplitFunction]] = {
    "none": _save_expensive,
    "dots": partial(_checkpoint, policy=_policies.dots_with_no_batch_dims_saveable),
    "named": partial(_checkpoint, policy=_policies.save_only_these_names(*SAVED_NAMES)),
    "layers": _checkpoint,
    "segment": _save_expensive,  # the backward task reruns forward and saves the same
}


class SplitVjp:
    """A function of a segment with forward and backward apart, for arguments of the given shapes.
    Backward does not get the hidden states. They get a gradient if `wants_hidden`; trained
    parameters and `edge_inputs` always do. With `wide_gradients`, those of parameters are float32
    where they are products."""

    def __init__(
        self,
        remat: Callable[[SplitFunction], SplitFunction],
        function: SplitFunction,
        trained: Tree,
        h: Tree,
        edge_inputs: Tree,
        constants: Tree,
        *,
        wants_hidden: bool,
        wide_gradients: bool = False,
    ):
        self._function, self._wide_gradients = function, wide_gradients
        self.has_gradient = wants_hidden or bool(jax.tree.leaves((trained, edge_inputs)))
        if not self.has_gradient:
            return

        def run(h: Tree, trained: Tree, edge_inputs: Tree, constants: Tree) -> Any:
            def differentiable(trained: Tree, edge_inputs: Tree, hidden: Tree = h) -> Tree:
                return remat(self._function)(trained, hidden, edge_inputs, constants)

            hidden = (h,) if wants_hidden else ()
            out, vjp = jax.vjp(differentiable, trained, edge_inputs, *hidden)
            leaves, self._vjp = jax.tree.flatten(vjp)
            return out, leaves

        closed, (out, _) = jax.make_jaxpr(run, return_shape=True)(
            h, trained, edge_inputs, constants
        )
        closed = ClosedJaxpr(_without_rounding(closed.jaxpr), closed.consts)
        self._run = jaxpr_as_fun(closed)
        self._n_hidden = len(jax.tree.leaves(h))
        self._out = jax.tree.structure(out)
        self._n_out = n_out = len(jax.tree.leaves(out))
        leaves = closed.jaxpr.outvars[n_out:]
        cast_from = {e.outvars[0]: e.invars[0] for e in closed.jaxpr.eqns if _is_widening_cast(e)}
        # Leaf -> number of its residual; by residual: (index among the outputs, dtype).
        self._residual_of_leaf: dict[int, int] = {}
        self._residual_outputs: list[tuple[int, Any]] = []
        residual_of_root: dict[Any, int] = {}
        needs_hidden = _dependents(closed.jaxpr, closed.jaxpr.invars[: self._n_hidden])
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Literal) or leaf not in needs_hidden:
                continue
            root = cast_from.get(leaf, leaf)
            if root not in residual_of_root:
                residual_of_root[root] = len(self._residual_outputs)
                self._residual_outputs.append((n_out + i, root.aval.dtype))
            self._residual_of_leaf[i] = residual_of_root[root]
        self._dtypes = [leaf.aval.dtype for leaf in leaves]
        is_free = [i not in self._residual_of_leaf for i in range(len(leaves))]
        jaxpr, self._used_inputs = _prune_jaxpr(closed.jaxpr, [False] * n_out + is_free)
        assert not any(self._used_inputs[: self._n_hidden])
        self._recompute_leaves = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))

    def forward(
        self, trained: Tree, h: Tree, edge_inputs: Tree, constants: Tree
    ) -> tuple[Tree, list[Array]]:
        """Return (output, residuals)."""
        if not self.has_gradient:
            return self._function(trained, h, edge_inputs, constants), []
        outputs = self._run(*jax.tree.leaves((h, trained, edge_inputs, constants)))
        residuals = [outputs[i].astype(dtype) for i, dtype in self._residual_outputs]
        return jax.tree.unflatten(self._out, outputs[: self._n_out]), residuals

    def backward(
        self, residuals: list[Array], trained: Tree, edge_inputs: Tree, constants: Tree, dout: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Return gradients of (trained, h or None, edge_inputs) for the output's cotangent."""
        if not self.has_gradient:
            return {}, None, {}
        arguments = jax.tree.leaves((trained, edge_inputs, constants))
        used = compress(arguments, self._used_inputs[self._n_hidden :])
        recomputed = iter(self._recompute_leaves(*used))
        leaves = [
            residuals[self._residual_of_leaf[i]].astype(dtype)
            if i in self._residual_of_leaf
            else next(recomputed)
            for i, dtype in enumerate(self._dtypes)
        ]
        pull = jax.tree.unflatten(self._vjp, leaves)
        dfree, dplaced, *dh = self._pull_wide(pull, dout) if self._wide_gradients else pull(dout)
        return dfree, dh[0] if dh else None, dplaced

    def _pull_wide(self, pull: Any, dout: Tree) -> Tree:
        """Return `pull(dout)`, with gradients of parameters in float32 where they are products."""
        closed, gradients = jax.make_jaxpr(pull, return_shape=True)(dout)
        n_trained = len(jax.tree.leaves(gradients[0]))
        jaxpr = widen_products(closed.jaxpr, range(n_trained))
        run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
        return jax.tree.unflatten(jax.tree.structure(gradients), run(*jax.tree.leaves(dout)))


def _without_rounding(jaxpr: Any) -> Any:
    """Return a jaxpr without the rounding of saved sums to their own dtype, by which jax keeps XLA
    from fusing them. A product rounds them anyway: see `SUM_NAME`."""
    sums = {
        e.outvars[0]
        for e in jaxpr.eqns
        if e.primitive.name == "name" and e.params["name"] == SUM_NAME
    }
    rounded = {
        e.outvars[0]: e.invars[0]
        for e in jaxpr.eqns
        if e.primitive.name == "reduce_precision"
        and not isinstance(e.invars[0], Literal)
        and e.invars[0] in sums
    }

    def unrounded(v: Any) -> Any:
        return v if isinstance(v, Literal) else rounded.get(v, v)

    eqns = [e for e in jaxpr.eqns if rounded.keys().isdisjoint(e.outvars)]
    return jaxpr.replace(
        eqns=[e.replace(invars=[unrounded(v) for v in e.invars]) for e in eqns],
        outvars=[unrounded(v) for v in jaxpr.outvars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _dependents(jaxpr: Any, inputs: list[Any]) -> set[Any]:
    """Return inputs of a jaxpr and every variable that is computed from them."""
    dependents = set(inputs)
    for eqn in jaxpr.eqns:
        if any(v in dependents for v in eqn.invars if not isinstance(v, Literal)):
            dependents.update(eqn.outvars)
    return dependents


def _prune_jaxpr(jaxpr: Any, used: list[bool]) -> tuple[Any, list[bool]]:
    """Return (jaxpr with the used outputs only, inputs that it reads); JAX's keeps all kernels."""
    outs = list(compress(jaxpr.outvars, used))
    needed = {v for v in outs if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
            eqns.append(eqn)
    reads = [v in needed for v in jaxpr.invars]
    alive = jaxpr.replace(
        eqns=eqns[::-1],
        outvars=outs,
        invars=list(compress(jaxpr.invars, reads)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return alive, reads


def _is_widening_cast(eqn: Any) -> bool:
    """Return whether an equation casts to a wider float, so that its input can be saved instead."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not all(jnp.issubdtype(d, jnp.floating) for d in (source, target)):
        return False
    return jnp.finfo(target).bits > jnp.finfo(source).bits
