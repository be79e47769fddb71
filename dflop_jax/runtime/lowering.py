"""Lowers a segment's programs; forward is lowered before backward, which reads its residuals."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dflop_jax.records import BACKWARD, FORWARD, MANUAL_AXES, Direction, Shape
from dflop_jax.runtime import segment as structs
from dflop_jax.runtime import spmd_loop
from dflop_jax.runtime.parameter_layout import grad_structs, program_structs
from dflop_jax.runtime.segment import ProgramKind, Segment, x_structs, y_structs
from dflop_jax.runtime.zero_sharding import axes_of

Tree = Any
# Each stage and data rank has its own entries; for outputs, the stage's microbatches.
_PER_RANK = P("stage", "data")
# Makes XLA's GPU compiler use deterministic operations only, also in libraries.
_DETERMINISTIC_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True}
# From jax 0.11 on, XLA fuses products with the rows of stacks that they read and write. In a loop
# over layers or ticks, forward would compute each product that backward needs twice: for the stack
# of residuals, and for the next operation.
_LOOP_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}


class Lowering:
    """A segment's programs, and the residuals between them.

    Residuals are arrays [stages, data ranks, ...]. Their shapes are known once forward is lowered.
    Under tensor parallelism the compiler chooses their shardings, which are known once forward is
    compiled.
    """

    def __init__(self, segment: Segment):
        self.segment = segment
        self._unsharded_residuals: dict[Shape, Tree] = {}
        self._residuals: dict[Shape, Tree] = {}
        # Forward and backward at a shape share the traces of the segment's functions.
        self._vjps: defaultdict[Shape, spmd_loop.Vjps] = defaultdict(dict)

    def argument_structs(self, shape: Shape, kind: ProgramKind) -> tuple[Tree, ...]:
        """Return (params, x, fields), and for backward also (dy, grads, residuals)."""
        s = self.segment
        args = (program_structs(s), x_structs(s, shape), structs.field_structs(s, shape))
        if kind != BACKWARD:
            return args
        dy = y_structs(s, shape)
        if s.has_loss:
            dy["sums"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=s.sharding())
        return (*args, dy, grad_structs(s), self.residual_structs(shape))

    def backward_structs(self, shape: Shape) -> tuple[Tree, Tree, Tree, jax.ShapeDtypeStruct]:
        """Return structs of backward's outputs: (sums, dx, grads, completion)."""
        s = self.segment
        completion = jax.ShapeDtypeStruct(
            (s.stages, s.data_ranks), jnp.float32, sharding=s.sharding(*_PER_RANK)
        )
        dx = {n: struct for n, struct in x_structs(s, shape).items() if n in s.wants_gradient}
        sums = y_structs(s, shape, sums=True).get("sums", {})
        return sums, dx, grad_structs(s), completion

    def residual_structs(self, shape: Shape) -> Tree:
        """Return structs of the residuals that forward saves for backward, {} if none. Under tensor
        parallelism this compiles forward, unless `set_residual_shardings` was called."""
        if not self.segment.saves_residuals:
            return {}
        if shape not in self._residuals:
            lowered = self.lower(shape, FORWARD)
            if self.segment.tp > 1:
                self.set_residual_shardings(shape, lowered.compile())
        return self._residuals[shape]

    def residual_bytes(self, shape: Shape) -> float:
        """Return the bytes of the residuals on one device."""
        return structs.device_bytes(self.residual_structs(shape))

    def set_residual_shardings(self, shape: Shape, forward: jax.stages.Compiled) -> None:
        """Set the residuals' shardings from the compiled forward, which was lowered here."""
        shardings = forward.output_shardings["residuals"]
        residuals = self._unsharded_residuals[shape]
        self._residuals[shape] = jax.tree.map(_with_sharding, residuals, shardings)

    def lower(self, shape: Shape, kind: ProgramKind) -> jax.stages.Lowered:
        """Lower the program of a kind at a per-rank shape, for arguments of `argument_structs`.
        Forward and evaluate return the outputs of `spmd_loop.forward_program`; backward returns
        `backward_structs` and donates the gradients."""
        if kind == BACKWARD:
            return self._lower_backward(shape)
        s, sums = self.segment, kind != FORWARD
        args = self.argument_structs(shape, kind)
        shardings = jax.tree.map(lambda a: a.sharding, y_structs(s, shape, sums=sums))
        saves_residuals = s.saves_residuals and not sums
        if saves_residuals:
            shardings["residuals"] = None if s.tp > 1 else s.sharding(*_PER_RANK)
        body = partial(spmd_loop.forward_program, s, self._vjps[shape], sums=sums)
        jitted = self._jit(body, jax.tree.map(manual_spec, args), _PER_RANK, shardings, FORWARD)
        lowered = jitted.lower(*args)
        if saves_residuals:
            residuals = lowered.out_info["residuals"]
            self._unsharded_residuals[shape] = residuals
            if s.tp == 1:
                on_ranks = partial(_with_sharding, sharding=s.sharding(*_PER_RANK))
                self._residuals[shape] = jax.tree.map(on_ranks, residuals)
        return lowered

    def _lower_backward(self, shape: Shape) -> jax.stages.Lowered:
        args, outs = self.argument_structs(shape, BACKWARD), self.backward_structs(shape)
        params, x, fields, _, grads = jax.tree.map(manual_spec, args[:5])
        dy = {k: P() if k == "sums" else _PER_RANK for k in args[3]}
        in_specs = (params, x, fields, dy, grads, _PER_RANK)
        shardings = jax.tree.map(lambda a: a.sharding, outs)
        body = partial(spmd_loop.backward_program, self.segment, self._vjps[shape])
        out_specs = jax.tree.map(manual_spec, outs)
        jitted = self._jit(body, in_specs, out_specs, shardings, BACKWARD, donate=(4,))
        return jitted.lower(*args)

    def _jit(
        self,
        body: Any,
        in_specs: Tree,
        out_specs: Tree,
        shardings: Tree,
        direction: Direction,
        donate: Any = (),
    ) -> Any:
        s = self.segment
        mapped: Any = jax.shard_map(
            body, mesh=s.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={*MANUAL_AXES}
        )
        return jax.jit(
            mapped,
            out_shardings=shardings,
            donate_argnums=donate,
            compiler_options=compiler_options(s, direction),
        )


def compiler_options(s: Segment, direction: Direction) -> dict[str, bool]:
    """Return XLA's options for a segment's programs of a direction, without those in XLA_FLAGS."""
    if not s.chip.startswith("sm_"):
        return {}
    exact = not getattr(s.module, "allows_nondeterminism", False)
    has_loop = not s.unrolls_layers or s.plan.ticks(s.stages, s.microbatches) > 1
    runs_forward = direction == FORWARD or not s.saves_residuals
    options = (_DETERMINISTIC_OPTIONS if exact else {}) | (
        _LOOP_OPTIONS if has_loop and runs_forward else {}
    )
    set_by_user = os.environ.get("XLA_FLAGS", "")
    return {k: v for k, v in options.items() if f"--{k}" not in set_by_user}


def _with_sharding(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def manual_spec(struct: jax.ShapeDtypeStruct) -> P:
    """Return the part of a struct's sharding that `shard_map` handles."""
    dims = [tuple(a for a in axes_of(dim) if a in MANUAL_AXES) for dim in struct.sharding.spec]
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in dims))
