"""Sharding propagation: a traced function as operations on one device of a tensor-parallel group.

Walks the jaxpr with one sharded dim per value, as GSPMD does (arXiv 2105.04663): parameters get
their dims from the contract's logical axes, operations propagate them, and a contraction over a
sharded dim gives partial sums to reduce over the group. At a sharding constraint
(`dflop_jax.runtime.token_split`), a sharded array is gathered or a sum is scattered. Nothing is
compiled, so it takes milliseconds. Known limits: one sharded dim per value, and a `while` counts
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.extend import core

RESHARD = "sharding_constraint"
LAYOUT_OPS = frozenset(
    {"reshape", "transpose", "squeeze", "slice", "copy", "stop_gradient", RESHARD}
)
# Operations whose results take the sharding of their consumers.
_FOLLOWS_CONSUMER = (LAYOUT_OPS - {RESHARD}) | frozenset(
    {"broadcast_in_dim", "iota", "scatter-add", "convert_element_type", "select_n"}
)


@dataclass(eq=False)
class Value:
    """An array; `dim` is the dim sharded over the group's `tp` devices, if any."""

    shape: tuple[int, ...]
    dtype: Any
    tp: int
    dim: int | None = None

    @property
    def n_bytes(self) -> float:
        """Bytes on one device."""
        whole = prod(self.shape) * self.dtype.itemsize if self.shape else 0
        return whole / (self.tp if self.dim is not None else 1)


@dataclass(eq=False)
class Op:
    """One operation. A loop has a `body` that runs `repeats` times; its first outputs are the
    carries, with initial values `carry`. Outputs of a `partial` operation are partial sums over
    the group."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any]
    partial: bool = False
    body: Region | None = None
    repeats: int = 1
    carry: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    """Operations in order, with the region's inputs and outputs, the values that the group reduces
    (scatters if sharded), and the values that the group gathers."""

    inputs: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    reduced: list[Value] = field(default_factory=list)
    gathered: list[Value] = field(default_factory=list)


def trace(closed: core.ClosedJaxpr, dims: Sequence[int | None], tp: int) -> Region:
    """Return a jaxpr's operations on one of `tp` devices; `dims`: the sharded dim of each input."""
    if tp == 1:
        dims = [None] * len(dims)
    inputs = [_value(v, tp, d) for v, d in zip(closed.jaxpr.invars, dims, strict=True)]
    region = _walk(closed.jaxpr, inputs, tp)
    _shard_inputs(region)
    return _eliminate_dead_ops(region)


def _value(var: Any, tp: int, dim: int | None = None) -> Value:
    return Value(var.aval.shape, var.aval.dtype, tp, dim)


def _walk(jaxpr: Any, inputs: Sequence[Value], tp: int) -> Region:
    env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= {v: _value(v, tp) for v in jaxpr.constvars}
    region = Region(list(inputs))

    def read(atom: Any) -> Value:
        return _value(atom, tp) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        name, params, args = eqn.primitive.name, eqn.params, [read(a) for a in eqn.invars]
        called_jaxpr = _called_jaxpr(params)
        if name == "scan":
            op = _trace_scan(eqn, args, tp)
        elif called_jaxpr is not None and len(called_jaxpr.invars) == len(args):
            called = _walk(called_jaxpr, args, tp)
            region.ops += called.ops
            env.update(zip(eqn.outvars, called.outputs, strict=True))
            continue
        elif name == "while":
            op = _trace_while(params, args, tp)
        else:
            op = Op(name, args, [_value(v, tp) for v in eqn.outvars], params)
            for output in op.outputs:
                output.dim, op.partial = _output_sharding(op, output)
        region.ops.append(op)
        env.update(zip(eqn.outvars, op.outputs, strict=True))
    region.outputs = [read(v) for v in jaxpr.outvars]
    return region


def _called_jaxpr(params: dict[str, Any]) -> Any:
    """Return the jaxpr that an operation calls, if any."""
    jaxpr = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
    return getattr(jaxpr, "jaxpr", jaxpr)


def _trace_scan(eqn: Any, args: list[Value], tp: int) -> Op:
    """Return a loop whose carries are sharded as its body's outputs."""
    jaxpr, length = eqn.params["jaxpr"].jaxpr, eqn.params["length"]
    # Only scanned arrays have one more dim outside than inside; ranks give the counts for every
    # version of JAX, while the parameters of `scan` differ.
    n_carry = _count_equal_ranks(eqn.outvars, jaxpr.outvars)
    n_fixed = _count_equal_ranks(args, jaxpr.invars) - n_carry
    constants, carry, xs = args[:n_fixed], args[n_fixed:][:n_carry], args[n_fixed + n_carry :]
    slices = [Value(v.shape[1:], v.dtype, tp, v.dim - 1 if v.dim else None) for v in xs]
    body_carry = [Value(v.shape, v.dtype, tp, v.dim) for v in carry]
    for _ in range(2):  # the second pass uses the carries' dims from the first
        body = _walk(jaxpr, [*constants, *body_carry, *slices], tp)
        for value, output in zip(body_carry, body.outputs):
            value.dim = output.dim if value.dim is None else value.dim
    _shard_inputs(body)
    body = _eliminate_dead_ops(body)
    stacked = [
        Value((length, *v.shape), v.dtype, tp, None if v.dim is None else v.dim + 1)
        for v in body.outputs[n_carry:]
    ]
    final_carry = [Value(v.shape, v.dtype, tp, v.dim) for v in body.outputs[:n_carry]]
    outputs = [*final_carry, *stacked]
    return Op("scan", args, outputs, eqn.params, body=body, repeats=length, carry=carry)


