"""The three kernels of `models/attention_gpu.py`: the code of one program.

A program holds a block of queries or of keys of one head in registers and visits blocks of the
other kind. Scores are in base 2, since the chip has exp2. The last inputs are the row's token mask
and the first and last + 1 block to visit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Array = jax.Array
Ref = Any

# Finite, so that differences are finite, too: a block without a visible key must not give nan.
_MASKED = float(jnp.finfo(jnp.float32).min) / 2
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Blocks:
    """Numbers of tokens that a program holds and that it visits at a time, powers of two that
    divide BLOCK; warps of a program and stages of its software pipeline."""

    held: int
    visited: int
    warps: int
    stages: int


@dataclass(frozen=True)
class MaskRule:
    """Which tokens of its segment a token sees: all, or itself and earlier ones, or the last
    `window` of these (0: no window); only the first `keys` tokens of a row (0: all)."""

    causal: bool
    window: int = 0
    keys: int = 0


class TokenMask(NamedTuple):
    """Properties of tokens, int [rows, tokens] each: their segments (0 is padding; None: a row is
    one segment), and the last token that each sees (None: itself, if attention is causal). In a
    kernel, those of one row."""

    segment_ids: Any = None
    last_visible: Any = None

    def slice_block(self, block: Any) -> TokenMask:
        """Return the mask of a block."""
        return TokenMask(*(None if a is None else a[block] for a in self))


class Extent(NamedTuple):
    """Tokens and head dim of the arrays. Blocks may reach beyond: nothing is read or written there,
    and what would be read counts as zeros."""

    tokens: int
    head_dim: int

    def has_token(self, first: Any, count: int) -> Array | None:
        """Return which of `count` tokens from `first` on there are; None: all of every block."""
        return first + jnp.arange(count) < self.tokens if self.tokens % count else None


# The head dim of a block, split into powers of two, which Triton needs: 80 = 64 + 16.
Parts = tuple[Array, ...]

_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


def _columns(ref: Ref) -> list[tuple[int, int]]:
    """Return start and width of each part of a block's head dim."""
    columns, start, head_dim = [], 0, ref.shape[-1]
    while start < head_dim:
        columns.append((start, 1 << (head_dim - start).bit_length() - 1))
        start += columns[-1][1]
    return columns


def _part_mask(extent: Extent, first: Any, count: int, start: int, width: int) -> Array | None:
    """Return which elements [count, width] of a part there are; None: all."""
    tokens = extent.has_token(first, count)
    columns = start + jnp.arange(width) < extent.head_dim
    if start + width <= extent.head_dim:
        return None if tokens is None else jnp.broadcast_to(tokens[:, None], (count, width))
    tokens = jnp.ones(count, bool) if tokens is None else tokens
    return tokens[:, None] & columns[None]


def _masked_load(ref: Ref, mask: Array | None) -> Array:
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _load(ref: Ref, extent: Extent, first: Any, block: Any, *index: Any) -> Parts:
    """Return the tokens of a block [tokens, H], the first of which is number `first` of its row."""
    count = ref.shape[0] if block == slice(None) else block.size
    return tuple(
        _masked_load(
            ref.at[block, *index, pl.ds(start, width)],
            _part_mask(extent, first, count, start, width),
        )
        for start, width in _columns(ref)
    )


def _store(ref: Ref, values: Parts, extent: Extent, first: Any) -> None:
    for (start, width), part in zip(_columns(ref), values, strict=True):
        mask = _part_mask(extent, first, part.shape[0], start, width)
        plgpu.store(ref.at[:, pl.ds(start, width)], part.astype(ref.dtype), mask=mask)


def _products(a: Parts, b: Parts) -> Array:
    """Return the product of each token of `a` with each of `b`."""
    total = _dot(a[0], b[0].T)
    for x, y in zip(a[1:], b[1:], strict=True):
        total += _dot(x, y.T)
    return total


