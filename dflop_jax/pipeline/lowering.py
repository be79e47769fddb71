"""Lowers a segment's programs, forward before backward, which takes what forward hands over."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import any_order_of, chip_of
from dflop_jax.pipeline import spmd_loop
from dflop_jax.pipeline.fused import axes_of
from dflop_jax.records import BACKWARD, FORWARD, MANUAL_AXES, Shape

if TYPE_CHECKING:
    from dflop_jax.pipeline.segment import Kind, Segment

Tree = Any
# Each stage and rank holds its own part. Of outputs these are the stage's share of microbatches.
_OWN = P("stage", "data")
# XLA's GPU compiler: equal inputs give equal bits, also from libraries that may add in any order.
_SAME_BITS = {"xla_gpu_exclude_nondeterministic_ops": True}


class Lowering:
    """A segment's programs, and what is known of the arrays between them.

    Residuals are arrays [stages, data ranks, ...]. Forward has to be lowered to know them; where
    tensors are split, the compiler chooses how these are, and forward has to be compiled.
    """

    def __init__(self, segment: Segment):
        self._segment = segment
        self._unplaced: dict[Shape, Tree] = {}
        self._residuals: dict[Shape, Tree] = {}

    def residual_structs(self, shape: Shape) -> Tree:
        """What forward hands over. Forward is compiled for it where tensors are split, unless
        `learn_residuals` was called."""
        if shape not in self._residuals:
            lowered = self.lower(shape, FORWARD)
            if self._segment.splits_tensors:
                self.learn_residuals(shape, lowered.compile())
        return self._residuals[shape]

    def learn_residuals(self, shape: Shape, forward: jax.stages.Compiled) -> None:
        """Take shardings from the compiled forward, which was lowered here."""
        self._place(shape, forward.output_shardings["residuals"])

    def _place(self, shape: Shape, shardings: Tree) -> None:
        self._residuals[shape] = jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            self._unplaced[shape],
            shardings,
        )

    def lower(self, shape: Shape, kind: Kind) -> jax.stages.Lowered:
        """See `Segment.lower`."""
        if kind == BACKWARD:
            return self._lower_backward(shape)
        s = self._segment
        sums = kind != FORWARD
        args = s.argument_structs(shape, kind)
        shardings = jax.tree.map(lambda a: a.sharding, s.y_structs(shape, sums=sums))
        hands_over = s.hands_over and not sums
        if hands_over:
            shardings["residuals"] = None if s.splits_tensors else s.sharding(*_OWN)
        body = partial(spmd_loop.forward_program, s, sums=sums)
        lowered = self._jit(body, jax.tree.map(manual_spec, args), _OWN, shardings).lower(*args)
        if hands_over:
            self._unplaced[shape] = residuals = lowered.out_info["residuals"]
            if not s.splits_tensors:
                self._place(shape, jax.tree.map(lambda _: s.sharding(*_OWN), residuals))
        return lowered

    def _lower_backward(self, shape: Shape) -> jax.stages.Lowered:
        s = self._segment
        args = s.argument_structs(shape, BACKWARD)
        outs = s.output_structs(shape, BACKWARD)
        params, x, fields, _, grads = jax.tree.map(manual_spec, args[:5])
        dy = {k: P() if k == "sums" else jax.tree.map(lambda _: _OWN, v)
              for k, v in args[3].items()}  # fmt: skip
        in_specs = (params, x, fields, dy, grads, _OWN)
        shardings = jax.tree.map(lambda a: a.sharding, outs)
        body = partial(spmd_loop.backward_program, s)
        jitted = self._jit(body, in_specs, jax.tree.map(manual_spec, outs), shardings, donate=(4,))
        return jitted.lower(*args)

    def _jit(
        self, body: Any, in_specs: Tree, out_specs: Tree, shardings: Tree, donate: Any = ()
    ) -> Any:
        mesh = self._segment.mesh
        mapped: Any = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
        )
        on_gpu = chip_of(mesh.devices.flat[0]).startswith("sm_")
        exact = on_gpu and not any_order_of(self._segment.module)
        return jax.jit(
            mapped,
            out_shardings=shardings,
            donate_argnums=donate,
            compiler_options=_SAME_BITS if exact else None,
        )


def manual_spec(struct: jax.ShapeDtypeStruct) -> P:
    """The part of a sharding that `shard_map` handles."""
    spec = struct.sharding.spec
    return P(*(dim if {*axes_of(dim)} <= {*MANUAL_AXES} else None for dim in spec))
