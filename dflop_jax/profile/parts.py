"""The parts of a module as functions to trace: what one layer, or an end, computes per microbatch.

A part is "entry", "layers" (one layer), "exit" or the name of a tap; of a module that names kinds
of layers each kind is taken alone (`one_kind`). Backward is what the runtime
runs: the gradient from what forward kept under a recompute policy, and its sum into the float32
accumulators (`dflop_jax.pipeline.residuals`). `placed` names the fields of the entry that edges
fill: they get a gradient too. What enters between layers is added to the hidden states there, and
is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dflop_jax.contract import Module, adapter_of, layer_kinds_of, split_dim, taps_of
from dflop_jax.pipeline.parts import exit_struct, hidden_struct, logical_axes, part_struct
from dflop_jax.pipeline.residuals import REMAT, Recorded
from dflop_jax.pipeline.token_split import matrix_cuts, rows_and_tokens, run_part
from dflop_jax.profile.fit import DEPTHS
from dflop_jax.profile.kernels import Kernel, kernels_of, working_bytes
from dflop_jax.profile.one_kind import kinds_apart
from dflop_jax.profile.sharded_trace import Region, Value, trace
from dflop_jax.records import BACKWARD, FORWARD, ParamDims, Remat, Shape, token_dim

Tree = Any
ENDS = ("entry", "exit")
# Jaxprs held: those of a shape are asked for together, so that more would spare no tracing.
_TRACED = 64

Names = tuple[str, ...]
Dims = tuple[int | None, ...]


def part_names(module: Module) -> Names:
    """Parts that hold a module's parameters, but for adapters."""
    kinds = dict.fromkeys(layer_kinds_of(module))
    return ("entry", *kinds, "exit", *(tap for tap in taps_of(module) if tap in module.inputs))


def end_names(module: Module) -> Names:
    """Parts that run once for all layers: the ends, and taps, which are counted with them."""
    return (*ENDS, *taps_of(module))


@lru_cache(maxsize=4096)
def part_kernels(
    module: Module,
    part: str,
    direction: str,
    shape: Shape,
    ways: int,
    placed: Names = (),
    remat: Remat = "none",
) -> tuple[Kernel, ...]:
    """Kernels of a part at a per-rank shape, on one of `ways` tensor-parallel devices."""
    return tuple(kernels_of(_region(module, part, direction, shape, placed, ways, remat)))


def forward_flops(module: Module, part: str, shape: Shape) -> float:
    """FLOPs of the matrix products of a part's forward at a shape, padding included."""
    return sum(k.flops * k.repeats for k in part_kernels(module, part, FORWARD, shape, 1))


@lru_cache(maxsize=1024)
def _traced_ways(module: Module, part: str, shape: Shape, ways: int) -> int:
    """The degree that a part is traced at: 2 where that lays out its activations as `ways` does."""

    def laid_out(ways: int) -> tuple[Any, ...]:
        rows, tokens = rows_and_tokens(hidden_struct(module, shape))
        return token_dim(rows, tokens, ways), matrix_cuts(module, part, ways)

    return 2 if ways > 2 and laid_out(2) == laid_out(ways) else ways


@lru_cache(maxsize=_TRACED)
def _recorded(
    module: Module, part: str, shape: Shape, placed: Names, ways: int, remat: Remat
) -> tuple[Recorded, Tree, core.ClosedJaxpr, Tree]:
    """A part's gradient in two halves as the runtime has it, its arguments (parameters by part,
    hidden states or None, what edges place, fields), the first half's jaxpr and what it gives:
    (output, what is kept)."""
    params, x, fields = _arguments(module, part, shape, placed)
    hidden = x.pop("hidden", None)

    def piece(params: Tree, h: Tree, x: Tree, fields: Tree) -> Tree:
        x = x if h is None else {"hidden": h}
        return _forward(module, part, ways, params, x, fields)

    args = (params, hidden, x, fields)
    recorded = Recorded(REMAT[remat], piece, *args, wants_hidden=hidden is not None)
    closed, given = jax.make_jaxpr(recorded.forward, return_shape=True)(*args)
    return recorded, args, closed, given


def has_loss(module: Module, shape: Shape) -> bool:
    """Whether the module's exit gives a loss."""
    return isinstance(exit_struct(module, shape), dict)


@lru_cache(maxsize=_TRACED)
def _traced_forward(
    module: Module, part: str, shape: Shape, placed: Names, ways: int
) -> tuple[core.ClosedJaxpr, Tree]:
    """Jaxpr of a part, and its arguments (parameters, what gets a gradient, fields)."""
    args = _arguments(module, part, shape, placed)
    return jax.make_jaxpr(partial(_forward, module, part, ways))(*args), args


