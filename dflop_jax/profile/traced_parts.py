"""Traces of a module's parts: the computation of one layer, or of an end, for a microbatch.

A part is "entry", "layers" (one layer), "exit" or the name of a tap. Modules with several kinds of
layers are traced one kind at a time (`shallow.single_kind_module`). Backward is traced as the
runtime runs it: the gradient from the residuals under a recompute policy, and its sum into the
float32 accumulators (`dflop_jax.runtime.residuals`). Entry fields that edges fill (`edge_fields`)
get a gradient, too. Inputs between layers are added to hidden states, which is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dflop_jax import contract
from dflop_jax.contract import Module, MultimodalModel, adapter_of, taps_of, tensor_parallel_dim
from dflop_jax.profile.fit import DEPTHS
from dflop_jax.profile.kernels import Kernel, kernels_of, peak_temporary_bytes
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.sharded_trace import Region, Value, trace
from dflop_jax.records import BACKWARD, FORWARD, ParamDims, Remat, Shape, layer_key, token_dim
from dflop_jax.runtime.module_parts import (
    exit_struct,
    hidden_struct,
    logical_axes,
    part_struct,
    tap_struct,
)
from dflop_jax.runtime.residuals import REMAT, SplitVjp
from dflop_jax.runtime.token_split import rows_and_tokens, run_module_part, tensor_parallel_dims
from dflop_jax.runtime.update import Optimizer, map_optimizer_state

Tree = Any
ENDS = ("entry", "exit")
Names = tuple[str, ...]
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class TraceSpec:
    """Specification of a trace: a part of a module at a per-rank shape on one of `tp` tensor ranks,
    under a recompute policy; edges fill `edge_fields` of the module's entry."""

    module: Module
    part: str
    shape: Shape
    tp: int = 1
    edge_fields: Names = ()
    remat: Remat = "none"


def end_parts(module: Module) -> Names:
    """Return the parts that run once for all layers: the ends, and taps, which count as ends."""
    return (*ENDS, *taps_of(module))


@lru_cache(maxsize=4096)
def trace_kernels(spec: TraceSpec, direction: str) -> tuple[Kernel, ...]:
    """Return the kernels of a part."""
    return tuple(kernels_of(_trace_device(spec, direction)))


def forward_flops(spec: TraceSpec) -> float:
    """Return the FLOPs of matrix products in a part's forward, padding included."""
    return sum(k.flops * k.repeats for k in trace_kernels(spec, FORWARD))


@lru_cache(maxsize=1024)
def _at_traced_degree(spec: TraceSpec) -> TraceSpec:
    """Return the spec at the degree to trace: 2 if activations are split in the same way."""

    def laid_out(tp: int) -> tuple[Any, ...]:
        rows, tokens = rows_and_tokens(hidden_struct(spec.module, spec.shape))
        return token_dim(rows, tokens, tp), tensor_parallel_dims(spec.module, spec.part, tp)

    same_split = spec.tp > 2 and laid_out(2) == laid_out(spec.tp)
    return replace(spec, tp=2) if same_split else spec


@lru_cache
def _record_gradient(spec: TraceSpec) -> tuple[SplitVjp, Tree, core.ClosedJaxpr, Tree]:
    """Return a part's split VJP as the runtime has it, its arguments (parameters by part, hidden
    states or None, edge fields, other fields), and the jaxpr and (output, residuals) of its
    forward."""
    params, x, fields = _argument_structs(spec)
    hidden = x.pop("hidden", None)

    def forward(params: Tree, h: Tree, x: Tree, fields: Tree) -> Tree:
        return _forward(spec, params, x if h is None else {"hidden": h}, fields)

    args = (params, hidden, x, fields)
    recorded = SplitVjp(REMAT[spec.remat], forward, *args, wants_hidden=hidden is not None)
    closed, outputs = jax.make_jaxpr(recorded.forward, return_shape=True)(*args)
    return recorded, args, closed, outputs


def has_loss(module: Module, shape: Shape) -> bool:
    """Return whether the module's exit computes a loss."""
    return isinstance(exit_struct(module, shape), dict)


@lru_cache
def traced_forward(spec: TraceSpec, *, adapter: bool = False) -> tuple[core.ClosedJaxpr, Tree]:
    """Return the jaxpr of a part, with its `adapter`, and its arguments (`_argument_structs`)."""
    params, x, fields = _argument_structs(spec)
    name = adapter_of(spec.part)
    if adapter and name in spec.module.freeze_groups:
        params[name] = part_struct(spec.module, name)
    return jax.make_jaxpr(partial(_forward, spec))(params, x, fields), (params, x, fields)


