"""Attention kernels that XLA cannot look into, with a gradient and with their heads split over the
mesh axis "model" where a program has one: every device runs its own query heads on its own kv
heads, and nothing is gathered.

Kv heads are split too where the degree divides them. Otherwise each device has them all, picks
those that its query heads read, and the gradients of all devices are added up in float32.

Shape suffixes: as in `models/attention.py`; L kv heads that the query heads of one device read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Array = jax.Array
Tree = Any

AXIS = "model"
SAVED = "attention"  # the name of what backward should not compute again: output and log-sums
_HEADS, _WHOLE = P(None, None, AXIS), P()  # of [B, T, N, H]
_STATS = P(None, AXIS)  # of what a kernel saves: [any, N, any]


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel's two directions, both called with `causal`, `interpret`, `scale` and, if there is
    one, the `window`. `ids` are what it is told of tokens, an array or several [B, T].

    `forward(q, k, v, ids)` gives (output, arrays for backward [any, N, any]), and
    `backward(q, k, v, ids, output, those arrays, cotangent)` the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Array, Tree]]
    backward: Callable[..., tuple[Array, Array, Array]]
    causal: bool
    interpret: bool
    scale: float
    window: int = 0

    @property
    def options(self) -> dict[str, Any]:
        window = {"window": self.window} if self.window else {}
        options = {"causal": self.causal, "interpret": self.interpret, "scale": self.scale}
        return options | window


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(kernel: AttentionKernel, q: Array, k: Array, v: Array, ids: Tree) -> Array:
    """The kernel's output [B, T, N, H]; see `models.attention.attention`.

    Raises:
      ValueError: the degree of tensor parallelism does not divide the query heads.
    """
    return _forward(kernel, q, k, v, ids)[0]


def _forward(
    kernel: AttentionKernel, q: Array, k: Array, v: Array, ids: Tree
) -> tuple[Array, tuple[Tree, ...]]:
    split = _Split.of(q, k)
    alone = partial(kernel.forward, **kernel.options)
    run: Callable[..., tuple[Array, Tree]] = alone
    if split.ways > 1:

        def on_rank(q: Array, k: Array, v: Array, ids: Tree) -> tuple[Array, Tree]:
            return alone(q, split.pick(k), split.pick(v), _varying(ids))

        run = on_ranks(on_rank, (_HEADS, split.spec, split.spec, _WHOLE), (_HEADS, _STATS))
    out, saved = checkpoint_name(run(q, k, v, ids), SAVED)
    return out, (q, k, v, ids, out, saved)


def _backward(
    kernel: AttentionKernel, residuals: tuple[Tree, ...], dout: Array
) -> tuple[Array, Array, Array, None]:
    split = _Split.of(*residuals[:2])
    alone = partial(kernel.backward, **kernel.options)
    run: Callable[..., tuple[Array, Array, Array]] = alone
    if split.ways > 1:

        def on_rank(
            q: Array, k: Array, v: Array, ids: Tree, out: Array, saved: Tree, dout: Array
        ) -> tuple[Array, Array, Array]:
            k, v = split.pick(k), split.pick(v)
            dq, dk, dv = alone(q, k, v, _varying(ids), out, saved, dout)
            return dq, split.put_back(dk), split.put_back(dv)

        kv = split.spec
        run = on_ranks(on_rank, (_HEADS, kv, kv, _WHOLE, _HEADS, _STATS, _HEADS), (_HEADS, kv, kv))
    return (*run(*residuals, dout), None)


attend.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Split:
    """How N query heads and K kv heads lie on `ways` devices."""

    ways: int
    heads: int
    kv_heads: int

    @staticmethod
    def of(q: Array, k: Array) -> _Split:
        ways = tensor_ranks()
        if q.shape[2] % ways:
            raise ValueError(
                f"{q.shape[2]} query heads do not divide over {AXIS}={ways}; choose a degree that "
                "divides them"
            )
        return _Split(ways, q.shape[2], k.shape[2])

    @property
    def is_even(self) -> bool:
        return self.kv_heads % self.ways == 0

    @property
    def spec(self) -> P:
        return _HEADS if self.is_even else _WHOLE

    def _own(self) -> Array:
        """Kv heads that this device's query heads read, int32 [L]: one, or one for each of them."""
        per_device, group = self.heads // self.ways, self.heads // self.kv_heads
        first = lax.axis_index(AXIS) * per_device
        return (first + jnp.arange(1 if group % per_device == 0 else per_device)) // group

    def pick(self, x_BSKH: Array) -> Array:
        """The kv heads of this device [B, S, L, H]."""
        if self.is_even:
            return x_BSKH
        return jnp.take(_varying(x_BSKH), self._own(), axis=2)

    def put_back(self, dx_BSLH: Array) -> Array:
        """The gradient of `pick`, summed over the devices."""
        if self.is_even:
            return dx_BSLH
        is_LK = self._own()[:, None] == jnp.arange(self.kv_heads)[None]
        own_BSKH = jnp.einsum(
            "BSLH,LK->BSKH", dx_BSLH.astype(jnp.float32), is_LK.astype(jnp.float32),
            precision="highest",
        )  # fmt: skip
        return lax.psum(own_BSKH, AXIS).astype(dx_BSLH.dtype)


def _varying(x: Tree) -> Tree:
    return jax.tree.map(lambda a: lax.pcast(a, (AXIS,), to="varying"), x)


def tensor_ranks() -> int:
    """Devices that the program being traced splits heads over."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return int(mesh.shape[AXIS]) if types.get(AXIS) == AxisType.Auto else 1


def on_ranks(function: Callable[..., Tree], ins: Tree, outs: Tree) -> Callable[..., Tree]:
    """The function on each device's heads, as one operation.

    A scan that is differentiated takes what does not change out of its body, also out of a
    `shard_map` in it, and what that leaves cannot be lowered inside another one. It does not look
    into a function with a batching rule of its own.
    """
    call = custom_vmap(jax.shard_map(function, in_specs=ins, out_specs=outs, axis_names={AXIS}))

    @call.def_vmap
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("attention kernels have rows of their own; do not vmap them")

    return call


def interpreted(call: Callable[..., Tree]) -> Callable[..., Tree]:
    """A Pallas kernel that jax interprets, also in a `shard_map`, where arrays differ along every
    axis that is mapped: the interpreter does not keep account of that, so it is not asked to."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or AXIS in mesh.manual_axes:
        return call

    def unaccounted(*arrays: Tree) -> Tree:
        return call(*jax.tree.map(lambda a: lax.max(a, a), arrays))  # equal, and of no account

    run = jax.shard_map(
        unaccounted, in_specs=P(), out_specs=P(), axis_names={AXIS}, check_vma=False
    )
    return lambda *arrays: lax.pcast(run(*arrays), mesh.manual_axes, to="varying")
