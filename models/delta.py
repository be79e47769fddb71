"""The gated delta rule (arXiv 2412.06464) over packed rows, in chunks of tokens.

Every head carries a state S [H, D], zeros before a piece's first token. A token changes it to S' =
a S + b k (v - (a S)^T k)^T and reads S'^T q, with its own a = exp(decay) and b. Within a chunk the
states are not computed: the values that its tokens write solve a triangular system (arXiv
2406.06484). Chunks have fixed places, so pieces may begin inside of them.

Pieces do not affect each other, not even by rounding: factors of another piece's numbers are
exactly 0, sums of decays restart with a piece, and their differences are masked before `exp`. So a
piece's output does not depend, to the bit, on its neighbours. The tokens of a piece are side by
side, as everywhere.

Shape suffixes: B rows, T tokens, N chunks, C (i, j) tokens of a chunk, K key heads, G value heads
per key head, V = K x G value heads, H key dim, D value dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from models.attention_split import RESIDUAL_NAME
from models.delta_states import CHUNK_TOKENS, XLA_SCAN, StateScan, product
from models.layers import NORM_EPS

Array = jax.Array

INVERSE_BLOCK = 16  # tokens of a triangle that is inverted alone; larger ones cost too much

_exact = partial(product, precision="highest")  # by default, a GPU uses 10 bits of each factor
_dot = partial(_exact, "...ij,...jk->...ik")


def delta_rule(
    q_BTKH: Array,
    k_BTKH: Array,
    v_BTVD: Array,
    decay_BTV: Array,
    beta_BTV: Array,
    segment_ids: Array,
    *,
    chunk: int = CHUNK_TOKENS,
    states: StateScan = XLA_SCAN,
) -> Array:
    """Return each token's read of its piece's state. Queries and keys are normed to length 1,
    queries are scaled by H^-0.5; value head v reads key head v // G.

    Backward saves the arguments and the states between chunks, float32 [N, B, V, H, D]; a recompute
    policy that drops these runs the chunks again.

    Args:
      decay_BTV: float32 log of the factor by which a token scales the state, at most 0.
      beta_BTV: share of the difference that a token writes, 0 to 1.
      segment_ids: int [B, T]; the output at padding (0) is finite and has no meaning.
      chunk: tokens, a power of two.
      states: how states go from chunk to chunk; see `choose_state_scan`.

    Returns:
      [B, T, V, D] in the dtype of the values; states and intermediate results are float32.
    """
    tokens = q_BTKH.shape[1]
    if not q_BTKH.size:
        return jnp.zeros_like(v_BTVD)
    chunk = _fit_chunk(chunk, tokens)
    fields = _pad_to_chunks(chunk, q_BTKH, k_BTKH, v_BTVD, decay_BTV, beta_BTV)
    ids = jnp.pad(segment_ids, ((0, 0), (0, -tokens % chunk)), constant_values=-1)
    return _chunked_delta_rule(chunk, states, fields, ids)[:, :tokens]


def last_state(k_BTKH: Array, v_BTVD: Array, decay_BTV: Array, beta_BTV: Array) -> Array:
    """Return the state [B, V, H, D] after rows of one piece each."""
    chunk = _fit_chunk(CHUNK_TOKENS, k_BTKH.shape[1])
    fields = _pad_to_chunks(chunk, k_BTKH, k_BTKH, v_BTVD, decay_BTV, beta_BTV)
    ids = jnp.ones(fields[0].shape[:2], jnp.int32)
    chunks = _chunk_transitions(chunk, ids, *fields)
    states_before, written = XLA_SCAN.forward(
        chunks.update, chunks.state_key, chunks.write_key, chunks.state_decay
    )
    new = product("bkgih,bkgid->bkghd", chunks.write_key[-1], written[-1])
    state = chunks.state_decay[-1][..., None, None] * states_before[-1] + new
    return state.reshape(state.shape[0], -1, *state.shape[3:])


def _fit_chunk(chunk: int, tokens: int) -> int:
    """Return a chunk's tokens for rows that may be shorter than a chunk."""
    return min(chunk, 1 << (tokens - 1).bit_length())


