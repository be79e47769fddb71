"""Attention kernels as operations that XLA cannot look into, with a gradient, and with heads split
over the mesh axis "model" if a program has one: every device runs its own query heads on their kv
heads, and nothing is gathered.

Kv heads are split, too, if the degree divides them. Otherwise each device has all of them and
selects those that its query heads read; the gradients of all devices are added up in float32.

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
RESIDUAL_NAME = "attention"  # name of the saved output and log-sums
_HEADS, _WHOLE = P(None, None, AXIS), P()  # of [B, T, N, H]
_STATS = P(None, AXIS)  # of a kernel's saved arrays: [any, N, any]


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel's two directions, both called with `causal`, `interpret`, `scale` and, if there is
    one, the `window` or the number of keys `n_keys`. `token_mask` is one array or several, [B, T].

    `forward(q, k, v, token_mask)` returns (output, arrays for backward [any, N, any]), and
    `backward(q, k, v, token_mask, output, those arrays, cotangent)` the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Array, Tree]]
    backward: Callable[..., tuple[Array, Array, Array]]
    causal: bool
    interpret: bool
    scale: float
    window: int = 0
    n_keys: int = 0
    is_tracked: bool = True  # jax can track along which mesh axes arrays of the forward vary

    @property
    def options(self) -> dict[str, Any]:
        options = {"causal": self.causal, "interpret": self.interpret, "scale": self.scale}
        optional = {"window": self.window, "n_keys": self.n_keys}
        return options | {name: n for name, n in optional.items() if n}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_split(kernel: AttentionKernel, q: Array, k: Array, v: Array, token_mask: Tree) -> Array:
    """Return the kernel's output [B, T, N, H]; see `models.attention.attention`.

    Raises:
      ValueError: the degree of tensor parallelism does not divide the query heads.
    """
    return _forward(kernel, q, k, v, token_mask)[0]


def _forward(
    kernel: AttentionKernel, q: Array, k: Array, v: Array, token_mask: Tree
) -> tuple[Array, tuple[Tree, ...]]:
    split = _HeadSplit.from_heads(kernel, q, k)
    run_on_device = partial(kernel.forward, **kernel.options)
    run: Callable[..., tuple[Array, Tree]] = run_on_device
    if split.is_explicit:

        def on_rank(q: Array, k: Array, v: Array, token_mask: Tree) -> tuple[Array, Tree]:
            return run_on_device(
                q, split.select_kv_heads(k), split.select_kv_heads(v), _mark_varying(token_mask)
            )

        specs = (_HEADS, split.spec, split.spec, _WHOLE)
        run = shard_over_heads(on_rank, specs, (_HEADS, _STATS), kernel.is_tracked)
    output, saved = checkpoint_name(run(q, k, v, token_mask), RESIDUAL_NAME)
    return output, (q, k, v, token_mask, output, saved)


def _backward(
    kernel: AttentionKernel, residuals: tuple[Tree, ...], dout: Array
) -> tuple[Array, Array, Array, None]:
    split = _HeadSplit.from_heads(kernel, *residuals[:2])
    run_on_device = partial(kernel.backward, **kernel.options)
    run: Callable[..., tuple[Array, Array, Array]] = run_on_device
    if split.is_explicit:

        def on_rank(
            q: Array, k: Array, v: Array, token_mask: Tree, output: Array, saved: Tree, dout: Array
        ) -> tuple[Array, Array, Array]:
            k, v = split.select_kv_heads(k), split.select_kv_heads(v)
            dq, dk, dv = run_on_device(q, k, v, _mark_varying(token_mask), output, saved, dout)
            return dq, split.sum_kv_gradients(dk), split.sum_kv_gradients(dv)

        kv = split.spec
        run = shard_over_heads(
            on_rank, (_HEADS, kv, kv, _WHOLE, _HEADS, _STATS, _HEADS), (_HEADS, kv, kv)
        )
    return (*run(*residuals, dout), None)


run_split.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _HeadSplit:
    """The distribution of N query heads and K kv heads over `tp` devices."""

    tp: int
    heads: int
    kv_heads: int
    is_explicit: bool  # a library's call cannot be split by the compiler, not even over one device

    @staticmethod
    def from_heads(kernel: AttentionKernel, q: Array, k: Array) -> _HeadSplit:
        degree = tp_degree()
        tp = max(1, degree)
        if q.shape[2] % tp:
            raise ValueError(
                f"{q.shape[2]} query heads do not divide by the degree {AXIS}={tp}; choose one "
                "that divides them"
            )
        is_explicit = degree > (1 if kernel.interpret else 0)
        return _HeadSplit(tp, q.shape[2], k.shape[2], is_explicit)

    @property
    def divides_kv_heads(self) -> bool:
        return self.kv_heads % self.tp == 0

    @property
    def spec(self) -> P:
        return _HEADS if self.divides_kv_heads else _WHOLE

    def _kv_head_indices(self) -> Array:
        """Return kv heads of this device's query heads, int32 [L]: one for all, or one for each."""
        per_device, group = self.heads // self.tp, self.heads // self.kv_heads
        first = lax.axis_index(AXIS) * per_device
        return (first + jnp.arange(1 if group % per_device == 0 else per_device)) // group

    def select_kv_heads(self, x_BSKH: Array) -> Array:
        """Return the kv heads of this device, [B, S, L, H]."""
        if self.divides_kv_heads:
            return x_BSKH
        return jnp.take(_mark_varying(x_BSKH), self._kv_head_indices(), axis=2)

    def sum_kv_gradients(self, dx_BSLH: Array) -> Array:
        """Return the gradient of `select_kv_heads`, summed over the devices."""
        if self.divides_kv_heads:
            return dx_BSLH
        is_LK = self._kv_head_indices()[:, None] == jnp.arange(self.kv_heads)[None]
        sum_BSKH = jnp.einsum(
            "BSLH,LK->BSKH", dx_BSLH.astype(jnp.float32), is_LK.astype(jnp.float32),
            precision="highest",
        )  # fmt: skip
        return lax.psum(sum_BSKH, AXIS).astype(dx_BSLH.dtype)


