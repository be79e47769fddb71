"""The gated delta rule (arXiv 2412.06464) over packed rows, in chunks of tokens.

Of every head a state S [H, D], zeros before a piece's first token, is carried along: a token makes
it S' = a S + b k (v - (a S)^T k)^T and reads S'^T q, where a = exp(decay) and b are its own. Within
a chunk the states are never made: what its tokens write is the solution of a triangular system
(arXiv 2406.06484). Chunks lie where they lie, so pieces begin anywhere in them.

Nothing passes between pieces, not even rounding: what multiplies another piece's numbers is exactly
0, sums of decays begin anew with a piece, and differences of them are masked before `exp`. So what
comes out for a piece does not depend, to the bit, on what stands beside it. Tokens of a piece stand
together, as everywhere.

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

from models.attention_split import SAVED
from models.delta_states import CHUNK, XLA, States, product

Array = jax.Array

BLOCK = 16  # tokens of a triangle inverted alone; of more the products outgrow the others
NORM_EPS = 1e-6  # of queries and keys, as published

_exact = partial(product, precision="highest")  # a GPU else takes 10 bits of each factor
_dot = partial(_exact, "...ij,...jk->...ik")


def delta_rule(
    q_BTKH: Array,
    k_BTKH: Array,
    v_BTVD: Array,
    decay_BTV: Array,
    beta_BTV: Array,
    segment_ids: Array,
    *,
    chunk: int = CHUNK,
    states: States = XLA,
) -> Array:
    """What every token reads of its piece's state. Queries and keys are normed to length 1, queries
    are scaled by H^-0.5; value head v reads key head v // G.

    Backward keeps the arguments and the states between chunks, float32 [N, B, V, H, D]; a recompute
    policy that drops these runs the chunks again.

    Args:
      decay_BTV: float32 logarithms of what a token leaves of the state, at most 0.
      beta_BTV: share of the difference that a token writes, 0 to 1.
      segment_ids: int [B, T]; what comes out for padding (0) is finite and means nothing.
      chunk: tokens, a power of two.
      states: what takes states from chunk to chunk; see `states_by`.

    Returns:
      [B, T, V, D] in the dtype of the values; states and all in between are float32.
    """
    tokens = q_BTKH.shape[1]
    if not q_BTKH.size:
        return jnp.zeros_like(v_BTVD)
    chunk = _fitting(chunk, tokens)
    fields = _whole_chunks(chunk, q_BTKH, k_BTKH, v_BTVD, decay_BTV, beta_BTV)
    ids = jnp.pad(segment_ids, ((0, 0), (0, -tokens % chunk)), constant_values=-1)
    return _delta(chunk, states, *fields, ids)[:, :tokens]


def last_state(k_BTKH: Array, v_BTVD: Array, decay_BTV: Array, beta_BTV: Array) -> Array:
    """The state [B, V, H, D] after rows of one piece each; what neither decays nor writes leaves it
    as it is."""
    chunk = _fitting(CHUNK, k_BTKH.shape[1])
    fields = _whole_chunks(chunk, k_BTKH, k_BTKH, v_BTVD, decay_BTV, beta_BTV)
    ids = jnp.ones(fields[0].shape[:2], jnp.int32)
    parts = _parts(chunk, ids, *fields)
    before, written = XLA.forward(parts.wanted, parts.reads_key, parts.leaves_key, parts.keeps)
    new = product("bkgih,bkgid->bkghd", parts.leaves_key[-1], written[-1])
    state = parts.keeps[-1][..., None, None] * before[-1] + new
    return state.reshape(state.shape[0], -1, *state.shape[3:])


def _fitting(chunk: int, tokens: int) -> int:
    """Tokens of a chunk in rows that may be shorter than one."""
    return min(chunk, 1 << (tokens - 1).bit_length())


def _whole_chunks(chunk: int, *fields: Array) -> tuple[Array, ...]:
    """Fields [B, T, ...] padded to chunks by tokens that neither decay nor write."""

    def padded(a: Array) -> Array:
        return jnp.pad(a, ((0, 0), (0, -a.shape[1] % chunk), *((0, 0),) * (a.ndim - 2)))

    return tuple(map(padded, fields))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta(
    chunk: int,
    states: States,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    ids: Array,
) -> Array:
    return _forward(chunk, states, q, k, v, decay, beta, ids)[0]


_Saved = tuple[tuple[Array, ...], Array, Array]


def _forward(
    chunk: int,
    states: States,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    ids: Array,
) -> tuple[Array, _Saved]:
    fields = q, k, v, decay, beta
    parts = _parts(chunk, ids, *fields)
    before, written = states.forward(parts.wanted, parts.reads_key, parts.leaves_key, parts.keeps)
    out = product("nbkgih,nbkghd->nbkgid", parts.reads_query, before)
    out = out + product("nbkgij,nbkgjd->nbkgid", parts.seen, written)
    out_BTVD = _unchunked(out, v.shape).astype(v.dtype)
    return checkpoint_name(out_BTVD, SAVED), (fields, ids, before)


def _backward(
    chunk: int, states: States, saved: _Saved, dout_BTVD: Array
) -> tuple[Array | None, ...]:
    fields, ids, before = saved
    parts, pull = jax.vjp(partial(_parts, chunk, ids), *fields)
    written = parts.wanted - product("nbkgih,nbkghd->nbkgid", parts.reads_key, before)
    dout = _value_chunks(dout_BTVD.astype(jnp.float32), chunk, parts.keeps.shape[2])
    dseen = product("nbkgid,nbkgjd->nbkgij", dout, written)
    dreads_query = product("nbkgid,nbkghd->nbkgih", dout, before)
    dread = product("nbkgih,nbkgid->nbkghd", parts.reads_query, dout)
    dwritten = product("nbkgij,nbkgid->nbkgjd", parts.seen, dout)
    dafter, dwritten = states.backward(
        dwritten, dread, parts.reads_key, parts.leaves_key, parts.keeps
    )
    dparts = _Parts(
        wanted=dwritten,
        reads_key=-product("nbkgid,nbkghd->nbkgih", dwritten, before),
        reads_query=dreads_query,
        leaves_key=product("nbkgid,nbkghd->nbkgih", written, dafter),
        seen=dseen,
        keeps=jnp.sum(before * dafter, axis=(-2, -1)),
    )
    return (*pull(dparts), None)


_delta.defvjp(_forward, _backward)


class _Parts(NamedTuple):
    """What chunks do to states S, each for itself: they write W = wanted - reads_key S, read
    reads_query S + seen W, and leave keeps S + leaves_key^T W.

    `wanted` is [N, B, K, G, C, D], `seen` [.., C, C], `keeps` [N, B, K, G], others [.., C, H].
    """

    wanted: Array
    reads_key: Array
    reads_query: Array
    leaves_key: Array
    seen: Array
    keeps: Array


def _parts(
    chunk: int, ids_BT: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> _Parts:
    heads = k.shape[2]
    q_NBKCH, k_NBKCH = (_key_chunks(normed(a), chunk) for a in (q, k))
    q_NBKCH = q_NBKCH * q.shape[-1] ** -0.5
    v_NBKGCD = _value_chunks(v.astype(jnp.float32), chunk, heads)
    decay_NBKGC, beta_NBKGC = (
        _value_chunks(a.astype(jnp.float32)[..., None], chunk, heads)[..., 0] for a in (decay, beta)
    )
    ids_NBC = ids_BT.reshape(ids_BT.shape[0], -1, chunk).swapaxes(0, 1)

    same_NBCC = ids_NBC[..., :, None] == ids_NBC[..., None, :]
    past_NBCC = same_NBCC & jnp.tri(chunk, dtype=bool)[None, None]
    own_NBCC = past_NBCC.astype(jnp.float32)
    # Of the piece's tokens in the chunk up to i; and after j, added up alone: of two sums that are
    # large the difference would be little but rounding.
    sum_NBKGC = _exact("nbij,nbkgj->nbkgi", own_NBCC, decay_NBKGC)
    later_CC = jnp.tri(chunk, k=-1, dtype=jnp.float32)
    after_NBKGCC = _exact(
        "nbil,nbkglj->nbkgij", own_NBCC, decay_NBKGC[..., None] * later_CC[None, None, None, None]
    )
    between_NBKGCC = _masked_exp(after_NBKGCC, past_NBCC[:, :, None, None])
    # The state before a chunk is of the piece of the token before it.
    last_NB = jnp.concatenate([jnp.full_like(ids_NBC[:1, :, -1], -2), ids_NBC[:-1, :, -1]])
    goes_on_NBC = ids_NBC == last_NB[..., None]
    since_NBKGC = _masked_exp(sum_NBKGC, goes_on_NBC[:, :, None, None])
    to_end_NBKGC = between_NBKGCC[..., -1, :]

    keys_NBKCC = product("nbkih,nbkjh->nbkij", k_NBKCH, k_NBKCH)
    overlap_NBKGCC = beta_NBKGC[..., None] * keys_NBKCC[:, :, :, None] * between_NBKGCC
    solved_NBKGCC = unit_inverse(overlap_NBKGCC)
    wanted = product("nbkgij,nbkgjd->nbkgid", solved_NBKGCC, beta_NBKGC[..., None] * v_NBKGCD)
    read_NBKGCH = (beta_NBKGC * since_NBKGC)[..., None] * k_NBKCH[:, :, :, None]
    return _Parts(
        wanted=wanted,
        reads_key=product("nbkgij,nbkgjh->nbkgih", solved_NBKGCC, read_NBKGCH),
        reads_query=since_NBKGC[..., None] * q_NBKCH[:, :, :, None],
        leaves_key=to_end_NBKGC[..., None] * k_NBKCH[:, :, :, None],
        seen=product("nbkih,nbkjh->nbkij", q_NBKCH, k_NBKCH)[:, :, :, None] * between_NBKGCC,
        keeps=since_NBKGC[..., -1],
    )


def normed(a: Array) -> Array:
    """Of length 1 along the last dim, float32."""
    a = a.astype(jnp.float32)
    return a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + NORM_EPS)


def _masked_exp(a: Array, mask: Array) -> Array:
    """exp where the mask, broadcast, holds, else 0."""
    return jnp.exp(jnp.where(mask, a, -jnp.inf))


def _key_chunks(a_BTKH: Array, chunk: int) -> Array:
    """[N, B, K, C, H]"""
    B, _, K, H = a_BTKH.shape
    return a_BTKH.reshape(B, -1, chunk, K, H).transpose(1, 0, 3, 2, 4)


def _value_chunks(a_BTVD: Array, chunk: int, heads: int) -> Array:
    """[N, B, K, G, C, D]"""
    B, _, V, D = a_BTVD.shape
    return a_BTVD.reshape(B, -1, chunk, heads, V // heads, D).transpose(1, 0, 3, 4, 2, 5)


def _unchunked(a_NBKGCD: Array, shape: tuple[int, ...]) -> Array:
    return a_NBKGCD.transpose(1, 0, 4, 2, 3, 5).reshape(shape)


@jax.custom_vjp
def unit_inverse(a: Array) -> Array:
    """The inverse of 1 + the strictly lower triangle of each matrix [..., n, n], n a power of two.

    By halves from the smallest up, first of blocks along the diagonal; entries that join two pieces
    stay exactly 0. Each step is on whole blocks or matrices: parts cut out and put together would
    be most of what there is to compile.
    """
    n = a.shape[-1]
    size = min(n, BLOCK)
    shape = (*a.shape[:-2], n // size, size, n // size, size)
    block = jnp.arange(n) // size
    own = jnp.broadcast_to(block[:, None] == block[None], a.shape)
    zeros = jnp.zeros_like(a)
    diagonal = jnp.sum(jnp.where(own, a, zeros).reshape(shape), axis=-2)
    unit = jnp.broadcast_to(jnp.eye(size, dtype=bool), diagonal.shape)
    one = jnp.where(unit, jnp.ones_like(diagonal), jnp.zeros_like(diagonal))
    blocks = _by_halves(diagonal, one, 1)
    apart = jnp.broadcast_to(blocks[..., None, :], shape).reshape(a.shape)
    return _by_halves(a, jnp.where(own, apart, zeros), size)


def _by_halves(a: Array, inverse: Array, least: int) -> Array:
    """From the inverse of halves of `least` tokens on that of the matrices."""
    n = a.shape[-1]
    halves = [least << i for i in range((n // least).bit_length() - 1)]
    half = np.arange(n) // np.array(halves, int)[:, None]  # of a token, by step
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


# ---- what goes in, and what is done with it ----


def short_convolution(x_BTKH: Array, taps_SKH: Array, segment_ids: Array) -> Array:
    """Causal convolution of each channel over a piece's tokens, the last tap the token's own;
    float32."""
    n = taps_SKH.shape[0]
    x_BTKH, taps_SKH = x_BTKH.astype(jnp.float32), taps_SKH.astype(jnp.float32)
    out = x_BTKH * taps_SKH[None, n - 1 : n]
    for back in range(1, n):
        room = ((0, 0), (back, 0))
        before = jnp.pad(x_BTKH, (*room, (0, 0), (0, 0)))[:, : x_BTKH.shape[1]]
        ids = jnp.pad(segment_ids, room, constant_values=-1)[:, : x_BTKH.shape[1]]
        own = (ids == segment_ids)[..., None, None]
        here = taps_SKH[None, n - 1 - back : n - back]
        out = out + jnp.where(own, before, jnp.zeros_like(before)) * here
    return out


Heads = tuple[Array, Array, Array]  # of queries, keys and values


def convolved(heads: Heads, taps: Heads, segment_ids: Array) -> Heads:
    """What goes into `delta_rule`, convolved over a few tokens."""
    q, k, v = (
        jax.nn.silu(short_convolution(x, own, segment_ids)).astype(x.dtype)
        for x, own in zip(heads, taps, strict=True)
    )
    return q, k, v


def delta_mix(
    heads: Heads,
    taps: Heads,
    decay_BTV: Array,
    beta_BTV: Array,
    segment_ids: Array,
    *,
    states: States = XLA,
) -> Array:
    """How a gated delta net mixes the tokens of a piece."""
    q, k, v = convolved(heads, taps, segment_ids)
    return delta_rule(q, k, v, decay_BTV, beta_BTV, segment_ids, states=states)
