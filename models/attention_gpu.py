"""Attention over packed samples as GPU kernels: Pallas, compiled by Triton.

FlashAttention-2 (arXiv 2307.08691) in three kernels (forward, gradient of keys and values, gradient
of queries). Each visits only the blocks with tokens of its own samples, and none for padding:
packed rows cost no more than the samples alone. Query heads of a group share one copy of the keys.
There are no atomic additions, so results are equal in every run.

jax has a similar kernel (`jax.experimental.pallas.ops.gpu.attention`), which 0.11 deprecates; it
repeats the kv heads and visits all blocks. 0.11 also announces the end of Pallas' Triton backend,
which 0.12.0 still has (the other one, Mosaic, supports only Hopper and newer).

On a CPU the same kernels run interpreted, for tests: exact but slow.

Shape suffixes: B rows, T queries and S keys (tokens), N query heads, K kv heads, G query heads per
kv head, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from models.attention_kernels import (
    Blocks,
    Extent,
    MaskRule,
    TokenMask,
    forward_kernel,
    kv_kernel,
    q_kernel,
)
from models.attention_split import interpret_in_shard_map

Array = jax.Array

BLOCK = 128  # rows are padded to a multiple of this; every block size below divides it
MAX_HEAD_DIM = 512  # a block of larger heads would not fit into shared memory


def block_sizes(dtype: jnp.dtype, head_dim: int) -> tuple[Blocks, Blocks, Blocks]:
    """Return blocks of forward, kv gradient and query gradient that fit into an A100 and newer."""
    if dtype.itemsize > 2:
        return (Blocks(32, 32, 4, 1),) * 3
    if head_dim > 256:
        return (Blocks(32, 32, 8, 1),) * 3
    if head_dim > 128:
        return Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 1), Blocks(64, 32, 8, 1)
    return Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2)


def forward(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    token_mask: TokenMask | Array | None,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    window: int = 0,
    n_keys: int = 0,
) -> tuple[Array, Array]:
    """Return (output, log2 of the sums of exponentials [B, N, T]) of `models.attention.attention`;
    0 at padding. A `token_mask` that is an array has segment ids; then T is padded to whole blocks
    in the sums."""
    T = q_BTNH.shape[1]
    token_mask = pad_token_mask(q_BTNH, token_mask)
    q, k, v = (_pad_packed(x, token_mask) for x in (q_BTNH, k_BSKH, v_BSKH))
    blocks = block_sizes(q.dtype, q.shape[3])[0]
    held, row, sums = _query_specs(q, k, blocks)
    log_sum = jax.eval_shape(lambda x: x[..., 0].swapaxes(1, 2).astype(jnp.float32), q)
    case = _Case(token_mask, _mask_rule(q, token_mask, causal, window, n_keys), scale, interpret)
    outs = ((_struct(q), held), (log_sum, sums))
    output, log_sum = _call_kernel(
        "forward", forward_kernel, blocks, q.shape[2], (q, k, v), (held, row, row), outs, case
    )
    return output[:, :T], log_sum


def backward(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    token_mask: TokenMask | Array | None,
    out_BTNH: Array,
    log_sum_BNT: Array,
    dout_BTNH: Array,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    window: int = 0,
    n_keys: int = 0,
) -> tuple[Array, Array, Array]:
    """Return gradients of queries, keys and values, 0 at padding, from the output of `forward`."""
    T = q_BTNH.shape[1]
    token_mask = pad_token_mask(q_BTNH, token_mask)
    q, k, v, output, dout = (
        _pad_packed(x, token_mask) for x in (q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH)
    )
    dout_times_out_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", dout, output, preferred_element_type=jnp.float32
    )
    arrays = (q, dout, log_sum_BNT, dout_times_out_BNT, k, v)
    case = _Case(token_mask, _mask_rule(q, token_mask, causal, window, n_keys), scale, interpret)
    dk, dv = _kv_gradient(arrays, case)
    blocks = block_sizes(q.dtype, q.shape[3])[2]
    held, row, sums = _query_specs(q, k, blocks)
    specs = (held, held, sums, sums, row, row)
    (dq,) = _call_kernel(
        "q_gradient", q_kernel, blocks, q.shape[2], arrays, specs, ((_struct(q), held),), case
    )
    return dq[:, :T], dk[:, :T], dv[:, :T]


def pad_rows(x: Array, multiple: int = BLOCK) -> Array:
    """Pad tokens of [items, tokens, heads, head_dim] with zeros to a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))


