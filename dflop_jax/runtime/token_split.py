"""Shards activations over tensor ranks (sequence parallelism, arXiv 2205.05198): between matrix
products each rank has its tokens; inside attention and an MLP it has its heads or hidden units of
all tokens.

A layer runs by interpreting its jaxpr. The activations of every product with a matrix that is split
over the mesh axis "model" get a sharding: all tokens are gathered before a column-split matrix, and
the terms of a row-split matrix are reduce-scattered to each rank's tokens. Backward does the
opposite. So no matrix moves and there is no all-reduce.

The functions here run under a `shard_map` that leaves "model" automatic, or are traced alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import (
    Array,
    Module,
    layer_of,
    stacked_parts,
    tensor_parallel_dim,
    with_adapter,
)
from dflop_jax.records import token_dim
from dflop_jax.runtime.module_parts import logical_axes, part_struct

Tree = Any
TENSOR_AXIS = "model"
# Operations on one matrix that keep its dims in place.
_CASTS = frozenset({"convert_element_type", "copy", "copy_p", "pcast", "pvary", "stop_gradient"})


def run_module_part(
    module: Any, name: str, tp: int, params: Tree, h: Tree, x: Tree, fields: Tree
) -> Tree:
    """Return the output of a module's entry, layer of a kind, exit, tap or inlet on one of `tp`
    tensor ranks.

    Args:
      params: by part; of one layer if the part is stacked.
      h: hidden states [rows, tokens, ...], one array or a tree of them; None for the entry.
      x: inputs from edges, by name.
    """
    if h is None:
        h = module.entry(with_adapter(name, params), {**fields, **x})
        if tp == 1:
            return h
        return jax.tree.map(lambda a: _scatter_tokens(_constrain(a, P(), tp), tp), h)
    if name in stacked_parts(module):
        return _run_layer(module, name, tp, params, shard_tokens(h, tp), fields)
    if name in x:
        edge_input = _constrain(x[name], P(), tp) if tp > 1 else x[name]  # and its gradient
        return shard_tokens(module.inlet(name, shard_tokens(h, tp), edge_input, fields), tp)
    whole = _gather_before_exit(h, tp)
    if name == "exit":
        return module.exit(with_adapter(name, params), whole, fields, params.get("entry"))
    return module.tap(name, with_adapter(name, params), whole, fields)


def rows_and_tokens(h: Tree) -> tuple[int, int]:
    """Return (rows, tokens) of hidden states, equal for all their arrays."""
    rows, tokens, *_ = jax.tree.leaves(h)[0].shape
    return rows, tokens


def token_spec(rows: int, tokens: int, tp: int) -> P | None:
    """Return how mesh axes split (rows, tokens) of hidden states; None: they do not."""
    dim = token_dim(rows, tokens, tp)
    return None if dim is None else P(*(TENSOR_AXIS if d == dim else None for d in range(2)))


def shard_tokens(h: Tree, tp: int) -> Tree:
    """Shard hidden states [rows, tokens, ...] and their gradient by tokens."""
    spec = token_spec(*rows_and_tokens(h), tp)
    return h if spec is None else jax.tree.map(lambda a: _constrain(a, spec, tp), h)


def _gather_tokens(h: Array, tp: int) -> Array:
    """Gather hidden states on every rank; their gradient is sharded by tokens."""
    spec = token_spec(*rows_and_tokens(h), tp)
    return h if spec is None else _constrain_with_gradient((P(), spec, tp), h)


def _scatter_tokens(h: Array, tp: int) -> Array:
    """Shard hidden states by tokens; their gradient is whole on every rank."""
    spec = token_spec(*rows_and_tokens(h), tp)
    return h if spec is None else _constrain_with_gradient((spec, P(), tp), h)


def _constrain(a: Array, spec: P, tp: int) -> Array:
    """Constrain an array's sharding, on an abstract mesh if the array is traced alone."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = spec if TENSOR_AXIS in mesh.axis_names else NamedSharding(_abstract_mesh(tp), spec)
    return lax.with_sharding_constraint(a, sharding)


