"""The GPU kernels, interpreted on the CPU, against the XLA reference; and that they lower."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P
from model_fields import fields, full_params, outputs, packed_segments
from test_attention import make_qkv
from test_model_sharding import _shardings, make_sharded

from models import attention_gpu
from models.attention import attention
from models.attention_choice import known_kernel
from models.attention_kernels import Marks, Sight
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS, VISION
from models.vit import VisionModule

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@functools.cache
def value_and_grads(kernel, causal, window=0):
    """One program for all rows of a shape; that of the kernels in a `shard_map`, as the engine has
    them."""

    def run(segments, wave, *qkv):
        out, pull = jax.vjp(
            lambda *qkv: attention(*qkv, segments, causal=causal, kernel=kernel, window=window),
            *qkv,
        )
        return [out, *pull(wave)]

    if kernel == "pallas":
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
        rows = P("data")
        run = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"})
    return jax.jit(run)


def wave_like(x):
    return jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype)


def check(qkv, segments, causal, atol, window=0):
    """The reference where tokens are, nothing at padding."""
    given = (wave_like(qkv[0]), *qkv)
    exact = (x.astype(np.float32) for x in given)
    want = value_and_grads("xla", causal, window)(segments, *exact)
    found = value_and_grads("pallas", causal, window)(segments, *given)
    for x, y, z in zip(found, want, [qkv[0], *qkv], strict=True):
        assert (x.dtype, x.shape) == (z.dtype, z.shape)
        if segments is not None:
            y = np.where(np.asarray(segments)[:, :, None, None] > 0, y, 0)
        scale = max(1.0, np.abs(y).max(initial=0.0))
        np.testing.assert_allclose(np.asarray(x, np.float32) / scale, y / scale, atol=atol)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    "items, tokens, heads, kv_heads, head_dim",
    [
        (0, 3, 2, 1, 4),
        (1, 1, 1, 1, 4),
        (2, 9, 4, 2, 8),
        (1, 128, 6, 2, 16),
        (2, 129, 3, 3, 72),
        (1, 300, 7, 1, 24),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_float32_equals_the_reference(items, tokens, heads, kv_heads, head_dim, causal):
    qkv = make_qkv(items, tokens, heads, kv_heads, head_dim)
    segments, _ = packed_segments(items, tokens, np.random.default_rng(3))
    check(qkv, segments, causal, 2e-6)


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("tokens, window", [(9, 3), (129, 128), (300, 1), (300, 40), (600, 256)])
def test_windows_equal_the_reference(tokens, window):
    qkv = make_qkv(2, tokens, 4, 2, 16)
    segments, _ = packed_segments(2, tokens, np.random.default_rng(3))
    for ids in (segments, None):
        check(qkv, ids, True, 2e-6, window)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("window", [1, 32, 100, 512])
def test_a_window_leaves_out_blocks_that_it_does_not_reach(keys, window):
    T, held, visited = 512, 64, 32
    start, stop = attention_gpu._spans(
        Marks(), T, held, visited, sees=Sight(causal=True, window=window), keys=keys
    )
    at = np.arange(T)
    sees = (at[:, None] >= at) & (at[:, None] - at < window)  # [queries, keys]
    sees = sees.T if keys else sees
    for i, (a, b) in enumerate(zip(start[0].tolist(), stop[0].tolist(), strict=True)):
        reached = sees[i * held : (i + 1) * held].reshape(held, -1, visited).any(axis=(0, 2))
        assert np.flatnonzero(reached).tolist() == list(range(a, b))


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("tokens", [1, 100, 128, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_segments(tokens, causal):
    check(make_qkv(2, tokens, 4, 2, 8), None, causal, 2e-6)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("head_dim, tokens", [(64, 260), (128, 260), (160, 260), (512, 70)])
def test_bfloat16_stays_near_float32(head_dim, tokens):
    """Within its rounding, 2^-8, where the reference itself is off by as much."""
    qkv = [jnp.asarray(x, BF16) for x in make_qkv(1, tokens, 4, 2, head_dim)]
    segments, _ = packed_segments(1, tokens, np.random.default_rng(4))
    check(qkv, segments, True, 2**-7)
    check(qkv, None, False, 2**-7)


@pytest.mark.parametrize(
    "lengths",
    [[300], [1] * 7 + [121, 128, 3], [64, 128, 64], [127, 1, 1, 127], [0, 200], [5, 0, 5, 300]],
)
def test_packings(lengths):
    """Samples that end at a block's edge, before and after it; of one token; padding between."""
    ids = np.concatenate([np.full(n, i if n else 0) for i, n in enumerate(lengths, 1)])
    ids = np.pad(ids, (0, 320 - len(ids))).astype(np.int32)[None]
    check(make_qkv(1, 320, 2, 1, 8), ids, True, 2e-6)


def test_segment_ids_need_not_rise():
    ids = np.random.default_rng(0).integers(0, 4, (2, 270)).astype(np.int32)
    check(make_qkv(2, 270, 2, 1, 8), ids, True, 2e-6)
    check(make_qkv(2, 270, 2, 1, 8), ids, False, 2e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [False, True])
