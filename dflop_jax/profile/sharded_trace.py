"""A traced function as a flat list of operations on one device of a tensor-parallel group.

The jaxpr is walked with one sharded dim per value, in the manner of GSPMD (arXiv 2105.04663):
parameters bring their dims from the contract's logical axes, every operation hands them on, and a
contraction over a sharded dim gives a sum to reduce over the group. Where the traced function lays
an array out (`dflop_jax.runtime.token_split`), a sharded one is gathered or a sum is scattered.
Nothing is compiled, so it takes milliseconds. Known limits: one sharded dim per value, and a
`while` counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.extend import core

LAID_OUT = "sharding_constraint"
LAYOUT = frozenset({"reshape", "transpose", "squeeze", "slice", "copy", "stop_gradient", LAID_OUT})
# What lays its result out as its consumers want it: their sharding reaches through.
_FREE = LAYOUT | {"broadcast_in_dim", "iota", "scatter-add", "convert_element_type", "select_n"}


@dataclass(eq=False)
class Value:
    """An array; `dim` is the dim that is split over the group's `ways` devices, if any."""

    shape: tuple[int, ...]
    dtype: Any
    ways: int
    dim: int | None = None

    @property
    def n_bytes(self) -> float:
        """Bytes on one device."""
        whole = prod(self.shape) * self.dtype.itemsize if self.shape else 0
        return whole / (self.ways if self.dim is not None else 1)


@dataclass(eq=False)
class Op:
    """One operation; a loop has a `body` that runs `repeats` times and its first
    outputs go from turn to turn, beginning as `carry`. The outputs of a `partial` one are terms of
    a sum over the group."""

    name: str
    ins: list[Value]
    outs: list[Value]
    params: dict[str, Any]
    partial: bool = False
    body: Region | None = None
    repeats: int = 1
    carry: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    """Operations in order, which values enter and leave them, which the group adds up (a sharded
    one piece by piece), and which it makes whole."""

    ins: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outs: list[Value] = field(default_factory=list)
    reduced: list[Value] = field(default_factory=list)
    gathered: list[Value] = field(default_factory=list)


def trace(closed: core.ClosedJaxpr, dims: Sequence[int | None], ways: int) -> Region:
    """The operations of a jaxpr on one of `ways` devices.

    Args:
      dims: for each input the dim that is sharded, if any.
    """
    if ways == 1:
        dims = [None] * len(dims)
    ins = [_value(v, ways, d) for v, d in zip(closed.jaxpr.invars, dims, strict=True)]
    region = _walk(closed.jaxpr, ins, ways)
    _settle(region)
    return _without_dead(region)


def _value(var: Any, ways: int, dim: int | None = None) -> Value:
    return Value(var.aval.shape, var.aval.dtype, ways, dim)


def _walk(jaxpr: Any, ins: Sequence[Value], ways: int) -> Region:
    env: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
    env |= {v: _value(v, ways) for v in jaxpr.constvars}
    region = Region(list(ins))

    def read(atom: Any) -> Value:
        return _value(atom, ways) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        name, params, args = eqn.primitive.name, eqn.params, [read(a) for a in eqn.invars]
        inner = _inner(params)
        if name == "scan":
            op = _scan(eqn, args, ways)
        elif inner is not None and len(inner.invars) == len(args):
            called = _walk(inner, args, ways)
            region.ops += called.ops
            env.update(zip(eqn.outvars, called.outs, strict=True))
            continue
        elif name == "while":
            op = _while(params, args, ways)
        else:
            op = Op(name, args, [_value(v, ways) for v in eqn.outvars], params)
            for out in op.outs:
                out.dim, op.partial = _passed_on(op, out)
        region.ops.append(op)
        env.update(zip(eqn.outvars, op.outs, strict=True))
    region.outs = [read(v) for v in jaxpr.outvars]
    return region


def _inner(params: dict[str, Any]) -> Any:
    """The jaxpr of a call; of a choice between branches the last."""
    jaxpr = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
    return getattr(jaxpr, "jaxpr", jaxpr)


def _scan(eqn: Any, args: list[Value], ways: int) -> Op:
    """A loop whose carries are sharded as its body leaves them."""
    jaxpr, length = eqn.params["jaxpr"].jaxpr, eqn.params["length"]
    # Only what is scanned over has one dim more outside than inside (how else the counts are told
    # differs between versions of jax).
    n_carry = _as_inside(eqn.outvars, jaxpr.outvars)
    n_fixed = _as_inside(args, jaxpr.invars) - n_carry
    fixed, carry, xs = args[:n_fixed], args[n_fixed:][:n_carry], args[n_fixed + n_carry :]
    slices = [Value(v.shape[1:], v.dtype, ways, v.dim - 1 if v.dim else None) for v in xs]
    inside = [Value(v.shape, v.dtype, ways, v.dim) for v in carry]
    for _ in range(2):  # the second time with the carries' dims of the first
        body = _walk(jaxpr, [*fixed, *inside, *slices], ways)
        for value, out in zip(inside, body.outs):
            value.dim = out.dim if value.dim is None else value.dim
    _settle(body)
    body = _without_dead(body)
    stacked = [
        Value((length, *v.shape), v.dtype, ways, None if v.dim is None else v.dim + 1)
        for v in body.outs[n_carry:]
    ]
    ends = [Value(v.shape, v.dtype, ways, v.dim) for v in body.outs[:n_carry]]
    outs = [*ends, *stacked]
    return Op("scan", args, outs, eqn.params, body=body, repeats=length, carry=carry)