def _mark_varying(x: Tree) -> Tree:
    return jax.tree.map(lambda a: lax.pcast(a, (AXIS,), to="varying"), x)


def tp_degree() -> int:
    """Return the number of devices over which the traced program splits heads; 0 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return int(mesh.shape[AXIS]) if types.get(AXIS) == AxisType.Auto else 0


def shard_over_heads(
    function: Callable[..., Tree], ins: Tree, outs: Tree, is_tracked: bool = True
) -> Callable[..., Tree]:
    """Return a function that runs on each device's heads, as one operation.

    When a scan is differentiated, jax moves constants out of its body, also out of a `shard_map` in
    it; the rest cannot be lowered inside another `shard_map`. jax does not look into a function
    with its own batching rule.
    """
    shard = partial(jax.shard_map, axis_names={AXIS}) if is_tracked else _shard_untracked
    call = custom_vmap(shard(function, in_specs=ins, out_specs=outs))

    @call.def_vmap
    def refuse(*_: Any) -> Any:
        raise ValueError("attention kernels take batches of rows; do not vmap them")

    return call


def interpret_in_shard_map(call: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a Pallas kernel that jax can interpret in a `shard_map`."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    if not manual_axes or AXIS in manual_axes:
        return call
    return _shard_untracked(call, in_specs=P(), out_specs=P())


def _shard_untracked(
    function: Callable[..., Tree], in_specs: Tree, out_specs: Tree
) -> Callable[..., Tree]:
    """Return a `shard_map` over AXIS in which jax does not track along which mapped axes arrays
    vary: Pallas' interpreter and Mosaic kernels do not. Its results vary along all."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes

    def untracked(*arrays: Tree) -> Tree:
        return function(*jax.tree.map(lambda a: lax.max(a, a), arrays))  # equal values, not tracked

    run = jax.shard_map(
        untracked, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )
    return lambda *arrays: lax.pcast(run(*arrays), manual_axes, to="varying")
