"""The scan over chunk states of the gated delta rule as GPU kernels: Pallas, compiled by Triton.

In XLA's loop, every step launches some ten kernels whose launch takes longer than their work. Here
one kernel runs all chunks: a program holds some columns of a head's state in registers; columns do
not depend on each other. Programs add nothing up, so results are equal in every run. On a CPU the
kernels run interpreted, for tests.

Shape suffixes as in `models.delta`; M value heads of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from models.attention_split import AXIS, interpret_in_shard_map, shard_over_heads, tp_degree

Array = jax.Array
Ref = Any

MIN_SIZE, MAX_SIZE = 16, 256  # tokens of a chunk and head sizes that the kernels support
_PROGRAM_COLUMNS = 32  # columns of a state that a program holds
_HEADS = P(None, None, AXIS)  # of [N, B, K, ...]
_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


def can_run(chunk: int, key_size: int, value_size: int) -> bool:
    """Return whether a GPU can run the kernels at these sizes."""
    sizes = chunk, key_size, value_size
    return all(MIN_SIZE <= n <= MAX_SIZE and n & (n - 1) == 0 for n in sizes)


def scan_states(
    update: Array, state_key: Array, write_key: Array, state_decay: Array, *, interpret: bool
) -> tuple[Array, Array]:
    """Compute `forward` of `models.delta_states.StateScan`."""
    call = partial(_call_kernel, _forward_kernel, "delta_states", interpret)
    states_before, written = _split_heads(call)((update,), (state_key, write_key), state_decay)
    return states_before, written


def scan_gradients(
    dwritten: Array,
    dstate_before: Array,
    state_key: Array,
    write_key: Array,
    state_decay: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Compute `backward` of `models.delta_states.StateScan`."""
    call = partial(_call_kernel, _backward_kernel, "delta_states_gradient", interpret)
    dstate_after, dwritten = _split_heads(call)(
        (dwritten, dstate_before), (state_key, write_key), state_decay
    )
    return dstate_after, dwritten


def _split_heads(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` sharded over tensor ranks: each rank runs it with its heads."""
    if tp_degree() < 2:
        return call
    return shard_over_heads(call, (_HEADS, _HEADS, _HEADS), (_HEADS, _HEADS))


def _call_kernel(
    kernel: Callable[..., None],
    name: str,
    interpret: bool,
    split_inputs: tuple[Array, ...],
    whole_inputs: tuple[Array, ...],
    state_decay: Array,
) -> tuple[Array, Array]:
    """Run a kernel over (heads, blocks of columns). A program sees its columns of `split_inputs`,
    [N, B, K, G, .., D], and all of `whole_inputs`. Returns states and an array like the first
    input."""
    n_chunks, heads = state_decay.shape[0], state_decay.shape[1:]
    split_inputs, whole_inputs = jax.tree.map(
        lambda a: a.reshape(n_chunks, -1, *a.shape[len(state_decay.shape) :]),
        (split_inputs, whole_inputs),
    )
    size = split_inputs[0].shape[-1]
    width = size if size % _PROGRAM_COLUMNS else _PROGRAM_COLUMNS
    state = jax.eval_shape(partial(jnp.einsum, "nmih,nmid->nmhd"), whole_inputs[0], split_inputs[0])
    out_structs = state, jax.eval_shape(lambda a: a, split_inputs[0])

    def column_spec(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((n_chunks, None, a.shape[2], width), lambda m, d: (0, m, 0, d))

    def whole_spec(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((n_chunks, None, *a.shape[2:]), lambda m, d: (0, m, 0, 0))

    run = pl.pallas_call(
        kernel,
        out_shape=out_structs,
        grid=(state.shape[1], size // width),
        in_specs=[
            *map(column_spec, split_inputs),
            *map(whole_spec, whole_inputs),
            pl.BlockSpec((n_chunks, None), lambda m, d: (0, m)),
        ],
        out_specs=tuple(map(column_spec, out_structs)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )
    run = interpret_in_shard_map(run) if interpret else run
    results = run(*split_inputs, *whole_inputs, state_decay.reshape(n_chunks, -1))
    states_before, like_columns = (a.reshape(n_chunks, *heads, *a.shape[2:]) for a in results)
    return states_before, like_columns


def _forward_kernel(
    update_ref: Ref,
    state_key_ref: Ref,
    write_key_ref: Ref,
    state_decay_ref: Ref,
    state_ref: Ref,
    out_ref: Ref,
) -> None:
    """Compute columns of a head's state, from the first chunk to the last."""

    def step(n: Array, state: Array) -> Array:
        state_ref[n] = state
        written = update_ref[n] - _dot(state_key_ref[n], state)
        out_ref[n] = written
        return state_decay_ref[n] * state + _dot(write_key_ref[n].T, written)

    lax.fori_loop(0, state_decay_ref.shape[0], step, jnp.zeros(state_ref.shape[1:], jnp.float32))


def _backward_kernel(
    dwritten_ref: Ref,
    dread_ref: Ref,
    state_key_ref: Ref,
    write_key_ref: Ref,
    state_decay_ref: Ref,
    dstate_ref: Ref,
    out_ref: Ref,
) -> None:
    """Compute columns of the gradient of a head's state, from the last chunk to the first."""
    n_chunks = state_decay_ref.shape[0]

    def states_before(steps_done: Array, dstate: Array) -> Array:
        n = n_chunks - 1 - steps_done
        dstate_ref[n] = dstate
        dwritten = dwritten_ref[n] + _dot(write_key_ref[n], dstate)
        out_ref[n] = dwritten
        return state_decay_ref[n] * dstate + dread_ref[n] - _dot(state_key_ref[n].T, dwritten)

    lax.fori_loop(0, n_chunks, states_before, jnp.zeros(dstate_ref.shape[1:], jnp.float32))
