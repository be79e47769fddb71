"""Attention over packed samples: one function, with an XLA reference that runs everywhere and, on
GPUs, the kernels of `models/attention_gpu.py`.

Shape suffixes: B rows, T queries and S keys (tokens), N query heads, K kv heads, G query heads per
kv head, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from models import attention_gpu

Array = jax.Array
Attend = Callable[..., Array]  # called as `attention` is

KERNELS = ("auto", "xla", "pallas")

_BLOCK = 128  # queries; fewer would not keep a core busy
_MOST_BLOCKS = 4  # each is compiled on its own


def attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segment_ids: Array | None,
    *,
    causal: bool,
    kernel: str = "auto",
) -> Array:
    """Softmax attention in which a token sees only tokens of its own segment.

    Query head n reads kv head n // G, G = N / K. Padding (segment 0) is a segment of its own: it
    sees itself, so no row of the softmax is empty and none gives NaN. Masked weights are exactly
    0, so a segment's output does not depend, to the bit, on what else is packed beside it.

    Args:
      q_BTNH: queries [items, tokens, heads, head_dim].
      k_BSKH, v_BSKH: keys and values [items, tokens, kv_heads, head_dim].
      segment_ids: int [items, tokens], 0 and up, or None where all tokens of a row see each other.
      causal: whether a token sees only itself and earlier ones.
      kernel: "xla"; "pallas", the GPU kernels, which any other backend interprets; or "auto": these
        on a GPU, in 16 bits and where a row fills a block, else "xla".

    Returns:
      [items, tokens, heads, head_dim] in the dtype of the queries; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if kernel == "pallas" or (T >= attention_gpu.BLOCK and skips(kernel, q_BTNH.dtype)):
        interpret = jax.default_backend() != "gpu"
        return attention_gpu.flash_attention(
            q_BTNH, k_BSKH, v_BSKH, segment_ids, causal=causal, interpret=interpret
        )
    if causal and T > _BLOCK:
        q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * H**-0.5
        out_BTKGH = _blocked(q_BTKGH, k_BSKH, v_BSKH, segment_ids)
        return out_BTKGH.reshape(B, T, N, H)
    return masked_attention(q_BTNH, k_BSKH, v_BSKH, _mask(segment_ids, 0, T, causal))


def masked_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_BTS: Array | None) -> Array:
    """`attention` under any mask: bool [items or 1, queries, keys], each query seeing some key;
    None lets all see all. Queries and keys may differ in number."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * H**-0.5
    scores_BKGTS = _scores(q_BTKGH, k_BSKH, mask_BTS)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


def known_kernel(name: str) -> str:
    """The name of an attention kernel; ValueError when it is none."""
    if name not in KERNELS:
        raise ValueError(f"unknown attention kernel {name!r}; known: {', '.join(KERNELS)}")
    return name


def attend_by(kernel: str) -> Attend:
    """`attention` by the named kernel."""
    return partial(attention, kernel=kernel)


def skips(kernel: str, dtype: jnp.dtype) -> bool:
    """Whether a kernel leaves out the tokens of other segments (in rows that fill a block)."""
    on_gpu = jax.default_backend() == "gpu"
    return kernel == "pallas" or (kernel == "auto" and on_gpu and dtype.itemsize == 2)


def pair_flops(kernel: str, dtype: jnp.dtype, heads: int, head_dim: int, *, causal: bool) -> float:
    """Forward FLOPs of a layer for a pair of tokens of one segment, 0 where whole rows are computed
    (see the engine's contract); of a causal pair half, as only one sees the other."""
    return (2.0 if causal else 4.0) * heads * head_dim * skips(kernel, dtype)


def needed_flops(tokens: int, heads: int, head_dim: int, *, causal: bool) -> float:
    """FLOPs of the two products for the pairs of a segment's tokens of which one sees the other."""
    pairs = tokens * (tokens + 1) / 2 if causal else float(tokens**2)
    return 4.0 * pairs * heads * head_dim


def _mask(segment_ids: Array | None, start: int, stop: int, causal: bool) -> Array | None:
    """[B or 1, T, S]: which keys the queries start..stop see (of the first `stop` if causal)."""
    mask = None
    if segment_ids is not None:
        seen = segment_ids[:, :stop] if causal else segment_ids
        mask = segment_ids[:, start:stop, None] == seen[:, None]
    if causal:
        past = jnp.tri(stop - start, stop, start, dtype=bool)[None]
        mask = past if mask is None else mask & past
    return mask


def _scores(q_BTKGH: Array, k_BSKH: Array, mask_BTS: Array | None) -> Array:
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    if mask_BTS is None:
        return scores_BKGTS
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


# ---- causal attention over long rows: blocks of queries, weights recomputed in backward ----


def _spans(tokens: int) -> list[tuple[int, int]]:
    step = max(_BLOCK, -(-tokens // _MOST_BLOCKS))
    return [(lo, min(lo + step, tokens)) for lo in range(0, tokens, step)]


@jax.custom_vjp
def _blocked(q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, segment_ids: Array | None) -> Array:
    """Each block of queries sees the keys up to its own end only; what is kept for backward is the
    output and the log-sum-exp (FlashAttention, arXiv 2205.14135, in blocks that XLA compiles)."""
    return _blocked_forward(q_BTKGH, k_BSKH, v_BSKH, segment_ids)[0]


def _blocked_forward(
    q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, segment_ids: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    outs, sums = [], []
    for lo, hi in _spans(q_BTKGH.shape[1]):
        mask = _mask(segment_ids, lo, hi, causal=True)
        scores = _scores(q_BTKGH[:, lo:hi], k_BSKH[:, :hi], mask)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - log_sum[..., None]).astype(v_BSKH.dtype)
        outs.append(jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH[:, :hi]))
        sums.append(log_sum)
    out = jnp.concatenate(outs, axis=1)
    return out, (q_BTKGH, k_BSKH, v_BSKH, segment_ids, out, jnp.concatenate(sums, axis=-1))


def _blocked_backward(
    saved: tuple[Array, Array, Array, Array | None, Array, Array], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segment_ids, out, log_sum = saved
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    own_BKGT = product("BTKGH,BTKGH->BKGT", dout, out)
    dq_blocks = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for lo, hi in _spans(q.shape[1]):
        q_t, dout_t, k_s, v_s = q[:, lo:hi], dout[:, lo:hi], k[:, :hi], v[:, :hi]
        scores = _scores(q_t, k_s, _mask(segment_ids, lo, hi, causal=True))
        weights = jnp.exp(scores - log_sum[..., lo:hi, None])
        dweights = product("BTKGH,BSKH->BKGTS", dout_t, v_s)
        dscores = (weights * (dweights - own_BKGT[..., lo:hi, None])).astype(q.dtype)
        dq_blocks.append(product("BKGTS,BSKH->BTKGH", dscores, k_s))
        rest = ((0, 0), (0, k.shape[1] - hi), (0, 0), (0, 0))  # keys that this block does not see
        dk += jnp.pad(product("BKGTS,BTKGH->BSKH", dscores, q_t), rest)
        dv += jnp.pad(product("BKGTS,BTKGH->BSKH", weights.astype(v.dtype), dout_t), rest)
    dq = jnp.concatenate(dq_blocks, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