def _add_weighted(sums: Parts, weights: Array, tokens: Parts) -> Parts:
    """Return the sums plus the weighted tokens."""
    return tuple(s + _dot(weights.astype(x.dtype), x) for s, x in zip(sums, tokens, strict=True))


def _zeros(tokens: Parts) -> Parts:
    return tuple(jnp.zeros(x.shape, jnp.float32) for x in tokens)


class _HeldBlock:
    """The block that a program holds, number `index`: queries, or keys (`are_keys`). Held tokens
    are the first dim of scores, since tensor cores need many rows."""

    def __init__(
        self, tokens: Parts, index: Array, token_mask: TokenMask, blocks: Blocks, scale: float,
        mask_rule: MaskRule, *, are_keys: bool = False,
    ):  # fmt: skip
        self.tokens, self.token_mask, self.blocks, self.scale = tokens, token_mask, blocks, scale
        self.mask_rule, self.are_keys = mask_rule, are_keys
        self.first = index * blocks.held
        self.held_mask = token_mask.slice_block(pl.ds(self.first, blocks.held))

    def scores(self, visited: Parts, number: Array) -> tuple[Array, Array | None]:
        """Return base-2 scores [held, visited] of a block, and which of them count (None: all)."""
        held, visited_first = self.held_mask, number * self.blocks.visited
        others = self.token_mask.slice_block(pl.ds(visited_first, self.blocks.visited))
        scores = _products(self.tokens, visited) * (self.scale * _LOG2E)
        mask = None
        if held.segment_ids is not None:
            ids = held.segment_ids[:, None]
            mask = (ids == others.segment_ids[None, :]) & (ids > 0)
        queries = (self.first + jnp.arange(self.blocks.held))[:, None]
        keys = (visited_first + jnp.arange(self.blocks.visited))[None]
        if self.are_keys:
            queries, keys = keys, queries
        if self.mask_rule.keys:
            is_key = keys < self.mask_rule.keys
            mask = is_key if mask is None else mask & is_key
        if self.mask_rule.causal:
            last_visible = None if held.last_visible is None else held.last_visible[:, None]
            if self.are_keys:
                last_visible = None if held.last_visible is None else others.last_visible[None]
            is_visible = (queries if last_visible is None else last_visible) >= keys
            mask = is_visible if mask is None else mask & is_visible
            if self.mask_rule.window:
                mask &= queries - keys < self.mask_rule.window
        return scores, mask

    def weights(self, visited: Parts, number: Array, log_sum: Array) -> Array:
        """Return softmax weights [held, visited], from the sums that forward saved."""
        scores, mask = self.scores(visited, number)
        weights = jnp.exp2(scores - log_sum)
        return weights if mask is None else jnp.where(mask, weights, 0.0)


def forward_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    token_mask: TokenMask,
    start_ref: Ref,
    stop_ref: Ref,
    out_ref: Ref,
    log_sum_ref: Ref,
    *,
    blocks: Blocks,
    scale: float,
    mask_rule: MaskRule,
    extent: Extent,
) -> None:
    """Compute one block of queries of one head, over all keys that it sees."""
    i = pl.program_id(0)
    q = _load(q_ref, extent, i * blocks.held, slice(None))
    held = _HeldBlock(q, i, token_mask, blocks, scale, mask_rule)

    def visit(j: Array, carry: tuple[Parts, Array, Array]) -> tuple[Parts, Array, Array]:
        output, peak, total = carry
        first = j * blocks.visited
        block = pl.ds(first, blocks.visited)
        scores, mask = held.scores(_load(k_ref, extent, first, block), j)
        if mask is not None:
            scores = jnp.where(mask, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_peak[:, None])
        if mask is not None:
            weights = jnp.where(mask, weights, 0.0)
        shrink = jnp.exp2(peak - new_peak)
        output = tuple(x * shrink[:, None] for x in output)
        output = _add_weighted(output, weights, _load(v_ref, extent, first, block))
        return output, new_peak, total * shrink + jnp.sum(weights, axis=1)

    carry = (
        _zeros(q),
        jnp.full((blocks.held,), _MASKED, jnp.float32),
        jnp.zeros((blocks.held,), jnp.float32),
    )
    output, peak, total = lax.fori_loop(start_ref[i], stop_ref[i], visit, carry)
    total = jnp.where(total > 0, total, 1.0)  # padding sees nothing
    _store(out_ref, tuple(x / total[:, None] for x in output), extent, held.first)
    is_token = extent.has_token(held.first, blocks.held)
    plgpu.store(log_sum_ref, peak + jnp.log2(total), mask=is_token)