@lru_cache(maxsize=_TRACED)
def _traced_backward(
    module: Module, part: str, shape: Shape, placed: Names, ways: int, remat: Remat
) -> tuple[core.ClosedJaxpr, Tree]:
    """Jaxpr of a part's gradient and of its sum into the accumulators, and its arguments
    (parameters, what was kept, what edges place, fields, the output's gradient, accumulators)."""
    recorded, args, _, (out, residuals) = _recorded(module, part, shape, placed, ways, remat)
    params, _, x, fields = args

    def backward(
        params: Tree, residuals: Tree, x: Tree, fields: Tree, dy: Tree, grads: Tree
    ) -> Tree:
        dparams, dh, dx = recorded.backward(residuals, params, x, fields, dy)
        return dh, dx, jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, dparams)

    grads = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params)
    args = (params, residuals, x, fields, out, grads)
    return jax.make_jaxpr(backward)(*args), args


@lru_cache(maxsize=1024)
def _param_dims(module: Module, part: str, shape: Shape, placed: Names, ways: int) -> Dims:
    """The dim of each parameter that a part reads that is split over `ways` devices."""
    params = _arguments(module, part, shape, placed)[0]
    leaves = [leaf for p in sorted(params) for leaf in _leaves(module, p)]
    return tuple(split_dim(leaf.shape, axes, ways) for leaf, axes in leaves)


def _region(
    module: Module,
    part: str,
    direction: str,
    shape: Shape,
    placed: Names,
    ways: int,
    remat: Remat = "none",
) -> Region:
    """What one of `ways` tensor-parallel devices runs of a part."""
    split = _param_dims(module, part, shape, placed, ways)
    alike = _traced_ways(module, part, shape, ways)
    if direction != BACKWARD:
        closed, args = _traced_forward(module, part, shape, placed, alike)
        return trace(closed, [*split, *_dims_of(args[1:], module, shape, ways)], ways)
    kept = [v.dim for v in _kept_region(module, part, shape, placed, ways, remat).outs]
    closed, args = _traced_backward(module, part, shape, placed, alike, remat)
    given = _dims_of(args[2:-1], module, shape, ways)
    return trace(closed, [*split, *kept, *given, *split], ways)


def _dims_of(args: Tree, module: Module, shape: Shape, ways: int) -> Dims:
    """The split dim of each array that a part is given: of hidden states that of their tokens."""
    structs = hidden_struct(module, shape)
    hidden = {a.shape for a in jax.tree.leaves(structs)}
    dim = token_dim(*rows_and_tokens(structs), ways)
    return tuple(dim if a.shape in hidden else None for a in jax.tree.leaves(args))


@lru_cache(maxsize=_TRACED)
def _kept_region(
    module: Module, part: str, shape: Shape, placed: Names, ways: int, remat: Remat
) -> Region:
    """What one device runs of a part's forward; its outputs are what is kept."""
    alike = _traced_ways(module, part, shape, ways)
    _, args, closed, (out, _) = _recorded(module, part, shape, placed, alike, remat)
    split = _param_dims(module, part, shape, placed, ways)
    region = trace(closed, [*split, *_dims_of(args[1:], module, shape, ways)], ways)
    return replace(region, outs=region.outs[len(jax.tree.leaves(out)) :])


def _arguments(
    module: Module, part: str, shape: Shape, placed: Names = ()
) -> tuple[Tree, Tree, Tree]:
    """Structs of (parameters by part, what gets a gradient, fields) that a part reads."""

    init = partial(part_struct, module)

    def read(p: str) -> dict[str, jax.ShapeDtypeStruct]:
        names = module.inputs.get(p, ())
        return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}

    fields = read(part)
    if part == "entry":
        x = {n: fields.pop(n) for n in placed if n in fields}
        return {"entry": init("entry")}, x, fields
    hidden = hidden_struct(module, shape)
    if part in taps_of(module):
        params = {part: init(part)} if part in module.inputs else {}
        return params, {"hidden": hidden}, {**read("entry"), **read("layers"), **fields}
    parts = ("entry", "exit") if part == "exit" and module.tied else (part,)
    return {p: init(p) for p in parts}, {"hidden": hidden}, fields


def _forward(module: Module, part: str, ways: int, params: Tree, x: Tree, fields: Tree) -> Tree:
    placed = {name: a for name, a in x.items() if name != "hidden"}
    return run_part(module, part, ways, params, x.get("hidden"), placed, fields)


@lru_cache(maxsize=_TRACED)
def traced_forward(
    module: Module, part: str, shape: Shape, placed: Names = ()
) -> tuple[core.ClosedJaxpr, tuple[tuple[str, str], ...]]:
    """Jaxpr of a part's forward, with its adapter, and of each input what it is of:
    ("params", part), ("x", "hidden" or a field of `placed`) or ("fields", field)."""
    params, x, fields = _arguments(module, part, shape, placed)
    adapter = adapter_of(part)
    if adapter in module.freeze_groups:
        params[adapter] = part_struct(module, adapter)
    kinds = {"params": params, "x": x, "fields": fields}
    inputs = tuple(
        (kind, name)
        for kind, by_name in kinds.items()
        for name in sorted(by_name)
        for _ in jax.tree.leaves(by_name[name])
    )
    return jax.make_jaxpr(partial(_forward, module, part, 1))(params, x, fields), inputs


