"""Attention over packed samples: one function, with an XLA reference that runs everywhere and, on
GPUs, cuDNN's or the project's kernels, as `models/attention_choice.py` chooses.

Shape suffixes: B rows, T queries and S keys (tokens), N query heads, K kv heads, G query heads per
kv head, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models import attention_cudnn, attention_gpu
from models.attention_choice import choose, on_gpu
from models.attention_kernels import Marks, Sight
from models.attention_split import SAVED, AttentionKernel, attend

Array = jax.Array
Attend = Callable[..., Array]  # called as `attention` is

_BLOCK = 128  # queries; fewer would not keep a core busy
_MOST_BLOCKS = 4  # each is compiled on its own


def attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    marks: Marks | Array | None,
    *,
    causal: bool,
    kernel: str = "auto",
    chip: str = "",
    window: int = 0,
    scale: float | None = None,
) -> Array:
    """Softmax attention in which a token sees only tokens of its own segment.

    Query head n reads kv head n // G, G = N / K. What comes out for padding (segment 0) is finite
    and means nothing: XLA lets padding see itself, so that no row of the softmax is empty, the
    kernels skip it and give 0. Masked weights are exactly 0, so a segment's output does not
    depend, to the bit, on what else is packed beside it.

    Args:
      q_BTNH: queries [items, tokens, heads, head_dim].
      k_BSKH, v_BSKH: keys and values [items, tokens, kv_heads, head_dim].
      marks: segment ids int [items, tokens], 0 and up, or None where all tokens of a row see each
        other. For cuDNN a segment's tokens stand together. `Marks` also say, where attention is
        causal, the index of the last token that each one sees if that is not always itself: see
        `reach_of`.
      causal: whether a token sees only itself and earlier ones.
      kernel: "xla"; "pallas", the project's GPU kernels, interpreted elsewhere; "auto", the fastest
        that computes the case on the chip and gives equal bits every time; or "cudnn", the fastest
        without that promise: packed rows too, gradients of queries added up in any order.
      chip: "sm_90" and the like, or another platform's name; "" is any. Where there is no GPU,
        "auto" and "cudnn" are "xla".
      window: how many tokens one sees at most, itself and those before it (sliding windows); what
        is outside is not computed, but in blocks that reach into it. 0: all. Only of causal
        attention, whose segments' tokens then stand together.
      scale: of the products of queries and keys; None: one over the root of head_dim.

    Returns:
      [items, tokens, heads, head_dim] in the dtype of the queries; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    marks = marks if isinstance(marks, Marks) else Marks(marks)
    segment_ids, reach = marks
    assert causal or (not window and reach is None), "windows and reach are of causal attention"
    window = window if window < T else 0
    is_packed = segment_ids is not None
    chosen = choose(
        kernel,
        chip,
        q_BTNH.dtype,
        q_BTNH.shape,
        is_packed=is_packed,
        window=window,
        reaches=reach is not None,
    )
    scale = H**-0.5 if scale is None else scale
    if chosen != "xla" and q_BTNH.size:
        by = attention_cudnn if chosen == "cudnn" else attention_gpu
        in_order = chosen == "cudnn" and kernel != "cudnn"
        backward = attention_cudnn.exact_backward if in_order else by.backward
        interpret = not on_gpu(chip)
        chosen_kernel = AttentionKernel(by.forward, backward, causal, interpret, scale, window)
        known = segment_ids if reach is None else marks
        return attend(chosen_kernel, q_BTNH, k_BSKH, v_BSKH, known)
    sees = Sight(causal, window)
    if causal and T > _BLOCK:
        q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * scale
        out_BTKGH = _blocked(sees, q_BTKGH, k_BSKH, v_BSKH, marks)
        return out_BTKGH.reshape(B, T, N, H)
    mask = _mask(marks, (0, T), (0, T), sees)
    return masked_attention(q_BTNH, k_BSKH, v_BSKH, mask, scale)


def reach_of(is_picture: Array, segment_ids: Array) -> Array:
    """The last token that each one sees, int [items, tokens], where pictures see themselves whole:
    a picture is a run of tokens where `is_picture`, in one segment."""
    T = is_picture.shape[1]
    at = jnp.arange(T)[None]
    goes_on = is_picture[:, :-1] & is_picture[:, 1:] & (segment_ids[:, :-1] == segment_ids[:, 1:])
    ends = jnp.where(jnp.pad(goes_on, ((0, 0), (0, 1))), T, at)
    return jax.lax.cummin(ends, axis=1, reverse=True)


