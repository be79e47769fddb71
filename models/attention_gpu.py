"""Attention over packed samples as GPU kernels: Pallas, compiled by Triton.

FlashAttention-2 (arXiv 2307.08691) in three kernels (forward, gradient of keys and values, gradient
of queries), each of which visits only the blocks that hold tokens of its own samples, none for
padding: of packed rows the cost falls to that of the samples alone. Query heads of a group share
one copy of the keys, nothing is added up atomically, so results are the same in every run.

jax has a kernel of this kind (`jax.experimental.pallas.ops.gpu.attention`), which 0.11 deprecates;
it repeats the kv heads and visits all blocks. 0.11 also announces the end of Pallas' Triton
backend, which 0.12.0 still has (the other one, Mosaic, knows only Hopper and newer).

On a CPU the same kernels run interpreted, for tests: exact but slow, and no word on speed.

Shape suffixes: B rows, T queries and S keys (tokens, padded to whole blocks), N query heads, K kv
heads, G query heads per kv head, H head dim (padded to a power of two).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from models.attention_kernels import Blocks, Marks, Sight, forward_kernel, kv_kernel, q_kernel
from models.attention_split import interpreted

Array = jax.Array

BLOCK = 128  # rows are padded to a multiple: every block size below divides it
MOST_HEAD_DIM = 512  # a block of larger heads would not fit a core's shared memory


def blocks_for(dtype: jnp.dtype, head_dim: int) -> tuple[Blocks, Blocks, Blocks]:
    """For forward, gradient of keys and values, gradient of queries: what fits the registers and
    the shared memory of an A100 and newer, up to heads of `MOST_HEAD_DIM` (compiled, not timed)."""
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
    marks: Marks | Array | None,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    window: int = 0,
) -> tuple[Array, Array]:
    """(output, log2 of the sums of exponentials [B, N, whole blocks of T]) of
    `models.attention.attention`; 0 where a token is padding. `marks` alone are segment ids;
    `interpret` needs no GPU."""
    _, T, _, H = q_BTNH.shape
    marks = _padded_marks(q_BTNH, marks)
    q, k, v = (_padded(x) for x in (q_BTNH, k_BSKH, v_BSKH))
    out, log_sum = _forward(q, k, v, marks, scale, Sight(causal, window), interpret)
    return out[:, :T, :, :H], log_sum


def backward(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    marks: Marks | Array | None,
    out_BTNH: Array,
    log_sum_BNT: Array,
    dout_BTNH: Array,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    window: int = 0,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, 0 at padding, from what `forward` gave."""
    _, T, _, H = q_BTNH.shape
    marks = _padded_marks(q_BTNH, marks)
    q, k, v, out, dout = map(_padded, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH))
    own_BNT = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=jnp.float32)
    arrays = (q, dout, log_sum_BNT, own_BNT, k, v)
    dk, dv = _kv_gradient(arrays, marks, scale, Sight(causal, window), interpret)
    dq = _q_gradient(arrays, marks, scale, Sight(causal, window), interpret)
    return dq[:, :T, :, :H], dk[:, :T, :, :H], dv[:, :T, :, :H]


def _padded(x: Array) -> Array:
    """Whole blocks of tokens, and heads of a power of two, as Triton's blocks are: zeros in the
    head dim change no product."""
    _, T, _, H = x.shape
    more = max(16, pl.next_power_of_2(H)) - H
    return jnp.pad(x, ((0, 0), (0, -T % BLOCK), (0, 0), (0, more)))


def _padded_marks(q: Array, given: Marks | Array | None) -> Marks:
    B, T = q.shape[:2]
    ids, reach = given if isinstance(given, Marks) else Marks(given)
    more = ((0, 0), (0, -T % BLOCK))
    if ids is None and T % BLOCK:
        ids = jnp.ones((B, T), jnp.int32)
    return Marks(*(None if a is None else jnp.pad(a, more) for a in (ids, reach)))


# ---- which blocks meet ----