@lru_cache
def _traced_backward(spec: TraceSpec) -> tuple[core.ClosedJaxpr, Tree]:
    """Return the jaxpr of a part's gradient with its accumulation, and its arguments (parameters,
    residuals, edge fields, other fields, the output's gradient, accumulators)."""
    recorded, args, _, (output, residuals) = _record_gradient(spec)
    params, _, x, fields = args

    def backward(
        params: Tree, residuals: Tree, x: Tree, fields: Tree, dy: Tree, grads: Tree
    ) -> Tree:
        dparams, dh, dx = recorded.backward(residuals, params, x, fields, dy)
        return dh, dx, jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, dparams)

    grads = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params)
    args = (params, residuals, x, fields, output, grads)
    return jax.make_jaxpr(backward)(*args), args


def _param_splits(spec: TraceSpec) -> Dims:
    """Return the dim of each parameter of a part that is split over tensor ranks."""
    parts = sorted(_argument_structs(spec)[0])
    leaves = [leaf for p in parts for leaf in params_with_axes(spec.module, p)]
    return tuple(tensor_parallel_dim(leaf.shape, axes, spec.tp) for leaf, axes in leaves)


def _trace_device(spec: TraceSpec, direction: str) -> Region:
    """Return a part's operations on one device."""
    split = _param_splits(spec)
    if direction != BACKWARD:
        closed, args = traced_forward(replace(_at_traced_degree(spec), remat="none"))
        return trace(closed, [*split, *_split_dims(args[1:], spec)], spec.tp)
    residual_dims = [v.dim for v in _trace_residuals(spec).outputs]
    closed, args = _traced_backward(_at_traced_degree(spec))
    return trace(closed, [*split, *residual_dims, *_split_dims(args[2:-1], spec), *split], spec.tp)


def _split_dims(args: Tree, spec: TraceSpec) -> Dims:
    """Return the split dim of each argument of a part; hidden states are split by `token_dim`."""
    structs = hidden_struct(spec.module, spec.shape)
    hidden = {a.shape for a in jax.tree.leaves(structs)}
    dim = token_dim(*rows_and_tokens(structs), spec.tp)
    return tuple(dim if a.shape in hidden else None for a in jax.tree.leaves(args))


@lru_cache
def _trace_residuals(spec: TraceSpec) -> Region:
    """Return a part's forward operations on one device, with the residuals as outputs."""
    _, args, closed, (output, _) = _record_gradient(_at_traced_degree(spec))
    region = trace(closed, [*_param_splits(spec), *_split_dims(args[1:], spec)], spec.tp)
    return replace(region, outputs=region.outputs[len(jax.tree.leaves(output)) :])


def _argument_structs(spec: TraceSpec) -> tuple[Tree, Tree, Tree]:
    """Return structs of a part's (parameters by part, inputs that get a gradient, fields)."""
    module, part, shape = spec.module, spec.part, spec.shape
    init = partial(part_struct, module)

    def read(p: str) -> dict[str, jax.ShapeDtypeStruct]:
        names = module.inputs.get(p, ())
        return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}

    fields = read(part)
    if part == "entry":
        x = {n: fields.pop(n) for n in spec.edge_fields if n in fields}
        return {"entry": init("entry")}, x, fields
    hidden = hidden_struct(module, shape)
    if part in taps_of(module):
        params = {part: init(part)} if part in module.inputs else {}
        return params, {"hidden": hidden}, {**read("entry"), **read("layers"), **fields}
    parts = ("entry", "exit") if part == "exit" and module.tied else (part,)
    return {p: init(p) for p in parts}, {"hidden": hidden}, fields


def _forward(spec: TraceSpec, params: Tree, x: Tree, fields: Tree) -> Tree:
    edge_fields = {name: a for name, a in x.items() if name != "hidden"}
    return run_module_part(
        spec.module, spec.part, spec.tp, params, x.get("hidden"), edge_fields, fields
    )


def hidden_bytes(module: Module, shape: Shape) -> float:
    """Return the bytes of hidden states between layers on one data rank."""
    arrays = jax.tree.leaves(hidden_struct(module, shape))
    return float(sum(a.size * a.dtype.itemsize for a in arrays))


def output_bytes(module: Module, shape: Shape) -> float:
    """Return the bytes of the largest features that an edge can read on one data rank."""
    outputs = [tap_struct(module, tap, shape) for tap in taps_of(module)]
    if not has_loss(module, shape):
        outputs.append(exit_struct(module, shape))
    return float(max((a.size * a.dtype.itemsize for a in outputs), default=0))


def _value_bytes(value: Value, half_bytes: int) -> float:
    """Return bytes on one device if half-precision floats take `half_bytes` each: 2 on GPUs and
    TPUs, 4 with XLA's CPU compiler."""
    is_half = value.dtype in (jnp.bfloat16, jnp.float16)
    return value.n_bytes * (half_bytes / 2 if is_half else 1)


@lru_cache(maxsize=1024)
def residual_bytes(spec: TraceSpec, half_bytes: int) -> float:
    """Return a part's residual bytes on one device for one microbatch, without values that the
    runtime derives from parameters and fields alone."""
    return sum(_value_bytes(v, half_bytes) for v in dict.fromkeys(_trace_residuals(spec).outputs))


