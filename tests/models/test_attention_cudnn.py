"""What is given to cuDNN and made of its answer: the library itself is stood in for by numpy, which
reads each piece from where the places say."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import packed_segments
from test_attention import make_qkv

from models import attention_cudnn
from models.attention import attention
from models.attention_split import AttentionKernel, run_split

F32 = np.float32


# ---- a library that computes what cuDNN is documented to ----


def read(flat, at, n, heads, head_dim):
    return flat[at : at + n * heads * head_dim].reshape(n, heads, head_dim).astype(F32)


def described(q, k, rows):
    """(place of queries, of keys, length) of each piece, and its number among the sums."""
    (B, T, N, H), K = q.shape, k.shape[2]
    if not rows:
        return [(b * T * N * H, b * T * K * H, T) for b in range(B)]
    if len(rows) == 2:
        assert np.array_equal(*rows)
        assert rows[0].shape == (B,)
        return [(b * T * N * H, b * T * K * H, int(n)) for b, n in enumerate(rows[0])]
    lengths, again, q_at, k_at = rows
    assert np.array_equal(lengths, again)
    assert q_at.shape == k_at.shape == (B, lengths.shape[1] + 1)
    return list(zip(q_at.ravel().tolist(), k_at.ravel().tolist(), lengths.ravel().tolist()))


def softmax(q, k, causal):
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("tnh,snh->nts", q, np.repeat(k, group, 1)) / np.sqrt(q.shape[-1])
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    log_sum = np.log(np.exp(scores - scores.max()).sum(-1)) + scores.max()
    return np.exp(scores - log_sum[..., None]), log_sum


def library_forward(q, k, v, rows, causal, scale):
    def run(q, k, v, *rows):
        (_, T, N, H), K = q.shape, k.shape[2]
        pieces = described(q, k, rows)
        out, stats = np.full(q.size, np.nan, F32), np.full((len(pieces), N, T), np.nan, F32)
        for i, (q_at, k_at, n) in enumerate(pieces):
            if n:
                keys, values = (read(x.ravel(), k_at, n, K, H) for x in (k, v))
                weights, log_sum = softmax(read(q.ravel(), q_at, n, N, H), keys, causal)
                mixed = np.einsum("nts,snh->tnh", weights, np.repeat(values, N // K, 1))
                out[q_at : q_at + mixed.size] = mixed.ravel()
                stats[i, :, :n] = log_sum
        return out.reshape(q.shape), stats

    n = rows[0].size if rows else q.shape[0]
    stats = jax.ShapeDtypeStruct((n, q.shape[2], q.shape[1]), F32)
    return jax.pure_callback(run, (jax.ShapeDtypeStruct(q.shape, F32), stats), q, k, v, *rows)


def library_backward(q, k, v, rows, stats, out, dout, causal, scale, seed):
    def run(q, k, v, stats, out, dout, *rows):
        (_, _, N, H), K = q.shape, k.shape[2]
        grads = [np.full(x.size, np.nan, F32) for x in (q, k, v)]
        for i, (q_at, k_at, n) in enumerate(described(q, k, rows)):
            if not n:
                continue
            q1, out1, dout1 = (read(x.ravel(), q_at, n, N, H) for x in (q, out, dout))
            k1, v1 = (np.repeat(read(x.ravel(), k_at, n, K, H), N // K, 1) for x in (k, v))
            weights, log_sum = softmax(q1, read(k.ravel(), k_at, n, K, H), causal)
            np.testing.assert_allclose(stats[i, :, :n], log_sum, atol=1e-5)
            dweights = np.einsum("tnh,snh->nts", dout1, v1)
            own = np.einsum("tnh,tnh->nt", dout1, out1)[..., None]
            dscores = weights * (dweights - own) / np.sqrt(H)
            found = (
                np.einsum("nts,snh->tnh", dscores, k1),
                np.einsum("nts,tnh->snh", dscores, q1).reshape(n, K, N // K, H).sum(2),
                np.einsum("nts,tnh->snh", weights, dout1).reshape(n, K, N // K, H).sum(2),
            )
            for grad, at, part in zip(grads, (q_at, k_at, k_at), found, strict=True):
                grad[at : at + part.size] = part.ravel()
        return tuple(g.reshape(x.shape) for g, x in zip(grads, (q, k, v)))

    outs = tuple(jax.ShapeDtypeStruct(x.shape, F32) for x in (q, k, v))
    return jax.pure_callback(run, outs, q, k, v, stats, out, dout, *rows)


@pytest.fixture
def library(monkeypatch):
    """A program that calls Python back is none for the cache that tests share: another process
    would call where nothing is."""
    monkeypatch.setattr(attention_cudnn, "call_forward", library_forward)
    monkeypatch.setattr(attention_cudnn, "call_backward", library_backward)
    setting = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, setting)
    jax.config.update(setting, math.inf)
    yield
    jax.config.update(setting, before)


def both(function, qkv):
    """Output and gradients."""
    wave = np.sin(np.arange(qkv[0].size)).reshape(qkv[0].shape).astype(F32)
    out, pull = jax.vjp(function, *qkv)
    return [out, *pull(wave)]


def check(qkv, ids, causal):
    kernel = AttentionKernel(
        attention_cudnn.forward, attention_cudnn.backward, causal, True, qkv[0].shape[-1] ** -0.5
    )

    def by_callback(*qkv):
        return both(lambda *a: run_split(kernel, *a, ids), qkv)

    found = jax.jit(by_callback)(*qkv)
    plain = partial(attention, token_mask=ids, causal=causal, kernel="xla")
    want = jax.jit(lambda *qkv: both(plain, qkv))(*qkv)
    for x, y in zip(found, want, strict=True):
        y = y if ids is None else np.where(np.asarray(ids)[:, :, None, None] > 0, y, 0)
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows(library, monkeypatch, causal, slots):
    """Also with more pieces than slots, which the project's kernels take over; a gap in a row, an
    empty row, and an id at the end of a row and at the begin of the next one."""
    monkeypatch.setattr(attention_cudnn, "SEGMENTS_PER_ROW", slots)
    ids, _ = packed_segments(4, 130, np.random.default_rng(3))
    ids[0, 120:], ids[1, :10] = 7, 7
    ids[1, 30:50], ids[2] = 0, 0
    ids[1, 50:] += 20 * (ids[1, 50:] > 0)  # another piece after the gap
    check(make_qkv(4, 130, 6, 2, 8), ids, causal)


@pytest.mark.parametrize("tokens", [1, 64, 73])
def test_rows_of_one_piece(library, tokens):
    check(make_qkv(2, tokens, 4, 4, 8), None, causal=False)
    check(make_qkv(1, tokens, 4, 2, 8), None, causal=True)


def test_jax_binds_cudnn_as_is_known():
    """If this fails, jax has changed and packed rows no longer run by cuDNN: see the module."""
    assert attention_cudnn.AVAILABLE


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("packed", [False, True])
def test_it_lowers_for_a_gpu(packed):
    """One call of the library in each direction, with the masks and places that the case needs."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    q, k, v = (jax.ShapeDtypeStruct((2, 192, n, 72), jnp.bfloat16) for n in (4, 2, 2))
    ids = jax.ShapeDtypeStruct((2, 192), jnp.int32) if packed else None

    def run(q, k, v, ids):
        by = {"causal": packed, "kernel": "cudnn", "chip": "sm_90"}
        out, pull = jax.vjp(lambda *a: attention(*a, ids, **by), q, k, v)
        return pull(out)

    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(run).trace(q, k, v, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        assert text.count(f"custom_call @{name}") == 1
    assert text.count("PADDING_CAUSAL" if packed else "NO_MASK") == 2
    assert re.findall(r"max_seg_per_batch\\22: (\d+)", text) == ["16" if packed else "1"] * 2


# ---- what XLA is told ----


def configurations(kernel):
    """What the calls of two equal layers' gradients say to XLA, lowered for a GPU."""
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    once = partial(attention, causal=True, kernel=kernel, chip="sm_90")

    def loss(q):
        return jnp.sum(once(once(q, q, q, None), q, q, None).astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@__cudnn\$(\w+)\(.*?backend_config = \"(.*?)\", ", lowered.as_text())
    return [(name, "force_deterministic" in text) for name, text in calls]


def test_all_exact_backward_calls_say_that_they_add_up_in_order():
    """XLA itself writes it into the first of equal ones, and the program fails on the others."""
    forward, backward = ("fmhaSoftmax", False), ("fmhaSoftmaxBackward", True)
    assert sorted(configurations("auto")) == [forward, forward, backward, backward]
    assert ("fmhaSoftmaxBackward", True) not in configurations("cudnn")
    assert len(configurations("cudnn")) == 4