def _spans(
    marks: Marks,
    length: int,
    held: int,
    visited: int,
    *,
    sees: Sight,
    keys: bool,
) -> tuple[Array, Array]:
    """First and last + 1 block that each held block must visit, int32 [B or 1, blocks] each.

    Held are queries, or with `keys` keys. Two blocks meet where the ranges of their segment ids
    do and a window joins them; as ids rise along a packed row, few others are visited, and those
    are masked.
    """
    ids, reach = marks
    n_held, n_visited = length // held, length // visited
    first = jnp.arange(n_held)[:, None] * held
    other = jnp.arange(n_visited)[None] * visited
    meet = jnp.ones((1, n_held, n_visited), bool)
    if ids is not None:
        # Padding is in no range, and a block of nothing else visits none.
        low = jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max)
        low_held, low_visited = low.reshape(-1, n_held, held), low.reshape(-1, n_visited, visited)
        ids_held, ids_visited = ids.reshape(low_held.shape), ids.reshape(low_visited.shape)
        meet = (low_held.min(-1)[:, :, None] <= ids_visited.max(-1)[:, None]) & (
            low_visited.min(-1)[:, None] <= ids_held.max(-1)[:, :, None]
        )
    if sees.causal:
        if reach is not None:
            queries = visited if keys else held
            last = reach.reshape(-1, length // queries, queries).max(-1)
            seen = last[:, None] >= first[None] if keys else other[None] <= last[:, :, None]
        else:
            seen = ((other + visited > first) if keys else (other < first + held))[None]
        meet = meet & seen
    window = sees.window
    if window:
        near = (
            (other < first + held - 1 + window) if keys else (other + visited > first + 1 - window)
        )
        meet = meet & near[None]
    start = jnp.argmax(meet, axis=-1)
    stop = jnp.where(meet.any(axis=-1), n_visited - jnp.argmax(meet[..., ::-1], axis=-1), start)
    return start.astype(jnp.int32), stop.astype(jnp.int32)


def _forward(
    q: Array,
    k: Array,
    v: Array,
    marks: Marks,
    scale: float,
    sees: Sight,
    interpret: bool,
) -> tuple[Array, Array]:
    """(output [B, T, N, H], log2 of the sums of exponentials [B, N, T])."""
    B, T, N, H = q.shape
    G = N // k.shape[2]
    blocks = blocks_for(q.dtype, H)[0]
    held = pl.BlockSpec((None, blocks.held, None, H), lambda i, b, n: (b, i, n, 0))
    row = pl.BlockSpec((None, T, None, H), lambda i, b, n: (b, 0, lax.div(n, G), 0))
    log_sum = jax.eval_shape(lambda x: x[..., 0].swapaxes(1, 2).astype(jnp.float32), q)
    return _call(
        partial(forward_kernel, blocks=blocks, scale=scale, sees=sees),
        "packed_attention_forward",
        (T // blocks.held, B, N),
        (q, k, v),
        (held, row, row),
        marks,
        _spans(marks, T, blocks.held, blocks.visited, sees=sees, keys=False),
        (jax.eval_shape(lambda x: x, q), log_sum),
        (held, pl.BlockSpec((None, None, blocks.held), lambda i, b, n: (b, n, i))),
        blocks,
        interpret,
    )


def _call(
    kernel: Any,
    name: str,
    grid: tuple[int, int, int],
    arrays: tuple[Array, ...],
    specs: tuple[pl.BlockSpec, ...],
    marks: Marks,
    spans: tuple[Array, Array],
    outs: Any,
    out_specs: Any,
    blocks: Blocks,
    interpret: bool,
) -> Any:
    """Run a kernel over (held blocks, rows, heads); the row's marks and spans follow its arrays."""
    rows = len(spans[0])

    def of_row(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, length), lambda i, b, n: (b if rows > 1 else 0, 0))

    mark_specs = Marks(
        *(None if a is None else pl.BlockSpec((None, a.shape[1]), lambda i, b, n: (b, 0))
          for a in marks)
    )  # fmt: skip
    span = of_row(grid[0])
    run = pl.pallas_call(
        kernel,
        out_shape=outs,
        grid=grid,
        in_specs=[*specs, mark_specs, span, span],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=name,
    )
    return (interpreted(run) if interpret else run)(*arrays, marks, *spans)


def _kv_gradient(
    arrays: tuple[Array, ...],
    marks: Marks,
    scale: float,
    sees: Sight,
    interpret: bool,
) -> tuple[Array, Array]:
    q, *_, k, v = arrays
    B, T, N, H = q.shape
    K = k.shape[2]
    G = N // K
    _, blocks, _ = blocks_for(q.dtype, H)
    queries = pl.BlockSpec((None, T, G, H), lambda j, b, n: (b, 0, n, 0))
    numbers = pl.BlockSpec((None, G, T), lambda j, b, n: (b, n, 0))
    held = pl.BlockSpec((None, blocks.held, None, H), lambda j, b, n: (b, j, n, 0))
    return _call(
        partial(kv_kernel, blocks=blocks, scale=scale, sees=sees, group=G),
        "packed_attention_kv_gradient",
        (T // blocks.held, B, K),
        arrays,
        (queries, queries, numbers, numbers, held, held),
        marks,
        _spans(marks, T, blocks.held, blocks.visited, sees=sees, keys=True),
        (jax.eval_shape(lambda x: x, k), jax.eval_shape(lambda x: x, v)),
        (held, held),
        blocks,
        interpret,
    )


def _q_gradient(
    arrays: tuple[Array, ...],
    marks: Marks,
    scale: float,
    sees: Sight,
    interpret: bool,
) -> Array:
    q, *_, k, _ = arrays
    B, T, N, H = q.shape
    G = N // k.shape[2]
    *_, blocks = blocks_for(q.dtype, H)
    row = pl.BlockSpec((None, T, None, H), lambda i, b, n: (b, 0, lax.div(n, G), 0))
    held = pl.BlockSpec((None, blocks.held, None, H), lambda i, b, n: (b, i, n, 0))
    numbers = pl.BlockSpec((None, None, blocks.held), lambda i, b, n: (b, n, i))
    return _call(
        partial(q_kernel, blocks=blocks, scale=scale, sees=sees),
        "packed_attention_q_gradient",
        (T // blocks.held, B, N),
        arrays,
        (held, held, numbers, numbers, row, row),
        marks,
        _spans(marks, T, blocks.held, blocks.visited, sees=sees, keys=False),
        jax.eval_shape(lambda x: x, q),
        held,
        blocks,
        interpret,
    )
