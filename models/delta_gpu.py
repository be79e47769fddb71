"""What chunks of the gated delta rule do to states, one after the other, as GPU kernels: Pallas,
compiled by Triton.

XLA runs a loop of which every step starts some ten kernels that take longer to start than to
compute. Here one kernel takes all chunks: a program holds some columns of a head's state, which no
other columns are needed for, in registers. Nothing is added up between programs, so results are the
same in every run. On a CPU the kernels run interpreted, for tests.

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

from models.attention_split import AXIS, interpreted, on_ranks, tensor_ranks

Array = jax.Array
Ref = Any

LEAST, MOST = 16, 256  # tokens of a chunk and sizes of heads that a GPU's blocks can have
_COLUMNS = 32  # of a state that a program holds
_HEADS = P(None, None, AXIS)  # of [N, B, K, ...]
_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


def fits(chunk: int, key_size: int, value_size: int) -> bool:
    """Whether a GPU can run the kernels at these sizes."""
    sizes = chunk, key_size, value_size
    return all(LEAST <= n <= MOST and n & (n - 1) == 0 for n in sizes)


def states(
    wanted: Array, reads_key: Array, leaves_key: Array, keeps: Array, *, interpret: bool
) -> tuple[Array, Array]:
    """`forward` of `models.delta_states.States`."""
    call = partial(_call, _forward_kernel, "delta_states", interpret)
    before, written = _on_heads(call)((wanted,), (reads_key, leaves_key), keeps)
    return before, written


def states_gradient(
    dwritten: Array,
    dread: Array,
    reads_key: Array,
    leaves_key: Array,
    keeps: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """`backward` of `models.delta_states.States`."""
    call = partial(_call, _backward_kernel, "delta_states_gradient", interpret)
    dafter, dwritten = _on_heads(call)((dwritten, dread), (reads_key, leaves_key), keeps)
    return dafter, dwritten


def _on_heads(call: Callable[..., Any]) -> Callable[..., Any]:
    """Every tensor rank with the heads that it has."""
    if tensor_ranks() == 1:
        return call
    return on_ranks(call, (_HEADS, _HEADS, _HEADS), (_HEADS, _HEADS))


def _call(
    kernel: Callable[..., None],
    name: str,
    interpret: bool,
    columns: tuple[Array, ...],
    wholes: tuple[Array, ...],
    keeps: Array,
) -> tuple[Array, Array]:
    """Run a kernel over (heads, blocks of columns): of `columns`, [N, B, K, G, .., D], a program
    sees its own, of `wholes` all. It gives one array of states and one like the first columns."""
    n_chunks, heads = keeps.shape[0], keeps.shape[1:]
    columns, wholes = jax.tree.map(
        lambda a: a.reshape(n_chunks, -1, *a.shape[len(keeps.shape) :]), (columns, wholes)
    )
    size = columns[0].shape[-1]
    width = size if size % _COLUMNS else _COLUMNS
    state = jax.eval_shape(partial(jnp.einsum, "nmih,nmid->nmhd"), wholes[0], columns[0])
    outs = state, jax.eval_shape(lambda a: a, columns[0])

    def own(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((n_chunks, None, a.shape[2], width), lambda m, d: (0, m, 0, d))

    def whole(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((n_chunks, None, *a.shape[2:]), lambda m, d: (0, m, 0, 0))

    run = pl.pallas_call(
        kernel,
        out_shape=outs,
        grid=(state.shape[1], size // width),
        in_specs=[
            *map(own, columns),
            *map(whole, wholes),
            pl.BlockSpec((n_chunks, None), lambda m, d: (0, m)),
        ],
        out_specs=tuple(map(own, outs)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )
    run = interpreted(run) if interpret else run
    found = run(*columns, *wholes, keeps.reshape(n_chunks, -1))
    before, like_columns = (a.reshape(n_chunks, *heads, *a.shape[2:]) for a in found)
    return before, like_columns


def _forward_kernel(
    wanted_ref: Ref, reads_ref: Ref, leaves_ref: Ref, keeps_ref: Ref, state_ref: Ref, out_ref: Ref
) -> None:
    """Columns of a head's state, from the first chunk to the last."""

    def after(n: Array, state: Array) -> Array:
        state_ref[n] = state
        written = wanted_ref[n] - _dot(reads_ref[n], state)
        out_ref[n] = written
        return keeps_ref[n] * state + _dot(leaves_ref[n].T, written)

    lax.fori_loop(0, keeps_ref.shape[0], after, jnp.zeros(state_ref.shape[1:], jnp.float32))


def _backward_kernel(
    dwritten_ref: Ref,
    dread_ref: Ref,
    reads_ref: Ref,
    leaves_ref: Ref,
    keeps_ref: Ref,
    dstate_ref: Ref,
    out_ref: Ref,
) -> None:
    """Columns of the gradient of a head's state, from the last chunk to the first."""
    n_chunks = keeps_ref.shape[0]

    def before(step: Array, dstate: Array) -> Array:
        n = n_chunks - 1 - step
        dstate_ref[n] = dstate
        dwritten = dwritten_ref[n] + _dot(leaves_ref[n], dstate)
        out_ref[n] = dwritten
        return keeps_ref[n] * dstate + dread_ref[n] - _dot(reads_ref[n].T, dwritten)

    lax.fori_loop(0, n_chunks, before, jnp.zeros(dstate_ref.shape[1:], jnp.float32))
