"""The gated delta rule against its recurrence, token by token in float64, of each piece alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.delta import NORM_EPS, delta_rule, short_convolution, unit_inverse
from models.delta_states import GPU_SCAN, INTERPRETED_SCAN, XLA_SCAN, choose_state_scan

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6


def normed(a):
    return a / np.sqrt((a * a).sum(-1, keepdims=True) + NORM_EPS)


def norm_gradient(a, d):
    r = 1 / np.sqrt((a * a).sum(-1, keepdims=True) + NORM_EPS)
    return r * d - a * r**3 * (a * d).sum(-1, keepdims=True)


def recurrence(q, k, v, decay, beta, dout):
    """Outputs of one piece [T, V, D], and the gradients of all that goes in for `dout`."""
    q, k, v, decay, beta, dout = (np.asarray(a, np.float64) for a in (q, k, v, decay, beta, dout))
    T, heads, group = len(v), v.shape[1], v.shape[1] // k.shape[1]
    out = np.zeros_like(v)
    grads = [np.zeros_like(a) for a in (q, k, v, decay, beta)]
    scale = q.shape[-1] ** -0.5
    for h in range(heads):
        qh, kh = normed(q[:, h // group]) * scale, normed(k[:, h // group])
        state, seen = np.zeros((k.shape[-1], v.shape[-1])), []
        for t in range(T):
            left = np.exp(decay[t, h]) * state
            error = v[t, h] - left.T @ kh[t]
            after = left + beta[t, h] * np.outer(kh[t], error)
            seen.append((state, left, error, after))
            out[t, h] = after.T @ qh[t]
            state = after
        dq, dk, dstate = np.zeros_like(qh), np.zeros_like(kh), np.zeros_like(state)
        for t in reversed(range(T)):
            state, left, error, after = seen[t]
            dstate = dstate + np.outer(qh[t], dout[t, h])
            dq[t] = after @ dout[t, h]
            derror = beta[t, h] * dstate.T @ kh[t]
            dk[t] = beta[t, h] * dstate @ error - left @ derror
            grads[4][t, h] = kh[t] @ dstate @ error
            grads[2][t, h] = derror
            dleft = dstate - np.outer(kh[t], derror)
            grads[3][t, h] = np.exp(decay[t, h]) * (dleft * state).sum()
            dstate = np.exp(decay[t, h]) * dleft
        grads[0][:, h // group] += norm_gradient(q[:, h // group], dq * scale)
        grads[1][:, h // group] += norm_gradient(k[:, h // group], dk)
    return out, grads


def drawn(rng, rows, tokens, steep=1.0):
    def normal(*shape):
        return rng.normal(size=(rows, tokens, *shape)).astype(np.float32)

    decay = -steep * rng.exponential(size=(rows, tokens, VALUE_HEADS)).astype(np.float32)
    beta = rng.uniform(size=decay.shape).astype(np.float32)
    return [normal(KEY_HEADS, KEY), normal(KEY_HEADS, KEY), normal(VALUE_HEADS, VALUE), decay, beta]


def ids_of(lengths, tokens):
    ids = np.zeros(tokens, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


@partial(jax.jit, static_argnums=(0, 4))
def with_gradients(chunk, fields, ids, dout, states=XLA_SCAN):
    out, pull = jax.vjp(lambda *a: delta_rule(*a, ids, chunk=chunk, states=states), *fields)
    return out, pull(dout)


def assert_close(got, want, least=0.0):
    """To a share of the largest, which is at least `least`."""
    scale = max(least, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


# Pieces shorter than a chunk to longer than three, that begin at its edges and inside.
ROWS = {
    "one token": (1, [[1]], 1),
    "one chunk": (4, [[4]], 4),
    "padding alone": (4, [[]], 6),
    "inside": (4, [[3, 2, 9, 1, 6], [13, 1, 1, 4]], 23),
    "at edges": (4, [[4, 8, 4], [15]], 16),
    "a chunk for all": (64, [[5, 7, 2]], 17),
    "others": (16, [[40, 3, 50, 1]], 99),
}


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("steep", [0.1, 30.0])
@pytest.mark.parametrize("name", ROWS)
def test_pieces_equal_their_recurrence(name, steep):
    chunk, rows, tokens = ROWS[name]
    rng = np.random.default_rng(0)
    fields = drawn(rng, len(rows), tokens, steep)
    ids = np.stack([ids_of(lengths, tokens) for lengths in rows])
    dout = np.where(ids[..., None, None] > 0, rng.normal(size=fields[2].shape), 0)
    dout = dout.astype(np.float32)
    out, grads = with_gradients(chunk, fields, ids, dout)
    assert all(np.isfinite(a).all() for a in (out, *grads))
    for row, lengths in enumerate(rows):
        for start, n in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            own = (row, slice(start, start + n))
            want, want_grads = recurrence(*(a[own] for a in fields), dout[own])
            assert_close(out[own], want)
            # Of steep decays the gradient is next to nothing beside the others.
            least = 0.01 * max(float(np.abs(g).max()) for g in want_grads)
            for got, wanted in zip(grads, want_grads, strict=True):
                assert_close(got[own], wanted, least)


def test_neighbours_change_no_bit():
    lengths, tokens = [3, 21, 1, 9, 5], 43
    ids = ids_of(lengths, tokens)[None]
    rng = np.random.default_rng(1)
    fields, other = drawn(rng, 1, tokens), drawn(rng, 1, tokens, 9.0)
    dout, dother = (rng.normal(size=fields[2].shape).astype(np.float32) for _ in range(2))
    for piece in range(1, len(lengths) + 1):
        own = ids[0] == piece

        def mixed(a, b, own=own):
            return np.where(own.reshape(1, -1, *[1] * (a.ndim - 2)), a, b)

        with_other = [mixed(a, b) for a, b in zip(fields, other, strict=True)]
        there = with_gradients(8, with_other, ids, mixed(dout, dother))
        here = with_gradients(8, fields, ids, dout)
        for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_array_equal(a[:, own], b[:, own])
            assert not np.array_equal(a, b)


def test_a_gpus_kernels_equal_the_loop():
    """In a `shard_map`, as the engine has them."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    chunk, rows, tokens = ROWS["others"]
    rng = np.random.default_rng(0)
    fields = drawn(rng, len(rows), tokens)
    ids = np.stack([ids_of(lengths, tokens) for lengths in rows])
    dout = rng.normal(size=fields[2].shape).astype(np.float32)
    by_kernels = jax.shard_map(
        lambda *a: with_gradients(chunk, *a, INTERPRETED_SCAN),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    want = with_gradients(chunk, fields, ids, dout, XLA_SCAN)
    jax.tree.map(assert_close, jax.jit(by_kernels)(fields, ids, dout), want)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_kernels_lower_for_a_gpu():
    """Heads split over "model", as the engine runs a layer."""
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    mesh = AbstractMesh((2,), ("model",), (AxisType.Auto,), abstract_device=device)
    states = choose_state_scan("auto", "sm_90", 16, 32)

    def struct(*shape):
        heads = NamedSharding(mesh, P(None, None, "model"))
        return jax.ShapeDtypeStruct((1, 192, *shape), jnp.float32, sharding=heads)

    key, value, number = struct(2, 16), struct(4, 32), struct(4)
    fields = (key, key, value, number, number)
    ids = jax.ShapeDtypeStruct((1, 192), jnp.int32, sharding=NamedSharding(mesh, P()))
    traced = with_gradients.trace(64, fields, ids, value, states)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = ('"delta_states"', '"delta_states_gradient"')
    assert [text.count(name) for name in names] == [1, 1]


@pytest.mark.parametrize(
    ("kernel", "chip", "sizes", "by"),
    [("auto", "sm_90", (128, 128), GPU_SCAN), ("auto", "cpu", (128, 128), XLA_SCAN),
     ("xla", "sm_90", (128, 128), XLA_SCAN), ("auto", "sm_90", (96, 128), XLA_SCAN),
     ("auto", "sm_75", (128, 128), XLA_SCAN), ("pallas", "cpu", (128, 128), INTERPRETED_SCAN),
     ("pallas", "cpu", (96, 128), XLA_SCAN)],
)  # fmt: skip
def test_what_runs_where(kernel, chip, sizes, by):
    assert choose_state_scan(kernel, chip, *sizes) is by


def test_no_rows_and_the_dtype_of_values():
    fields = drawn(np.random.default_rng(3), 1, 12)
    none = [a[:0] for a in fields]
    assert delta_rule(*none, np.zeros((0, 12), np.int32)).shape == (0, 12, VALUE_HEADS, VALUE)
    half = [jnp.asarray(a, jnp.bfloat16) for a in fields[:3]]
    run = jax.jit(partial(delta_rule, chunk=4))
    out, want = (
        run(*qkv, *fields[3:], ids_of([12], 12)[None])
        for qkv in (half, [np.asarray(a, np.float32) for a in half])
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_inverse_of_a_triangle(n):
    """Also of keys that are all alike, whose powers are huge."""
    rng = np.random.default_rng(n)
    for a in (rng.uniform(-1, 1, (3, n, n)), np.ones((1, n, n))):
        a = np.tril(a, -1)
        want = np.linalg.inv(np.eye(n) + a)
        got = jax.jit(unit_inverse)(a.astype(np.float32))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_convolution_begins_anew_with_a_piece():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(1, 13, 2, 3)).astype(np.float32)
    taps = rng.normal(size=(4, 2, 3)).astype(np.float32)
    lengths = [1, 2, 7, 3]
    got = jax.jit(short_convolution)(x, taps, ids_of(lengths, 13)[None])
    start = 0
    for n in lengths:
        for t in range(n):
            want = sum(x[0, start + t - back] * taps[3 - back] for back in range(min(t, 3) + 1))
            np.testing.assert_allclose(got[0, start + t], want, rtol=1e-5, atol=1e-6)
        start += n
