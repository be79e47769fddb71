"""Scans the states of a gated delta net from chunk to chunk, by XLA or a GPU kernel.

Shape suffixes and letters as in `models.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models import delta_gpu
from models.attention_choice import is_gpu, skips

Array = jax.Array

CHUNK_TOKENS = 64  # tokens; larger chunks need fewer sequential steps and more products
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class StateScan:
    """Two functions that carry states S from chunk to chunk, and gradients back.

    `forward(update, state_key, write_key, state_decay)`, see `models.delta.ChunkTransition`,
    returns the states before every chunk [N, B, K, G, H, D], zeros before the first, and the
    chunks' writes, shaped like `update`. `backward(dwritten, dstate_before, state_key, write_key,
    state_decay)` takes gradients of a chunk's writes and of the state before it, from the reads of
    the chunk's own tokens. It returns gradients of the state after the chunk and of its writes.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array]]


def choose_state_scan(kernel: str, chip: str, key_size: int, value_size: int) -> StateScan:
    """Return the project's GPU kernels, interpreted without a GPU, if they support these sizes and
    attention by `kernel` also uses the project's kernels; else XLA."""
    by_kernel = skips(kernel, chip, jnp.dtype(jnp.bfloat16), key_size)
    if not (by_kernel and delta_gpu.can_run(CHUNK_TOKENS, key_size, value_size)):
        return XLA_SCAN
    return GPU_SCAN if is_gpu(chip) else INTERPRETED_SCAN


def _scan_states(
    update: Array, state_key: Array, write_key: Array, state_decay: Array
) -> tuple[Array, Array]:
    def step(state: Array, per_chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        update, state_key, write_key, state_decay = per_chunk
        written = update - product("bkgih,bkghd->bkgid", state_key, state)
        new = product("bkgih,bkgid->bkghd", write_key, written)
        return state_decay[..., None, None] * state + new, (state, written)

    state_like = product("bkgih,bkgid->bkghd", write_key[0], update[0])
    per_chunk = update, state_key, write_key, state_decay
    states_before, written = jax.lax.scan(step, jnp.zeros_like(state_like), per_chunk)[1]
    return states_before, written


def _scan_gradients(
    dwritten: Array, dstate_before: Array, state_key: Array, write_key: Array, state_decay: Array
) -> tuple[Array, Array]:
    def step(dstate: Array, per_chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        dwritten, dstate_before, state_key, write_key, state_decay = per_chunk
        dwritten = dwritten + product("bkgih,bkghd->bkgid", write_key, dstate)
        decayed = state_decay[..., None, None] * dstate
        earlier = decayed + dstate_before - product("bkgih,bkgid->bkghd", state_key, dwritten)
        return earlier, (dstate, dwritten)

    per_chunk = dwritten, dstate_before, state_key, write_key, state_decay
    dstate_after, dwritten = jax.lax.scan(
        step, jnp.zeros_like(dstate_before[0]), per_chunk, reverse=True
    )[1]
    return dstate_after, dwritten


XLA_SCAN = StateScan(_scan_states, _scan_gradients)
GPU_SCAN, INTERPRETED_SCAN = (
    StateScan(
        partial(delta_gpu.scan_states, interpret=interpret),
        partial(delta_gpu.scan_gradients, interpret=interpret),
    )
    for interpret in (False, True)
)
