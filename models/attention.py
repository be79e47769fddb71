"""Attention over packed samples: one function, with an XLA reference that runs everywhere and, on
GPUs, cuDNN's or the project's kernels, chosen by `models/attention_choice.py`.

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

from models import attention_cudnn, attention_gpu, attention_tokamax
from models.attention_choice import MIN_KERNEL_TOKENS, choose_kernel, is_gpu
from models.attention_kernels import MaskRule, TokenMask
from models.attention_split import RESIDUAL_NAME, AttentionKernel, run_split

Array = jax.Array
AttentionFunction = Callable[..., Array]  # has the signature of `attention`

_MAX_QUERY_BLOCKS = 4  # upper limit of blocks; each one is compiled separately


def attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    token_mask: TokenMask | Array | None,
    *,
    causal: bool,
    kernel: str = "auto",
    chip: str = "",
    window: int = 0,
    scale: float | None = None,
    n_keys: int = 0,
) -> Array:
    """Compute softmax attention in which a token sees only tokens of its own segment.

    Query head n reads kv head n // G, G = N / K. The output at padding (segments below 1) is finite
    and has no meaning: in XLA, padding sees itself, so that no softmax row is empty; the kernels
    skip padding and return 0. Masked weights are exactly 0, so a segment's output does not depend,
    to the bit, on the other segments of its row.

    Args:
      q_BTNH: queries [items, tokens, heads, head_dim].
      k_BSKH, v_BSKH: keys and values [items, tokens, kv_heads, head_dim].
      token_mask: segment ids int [items, tokens], or None if all tokens of a row see each
        other. The tokens of a segment are side by side. For causal attention a `TokenMask` also
        has the last token that each token sees: see `last_visible_tokens`.
      causal: whether a token sees only itself and earlier tokens.
      kernel: "xla"; "pallas": the project's GPU kernels, interpreted on other chips; "auto": the
        fastest deterministic kernels for the case and chip; "cudnn": cuDNN also for the backward of
        rows of one segment, which adds up the gradients of queries in any order.
      chip: "sm_90" and the like, or another platform's name; "": any. Without a GPU, "auto" and
        "cudnn" are "xla".
      window: number of tokens that a token sees, itself and earlier ones (sliding windows); 0: all.
        Tokens outside the window are not computed, except in blocks that overlap it. Only for
        causal attention with the tokens of a segment side by side.
      scale: factor of the products of queries and keys; None: head_dim^-0.5.
      n_keys: number of tokens of a row that tokens see; the tokens after them are padding, whose
        output is finite. 0: all. Only without segment ids, and if attention is not causal.

    Returns:
      [items, tokens, heads, head_dim] in the dtype of the queries; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    token_mask = token_mask if isinstance(token_mask, TokenMask) else TokenMask(token_mask)
    assert causal or (not window and token_mask.last_visible is None), "only of causal attention"
    assert not n_keys or not (causal or token_mask.segment_ids is not None)
    window = window if window < T else 0
    chosen = choose_kernel(
        kernel,
        chip,
        q_BTNH.dtype,
        q_BTNH.shape,
        is_packed=token_mask.segment_ids is not None,
        window=window,
        has_last_visible=token_mask.last_visible is not None,
    )
    scale = H**-0.5 if scale is None else scale
    if chosen != "xla" and q_BTNH.size:
        forward: Any = {
            "pallas": attention_gpu.forward,
            "tokamax_forward": attention_tokamax.forward,
        }.get(chosen, attention_cudnn.forward)
        backward: Any = attention_cudnn.backward if chosen == "cudnn" else attention_gpu.backward
        is_tracked = chosen != "tokamax_forward"
        gpu_kernel = AttentionKernel(
            forward, backward, causal, not is_gpu(chip), scale, window, n_keys, is_tracked
        )
        has_more = token_mask.last_visible is not None
        kernel_mask = token_mask if has_more else token_mask.segment_ids
        return run_split(gpu_kernel, q_BTNH, k_BSKH, v_BSKH, kernel_mask)
    mask_rule = MaskRule(causal, window)
    if causal and T > MIN_KERNEL_TOKENS:
        q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * scale
        out_BTKGH = _blocked_attention(mask_rule, q_BTKGH, k_BSKH, v_BSKH, token_mask)
        return out_BTKGH.reshape(B, T, N, H)
    mask = _visibility_mask(token_mask, (0, T), (0, T), mask_rule)
    k_BSKH, v_BSKH = (x[:, : n_keys or T] for x in (k_BSKH, v_BSKH))
    return masked_attention(q_BTNH, k_BSKH, v_BSKH, mask, scale)


def last_visible_tokens(is_picture: Array, segment_ids: Array) -> Array:
    """Return the last token that each token sees, int [items, tokens], if pictures see all of
    themselves. A picture is a run of tokens of one segment with `is_picture`."""
    T = is_picture.shape[1]
    token_index = jnp.arange(T)[None]
    continues = is_picture[:, :-1] & is_picture[:, 1:] & (segment_ids[:, :-1] == segment_ids[:, 1:])
    ends = jnp.where(jnp.pad(continues, ((0, 0), (0, 1))), T, token_index)
    return jax.lax.cummin(ends, axis=1, reverse=True)