def _pad_packed(x: Array, token_mask: TokenMask) -> Array:
    """Pad rows with a mask, which kernels read in whole blocks; they read others as they are."""
    return x if all(a is None for a in token_mask) else pad_rows(x)


def pad_token_mask(q: Array, token_mask: TokenMask | Array | None) -> TokenMask:
    """Return the mask of q's rows [items, tokens, ...], padded to whole blocks."""
    segment_ids, last_visible = (
        token_mask if isinstance(token_mask, TokenMask) else TokenMask(token_mask)
    )
    padding = ((0, 0), (0, -q.shape[1] % BLOCK))
    return TokenMask(
        *(None if a is None else jnp.pad(a, padding) for a in (segment_ids, last_visible))
    )


def _mask_rule(q: Array, token_mask: TokenMask, causal: bool, window: int, n_keys: int) -> MaskRule:
    """Return the rule of a row's blocks: no token sees what has no segment, is later, or is after
    the keys."""
    is_bare = token_mask.segment_ids is None and not causal
    keys = n_keys or q.shape[1]
    return MaskRule(causal, window, keys if n_keys or (is_bare and keys % BLOCK) else 0)


# ---- which blocks to visit ----


def _block_spans(
    token_mask: TokenMask,
    length: int,
    held_tokens: int,
    visited_tokens: int,
    *,
    mask_rule: MaskRule,
    held_are_keys: bool,
) -> tuple[Array, Array]:
    """Return the first and last + 1 block that each held block visits, int32 [B or 1, blocks] each.

    Held blocks are queries, or keys if `held_are_keys`. A block visits another one if their ranges
    of segment ids overlap and a window allows it; as ids rise along a packed row, few other blocks
    are visited, and these are masked. Only rows without a `token_mask` may end within a block.
    """
    ids, last_visible = token_mask
    n_held, n_visited = pl.cdiv(length, held_tokens), pl.cdiv(length, visited_tokens)
    held_first = jnp.arange(n_held)[:, None] * held_tokens
    visited_first = jnp.arange(n_visited)[None] * visited_tokens
    meet = jnp.ones((1, n_held, n_visited), bool)
    if ids is not None:
        # Padding is in no range; a block of padding only visits nothing.
        low = jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max)
        low_held = low.reshape(-1, n_held, held_tokens)
        low_visited = low.reshape(-1, n_visited, visited_tokens)
        ids_held, ids_visited = ids.reshape(low_held.shape), ids.reshape(low_visited.shape)
        meet = (low_held.min(-1)[:, :, None] <= ids_visited.max(-1)[:, None]) & (
            low_visited.min(-1)[:, None] <= ids_held.max(-1)[:, :, None]
        )
    queries = visited_tokens if held_are_keys else held_tokens
    query_first, key_first = held_first, visited_first
    if held_are_keys:
        query_first, key_first = visited_first, held_first
    if mask_rule.keys:
        meet = meet & (key_first < mask_rule.keys)[None]
    if mask_rule.causal:
        last_query = (query_first + queries - 1)[None]
        if last_visible is not None:
            last_query = last_visible.reshape(-1, length // queries, queries).max(-1)
            last_query = last_query[:, None] if held_are_keys else last_query[:, :, None]
        meet = meet & (key_first[None] <= last_query)
    if mask_rule.window:
        keys = held_tokens if held_are_keys else visited_tokens
        meet = meet & (key_first + keys - 1 > query_first - mask_rule.window)[None]
    start = jnp.argmax(meet, axis=-1)
    stop = jnp.where(meet.any(axis=-1), n_visited - jnp.argmax(meet[..., ::-1], axis=-1), start)
    return start.astype(jnp.int32), stop.astype(jnp.int32)


# ---- calls ----


@dataclass(frozen=True)
class _Case:
    """The common arguments of a case's kernels; `interpret` needs no GPU."""

    token_mask: TokenMask
    mask_rule: MaskRule
    scale: float
    interpret: bool


def _struct(x: Array) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and, in a `shard_map`, the axes along which the array varies."""
    struct: jax.ShapeDtypeStruct = jax.eval_shape(lambda a: a, x)
    return struct


def _padded(q: Array) -> tuple[int, int]:
    """Return tokens in whole blocks, and the head dim as a multiple that tensor cores multiply."""
    _, T, _, H = q.shape
    return pl.cdiv(T, BLOCK) * BLOCK, pl.cdiv(H, 16) * 16


def _query_specs(
    q: Array, k: Array, blocks: Blocks
) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Return specs for programs that hold a head's queries: query block, key row, sums."""
    N, (T, H) = q.shape[2], _padded(q)
    group = N // k.shape[2]
    held = pl.BlockSpec((None, blocks.held, None, H), lambda i, b, n: (b, i, n, 0))
    row = pl.BlockSpec((None, T, None, H), lambda i, b, n: (b, 0, lax.div(n, group), 0))
    return held, row, pl.BlockSpec((None, None, blocks.held), lambda i, b, n: (b, n, i))


def _kv_gradient(arrays: tuple[Array, ...], case: _Case) -> tuple[Array, Array]:
    q, *_, k, v = arrays
    K, (T, H) = k.shape[2], _padded(q)
    G = q.shape[2] // K
    _, blocks, _ = block_sizes(q.dtype, H)
    queries = pl.BlockSpec((None, T, G, H), lambda j, b, n: (b, 0, n, 0))
    sums = pl.BlockSpec((None, G, T), lambda j, b, n: (b, n, 0))
    held = pl.BlockSpec((None, blocks.held, None, H), lambda j, b, n: (b, j, n, 0))
    specs = (queries, queries, sums, sums, held, held)
    kernel = partial(kv_kernel, group=G)
    outs = ((_struct(k), held), (_struct(v), held))
    dk, dv = _call_kernel(
        "kv_gradient", kernel, blocks, K, arrays, specs, outs, case, held_are_keys=True
    )
    return dk, dv


def _call_kernel(
    name: str,
    kernel: Any,
    blocks: Blocks,
    heads: int,
    arrays: tuple[Array, ...],
    specs: tuple[pl.BlockSpec, ...],
    outs: tuple[tuple[Any, pl.BlockSpec], ...],
    case: _Case,
    *,
    held_are_keys: bool = False,
) -> tuple[Array, ...]:
    """Run a kernel over (held blocks, rows, heads); mask and spans of the row follow its arrays.

    Args:
      outs: shape and dtype of each output, and its blocks.
    """
    B, T, _, H = arrays[0].shape
    n_blocks = pl.cdiv(T, blocks.held)
    spans = _block_spans(
        case.token_mask, T, blocks.held, blocks.visited,
        mask_rule=case.mask_rule, held_are_keys=held_are_keys,
    )  # fmt: skip
    rows = len(spans[0])
    span = pl.BlockSpec((None, n_blocks), lambda i, b, n: (b if rows > 1 else 0, 0))
    mask_specs = TokenMask(
        *(None if a is None else pl.BlockSpec((None, a.shape[1]), lambda i, b, n: (b, 0))
          for a in case.token_mask)
    )  # fmt: skip
    run = pl.pallas_call(
        partial(
            kernel, blocks=blocks, scale=case.scale, mask_rule=case.mask_rule, extent=Extent(T, H)
        ),
        out_shape=tuple(struct for struct, _ in outs),
        grid=(n_blocks, B, heads),
        in_specs=[*specs, mask_specs, span, span],
        out_specs=tuple(spec for _, spec in outs),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=case.interpret,
        name=f"packed_attention_{name}",
    )
    run = interpret_in_shard_map(run) if case.interpret else run
    results: tuple[Array, ...] = run(*arrays, case.token_mask, *spans)
    return results