def hidden_bytes(module: Module, shape: Shape) -> float:
    """Bytes of the hidden states between layers, on one data rank."""
    arrays = jax.tree.leaves(hidden_struct(module, shape))
    return sum(Value(a.shape, a.dtype, 1).n_bytes for a in arrays)


@lru_cache(maxsize=1024)
def residual_bytes(
    module: Module,
    part: str,
    shape: Shape,
    ways: int,
    half_bytes: int,
    placed: Names = (),
    remat: Remat = "none",
) -> float:
    """Bytes on one device that a microbatch's forward of a part keeps for backward, as the runtime
    hands them on: nothing that follows from parameters and fields alone.

    Args:
      half_bytes: what an element of a half-precision activation takes: 2 on accelerators, 4 in
        programs of XLA's CPU compiler.
    """
    residuals = dict.fromkeys(_kept_region(module, part, shape, placed, ways, remat).outs)
    return sum(value_bytes(v, half_bytes) for v in residuals)


@lru_cache(maxsize=4096)
def live_bytes(
    module: Module,
    part: str,
    shape: Shape,
    ways: int,
    half_bytes: int,
    placed: Names = (),
    remat: Remat = "none",
) -> float:
    """Most bytes on one device that backward of a part has alive at once beside its arguments."""
    region = _region(module, part, BACKWARD, shape, placed, ways, remat)
    return working_bytes(region, partial(value_bytes, half_bytes=half_bytes))


def program_bytes(
    module: Module,
    shape: Shape,
    ways: int,
    half_bytes: int,
    remat: Remat = "none",
    placed: Names = (),
    *,
    loss: bool = False,
) -> tuple[float, float, float]:
    """(residual bytes of a layer, of both ends, live bytes of backward's largest part, however many
    layers there are) of a module; see `residual_bytes`. `loss`: the exit gives a loss, whose
    gradient is computed at once."""

    def residuals(part: str) -> float:
        fields = placed if part == "entry" else ()
        return residual_bytes(module, part, shape, ways, half_bytes, fields, remat)

    def alive(part: str) -> float:
        fields, at_once = placed if part == "entry" else (), loss and part == "exit"
        policy = "layers" if at_once else remat
        return live_bytes(module, part, shape, ways, half_bytes, fields, policy)

    ends = [p for p in end_names(module) if not (loss and p == "exit")]
    return residuals("layers"), sum(map(residuals, ends)), max(map(alive, part_names(module)))


def probe_bytes(module: Module, shape: Shape) -> float:
    """Bytes of activations of the largest program that times a shape on one CPU device, parameters
    aside."""

    def of_kind(apart: Module) -> float:
        layer, ends, alive = program_bytes(apart, shape, 1, half_bytes=4)
        return max(DEPTHS) * layer + ends + alive

    return max(map(of_kind, kinds_apart(module).values()))


def value_bytes(value: Value, half_bytes: int) -> float:
    """Bytes on one device if half-precision floats take `half_bytes` each."""
    is_half = value.dtype in (jnp.bfloat16, jnp.float16)
    return value.n_bytes * (half_bytes / 2 if is_half else 1)


@lru_cache(maxsize=256)
def _leaves(module: Module, part: str) -> list[tuple[Any, tuple[str | None, ...]]]:
    """(struct, logical axes) of each parameter."""
    axes = jax.tree.leaves(logical_axes(module, part), is_leaf=lambda a: isinstance(a, tuple))
    return list(zip(jax.tree.leaves(part_struct(module, part)), axes, strict=True))


def param_dims(module: Module, parts: Sequence[str]) -> tuple[ParamDims, ...]:
    """Every parameter of some parts, of one layer for "layers"."""
    leaves = [leaf for part in parts for leaf in _leaves(module, part)]
    split = (split_dim(leaf.shape, names, 1) for leaf, names in leaves)
    return tuple(
        ParamDims(tuple(leaf.shape), -1 if dim is None else dim, working_bytes=leaf.dtype.itemsize)
        for (leaf, _), dim in zip(leaves, split, strict=True)
    )


def divides(module: Module, ways: int) -> bool:
    """Whether every dim that tensor parallelism splits divides over `ways` devices."""
    leaves = [leaf for part in part_names(module) for leaf in _leaves(module, part)]
    split = [(leaf.shape, split_dim(leaf.shape, names, ways)) for leaf, names in leaves]
    return not any(dim is not None and shape[dim] % ways for shape, dim in split)