def masked_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    mask_BTS: Array | None,
    scale: float | None = None,
) -> Array:
    """Compute `attention` under any mask: bool [items or 1, queries, keys], in which each query
    sees some key; None: all see all. The numbers of queries and keys may differ."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5 if scale is None else scale)
    scores_BKGTS = _scores(q_BTKGH, k_BSKH, mask_BTS)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return checkpoint_name(out_BTKGH.reshape(B, T, N, H), RESIDUAL_NAME)


def bind_attention(kernel: str, chip: str) -> AttentionFunction:
    """Return `attention` by the named kernel, or the best one, on a chip."""
    return partial(attention, kernel=kernel, chip=chip)


def _visibility_mask(
    token_mask: TokenMask, queries: tuple[int, int], keys: tuple[int, int], mask_rule: MaskRule
) -> Array | None:
    """Return [B or 1, T, S]: which of the keys first..last the queries start..stop see."""
    (start, stop), (first, last) = queries, keys
    ids, last_visible = token_mask
    mask = None
    if ids is not None:
        mask = ids[:, start:stop, None] == ids[:, None, first:last]
    if mask_rule.causal:
        is_past = jnp.tri(stop - start, last - first, start - first, dtype=bool)[None]
        if last_visible is not None:
            is_past = jnp.arange(first, last)[None, None] <= last_visible[:, start:stop, None]
        mask = is_past if mask is None else mask & is_past
    if mask_rule.window:
        in_window = ~jnp.tri(
            stop - start, last - first, start - first - mask_rule.window, dtype=bool
        )[None]
        mask = in_window if mask is None else mask & in_window
    return mask


def _scores(q_BTKGH: Array, k_BSKH: Array, mask_BTS: Array | None) -> Array:
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    if mask_BTS is None:
        return scores_BKGTS
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


# ---- causal attention over long rows: blocks of queries, weights recomputed in backward ----


def _query_blocks(
    tokens: int, window: int, has_last_visible: bool
) -> list[tuple[int, int, int, int]]:
    """Return each block of queries as [low, high) and the keys [first, last) that it sees."""
    step = max(MIN_KERNEL_TOKENS, -(-tokens // _MAX_QUERY_BLOCKS))
    ends = ((lo, min(lo + step, tokens)) for lo in range(0, tokens, step))
    return [
        (lo, hi, max(0, lo + 1 - window) if window else 0, tokens if has_last_visible else hi)
        for lo, hi in ends
    ]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_attention(
    mask_rule: MaskRule, q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, token_mask: TokenMask
) -> Array:
    """Compute attention by blocks of queries, each over the keys up to its end and in its window.
    Backward saves the output and the log-sum-exp (FlashAttention, arXiv 2205.14135, in blocks that
    XLA compiles)."""
    return _blocked_forward(mask_rule, q_BTKGH, k_BSKH, v_BSKH, token_mask)[0]


def _blocked_forward(
    mask_rule: MaskRule, q_BTKGH: Array, k_BSKH: Array, v_BSKH: Array, token_mask: TokenMask
) -> tuple[Array, tuple[Any, ...]]:
    outputs, sums = [], []
    spans = _query_blocks(q_BTKGH.shape[1], mask_rule.window, token_mask.last_visible is not None)
    for lo, hi, first, last in spans:
        mask = _visibility_mask(token_mask, (lo, hi), (first, last), mask_rule)
        scores = _scores(q_BTKGH[:, lo:hi], k_BSKH[:, first:last], mask)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - log_sum[..., None]).astype(v_BSKH.dtype)
        outputs.append(jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH[:, first:last]))
        sums.append(log_sum)
    output = checkpoint_name(jnp.concatenate(outputs, axis=1), RESIDUAL_NAME)
    log_sum = checkpoint_name(jnp.concatenate(sums, axis=-1), RESIDUAL_NAME)
    return output, (q_BTKGH, k_BSKH, v_BSKH, token_mask, output, log_sum)


def _blocked_backward(
    mask_rule: MaskRule, saved: tuple[Array, Array, Array, TokenMask, Array, Array], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, token_mask, output, log_sum = saved
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    dout_times_out_BKGT = product("BTKGH,BTKGH->BKGT", dout, output)
    dq_blocks = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for lo, hi, first, last in _query_blocks(
        q.shape[1], mask_rule.window, token_mask.last_visible is not None
    ):
        q_t, dout_t, k_s, v_s = q[:, lo:hi], dout[:, lo:hi], k[:, first:last], v[:, first:last]
        scores = _scores(q_t, k_s, _visibility_mask(token_mask, (lo, hi), (first, last), mask_rule))
        weights = jnp.exp(scores - log_sum[..., lo:hi, None])
        dweights = product("BTKGH,BSKH->BKGTS", dout_t, v_s)
        dscores = (weights * (dweights - dout_times_out_BKGT[..., lo:hi, None])).astype(q.dtype)
        dq_blocks.append(product("BKGTS,BSKH->BTKGH", dscores, k_s))
        # Keys that this block does not see.
        key_padding = ((0, 0), (first, k.shape[1] - last), (0, 0), (0, 0))
        dk += jnp.pad(product("BKGTS,BTKGH->BSKH", dscores, q_t), key_padding)
        dv += jnp.pad(product("BKGTS,BTKGH->BSKH", weights.astype(v.dtype), dout_t), key_padding)
    dq = jnp.concatenate(dq_blocks, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blocked_attention.defvjp(_blocked_forward, _blocked_backward)
