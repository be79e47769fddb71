"""What takes the states of a gated delta net from chunk to chunk: XLA, or a GPU kernel.

Shape suffixes and letters as in `models.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models import delta_gpu
from models.attention_choice import on_gpu, skips

Array = jax.Array

CHUNK = 64  # tokens; twice as many take half the steps one after the other, and more products
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class States:
    """What takes states S from chunk to chunk, and gradients back.

    `forward(wanted, reads_key, leaves_key, keeps)`, see `models.delta._Parts`, gives the states
    before every chunk [N, B, K, G, H, D], zeros at first, and what chunks write, like `wanted`.
    `backward(dwritten, dread, reads_key, leaves_key, keeps)` takes the gradients of what a chunk
    wrote and of the state before it, as far as they come from what its own tokens read, and gives
    those of the state after it and of what it wrote.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array]]


def states_by(kernel: str, chip: str, key_size: int, value_size: int) -> States:
    """By the project's GPU kernels, interpreted where there is no GPU, where attention by a kernel
    of that name is theirs too and they have such sizes; else by XLA."""
    by_kernel = skips(kernel, chip, jnp.dtype(jnp.bfloat16), key_size)
    if not (by_kernel and delta_gpu.fits(CHUNK, key_size, value_size)):
        return XLA
    return GPU if on_gpu(chip) else INTERPRETED


def _states(
    wanted: Array, reads_key: Array, leaves_key: Array, keeps: Array
) -> tuple[Array, Array]:
    def after(state: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        wanted, reads_key, leaves_key, keeps = now
        written = wanted - product("bkgih,bkghd->bkgid", reads_key, state)
        new = product("bkgih,bkgid->bkghd", leaves_key, written)
        return keeps[..., None, None] * state + new, (state, written)

    like = product("bkgih,bkgid->bkghd", leaves_key[0], wanted[0])
    now = wanted, reads_key, leaves_key, keeps
    before, written = jax.lax.scan(after, jnp.zeros_like(like), now)[1]
    return before, written


def _states_gradient(
    dwritten: Array, dread: Array, reads_key: Array, leaves_key: Array, keeps: Array
) -> tuple[Array, Array]:
    def before(dstate: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        dwritten, dread, reads_key, leaves_key, keeps = now
        dwritten = dwritten + product("bkgih,bkghd->bkgid", leaves_key, dstate)
        kept = keeps[..., None, None] * dstate
        earlier = kept + dread - product("bkgih,bkgid->bkghd", reads_key, dwritten)
        return earlier, (dstate, dwritten)

    now = dwritten, dread, reads_key, leaves_key, keeps
    dafter, dwritten = jax.lax.scan(before, jnp.zeros_like(dread[0]), now, reverse=True)[1]
    return dafter, dwritten


XLA = States(_states, _states_gradient)
GPU, INTERPRETED = (
    States(
        partial(delta_gpu.states, interpret=interpret),
        partial(delta_gpu.states_gradient, interpret=interpret),
    )
    for interpret in (False, True)
)