@cache
def _abstract_mesh(tp: int) -> AbstractMesh:
    return AbstractMesh((tp,), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def _gather_before_exit(h: Tree, tp: int) -> Tree:
    """Gather hidden states for an exit or a tap. Like the entry, both work on all tokens, forward
    and backward; the compiler would otherwise shard their lookups and loops over token chunks."""
    if tp == 1:
        return h
    return jax.tree.map(lambda a: _constrain(_gather_tokens(a, tp), P(), tp), h)


def run_per_tensor_rank(collective: Callable[[Array], Array], h: Array, tp: int) -> Array:
    """Run a collective over another axis on each tensor rank's part of hidden states [microbatches,
    rows, tokens, ...]; by itself, the compiler would gather "model" first."""
    _, rows, tokens, *_ = h.shape
    row_spec = token_spec(rows, tokens, tp)
    if row_spec is None:
        return collective(h)
    spec = P(None, *row_spec)
    run = jax.shard_map(collective, in_specs=(spec,), out_specs=spec, axis_names={TENSOR_AXIS})
    return run(h)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _constrain_with_gradient(specs: tuple[P, P, int], h: Array) -> Array:
    """Constrain an array. `specs`: of the array, of its gradient, and the tensor ranks."""
    return _constrain(h, specs[0], specs[2])


_constrain_with_gradient.defvjp(
    lambda specs, h: (_constrain(h, specs[0], specs[2]), None),
    lambda specs, _, dh: (_constrain(dh, specs[1], specs[2]),),
)


# ---- the products of a layer ----


@dataclass(frozen=True)
class TensorParallelDim:
    """The dim of a matrix that tensor parallelism names, split if the degree divides it."""

    dim: int
    is_split: bool


def _run_layer(module: Module, kind: str, tp: int, params: Tree, h: Tree, fields: Tree) -> Tree:
    """Run a layer with sharded activations, or as the compiler shards if tp divides neither dim."""
    arguments, layer = with_adapter(kind, params), layer_of(module, kind)
    if token_spec(*rows_and_tokens(h), tp) is None:
        return layer(arguments, h, fields)
    dims = with_adapter(kind, {part: tensor_parallel_dims(module, part, tp) for part in params})
    closed, out_structs = jax.make_jaxpr(layer, return_shape=True)(arguments, h, fields)
    dim_of_var = dict(zip(closed.jaxpr.invars, jax.tree.leaves(dims, is_leaf=lambda c: c is None)))
    leaves = jax.tree.leaves((arguments, h, fields))
    walk = _JaxprInterpreter(rows_and_tokens(h), tp)
    outs = walk.run(closed.jaxpr, closed.consts, leaves, {v: c for v, c in dim_of_var.items() if c})
    return shard_tokens(jax.tree.unflatten(jax.tree.structure(out_structs), outs), tp)


@lru_cache(maxsize=256)
def tensor_parallel_dims(module: Module, part: str, tp: int) -> Tree:
    """Return the `TensorParallelDim`, or None, of each parameter of a part (of one layer)."""

    def tensor_dim(
        leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]
    ) -> TensorParallelDim | None:
        dim, split = (tensor_parallel_dim(leaf.shape, axes, degree) for degree in (1, tp))
        return None if dim is None else TensorParallelDim(dim, split is not None)

    return jax.tree.map(tensor_dim, part_struct(module, part), logical_axes(module, part))


@dataclass(frozen=True)
class _JaxprInterpreter:
    """Runs a layer's jaxpr on hidden states of `rows_tokens`."""

    rows_tokens: tuple[int, ...]
    tp: int

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        dims: dict[Any, TensorParallelDim],
    ) -> list[Any]:
        """Return the jaxpr's outputs; `dims` are those of its matrix inputs."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            operand_dims = [None if isinstance(v, Literal) else dims.get(v) for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                inner_dims = zip(inner.jaxpr.invars, operand_dims, strict=True)
                outs = self.run(inner.jaxpr, inner.consts, ins, {v: c for v, c in inner_dims if c})
            elif eqn.primitive.name == "dot_general" and operand_dims.count(None) == 1:
                outs = [self._product(jaxpr, eqn, ins, operand_dims)]
            else:
                outs = _run_equation(jaxpr, eqn, ins)
                if eqn.primitive.name in _CASTS and operand_dims[0]:
                    dims[eqn.outvars[0]] = operand_dims[0]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _product(
        self, jaxpr: Any, eqn: Any, ins: list[Any], operand_dims: list[TensorParallelDim | None]
    ) -> Array:
        """Multiply an activation by a matrix that tensor parallelism names."""
        side = 0 if operand_dims[0] is None else 1  # index of the activation
        matrix_dim, x = operand_dims[1 - side], ins[side]
        assert matrix_dim is not None
        contracted, batch = eqn.params["dimension_numbers"]
        if any(batch) or x.shape[:2] != self.rows_tokens or {0, 1} & {*contracted[side]}:
            return _run_equation(jaxpr, eqn, ins)[0]
        if matrix_dim.dim not in contracted[1 - side]:
            ins[side] = _gather_tokens(x, self.tp)
            product = _run_equation(jaxpr, eqn, ins)[0]
            free = [d for d in range(ins[1 - side].ndim) if d not in contracted[1 - side]]
            n_before = x.ndim - len(contracted[0]) if side == 0 else 0
            dim = n_before + free.index(matrix_dim.dim)
            spec = P(*[None] * dim, TENSOR_AXIS) if matrix_dim.is_split else P()
            return _constrain(product, spec, self.tp)
        product = _run_equation(jaxpr, eqn, ins)[0]
        # Its first two dims are rows and tokens only if the activation's free dims come first.
        return _scatter_tokens(product, self.tp) if side == 0 and matrix_dim.is_split else product


def _run_equation(jaxpr: Any, eqn: Any, ins: Sequence[Any]) -> list[Any]:
    read = {v: a for v, a in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    debug_info = jaxpr.debug_info.with_unknown_names()
    one_equation = jaxpr.replace(
        constvars=[], invars=[*read], outvars=eqn.outvars, eqns=[eqn], debug_info=debug_info
    )
    return jaxpr_as_fun(ClosedJaxpr(one_equation, []))(*read.values())