def test_changing_one_sample_leaves_the_others_bit_identical(dtype, causal):
    segments = np.repeat(np.array([[1, 2, 3, 0]], np.int32), [70, 100, 60, 50], axis=1)
    run = value_and_grads("pallas", causal)
    a = [jnp.asarray(x, dtype) for x in make_qkv(1, 280, 4, 2, 16, seed=0)]
    other = [jnp.asarray(50 * x, dtype) for x in make_qkv(1, 280, 4, 2, 16, seed=1)]
    wave = wave_like(a[0])
    before = jax.device_get(run(segments, wave, *a))
    for changed in range(4):
        move = segments[0] == changed
        b = [jnp.where(move[None, :, None, None], y, x) for x, y in zip(a, other)]
        for x, y in zip(before, jax.device_get(run(segments, wave, *b)), strict=True):
            np.testing.assert_array_equal(x[0, ~move], y[0, ~move])
            assert changed == 0 or not np.array_equal(x[0, move], y[0, move])


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_visited_blocks_are_those_of_the_own_samples(keys, causal):
    """Against every pair of tokens: none is missed, of a packed row few are too many, and padding
    visits none."""
    ids = np.sort(np.random.default_rng(1).integers(1, 9, (2, 512)), axis=1).astype(np.int32)
    ids[:, 380:] = 0
    held, visited = 128, 32
    start, stop = attention_gpu._spans(
        Marks(ids), 512, held, visited, sees=Sight(causal), keys=keys
    )
    see = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    if causal:
        see &= np.tri(512, dtype=bool)
    see = see.swapaxes(1, 2) if keys else see  # [row, held token, visited token]
    meet = see.reshape(2, 4, held, 16, visited).any(axis=(2, 4))
    for row in range(2):
        for i in range(4):
            blocks = np.flatnonzero(meet[row, i])
            if len(blocks):
                assert (start[row, i], stop[row, i]) == (blocks[0], blocks[-1] + 1)
            else:
                assert start[row, i] == stop[row, i]
    assert not meet[:, 3].any()


def test_the_kernel_is_a_choice_of_the_model():
    batch = fields(DecoderModule(DECODERS["nano"], F32), 2, 150)
    found = {}
    for kernel in ("xla", "pallas"):
        module = DecoderModule(DECODERS["nano"], F32, attention_kernel=kernel)
        params = full_params(module)
        loss = jax.jit(jax.value_and_grad(lambda p, m=module: outputs(m, p, batch)["loss_sum"]))
        assert ("packed_attention" in str(jax.make_jaxpr(loss)(params))) == (kernel == "pallas")
        found[kernel] = loss(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *found.values()
    )
    towers = [VisionModule(VISION["nano"], 8, F32, kernel) for kernel in ("xla", "pallas")]
    params, pixels = full_params(towers[0]), fields(towers[0], 2, 0)
    a, b = (outputs(tower, params, pixels) for tower in towers)
    np.testing.assert_allclose(a, b, atol=1e-4)
    modules = build("nano", attention_kernel="xla").modules.values()
    assert {m.attention_kernel for m in modules} == {"xla"}
    with pytest.raises(ValueError, match="unknown attention kernel 'fast'; known: auto, cudnn"):
        known_kernel("fast")


# ---- what the interpreter takes, Triton need not: compiled for a GPU, without one ----

H100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
KERNELS = ("forward", "kv_gradient", "q_gradient")
# From 0.11 on jax announces the end of this backend, which 0.12 still has.
triton = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def lower(function, *args):
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return {name: lowered.count(f'"packed_attention_{name}"') for name in KERNELS}


@triton
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim, segments", [(128, True), (72, False)])
def test_the_kernels_lower_for_a_gpu(dtype, head_dim, segments):
    q, k, v = (jax.ShapeDtypeStruct((2, 384, n, head_dim), dtype) for n in (14, 2, 2))
    ids = jax.ShapeDtypeStruct((2, 384), jnp.int32) if segments else None

    def run(q, k, v, ids):
        def attend(*qkv):
            return attention(*qkv, ids, causal=segments, kernel="pallas", chip="sm_90")

        out, pull = jax.vjp(attend, q, k, v)
        return pull(out)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        assert lower(run, q, k, v, ids) == {"forward": 1, "kv_gradient": 1, "q_gradient": 1}


@triton
@pytest.mark.parametrize("name", ["decoder", "vision"])
def test_they_lower_inside_the_pipeline(name):
    """As the engine runs a layer: manual over stage and data, automatic over model."""
    axes = (AxisType.Auto,) * 3
    mesh = AbstractMesh((2, 2, 2), ("stage", "data", "model"), axes, abstract_device=H100)
    module = {
        "decoder": DecoderModule(DECODERS["nano"], BF16, attention_kernel="pallas"),
        "vision": VisionModule(VISION["nano"], 8, BF16, "pallas"),
    }[name].on_chip("sm_80")

    def placed(a, sharding):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    params = jax.tree.map(placed, full_params(module), _shardings(module, mesh))
    batch = fields(module, 4, 100)
    batch = jax.tree.map(lambda a: placed(a, NamedSharding(mesh, P("data"))), batch)
    count = lower(make_sharded(module, mesh), params, batch)
    assert count == {"forward": 2, "kv_gradient": 1, "q_gradient": 1}  # a layer is recomputed