@lru_cache(maxsize=4096)
def live_bytes(spec: TraceSpec, half_bytes: int) -> float:
    """Return the peak live bytes of a part's backward on one device, without its arguments."""
    value_bytes = partial(_value_bytes, half_bytes=half_bytes)
    return peak_temporary_bytes(_trace_device(spec, BACKWARD), value_bytes)


def program_bytes(
    whole: TraceSpec, half_bytes: int, *, loss: bool = False
) -> tuple[float, float, float]:
    """Return (residual bytes of a layer, of both ends, live bytes of the largest part in backward)
    of a spec's module. `loss`: the exit computes a loss with its gradient in forward."""
    layer, *ends = (
        residual_bytes(replace(whole, part=name), half_bytes)
        for name in ("layers", *end_parts(whole.module))
        if not (loss and name == "exit")
    )
    specs = [replace(whole, part=name) for name in parameter_parts(whole.module)]
    if loss:
        specs = [replace(s, remat="layers") if s.part == "exit" else s for s in specs]
    return layer, sum(ends), max(live_bytes(s, half_bytes) for s in specs)


def timed_program_bytes(module: Module, shape: Shape) -> float:
    """Return the activation bytes of the largest timed program of a shape on one CPU device."""
    all_bytes = []
    for kind_module in single_kind_modules(module).values():
        layer, ends, live = program_bytes(TraceSpec(kind_module, "layers", shape), half_bytes=4)
        all_bytes.append(max(DEPTHS) * layer + ends + live)
    return max(all_bytes)


# ---- parameters ----


def parameter_parts(module: Module) -> tuple[str, ...]:
    """Return the parts with parameters of a module, without adapters."""
    kinds = dict.fromkeys(contract.layer_kinds_of(module))
    return ("entry", *kinds, "exit", *(tap for tap in taps_of(module) if tap in module.inputs))


@lru_cache(maxsize=256)
def params_with_axes(module: Module, part: str) -> list[tuple[Any, tuple[str | None, ...]]]:
    """Return (struct, logical axes) of each parameter of a part ("layers": of one layer)."""
    axes = jax.tree.leaves(logical_axes(module, part), is_leaf=lambda a: isinstance(a, tuple))
    return list(zip(jax.tree.leaves(part_struct(module, part)), axes, strict=True))


def divides(module: Module, tp: int) -> bool:
    """Return whether `tp` divides every dim that tensor parallelism splits."""
    leaves = [leaf for part in parameter_parts(module) for leaf in params_with_axes(module, part)]
    split = [(leaf.shape, tensor_parallel_dim(leaf.shape, names, tp)) for leaf, names in leaves]
    return not any(dim is not None and shape[dim] % tp for shape, dim in split)


def parameter_dims(
    model: MultimodalModel, tx: Optimizer | None = None, frozen: Collection[str] = ()
) -> dict[str, Any]:
    """Return `layer_dims` and `ends_dims` of a model's profile: each parameter, whether it trains
    (it is in no `frozen` group), and its state bytes under `tx`; None: AdamW."""
    layer_dims, ends_dims = {}, {}
    for name, module in model.modules.items():
        stacked = contract.stacked_parts(module)
        for kind in dict.fromkeys(stacked.values()):
            parts = [p for p, k in stacked.items() if k == kind]
            layer_dims[layer_key(name, kind)] = _param_dims(module, parts, tx, frozen)
        ends = [p for p in module.freeze_groups if p not in stacked]
        ends_dims[name] = _param_dims(module, ends, tx, frozen)
    return {"layer_dims": layer_dims, "ends_dims": ends_dims}


def _param_dims(
    module: Module, parts: Sequence[str], tx: Optimizer | None, frozen: Collection[str]
) -> tuple[ParamDims, ...]:
    all_dims: list[ParamDims] = []
    for part in parts:
        structs = params_with_axes(module, part)
        trains = module.freeze_groups[part] not in frozen
        element_bytes = [ParamDims.element_state_bytes * trains] * len(structs)
        if tx and trains:
            element_bytes = _state_element_bytes(tx, module, part)
        for (leaf, axes), n_bytes in zip(structs, element_bytes, strict=True):
            dim = tensor_parallel_dim(leaf.shape, axes, 1)
            split = -1 if dim is None else dim
            all_dims.append(
                ParamDims(tuple(leaf.shape), split, n_bytes, trains, leaf.dtype.itemsize)
            )
    return tuple(all_dims)


def _state_element_bytes(tx: Optimizer, module: Module, part: str) -> list[float]:
    """Return the optimizer state's bytes per element, for each parameter of a part."""
    structs = part_struct(module, part)
    params = {part: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), structs)}
    element_bytes = [0.0] * len(jax.tree.leaves(params))

    def add(moments: Tree) -> Tree:
        for i, leaf in enumerate(jax.tree.leaves(moments)):
            element_bytes[i] += leaf.dtype.itemsize
        return moments

    map_optimizer_state(add, lambda leaf: leaf, jax.eval_shape(tx.init, params), params)
    return element_bytes
