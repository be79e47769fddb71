"""Activations on tensor ranks: between products each rank has its tokens, inside of attention and
of an MLP its heads or hidden units of all tokens (sequence parallelism, arXiv 2205.05198).

A layer is run by its own jaxpr, in which every product with a matrix that is split over the mesh
axis "model" gets its activations laid out: all tokens are gathered before split columns, and the
terms of split rows are reduced to each rank's tokens. So no matrix moves and nothing is reduced
whole. Backward lays gradients out the other way round.

The functions here are called under a `shard_map` that leaves "model" automatic, or traced alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, Module, layer_of, split_dim, stacked_parts, with_adapter
from dflop_jax.records import token_dim
from dflop_jax.runtime.module_parts import logical_axes, part_struct

Tree = Any
AXIS = "model"
# Of one operand, of its own or of another dtype: a matrix stays a matrix, its dims in place.
_CASTS = frozenset({"convert_element_type", "copy", "copy_p", "pcast", "pvary", "stop_gradient"})


def run_part(
    module: Any, name: str, ways: int, params: Tree, h: Tree, x: Tree, fields: Tree
) -> Tree:
    """What a module's "entry", layer of a kind, "exit", tap or inlet gives on one of `ways` tensor
    ranks.

    Args:
      params: by part, of one layer for those that are stacked.
      h: hidden states [rows, tokens, ...], one array or a tree of them; None for the entry.
      x: what edges place, by name.
    """
    if h is None:
        return _after_entry(module.entry(with_adapter(name, params), {**fields, **x}), ways)
    if name in stacked_parts(module):
        return _run_layer(module, name, ways, params, split(h, ways), fields)
    if name in x:
        placed = _constrain(x[name], P(), ways) if ways > 1 else x[name]  # and its gradient
        return split(module.inlet(name, split(h, ways), placed, fields), ways)
    whole = before_exit(h, ways)
    if name == "exit":
        return module.exit(with_adapter(name, params), whole, fields, params.get("entry"))
    return module.tap(name, with_adapter(name, params), whole, fields)


def rows_and_tokens(h: Tree) -> tuple[int, int]:
    """Those of hidden states, which all their arrays have."""
    rows, tokens, *_ = jax.tree.leaves(h)[0].shape
    return rows, tokens


def token_spec(rows: int, tokens: int, ways: int) -> tuple[str | None, str | None]:
    """How (rows, tokens) of hidden states are split over mesh axes."""
    dim = token_dim(rows, tokens, ways)
    return (AXIS if dim == 0 else None, AXIS if dim == 1 else None)


def split(h: Tree, ways: int) -> Tree:
    """Hidden states [rows, tokens, ...], and their gradient, each rank its tokens."""
    spec = _by_tokens(h, ways)
    return h if spec is None else jax.tree.map(lambda a: _constrain(a, spec, ways), h)


def gathered(h: Array, ways: int) -> Array:
    """Hidden states [rows, tokens, ...] whole on every rank, their gradient by tokens."""
    spec = _by_tokens(h, ways)
    return h if spec is None else _laid((P(), spec, ways), h)


def scattered(h: Array, ways: int) -> Array:
    """Hidden states [rows, tokens, ...] by tokens, their gradient whole on every rank."""
    spec = _by_tokens(h, ways)
    return h if spec is None else _laid((spec, P(), ways), h)


def _constrain(a: Array, spec: P, ways: int) -> Array:
    """An array laid out by a spec, in a program; elsewhere, where a part is traced for what it
    costs, as far as a trace can tell."""
    here = jax.sharding.get_abstract_mesh()
    sharding = spec if AXIS in here.axis_names else NamedSharding(_mesh(ways), spec)
    return lax.with_sharding_constraint(a, sharding)


@cache
def _mesh(ways: int) -> AbstractMesh:
    return AbstractMesh((ways,), (AXIS,), axis_types=(AxisType.Auto,))


def _by_tokens(h: Tree, ways: int) -> P | None:
    """How [rows, tokens, ...] is split; None: it is not."""
    rows, tokens = rows_and_tokens(h)
    return None if token_dim(rows, tokens, ways) is None else P(*token_spec(rows, tokens, ways))


# An end of a module works on all tokens, forward and backward: left to the compiler, the split
# would reach into its lookups and its loops over chunks of tokens.


def _after_entry(h: Tree, ways: int) -> Tree:
    """`scattered` hidden states that an entry gives."""
    if ways == 1:
        return h
    return jax.tree.map(lambda a: scattered(_constrain(a, P(), ways), ways), h)


def before_exit(h: Tree, ways: int) -> Tree:
    """`gathered` hidden states that an exit or a tap reads."""
    if ways == 1:
        return h
    return jax.tree.map(lambda a: _constrain(gathered(a, ways), P(), ways), h)


def by_tensor_rank(collective: Callable[[Array], Array], h: Array, ways: int) -> Array:
    """A collective over another axis, of hidden states [microbatches, rows, tokens, ...], on what
    each tensor rank has of them: left to the compiler, "model" is gathered first."""
    _, rows, tokens, *_ = h.shape
    if token_dim(rows, tokens, ways) is None:
        return collective(h)
    spec = P(None, *token_spec(rows, tokens, ways))
    run = jax.shard_map(collective, in_specs=(spec,), out_specs=spec, axis_names={AXIS})
    return run(h)


_Laid = tuple[P, P, int]  # how an array, and how its gradient is laid out on so many ranks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _laid(laid: _Laid, h: Array) -> Array:
    return _constrain(h, laid[0], laid[2])


_laid.defvjp(
    lambda laid, h: (_constrain(h, laid[0], laid[2]), None),
    lambda laid, _, dh: (_constrain(dh, laid[1], laid[2]),),
)


# ---- the products of a layer ----


@dataclass(frozen=True)
class _NamedDim:
    """The dim of a matrix that tensor parallelism names, and whether it is split: one that the
    degree does not divide may be whole."""

    dim: int
    is_split: bool


def _run_layer(module: Module, kind: str, ways: int, params: Tree, h: Tree, fields: Tree) -> Tree:
    """A layer with its activations laid out. Where the degree divides neither rows nor tokens it is
    left to the compiler."""
    arguments, layer = with_adapter(kind, params), layer_of(module, kind)
    if _by_tokens(h, ways) is None:
        return layer(arguments, h, fields)
    cuts = with_adapter(kind, {part: matrix_cuts(module, part, ways) for part in params})
    closed, out = jax.make_jaxpr(layer, return_shape=True)(arguments, h, fields)
    known = dict(zip(closed.jaxpr.invars, jax.tree.leaves(cuts, is_leaf=lambda c: c is None)))
    leaves = jax.tree.leaves((arguments, h, fields))
    walk = _Walk(rows_and_tokens(h), ways)
    outs = walk.run(closed.jaxpr, closed.consts, leaves, {v: c for v, c in known.items() if c})
    return split(jax.tree.unflatten(jax.tree.structure(out), outs), ways)


@lru_cache(maxsize=256)
def matrix_cuts(module: Module, part: str, ways: int) -> Tree:
    """Of each parameter of a part (of one layer) how tensor parallelism cuts it, None for others;
    a tree of the part's form."""

    def cut(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> _NamedDim | None:
        named = split_dim(leaf.shape, axes, 1)
        return (
            None
            if named is None
            else _NamedDim(named, split_dim(leaf.shape, axes, ways) is not None)
        )

    return jax.tree.map(cut, part_struct(module, part), logical_axes(module, part))


@dataclass(frozen=True)
class _Walk:
    """Runs a layer's jaxpr on hidden states of `rows_tokens`."""

    rows_tokens: tuple[int, ...]
    ways: int

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], cuts: dict[Any, _NamedDim]
    ) -> list[Any]:
        """The jaxpr's outputs; `cuts` are those of its inputs that are matrices."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            here = [None if isinstance(v, Literal) else cuts.get(v) for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                known = {v: c for v, c in zip(inner.jaxpr.invars, here, strict=True) if c}
                outs = self.run(inner.jaxpr, inner.consts, ins, known)
            elif eqn.primitive.name == "dot_general" and (here[0] is None) != (here[1] is None):
                outs = [self._product(jaxpr, eqn, ins, here)]
            else:
                outs = _alone(jaxpr, eqn, ins)
                if eqn.primitive.name in _CASTS and here[0]:
                    cuts[eqn.outvars[0]] = here[0]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _product(self, jaxpr: Any, eqn: Any, ins: list[Any], cuts: list[_NamedDim | None]) -> Array:
        """A product of an activation with a matrix that tensor parallelism names."""
        side = 0 if cuts[0] is None else 1  # of the activation
        cut, x = cuts[1 - side], ins[side]
        assert cut is not None
        contracted, batch = eqn.params["dimension_numbers"]
        if any(batch) or x.shape[:2] != self.rows_tokens or {0, 1} & {*contracted[side]}:
            return _alone(jaxpr, eqn, ins)[0]
        if cut.dim not in contracted[1 - side]:
            ins[side] = gathered(x, self.ways)
            out = _alone(jaxpr, eqn, ins)[0]
            place = _free_place(eqn, 1 - side, cut.dim)
            spec = P(*[None] * place, AXIS) if cut.is_split else P()
            return _constrain(out, spec, self.ways)
        out = _alone(jaxpr, eqn, ins)[0]
        # Its first two dims are rows and tokens only if the activation's free dims come first.
        return scattered(out, self.ways) if side == 0 and cut.is_split else out


def _free_place(eqn: Any, side: int, dim: int) -> int:
    """Where a product has a dim of one of its sides that it does not contract."""
    contracted, _ = eqn.params["dimension_numbers"]

    def free(side: int) -> Iterator[int]:
        return (d for d in range(eqn.invars[side].aval.ndim) if d not in contracted[side])

    before = len(list(free(0))) if side == 1 else 0
    return before + list(free(side)).index(dim)


def _alone(jaxpr: Any, eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """What an equation of a jaxpr gives for these inputs."""
    read = {v: a for v, a in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    names = jaxpr.debug_info.with_unknown_names()
    alone = jaxpr.replace(
        constvars=[], invars=[*read], outvars=eqn.outvars, eqns=[eqn], debug_info=names
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))(*read.values())