def _count_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Return the number of values with the same rank outside and inside a loop."""

    def rank(a: Any) -> int:
        return len(getattr(a, "aval", a).shape)

    return sum(rank(a) == rank(b) for a, b in zip(outside, inside, strict=True))


def _trace_while(params: dict[str, Any], args: list[Value], tp: int) -> Op:
    n_cond_consts, n_consts = params["cond_nconsts"], params["body_nconsts"]
    body = _walk(params["body_jaxpr"].jaxpr, args[n_cond_consts:], tp)
    carry = args[n_cond_consts + n_consts :]
    outputs = [Value(v.shape, v.dtype, tp, v.dim) for v in carry]
    return Op("while", args, outputs, params, body=_eliminate_dead_ops(body), carry=carry)


def _output_sharding(op: Op, output: Value) -> tuple[int | None, bool]:
    """Return (sharded dim of an output, whether the output is a partial sum)."""
    if op.name == "dot_general":
        return _dot_dim(op)
    if op.name == RESHARD:
        spec = op.params["sharding"].spec
        return next((i for i, axis in enumerate(spec) if axis is not None), None), False
    sharded = next((v for v in op.inputs if v.dim is not None), None)
    if sharded is None or sharded.dim is None:
        return None, False
    dim, rank = sharded.dim, len(sharded.shape)
    if op.name == "gather":
        return None, sharded is op.inputs[0]
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
        return _reshaped_dim(sharded.shape, dim, output), False
    # Elementwise operations, or operations along another dim.
    return (dim, False) if rank == len(output.shape) else (None, False)


def _reshaped_dim(shape: tuple[int, ...], dim: int, output: Value) -> int | None:
    """Return the output dim that starts at the same element as the sharded dim."""
    n_before = prod(shape[:dim])
    for i, size in enumerate(output.shape):
        if prod(output.shape[:i]) == n_before and size % output.tp == 0:
            return i
    return None


def _dot_dim(op: Op) -> tuple[int | None, bool]:
    lhs, rhs = op.inputs
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    if lhs.dim in lc or rhs.dim in rc:
        return None, True
    for v, batch in ((lhs, lb), (rhs, rb)):
        if v.dim in batch:
            return tuple(batch).index(v.dim), False
    offset = len(lb)
    for v, paired in ((lhs, (*lc, *lb)), (rhs, (*rc, *rb))):
        free = [i for i in range(len(v.shape)) if i not in paired]
        if v.dim is not None:
            return offset + free.index(v.dim), False
        offset += len(free)
    return None, False


def _shard_inputs(region: Region) -> None:
    """Shard values with a sharded consumer of the same shape, if their producer allows it."""
    producer = {output: op for op in region.ops for output in op.outputs}
    for op in reversed(region.ops):
        if op.body is not None:
            pairs = list(zip(op.carry, op.outputs))
        elif op.name == "dot_general":
            continue
        else:
            sharded_outputs = [v for v in op.outputs if v.dim is not None][:1]
            pairs = [(v, out) for out in sharded_outputs for v in op.inputs if v.shape == out.shape]
        for v, sharded in pairs:
            if v.dim is None and v in producer and producer[v].name in _FOLLOWS_CONSUMER:
                v.dim = sharded.dim


def _eliminate_dead_ops(region: Region) -> Region:
    """Return the region without operations whose results are not read."""
    live, reversed_ops = set(region.outputs), []
    for op in reversed(region.ops):
        if any(output in live for output in op.outputs):
            live.update(op.inputs)
            reversed_ops.append(op)
    ops = reversed_ops[::-1]
    # Gather each array once, for all its readers.
    gathered = {
        op.inputs[0]: op.outputs[0]
        for op in ops
        if op.name == RESHARD
        if op.inputs[0].dim is not None and op.outputs[0].dim is None
    }
    reduced = _reduced_values(ops, region.outputs)
    return Region(region.inputs, ops, region.outputs, reduced, [*gathered.values()])


def _reduced_values(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Value]:
    """Return the values that the group reduces. Partial sums are added before the reduction, as XLA
    does (AllReduceReassociate), so a sum of three products costs one reduction."""
    partial_sums: dict[Value, None] = {}
    reduced: dict[Value, None] = {}
    for op in ops:
        terms = [v for v in op.inputs if v in partial_sums]
        adds = op.name in ("add", "add_any") and len(terms) == len(op.inputs)
        if op.partial or adds or (terms and op.name in LAYOUT_OPS):
            partial_sums |= dict.fromkeys(op.outputs)
        else:
            reduced |= dict.fromkeys(terms)
    return list(reduced | {v: None for v in outputs if v in partial_sums})
