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
    `window` of these (0: no window)."""

    causal: bool
    window: int = 0


class TokenMask(NamedTuple):
    """Properties of tokens, int [rows, tokens] each: their segments (0 is padding; None: a row is
    one segment), and the last token that each sees (None: itself, if attention is causal). In a
    kernel, those of one row."""

    segment_ids: Any = None
    last_visible: Any = None

    def slice_block(self, block: Any) -> TokenMask:
        """Return the mask of a block."""
        return TokenMask(*(None if a is None else a[block] for a in self))


_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


class _HeldBlock:
    """The block that a program holds, number `index`: queries, or keys (`are_keys`). Held tokens
    are the first dim of scores, since tensor cores need many rows."""

    def __init__(
        self, array: Array, index: Array, token_mask: TokenMask, blocks: Blocks, scale: float,
        mask_rule: MaskRule, *, are_keys: bool = False,
    ):  # fmt: skip
        self.array, self.token_mask, self.blocks, self.scale = array, token_mask, blocks, scale
        self.mask_rule, self.are_keys = mask_rule, are_keys
        self.first = index * blocks.held
        self.held_mask = token_mask.slice_block(pl.ds(self.first, blocks.held))

    def scores(self, visited: Array, number: Array) -> tuple[Array, Array | None]:
        """Return base-2 scores [held, visited] of a block, and which of them count (None: all)."""
        held, visited_first = self.held_mask, number * self.blocks.visited
        others = self.token_mask.slice_block(pl.ds(visited_first, self.blocks.visited))
        scores = _dot(self.array, visited.T) * (self.scale * _LOG2E)
        mask = None
        if held.segment_ids is not None:
            ids = held.segment_ids[:, None]
            mask = (ids == others.segment_ids[None, :]) & (ids > 0)
        if self.mask_rule.causal:
            held_positions = (self.first + jnp.arange(self.blocks.held))[:, None]
            queries, keys = held_positions, (visited_first + jnp.arange(self.blocks.visited))[None]
            last_visible = None if held.last_visible is None else held.last_visible[:, None]
            if self.are_keys:
                queries, keys = keys, queries
                last_visible = None if held.last_visible is None else others.last_visible[None]
            is_visible = (queries if last_visible is None else last_visible) >= keys
            mask = is_visible if mask is None else mask & is_visible
            if self.mask_rule.window:
                mask &= queries - keys < self.mask_rule.window
        return scores, mask

    def weights(self, visited: Array, number: Array, log_sum: Array) -> Array:
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
) -> None:
    """Compute one block of queries of one head, over all keys that it sees."""
    i, q = pl.program_id(0), q_ref[...]
    held = _HeldBlock(q, i, token_mask, blocks, scale, mask_rule)

    def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        output, peak, total = carry
        block = pl.ds(j * blocks.visited, blocks.visited)
        scores, mask = held.scores(k_ref[block, :], j)
        if mask is not None:
            scores = jnp.where(mask, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_peak[:, None])
        if mask is not None:
            weights = jnp.where(mask, weights, 0.0)
        shrink = jnp.exp2(peak - new_peak)
        v = v_ref[block, :]
        output = output * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return output, new_peak, total * shrink + jnp.sum(weights, axis=1)

    carry = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((blocks.held,), _MASKED, jnp.float32),
        jnp.zeros((blocks.held,), jnp.float32),
    )
    output, peak, total = lax.fori_loop(start_ref[i], stop_ref[i], visit, carry)
    total = jnp.where(total > 0, total, 1.0)  # padding sees nothing
    out_ref[...] = (output / total[:, None]).astype(out_ref.dtype)
    log_sum_ref[...] = peak + jnp.log2(total)


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
    group: int,
) -> None:
    """Compute gradients of one block of keys of one kv head, over all queries that see it."""
    j, k, v = pl.program_id(0), k_ref[...], v_ref[...]
    held = _HeldBlock(k, j, token_mask, blocks, scale, mask_rule, are_keys=True)
    start, stop = start_ref[j], stop_ref[j]

    def visit(i: Array, g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        block = pl.ds(i * blocks.visited, blocks.visited)
        q, dout = q_ref[block, g, :], dout_ref[block, g, :]
        weights = held.weights(q, i, log_sum_ref[g, block][None, :])
        dv = dv + _dot(weights.astype(dout.dtype), dout)
        dscores = weights * (_dot(v, dout.T) - dout_times_out_ref[g, block][None, :])
        return dk + _dot(dscores.astype(q.dtype), q), dv

    def head(g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return lax.fori_loop(start, stop, lambda i, c: visit(i, g, c), carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, group, head, (zeros, zeros))
    dk_ref[...] = (dk * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


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
) -> None:
    """Compute the gradient of one block of queries of one head, over all keys that it sees."""
    i, q, dout = pl.program_id(0), q_ref[...], dout_ref[...]
    log_sum, dout_times_out = log_sum_ref[...], dout_times_out_ref[...]
    held = _HeldBlock(q, i, token_mask, blocks, scale, mask_rule)

    def visit(j: Array, dq: Array) -> Array:
        block = pl.ds(j * blocks.visited, blocks.visited)
        k, v = k_ref[block, :], v_ref[block, :]
        weights = held.weights(k, j, log_sum[:, None])
        dscores = weights * (_dot(dout, v.T) - dout_times_out[:, None])
        return dq + _dot(dscores.astype(k.dtype), k)

    dq = lax.fori_loop(start_ref[i], stop_ref[i], visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)
