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

from models.attention_gpu import BLOCK, pad_blocks

Array = jax.Array


@cache
def is_available() -> bool:
    """Return whether jax finds cuDNN, without which it does not trace these calls, and whether
    their gradient saves what is known."""
    tokens = jax.ShapeDtypeStruct((1, BLOCK, 1, 64), jnp.bfloat16)
    try:
        _saved_places(partial(_attend, tokens=1, causal=False, scale=1.0), *[tokens] * 3)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def forward(
    q: Array, k: Array, v: Array, ids: None, *, causal: bool, interpret: bool, scale: float
) -> tuple[Array, Array]:
    """Return what `models.attention_gpu.forward` does, for its backward or for the one below."""
    T = q.shape[1]
    attend = partial(_attend, tokens=T, causal=causal, scale=scale)
    q, k, v = map(pad_blocks, (q, k, v))  # cuDNN refuses some odd lengths
    output, pull = jax.vjp(attend, q, k, v)
    log_sum = jax.tree.leaves(pull)[_saved_places(attend, q, k, v)[1]]
    is_token = (jnp.arange(log_sum.shape[2]) < T)[None, None]
    return output[:, :T], jnp.where(is_token, log_sum * math.log2(math.e), 0.0)


def backward(
    q: Array, k: Array, v: Array, ids: None, output: Array, log_sum: Array, dout: Array,
    *, causal: bool, interpret: bool, scale: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return gradients of queries, keys and values; those of queries are added up in any order."""
    T = q.shape[1]
    attend = partial(_attend, tokens=T, causal=causal, scale=scale)
    q, k, v, output, dout = map(pad_blocks, (q, k, v, output, dout))
    # This forward pass is not run: what backward needs of it is replaced.
    leaves, tree = jax.tree.flatten(jax.vjp(attend, q, k, v)[1])
    output_at, log_sum_at = _saved_places(attend, q, k, v)
    leaves[output_at], leaves[log_sum_at] = output, log_sum * math.log(2)
    dq, dk, dv = (x[:, :T] for x in jax.tree.unflatten(tree, leaves)(dout))
    return dq, dk, dv


def _attend(q: Array, k: Array, v: Array, *, tokens: int, causal: bool, scale: float) -> Array:
    """Return attention of padded rows, in which the first `tokens` tokens count."""
    lengths = jnp.full(len(q), tokens, jnp.int32) if tokens < q.shape[1] else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, query_seq_lengths=lengths,
        key_value_seq_lengths=lengths, implementation="cudnn",
    )  # fmt: skip


def _saved_places(attend: Any, q: Any, k: Any, v: Any) -> tuple[int, int]:
    """Return which leaves of the gradient function are the output and the log-sums."""

    def output_and_saved(*qkv: Array) -> tuple[Array, ...]:
        output, pull = jax.vjp(attend, *qkv)
        return output, *jax.tree.leaves(pull)

    output, *saved = jax.make_jaxpr(output_and_saved)(q, k, v).jaxpr.outvars
    (log_sum_at,) = (i for i, x in enumerate(saved) if x.aval.ndim == 3)
    return saved.index(output), log_sum_at