def _as_inside(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many of the values of a loop have the same rank outside as inside."""

    def rank(a: Any) -> int:
        return len(getattr(a, "aval", a).shape)

    return sum(rank(a) == rank(b) for a, b in zip(outside, inside, strict=True))


def _while(params: dict[str, Any], args: list[Value], ways: int) -> Op:
    skipped, n_consts = params["cond_nconsts"], params["body_nconsts"]
    body = _walk(params["body_jaxpr"].jaxpr, args[skipped:], ways)
    carry = args[skipped + n_consts :]
    outs = [Value(v.shape, v.dtype, ways, v.dim) for v in carry]
    return Op("while", args, outs, params, body=_without_dead(body), carry=carry)


def _passed_on(op: Op, out: Value) -> tuple[int | None, bool]:
    """(dim of an output that is sharded, whether the output is a sum over the group)."""
    if op.name == "dot_general":
        return _dot_dim(op)
    if op.name == LAID_OUT:
        spec = op.params["sharding"].spec
        return next((i for i, axis in enumerate(spec) if axis is not None), None), False
    sharded = next((v for v in op.ins if v.dim is not None), None)
    if sharded is None or sharded.dim is None:
        return None, False
    dim, rank = sharded.dim, len(sharded.shape)
    if op.name == "gather":
        return None, sharded is op.ins[0]
    if "axes" in op.params and (op.name.startswith("reduce_") or op.name.startswith("arg")):
        axes = op.params["axes"]
        return (None, True) if dim in axes else (dim - sum(a < dim for a in axes), False)
    if op.name == "broadcast_in_dim":
        return op.params["broadcast_dimensions"][dim], False
    if op.name == "transpose":
        return op.params["permutation"].index(dim), False
    if op.name == "squeeze":
        return dim - sum(a < dim for a in op.params["dimensions"]), False
    if op.name == "reshape":
        return _reshaped(sharded.shape, dim, out), False
    # Element by element, or along another dim.
    return (dim, False) if rank == len(out.shape) else (None, False)


def _reshaped(shape: tuple[int, ...], dim: int, out: Value) -> int | None:
    """The dim of the output that starts where the sharded one did."""
    before = prod(shape[:dim])
    for i, size in enumerate(out.shape):
        if prod(out.shape[:i]) == before and size % out.ways == 0:
            return i
    return None


def _dot_dim(op: Op) -> tuple[int | None, bool]:
    lhs, rhs = op.ins
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    if lhs.dim in lc or rhs.dim in rc:
        return None, True
    for v, batch in ((lhs, lb), (rhs, rb)):
        if v.dim in batch:
            return tuple(batch).index(v.dim), False
    if lhs.dim is not None:
        free = [i for i in range(len(lhs.shape)) if i not in (*lc, *lb)]
        return len(lb) + free.index(lhs.dim), False
    if rhs.dim is not None:
        free = [i for i in range(len(rhs.shape)) if i not in (*rc, *rb)]
        return len(lb) + len(lhs.shape) - len(lc) - len(lb) + free.index(rhs.dim), False
    return None, False


def _settle(region: Region) -> None:
    """Shards what a sharded consumer of the same shape reads and what need not be whole."""
    maker = {out: op for op in region.ops for out in op.outs}
    for op in reversed(region.ops):
        if op.body is not None:
            pairs = list(zip(op.carry, op.outs))
        elif op.name == "dot_general":
            continue
        else:
            wanted = next((v for v in op.outs if v.dim is not None), None)
            pairs = [(v, wanted) for v in op.ins if wanted and v.shape == wanted.shape]
        for v, like in pairs:
            if v.dim is None and v in maker and maker[v].name in _FREE - {LAID_OUT}:
                v.dim = like.dim


def _without_dead(region: Region) -> Region:
    """The region without operations whose results nothing reads."""
    alive, reversed_ops = set(region.outs), []
    for op in reversed(region.ops):
        if any(out in alive for out in op.outs):
            alive.update(op.ins)
            reversed_ops.append(op)
    ops = reversed_ops[::-1]
    return Region(region.ins, ops, region.outs, _reduced(ops, region.outs), _gathered(ops))


def _reduced(ops: Sequence[Op], outs: Sequence[Value]) -> list[Value]:
    """Values that the group has to add up. Terms are added before that, as XLA does
    (AllReduceReassociate), so three products of one sum cost one reduction."""
    open_: dict[Value, None] = {}
    summed: dict[Value, None] = {}
    for op in ops:
        terms = [v for v in op.ins if v in open_]
        adds = op.name in ("add", "add_any") and len(terms) == len(op.ins)
        if op.partial or adds or (terms and op.name in LAYOUT):
            open_ |= dict.fromkeys(op.outs)
        else:
            summed |= dict.fromkeys(terms)
    return list(summed | {v: None for v in outs if v in open_})


def _gathered(ops: Sequence[Op]) -> list[Value]:
    """Values that are whole where they were sharded before; those of one array once."""
    laid_out = (op for op in ops if op.name == LAID_OUT)
    whole = {op.ins[0]: op.outs[0] for op in laid_out
             if op.ins[0].dim is not None and op.outs[0].dim is None}  # fmt: skip
    return list(whole.values())
