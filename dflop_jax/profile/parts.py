"""The parts of a module as functions to trace: what one layer, or an end, computes per microbatch.

A part is "entry", "layers" (one layer), "exit" or the name of a tap. Backward is what the runtime
runs: the forward again, its gradient, and the sum into the float32 accumulators
(`dflop_jax.pipeline.spmd_loop`). `placed` names the fields of the entry that edges fill: they get a
gradient too. What enters between layers is added to the hidden states there, and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dflop_jax.contract import Module, split_dim, taps_of
from dflop_jax.pipeline.held import init_structs
from dflop_jax.pipeline.pieces import ADAPTER, PARTS, layer_params
from dflop_jax.profile.kernels import Kernel, kernels_of, working_bytes
from dflop_jax.profile.sharded_trace import LAYOUT, Region, Value, sources, trace
from dflop_jax.records import BACKWARD, FORWARD, Shape

Tree = Any
ENDS = ("entry", "exit")


Names = tuple[str, ...]


def part_names(module: Module) -> Names:
    """Parts that hold a module's parameters, but for adapters."""
    return (*PARTS, *(tap for tap in taps_of(module) if tap in module.inputs))


def end_names(module: Module) -> Names:
    """Parts that run once for all layers: the ends, and taps, which are counted with them."""
    return (*ENDS, *taps_of(module))


@lru_cache(maxsize=4096)
def part_kernels(
    module: Module, part: str, direction: str, shape: Shape, ways: int, placed: Names = ()
) -> tuple[Kernel, ...]:
    """Kernels of a part at a per-rank shape, on one of `ways` tensor-parallel devices."""
    return tuple(kernels_of(_region(module, part, direction, shape, placed, ways)))


def forward_flops(module: Module, part: str, shape: Shape) -> float:
    """FLOPs of the matrix products of a part's forward at a shape, padding included."""
    return sum(k.flops * k.repeats for k in part_kernels(module, part, FORWARD, shape, 1))


@lru_cache(maxsize=1024)
def _traced(
    module: Module, part: str, direction: str, shape: Shape, placed: Names
) -> tuple[core.ClosedJaxpr, list[tuple[Any, tuple[str | None, ...]]]]:
    """Jaxpr of a part, and the parameters that are its first inputs; backward's last inputs are
    their gradients."""
    params, x, fields = _arguments(module, part, shape, placed)
    leaves = [leaf for p in sorted(params) for leaf in _leaves(module, p)]
    forward = partial(_forward, module, part)
    if direction != BACKWARD:
        return jax.make_jaxpr(forward)(params, x, fields), leaves
    dy = jax.eval_shape(forward, params, x, fields)
    grads = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params)
    return jax.make_jaxpr(partial(_backward, forward))(params, x, fields, dy, grads), leaves


def _region(
    module: Module, part: str, direction: str, shape: Shape, placed: Names, ways: int
) -> Region:
    """What one of `ways` tensor-parallel devices runs of a part."""
    closed, leaves = _traced(module, part, direction, shape, placed)
    split = [split_dim(leaf.shape, axes, ways) for leaf, axes in leaves]
    ends = split if direction == BACKWARD else []
    whole = len(closed.jaxpr.invars) - len(split) - len(ends)
    return trace(closed, [*split, *[None] * whole, *ends], ways)


@lru_cache(maxsize=256)
def part_structs(module: Module, part: str) -> Tree:
    """Shapes and dtypes of a part's parameters, those of one layer for "layers"."""
    return init_structs(module, part)


def _arguments(
    module: Module, part: str, shape: Shape, placed: Names = ()
) -> tuple[Tree, Tree, Tree]:
    """Structs of (parameters by part, what gets a gradient, fields) that a part reads."""

    init = partial(part_structs, module)

    def read(p: str) -> dict[str, jax.ShapeDtypeStruct]:
        names = module.inputs.get(p, ())
        return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}

    fields = read(part)
    if part == "entry":
        x = {n: fields.pop(n) for n in placed if n in fields}
        return {"entry": init("entry")}, x, fields
    hidden = jax.eval_shape(module.entry, init("entry"), read("entry"))
    if part in taps_of(module):
        own = {part: init(part)} if part in module.inputs else {}
        return own, {"hidden": hidden}, {**read("entry"), **read("layers"), **fields}
    parts = ("entry", "exit") if part == "exit" and module.tied else (part,)
    return {p: init(p) for p in parts}, {"hidden": hidden}, fields


def _forward(module: Module, part: str, params: Tree, x: Tree, fields: Tree) -> Tree:
    if part == "entry":
        return module.entry(params["entry"], {**fields, **x})
    if part == "layers":
        return module.layer(layer_params(params), x["hidden"], fields)
    if part == "exit":
        return module.exit(params["exit"], x["hidden"], fields, params.get("entry"))
    tap: Any = module.tap  # type: ignore[attr-defined]
    return tap(part, params.get(part), x["hidden"], fields)


def _backward(forward: Any, params: Tree, x: Tree, fields: Tree, dy: Tree, grads: Tree) -> Tree:
    y, vjp = jax.vjp(lambda p, x: forward(p, x, fields), params, x)
    dparams, dx = vjp(dy)
    sums = y if isinstance(y, dict) else ()  # a loss also says its sums
    return sums, dx, jax.tree.map(jnp.add, grads, dparams)