def _pad_to_chunks(chunk: int, *fields: Array) -> tuple[Array, ...]:
    """Pad fields [B, T, ...] to whole chunks, by tokens that neither decay nor write."""
    more = -fields[0].shape[1] % chunk
    return tuple(jnp.pad(a, ((0, 0), (0, more), *((0, 0),) * (a.ndim - 2))) for a in fields)


Fields = tuple[Array, ...]  # queries, keys, values, decays, betas
_Residuals = tuple[Fields, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_delta_rule(chunk: int, states: StateScan, fields: Fields, ids: Array) -> Array:
    return _forward(chunk, states, fields, ids)[0]


def _forward(chunk: int, states: StateScan, fields: Fields, ids: Array) -> tuple[Array, _Residuals]:
    chunks = _chunk_transitions(chunk, ids, *fields)
    states_before, written = states.forward(
        chunks.update, chunks.state_key, chunks.write_key, chunks.state_decay
    )
    output = product("nbkgih,nbkghd->nbkgid", chunks.state_query, states_before)
    output = output + product("nbkgij,nbkgjd->nbkgid", chunks.local_scores, written)
    out_BTVD = _join_chunks(output, fields[2].shape).astype(fields[2].dtype)
    return checkpoint_name(out_BTVD, RESIDUAL_NAME), (fields, ids, states_before)


def _backward(
    chunk: int, states: StateScan, saved: _Residuals, dout_BTVD: Array
) -> tuple[tuple[Array, ...], None]:
    fields, ids, states_before = saved
    chunks, pull = jax.vjp(partial(_chunk_transitions, chunk, ids), *fields)
    written = chunks.update - product("nbkgih,nbkghd->nbkgid", chunks.state_key, states_before)
    dout = _value_chunks(dout_BTVD.astype(jnp.float32), chunk, chunks.state_decay.shape[2])
    dlocal_scores = product("nbkgid,nbkgjd->nbkgij", dout, written)
    dstate_query = product("nbkgid,nbkghd->nbkgih", dout, states_before)
    dstate_before = product("nbkgih,nbkgid->nbkghd", chunks.state_query, dout)
    dwritten = product("nbkgij,nbkgid->nbkgjd", chunks.local_scores, dout)
    dstate_after, dwritten = states.backward(
        dwritten, dstate_before, chunks.state_key, chunks.write_key, chunks.state_decay
    )
    dchunks = ChunkTransition(
        update=dwritten,
        state_key=-product("nbkgid,nbkghd->nbkgih", dwritten, states_before),
        state_query=dstate_query,
        write_key=product("nbkgid,nbkghd->nbkgih", written, dstate_after),
        local_scores=dlocal_scores,
        state_decay=jnp.sum(states_before * dstate_after, axis=(-2, -1)),
    )
    return pull(dchunks), None


_chunked_delta_rule.defvjp(_forward, _backward)


class ChunkTransition(NamedTuple):
    """The effect of chunks on states S, each chunk by itself: it writes W = update - state_key S,
    reads state_query S + local_scores W, and leaves state_decay S + write_key^T W.

    `update` is [N, B, K, G, C, D], `local_scores` [.., C, C], `state_decay` [N, B, K, G], others
    [.., C, H].
    """

    update: Array
    state_key: Array
    state_query: Array
    write_key: Array
    local_scores: Array
    state_decay: Array


def _chunk_transitions(
    chunk: int, ids_BT: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> ChunkTransition:
    heads = k.shape[2]
    q_NBKCH, k_NBKCH = (_key_chunks(normalize(a), chunk) for a in (q, k))
    q_NBKCH = q_NBKCH * q.shape[-1] ** -0.5
    v_NBKGCD = _value_chunks(v.astype(jnp.float32), chunk, heads)
    decay_NBKGC, beta_NBKGC = (
        _value_chunks(a.astype(jnp.float32)[..., None], chunk, heads)[..., 0] for a in (decay, beta)
    )
    ids_NBC = ids_BT.reshape(ids_BT.shape[0], -1, chunk).swapaxes(0, 1)

    same_NBCC = ids_NBC[..., :, None] == ids_NBC[..., None, :]
    past_NBCC = same_NBCC & jnp.tri(chunk, dtype=bool)[None, None]
    own_NBCC = past_NBCC.astype(jnp.float32)
    # The decays of the piece's tokens in the chunk up to i, and of those after j, are summed
    # separately: a difference of two large sums would be mostly rounding.
    sum_NBKGC = _exact("nbij,nbkgj->nbkgi", own_NBCC, decay_NBKGC)
    later_CC = jnp.tri(chunk, k=-1, dtype=jnp.float32)
    after_NBKGCC = _exact(
        "nbil,nbkglj->nbkgij", own_NBCC, decay_NBKGC[..., None] * later_CC[None, None, None, None]
    )
    between_NBKGCC = _masked_exp(after_NBKGCC, past_NBCC[:, :, None, None])
    # The state before a chunk belongs to the piece of the token before it.
    last_NB = jnp.concatenate([jnp.full_like(ids_NBC[:1, :, -1], -2), ids_NBC[:-1, :, -1]])
    goes_on_NBC = ids_NBC == last_NB[..., None]
    since_NBKGC = _masked_exp(sum_NBKGC, goes_on_NBC[:, :, None, None])
    to_end_NBKGC = between_NBKGCC[..., -1, :]

    keys_NBKCC = product("nbkih,nbkjh->nbkij", k_NBKCH, k_NBKCH)
    overlap_NBKGCC = beta_NBKGC[..., None] * keys_NBKCC[:, :, :, None] * between_NBKGCC
    solved_NBKGCC = unit_inverse(overlap_NBKGCC)
    update = product("nbkgij,nbkgjd->nbkgid", solved_NBKGCC, beta_NBKGC[..., None] * v_NBKGCD)
    read_NBKGCH = (beta_NBKGC * since_NBKGC)[..., None] * k_NBKCH[:, :, :, None]
    return ChunkTransition(
        update=update,
        state_key=product("nbkgij,nbkgjh->nbkgih", solved_NBKGCC, read_NBKGCH),
        state_query=since_NBKGC[..., None] * q_NBKCH[:, :, :, None],
        write_key=to_end_NBKGC[..., None] * k_NBKCH[:, :, :, None],
        local_scores=product("nbkih,nbkjh->nbkij", q_NBKCH, k_NBKCH)[:, :, :, None]
        * between_NBKGCC,
        state_decay=since_NBKGC[..., -1],
    )


def normalize(a: Array) -> Array:
    """Scale to length 1 along the last dim, in float32."""
    a = a.astype(jnp.float32)
    return a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + NORM_EPS)


def _masked_exp(a: Array, mask: Array) -> Array:
    """Return exp where the broadcast mask is true, else 0."""
    return jnp.exp(jnp.where(mask, a, -jnp.inf))


def _key_chunks(a_BTKH: Array, chunk: int) -> Array:
    """Reshape to [N, B, K, C, H]."""
    B, _, K, H = a_BTKH.shape
    return a_BTKH.reshape(B, -1, chunk, K, H).transpose(1, 0, 3, 2, 4)


def _value_chunks(a_BTVD: Array, chunk: int, heads: int) -> Array:
    """Reshape to [N, B, K, G, C, D]."""
    B, _, V, D = a_BTVD.shape
    return a_BTVD.reshape(B, -1, chunk, heads, V // heads, D).transpose(1, 0, 3, 4, 2, 5)


def _join_chunks(a_NBKGCD: Array, shape: tuple[int, ...]) -> Array:
    return a_NBKGCD.transpose(1, 0, 4, 2, 3, 5).reshape(shape)


@jax.custom_vjp
def unit_inverse(a: Array) -> Array:
    """Return the inverse of 1 + the strictly lower triangle of matrices [..., n, n], n = 2^k.

    It inverts blocks on the diagonal, then doubles their size; entries that join two pieces stay
    exactly 0. Each step works on whole blocks or matrices: slicing and concatenating parts would
    take most of the compile time.
    """
    n = a.shape[-1]
    size = min(n, INVERSE_BLOCK)
    shape = (*a.shape[:-2], n // size, size, n // size, size)
    block = jnp.arange(n) // size
    is_diagonal_block = jnp.broadcast_to(block[:, None] == block[None], a.shape)
    zeros = jnp.zeros_like(a)
    diagonal = jnp.sum(jnp.where(is_diagonal_block, a, zeros).reshape(shape), axis=-2)
    unit = jnp.broadcast_to(jnp.eye(size, dtype=bool), diagonal.shape)
    one = jnp.where(unit, jnp.ones_like(diagonal), jnp.zeros_like(diagonal))
    blocks = _invert_by_halves(diagonal, one, 1)
    block_diagonal = jnp.broadcast_to(blocks[..., None, :], shape).reshape(a.shape)
    return _invert_by_halves(a, jnp.where(is_diagonal_block, block_diagonal, zeros), size)


def _invert_by_halves(a: Array, inverse: Array, smallest: int) -> Array:
    """Return the inverse of the matrices from the inverse of their blocks of `smallest` tokens."""
    n = a.shape[-1]
    halves = [smallest << i for i in range((n // smallest).bit_length() - 1)]
    half = np.arange(n) // np.array(halves, int)[:, None]  # half that a token is in, by step
    i, j = half[:, :, None], half[:, None, :]
    corners = (i == j + 1) & (i % 2 == 1)

    def step(inverse: Array, corner: Array) -> tuple[Array, None]:
        below = jnp.where(jnp.broadcast_to(corner, a.shape), a, jnp.zeros_like(a))
        return inverse - _dot(_dot(inverse, below), inverse), None

    return jax.lax.scan(step, inverse, corners)[0]


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, dinverse: Array) -> tuple[Array]:
    da = -_exact("...ji,...jk,...lk->...il", inverse, dinverse, inverse)
    return (jnp.tril(da, -1),)


unit_inverse.defvjp(_inverse_forward, _inverse_backward)


# ---- inputs of the delta rule ----


def short_convolution(x_BTKH: Array, taps_SKH: Array, segment_ids: Array) -> Array:
    """Convolve each channel in a piece, causally in float32; the last tap is the token's own."""
    n = taps_SKH.shape[0]
    x_BTKH, taps_SKH = x_BTKH.astype(jnp.float32), taps_SKH.astype(jnp.float32)
    output = x_BTKH * taps_SKH[None, n - 1 : n]
    for shift in range(1, n):
        shift_padding = ((0, 0), (shift, 0))
        states_before = jnp.pad(x_BTKH, (*shift_padding, (0, 0), (0, 0)))[:, : x_BTKH.shape[1]]
        ids = jnp.pad(segment_ids, shift_padding, constant_values=-1)[:, : x_BTKH.shape[1]]
        same_segment = (ids == segment_ids)[..., None, None]
        tap = taps_SKH[None, n - 1 - shift : n - shift]
        output = (
            output + jnp.where(same_segment, states_before, jnp.zeros_like(states_before)) * tap
        )
    return output


Heads = tuple[Array, Array, Array]  # of queries, keys and values


def convolve_heads(heads: Heads, taps: Heads, segment_ids: Array) -> Heads:
    """Convolve the inputs of `delta_rule` over a few tokens."""
    q, k, v = (
        jax.nn.silu(short_convolution(x, own, segment_ids)).astype(x.dtype)
        for x, own in zip(heads, taps, strict=True)
    )
    return q, k, v


def mix_tokens(
    heads: Heads,
    taps: Heads,
    decay_BTV: Array,
    beta_BTV: Array,
    segment_ids: Array,
    *,
    states: StateScan = XLA_SCAN,
) -> Array:
    """Mix the tokens of a piece as a gated delta net does."""
    q, k, v = convolve_heads(heads, taps, segment_ids)
    return delta_rule(q, k, v, decay_BTV, beta_BTV, segment_ids, states=states)
