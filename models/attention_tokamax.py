"""tokamax's attention over packed rows on Hopper (extra `kernels`), forward only.

The backward of tokamax 0.0.17 visits all blocks of a row, whatever its segments, and in rows of one
sample reaches 193 TFLOP/s (published) where `models/attention_gpu.py` reaches 219 (measured, H100).
So that one follows. tokamax's public functions take no ranges of keys and ask for the default
device, which is a CPU where programs are compiled for an absent GPU; its kernel is called instead.
"""

from __future__ import annotations

import importlib.metadata
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from models.attention_gpu import pad_rows, pad_token_mask
from models.attention_kernels import TokenMask

Array = jax.Array

CHIP, MAX_HEAD_DIM = "sm_90", 256
_VERSION = "0.0.17"  # whose kernel's arguments are known


@cache
def is_available() -> bool:
    """Return whether tokamax is installed, in the version that is known."""
    try:
        return importlib.metadata.version("tokamax") == _VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def forward(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    token_mask: TokenMask | Array,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    window: int = 0,
) -> tuple[Array, Array]:
    """Return what `models.attention_gpu.forward` does, for its backward; padding may see itself."""
    T = q_BTNH.shape[1]
    token_mask = pad_token_mask(q_BTNH, token_mask)
    q, k, v = map(pad_rows, (q_BTNH, k_BSKH, v_BSKH))
    # The kernel skips blocks after a query itself if it is told nothing of last keys.
    starts, ends = key_ranges(token_mask, causal, window)
    is_causal = causal and token_mask.last_visible is None
    output, peak, total = _run_kernel(
        q, k, v, starts, None if is_causal else ends, is_causal, scale
    )
    log_sum = jnp.where(total > 0, peak * math.log2(math.e) + jnp.log2(total), 0.0)
    return output[:, :T], log_sum


def key_ranges(token_mask: TokenMask, causal: bool, window: int) -> tuple[Array, Array]:
    """Return the first and the last + 1 key that each token sees, int32 [items, tokens] each, if
    the tokens of a segment are side by side. Padding sees nothing, or itself if attention is
    causal: the kernel waits for a block for ever if the first keys of all its tokens are later."""
    ids, last_visible = token_mask
    T = ids.shape[1]
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], ids.shape)
    changes = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = lax.cummax(jnp.where(changes, index, 0), axis=1)
    is_last = jnp.pad(changes[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    ends = 1 + lax.cummin(jnp.where(is_last, index, T), axis=1, reverse=True)
    if causal:
        ends = 1 + (index if last_visible is None else last_visible.astype(jnp.int32))
        starts = jnp.where(ids > 0, starts, index)
        starts = jnp.maximum(starts, index + 1 - window) if window else starts
        return starts, ends
    return jnp.where(ids > 0, starts, T), jnp.where(ids > 0, ends, 0)


def _run_kernel(
    q: Array, k: Array, v: Array, starts: Array, ends: Array | None, causal: bool, scale: float
) -> tuple[Array, Array, Array]:
    """Return the output, and the largest scores and sums of exponentials float32 [B, N, T]."""
    from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as tokamax

    run = partial(
        tokamax.flash_attention_kernel,
        bias=None,
        mask=None,
        is_causal=causal,
        logits_soft_cap=None,
        logits_scale=scale,
        out_dtype=q.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
        # As tokamax chooses, but not persistent, which also asks for the default device.
        config=tokamax.Config(block_q=64, block_kv=128 if q.shape[3] <= 128 else 64, num_stages=2),
    )
    ranges = tuple(None if x is None else x[:, None] for x in (starts, ends))
    with jax.named_scope("packed_attention_forward"):
        output, (peak, total) = jax.vmap(lambda q, k, v, starts, ends: run(
            q, k, v, k_start=starts, k_end=ends
        ))(q, k, v, *ranges)  # fmt: skip
    return output, peak, total