def masked_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    mask_BTS: Array | None,
    scale: float | None = None,
) -> Array:
    """`attention` under any mask: bool [items or 1, queries, keys], each query seeing some key;
    None lets all see all. Queries and keys may differ in number."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5 if scale is None else scale)
    scores_BKGTS = _scores(q_BTKGH, k_BSKH, mask_BTS)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return checkpoint_name(out_BTKGH.reshape(B, T, N, H), SAVED)


def attend_by(kernel: str, chip: str) -> Attend:
    """`attention` by the named kernel, or the best, on a chip."""
    return partial(attention, kernel=kernel, chip=chip)


def _mask(
    marks: Marks, queries: tuple[int, int], keys: tuple[int, int], sees: Sight
) -> Array | None:
    """[B or 1, T, S]: which of the keys first..last the queries start..stop see."""
    (start, stop), (first, last) = queries, keys
    ids, reach = marks
    mask = None
    if ids is not None:
        mask = ids[:, start:stop, None] == ids[:, None, first:last]
    if sees.causal:
        past = jnp.tri(stop - start, last - first, start - first, dtype=bool)[None]
        if reach is not None:
            past = jnp.arange(first, last)[None, None] <= reach[:, start:stop, None]
        mask = past if mask is None else mask & past
    if sees.window:
        near = ~jnp.tri(stop - start, last - first, start - first - sees.window, dtype=bool)[None]
        mask = near if mask is None else mask & near
    return mask


def _scores(q_BTKGH: Array, k_BSKH: Array, mask_BTS: Array | None) -> Array:
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    if mask_BTS is None:
        return scores_BKGTS
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


# ---- causal attention over long rows: blocks of queries, weights recomputed in backward ----


def _spans(tokens: int, window: int, reaches: bool) -> list[tuple[int, int, int, int]]:
    """[low, high) of each block of queries, and [first, last) of the keys that any of them sees."""
    step = max(_BLOCK, -(-tokens // _MOST_BLOCKS))
    ends = ((lo, min(lo + step, tokens)) for lo in range(0, tokens, step))
    return [
        (lo, hi, max(0, lo + 1 - window) if window else 0, tokens if reaches else hi)
        for lo, hi in ends
    ]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(sees: Sight, q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, marks: Marks) -> Array:
    """Each block of queries sees the keys of its window and up to its own end only; what is kept
    for backward is the output and the log-sum-exp (FlashAttention, arXiv 2205.14135, in blocks that
    XLA compiles)."""
    return _blocked_forward(sees, q_BTKGH, k_BSKH, v_BSKH, marks)[0]


def _blocked_forward(
    sees: Sight, q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, marks: Marks
) -> tuple[Array, tuple[Any, ...]]:
    outs, sums = [], []
    spans = _spans(q_BTKGH.shape[1], sees.window, marks.reach is not None)
    for lo, hi, first, last in spans:
        mask = _mask(marks, (lo, hi), (first, last), sees)
        scores = _scores(q_BTKGH[:, lo:hi], k_BSKH[:, first:last], mask)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - log_sum[..., None]).astype(v_BSKH.dtype)
        outs.append(jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH[:, first:last]))
        sums.append(log_sum)
    out = checkpoint_name(jnp.concatenate(outs, axis=1), SAVED)
    log_sum = checkpoint_name(jnp.concatenate(sums, axis=-1), SAVED)
    return out, (q_BTKGH, k_BSKH, v_BSKH, marks, out, log_sum)


def _blocked_backward(
    sees: Sight, saved: tuple[Array, Array, Array, Marks, Array, Array], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, marks, out, log_sum = saved
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    own_BKGT = product("BTKGH,BTKGH->BKGT", dout, out)
    dq_blocks = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for lo, hi, first, last in _spans(q.shape[1], sees.window, marks.reach is not None):
        q_t, dout_t, k_s, v_s = q[:, lo:hi], dout[:, lo:hi], k[:, first:last], v[:, first:last]
        scores = _scores(q_t, k_s, _mask(marks, (lo, hi), (first, last), sees))
        weights = jnp.exp(scores - log_sum[..., lo:hi, None])
        dweights = product("BTKGH,BSKH->BKGTS", dout_t, v_s)
        dscores = (weights * (dweights - own_BKGT[..., lo:hi, None])).astype(q.dtype)
        dq_blocks.append(product("BKGTS,BSKH->BTKGH", dscores, k_s))
        # Keys that this block does not see.
        rest = ((0, 0), (first, k.shape[1] - last), (0, 0), (0, 0))
        dk += jnp.pad(product("BKGTS,BTKGH->BSKH", dscores, q_t), rest)
        dv += jnp.pad(product("BKGTS,BTKGH->BSKH", weights.astype(v.dtype), dout_t), rest)
    dq = jnp.concatenate(dq_blocks, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
