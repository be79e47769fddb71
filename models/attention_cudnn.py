"""cuDNN's flash attention through `jax.nn.dot_product_attention`, for rows of one segment each.

cuDNN's forward gives equal bits in every run; its backward adds up the gradient of queries in any
order. XLA can order the sum (`xla_gpu_exclude_nondeterministic_ops`), but a program with several
equal calls then fails when it runs (IndexError, jax 0.11.2 on an H100): XLA marks the first call
only. So programs with equal bits combine `forward` with the backward of `models/attention_gpu.py`.

jax returns log-sums in the dtype of the keys only, too coarse for a gradient. Its gradient function
holds them in float32, and is a pytree; so they are taken from there, and put back for `backward`.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from models.attention_gpu import BLOCK, pad_rows

Array = jax.Array

_TOKEN_MULTIPLE = 8  # cuDNN refuses some odd lengths


@cache
def is_available() -> bool:
    """Return whether jax finds cuDNN, without which it does not trace these calls, and whether
    their gradient saves what is known."""
    tokens = jax.ShapeDtypeStruct((1, BLOCK, 1, 64), jnp.bfloat16)
    try:
        _saved_places(partial(_attend, n_keys=1, causal=False, scale=1.0), *[tokens] * 3)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def forward(
    q: Array, k: Array, v: Array, ids: None,
    *, causal: bool, interpret: bool, scale: float, n_keys: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Return what `models.attention_gpu.forward` does, for its backward or for the one below."""
    T = q.shape[1]
    attend = partial(_attend, n_keys=n_keys or T, causal=causal, scale=scale)
    q, k, v = (pad_rows(x, _TOKEN_MULTIPLE) for x in (q, k, v))
    output, pull = jax.vjp(attend, q, k, v)
    log_sum = jax.tree.leaves(pull)[_saved_places(attend, q, k, v)[1]]
    return output[:, :T], log_sum[:, :, :T] * math.log2(math.e)


def backward(
    q: Array, k: Array, v: Array, ids: None, output: Array, log_sum: Array, dout: Array,
    *, causal: bool, interpret: bool, scale: float, n_keys: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return gradients of queries, keys and values; those of queries are added up in any order."""
    T = q.shape[1]
    n_keys = n_keys or T
    attend = partial(_attend, n_keys=n_keys, causal=causal, scale=scale)
    q, k, v, output, dout = (pad_rows(x, _TOKEN_MULTIPLE) for x in (q, k, v, output, dout))
    log_sum = jnp.pad(log_sum, ((0, 0), (0, 0), (0, q.shape[1] - T)))
    # This forward pass is not run: what backward needs of it is replaced.
    leaves, tree = jax.tree.flatten(jax.vjp(attend, q, k, v)[1])
    output_at, log_sum_at = _saved_places(attend, q, k, v)
    leaves[output_at], leaves[log_sum_at] = output, log_sum * math.log(2)
    dq, dk, dv = (x[:, :T] for x in jax.tree.unflatten(tree, leaves)(dout))
    return dq, _clear_after(dk, n_keys), _clear_after(dv, n_keys)


def _attend(q: Array, k: Array, v: Array, *, n_keys: int, causal: bool, scale: float) -> Array:
    """Return attention of rows in which the first `n_keys` keys count. All queries do, so that
    output and log-sums are finite: cuDNN documents none of those that do not count."""
    lengths = jnp.full(len(q), n_keys, jnp.int32) if n_keys < q.shape[1] else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip


def _clear_after(x: Array, n: int) -> Array:
    """Return x [items, tokens, ...] with zeros after n tokens, of which cuDNN says nothing."""
    zeros = jnp.zeros_like(x, shape=(len(x), x.shape[1] - n, *x.shape[2:]))
    return jax.lax.dynamic_update_slice_in_dim(x, zeros, n, axis=1) if n < x.shape[1] else x


def _saved_places(attend: Any, q: Any, k: Any, v: Any) -> tuple[int, int]:
    """Return which leaves of the gradient function are the output and the log-sums."""

    def output_and_saved(*qkv: Array) -> tuple[Array, ...]:
        output, pull = jax.vjp(attend, *qkv)
        return output, *jax.tree.leaves(pull)

    output, *saved = jax.make_jaxpr(output_and_saved)(q, k, v).jaxpr.outvars
    (log_sum_at,) = (i for i, x in enumerate(saved) if x.aval.ndim == 3)
    return saved.index(output), log_sum_at