@lru_cache(maxsize=1024)
def traced_forward(
    module: Module, part: str, shape: Shape, placed: Names = ()
) -> tuple[core.ClosedJaxpr, tuple[tuple[str, str], ...]]:
    """Jaxpr of a part's forward, a layer with its adapter, and of each input what it is of:
    ("params", part), ("x", "hidden" or a field of `placed`) or ("fields", field)."""
    params, x, fields = _arguments(module, part, shape, placed)
    if part == "layers" and ADAPTER in module.freeze_groups:
        params[ADAPTER] = part_structs(module, ADAPTER)
    kinds = {"params": params, "x": x, "fields": fields}
    inputs = tuple(
        (kind, name)
        for kind, by_name in kinds.items()
        for name in sorted(by_name)
        for _ in jax.tree.leaves(by_name[name])
    )
    return jax.make_jaxpr(partial(_forward, module, part))(params, x, fields), inputs


def hidden_bytes(module: Module, shape: Shape, half_bytes: int = 2) -> float:
    """Bytes of the hidden states between layers, on one data rank."""
    hidden = _arguments(module, "layers", shape)[1]["hidden"]
    return value_bytes(Value(hidden.shape, hidden.dtype, 1), half_bytes)


@dataclass(frozen=True)
class Kept:
    """Bytes on one device that a part's gradient keeps of its forward: those of activations, of
    parameters (cast for computing), and of fields alone (masks, angles: equal in all layers)."""

    activations: float
    parameters: float
    fields: float


@lru_cache(maxsize=1024)
def part_kept(module: Module, part: str, shape: Shape, ways: int, half_bytes: int) -> Kept:
    """Bytes that backward of a part needs beside its inputs; `half_bytes` as in `value_bytes`."""
    closed, marks = _residuals(module, part, shape)
    _, leaves = _traced(module, part, FORWARD, shape, ())
    split = [split_dim(leaf.shape, axes, ways) for leaf, axes in leaves]
    region = trace(closed, [*split, *[None] * (len(marks) - len(split))], ways)
    comes_from = sources(region, marks)
    original = {op.outs[0]: op.ins[0] for op in region.ops if op.name in LAYOUT}
    total = dict.fromkeys(("activations", "parameters", "fields"), 0.0)
    for v in dict.fromkeys(region.outs):
        origins = comes_from.get(v, frozenset())
        while v in original:
            v = original[v]
        if not origins or v in region.ins:
            continue  # a constant is made again, an input is there anyway
        kind = "parameters"
        if "x" in origins:
            kind = "activations"
        elif "fields" in origins:
            kind = "fields"
        total[kind] += value_bytes(v, half_bytes)
    if part == "entry":  # its fields are its activations
        total["activations"] += total.pop("fields")
        total["fields"] = 0.0
    return Kept(**total)


@lru_cache(maxsize=1024)
def _residuals(module: Module, part: str, shape: Shape) -> tuple[core.ClosedJaxpr, tuple[str, ...]]:
    """Jaxpr of what a part's gradient keeps, and where each input comes from."""
    params, x, fields = _arguments(module, part, shape)
    forward = partial(_forward, module, part)

    def residuals(params: Tree, x: Tree, fields: Tree) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda p, x: forward(p, x, fields), params, x)[1])

    trees = {"params": params, "x": x, "fields": fields}
    marks = tuple(name for name, tree in trees.items() for _ in jax.tree.leaves(tree))
    return jax.make_jaxpr(residuals)(params, x, fields), marks


@lru_cache(maxsize=4096)
def part_work(
    module: Module,
    part: str,
    direction: str,
    shape: Shape,
    ways: int,
    half_bytes: int,
    placed: Names = (),
) -> float:
    """Most bytes on one device that a part has alive at once beside its inputs."""
    region = _region(module, part, direction, shape, placed, ways)
    return working_bytes(region, partial(value_bytes, half_bytes=half_bytes))


def value_bytes(value: Value, half_bytes: int) -> float:
    """Bytes on one device if half-precision floats take `half_bytes` each."""
    is_half = value.dtype in (jnp.bfloat16, jnp.float16)
    return value.n_bytes * (half_bytes / 2 if is_half else 1)


@lru_cache(maxsize=256)
def part_param_bytes(module: Module, part: str, ways: int) -> float:
    """Bytes on one device of a part's parameters, of one layer for "layers"."""
    total = 0.0
    for leaf, names in _leaves(module, part):
        is_split = split_dim(leaf.shape, names, ways) is not None
        total += prod(leaf.shape) * leaf.dtype.itemsize / (ways if is_split else 1)
    return total


@lru_cache(maxsize=256)
def _leaves(module: Module, part: str) -> list[tuple[Any, tuple[str | None, ...]]]:
    """(struct, logical axes) of each parameter."""
    axes = jax.tree.leaves(module.logical_axes(part), is_leaf=lambda a: isinstance(a, tuple))
    return list(zip(jax.tree.leaves(part_structs(module, part)), axes, strict=True))


def divides(module: Module, ways: int) -> bool:
    """Whether every dim that tensor parallelism splits divides over `ways` devices."""
    leaves = [leaf for part in part_names(module) for leaf in _leaves(module, part)]
    split = [(leaf.shape, split_dim(leaf.shape, names, ways)) for leaf, names in leaves]
    return not any(dim is not None and shape[dim] % ways for shape, dim in split)