def kv_kernel(
    q_ref: Ref,
    dout_ref: Ref,
    log_sum_ref: Ref,
    dout_times_out_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    token_mask: TokenMask,
    start_ref: Ref,
    stop_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
    *,
    blocks: Blocks,
    scale: float,
    mask_rule: MaskRule,
    extent: Extent,
    group: int,
) -> None:
    """Compute gradients of one block of keys of one kv head, over all queries that see it."""
    j = pl.program_id(0)
    k, v = (_load(x, extent, j * blocks.held, slice(None)) for x in (k_ref, v_ref))
    held = _HeldBlock(k, j, token_mask, blocks, scale, mask_rule, are_keys=True)
    start, stop = start_ref[j], stop_ref[j]

    def visit(i: Array, g: Array, carry: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
        dk, dv = carry
        first = i * blocks.visited
        block = pl.ds(first, blocks.visited)
        q, dout = (_load(x, extent, first, block, g) for x in (q_ref, dout_ref))
        is_token = extent.has_token(first, blocks.visited)
        sums = (_masked_load(x.at[g, block], is_token) for x in (log_sum_ref, dout_times_out_ref))
        log_sum, dout_times_out = (x[None, :] for x in sums)
        weights = held.weights(q, i, log_sum)
        dv = _add_weighted(dv, weights, dout)
        dscores = weights * (_products(v, dout) - dout_times_out)
        return _add_weighted(dk, dscores, q), dv

    def head(g: Array, carry: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
        return lax.fori_loop(start, stop, lambda i, c: visit(i, g, c), carry)

    dk, dv = lax.fori_loop(0, group, head, (_zeros(k), _zeros(v)))
    _store(dk_ref, tuple(x * scale for x in dk), extent, held.first)
    _store(dv_ref, dv, extent, held.first)


def q_kernel(
    q_ref: Ref,
    dout_ref: Ref,
    log_sum_ref: Ref,
    dout_times_out_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    token_mask: TokenMask,
    start_ref: Ref,
    stop_ref: Ref,
    dq_ref: Ref,
    *,
    blocks: Blocks,
    scale: float,
    mask_rule: MaskRule,
    extent: Extent,
) -> None:
    """Compute the gradient of one block of queries of one head, over all keys that it sees."""
    i = pl.program_id(0)
    q, dout = (_load(x, extent, i * blocks.held, slice(None)) for x in (q_ref, dout_ref))
    is_token = extent.has_token(i * blocks.held, blocks.held)
    log_sum, dout_times_out = (
        _masked_load(x, is_token)[:, None] for x in (log_sum_ref, dout_times_out_ref)
    )
    held = _HeldBlock(q, i, token_mask, blocks, scale, mask_rule)

    def visit(j: Array, dq: Parts) -> Parts:
        first = j * blocks.visited
        block = pl.ds(first, blocks.visited)
        k, v = (_load(x, extent, first, block) for x in (k_ref, v_ref))
        weights = held.weights(k, j, log_sum)
        dscores = weights * (_products(dout, v) - dout_times_out)
        return _add_weighted(dq, dscores, k)

    dq = lax.fori_loop(start_ref[i], stop_ref[i], visit, _zeros(q))
    _store(dq_ref, tuple(x * scale for x in dq), extent, held.first)
