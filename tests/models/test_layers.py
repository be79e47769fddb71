"""Layers against scipy, numpy and Python: GELU, embeddings, dropout; modules in bfloat16."""

import dataclasses
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from model_fields import fields, forward, full_params, outputs

from dflop_jax.data.media.mel import encoder_tokens
from dflop_jax.train.optimizer import UNDECAYED
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.dropout import InputDropout
from models.embedding import embed
from models.layers import exact_gelu, tanh_gelu
from models.llava import build
from models.sizes import AUDIO, DECODERS, VISION
from models.vit import VisionModule

BF16 = jnp.dtype("bfloat16")

# Pixels beyond the last whole patch, no merging, no final norm.
ODD = dataclasses.replace(VISION["nano"], tile_px=29, merge=1, post_norm=False)
X = np.concatenate([np.linspace(-12, 12, 4801), [0.0, -1e-6, 1e-6, 100.0, -100.0]])


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 4e-7), (jnp.bfloat16, 0.008)])
def test_exact_gelu_and_its_slope(dtype, tolerance):
    x = jnp.asarray(X, dtype)
    x64 = np.asarray(x, np.float64)
    share, density = scipy.stats.norm.cdf(x64), scipy.stats.norm.pdf(x64)
    value, slope = jax.vmap(jax.value_and_grad(exact_gelu))(x)
    assert value.dtype == slope.dtype == dtype
    np.testing.assert_allclose(np.asarray(value, float), x64 * share, tolerance, 1e-6)
    np.testing.assert_allclose(np.asarray(slope, float), share + x64 * density, tolerance, 1e-6)


def test_tanh_gelu_and_its_slope():
    value, slope = jax.vmap(jax.value_and_grad(tanh_gelu))(jnp.asarray(X, jnp.float32))
    scale, tanh = (2 / np.pi) ** 0.5, np.tanh((2 / np.pi) ** 0.5 * (X + 0.044715 * X**3))
    inner = scale * (1 + 3 * 0.044715 * X**2)
    want = 0.5 * (1 + tanh) + 0.5 * X * (1 - tanh**2) * inner
    np.testing.assert_allclose(value, 0.5 * X * (1 + tanh), 4e-6, 1e-6)
    np.testing.assert_allclose(slope, want, 4e-6, 2e-6)


MODULES = {
    "llm": DecoderModule(DECODERS["nano"], BF16),
    "vision": VisionModule(VISION["nano"], 24, BF16),
    "odd vision": VisionModule(ODD, 24, BF16),
    "audio": AudioModule(AUDIO["whisper-nano"], 24, BF16),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("items", [0, 1])
def test_modules_take_no_rows_and_rows_of_one_token(module, items):
    params, batch = full_params(module), fields(module, items, 1)
    found = jax.jit(partial(outputs, module))(params, batch)
    if isinstance(found, dict):
        assert np.isfinite(found["loss_sum"])
        assert items or found["loss_sum"] == 0
    else:
        assert found.shape[0] == items
        assert found.shape[2] == 24
        assert jnp.isfinite(found.astype(jnp.float32)).all()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_modules_in_bfloat16_stay_near_float32(module):
    exact = dataclasses.replace(module, dtype=jnp.dtype(jnp.float32))
    params, batch = full_params(exact), fields(exact, 2, 11)
    found, want = (jax.jit(partial(outputs, m))(params, batch) for m in (module, exact))
    if isinstance(found, dict):
        assert found["loss_sum"].dtype == found["correct"].dtype == jnp.float32
        assert jax.eval_shape(partial(forward, module), params, batch).dtype == BF16
        np.testing.assert_allclose(found["loss_sum"], want["loss_sum"], rtol=2e-2)
        return
    assert found.dtype == BF16
    error = jnp.abs(found.astype(jnp.float32) - want).mean()
    assert error < 3e-2 * jnp.abs(want).mean()


# ---- padding for GPUs ----

INTERNVIT = dataclasses.replace(ODD, form="internvit", post_norm=False)


@pytest.mark.parametrize("items", [0, 1, 3])
@pytest.mark.parametrize("module", [
    VisionModule(ODD, 24, jnp.dtype("float32"), "xla"),  # 9 tokens
    VisionModule(INTERNVIT, 24, jnp.dtype("float32"), "xla"),  # 10
    AudioModule(dataclasses.replace(AUDIO["whisper-nano"], frames=36), 24, jnp.dtype("float32"),
                "xla"),  # 18
], ids=["siglip", "internvit", "audio"])  # fmt: skip
def test_tokens_padded_for_gpus_change_no_output_and_no_gradient(module, items):
    params, batch = full_params(module), fields(module, items, 0)

    def run(m, params):
        loss = jnp.sum(jnp.sin(outputs(m, params, batch)))
        return loss, jax.eval_shape(partial(forward, m), params, batch).shape[1]

    on_gpu = module.on_chip("sm_90")
    results = [
        jax.jit(jax.value_and_grad(partial(run, m), has_aux=True))(params) for m in (module, on_gpu)
    ]
    ((want, tokens), want_grads), ((found, padded), grads) = results
    assert (tokens, padded) == (module.item_tokens, -(-module.item_tokens // 8) * 8)
    assert padded > tokens
    np.testing.assert_allclose(found, want, 1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), grads, want_grads)


# ---- sounds ----

AUDIO_MODULE = AudioModule(AUDIO["whisper-nano"], 24, jnp.dtype("float32"))


@pytest.mark.parametrize("items", [0, 1, 3])
def test_padding_is_not_heard(items):
    """Frames beyond the real ones change nothing in the tokens that are used; nothing is NaN."""
    params = full_params(AUDIO_MODULE)
    batch = fields(AUDIO_MODULE, items, 0)
    frames = np.asarray([0, 13, 32])[:items]
    batch["mel_frames"] = jnp.asarray(frames, jnp.int32)
    # The stem's two convolutions look two frames further.
    real = np.arange(AUDIO_MODULE.size.frames) < frames[:, None, None] + 2
    other = {**batch, "mel": jnp.where(real, batch["mel"], 100.0)}
    run = jax.jit(lambda b: outputs(AUDIO_MODULE, params, b))
    a, b = np.asarray(run(batch)), np.asarray(run(other))
    assert a.shape == (items, 8, 24)
    assert np.isfinite(a).all()
    for item in range(items):
        used = encoder_tokens(frames[item])
        np.testing.assert_array_equal(a[item, :used], b[item, :used])
    if items == 3:
        assert not np.array_equal(a[1], b[1])


def test_positions_of_sound_are_not_trained():
    params, batch = full_params(AUDIO_MODULE), fields(AUDIO_MODULE, 2, 0)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(outputs(AUDIO_MODULE, p, batch) ** 2)))(params)
    assert not np.any(grads["entry"]["bias"])
    assert np.any(grads["entry"]["conv1"]["kernel"])
    assert "bias" in UNDECAYED


# ---- embeddings: what a GPU would be free to reorder ----

VOCAB, WIDTH = 11, 4


def gradient(table, tokens, dx):
    return jax.vjp(lambda t: embed(t, tokens), table)[1](dx)[0]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 64, 65, 700])
@pytest.mark.parametrize("spread", [1, 3, 2 * VOCAB], ids=["one token", "few", "out of range too"])
def test_equal_tokens_add_up(n, spread):
    rng = np.random.default_rng(n)
    table = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    tokens = rng.integers(0, spread, (1, n)).astype(np.int32) - (spread > VOCAB) * 3
    # Whole numbers: their float32 sums are exact in any order.
    dx = rng.integers(-9, 9, (1, n, WIDTH)).astype(np.float32)
    want = np.zeros_like(table)
    taken = np.clip(tokens, 0, VOCAB - 1)
    np.add.at(want, taken, dx)
    np.testing.assert_array_equal(embed(table, tokens), table[taken])
    np.testing.assert_array_equal(jax.jit(gradient)(table, tokens, dx), want)


def test_bfloat16_gradients_are_summed_in_float32():
    tokens, dx = jnp.zeros((1, 513), jnp.int32), jnp.ones((1, 513, WIDTH), jnp.bfloat16)
    got = jax.vjp(lambda t: embed(t, tokens).astype(jnp.bfloat16), jnp.ones((VOCAB, WIDTH)))[1](dx)
    np.testing.assert_array_equal(got[0][0], 513.0)  # bfloat16 ends at 256
    assert not np.any(got[0][1:])


def test_no_scatter_adds_in_an_order_of_its_own():
    """Only one that meets every row at most once is left in the LLM's entry, and none adds."""
    llm = build("nano").modules["llm"]
    params = jax.eval_shape(lambda k: llm.init("entry", k), jax.random.key(0))
    batch = {n: llm.field_spec(n, 1, 64) for n in llm.inputs["entry"]}

    def backward(params, batch, dx):
        return jax.vjp(lambda p: llm.entry(p, batch), params)[1](dx)

    dx = jax.eval_shape(llm.entry, params, batch)
    text = jax.jit(backward).lower(params, batch, dx).as_text()
    assert text.count('"stablehlo.scatter"') == text.count("unique_indices = true") == 1


# ---- what training leaves out ----

MASK = 2**32 - 1


def mixed(x: int) -> int:
    """The end of MurmurHash3, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


def by_hand(seed: int, name: str, layer: int | None, place: int, rate: float) -> bool:
    """Whether a value is seen."""
    number = zlib.crc32(name.encode())
    if layer is not None:
        number = mixed((number + layer * 0x9E3779B9) & MASK)
    if not seed:
        return True
    return mixed((mixed(seed ^ number) + place * 0x9E3779B9) & MASK) >= int(rate * 2**32)


def drawn(seeds, layer=3, rate=0.25, part="layers"):
    number = None if layer is None else jnp.int32(layer)
    return InputDropout(rate, part, jnp.asarray(seeds, jnp.uint32), number)


@pytest.mark.parametrize("layer", [None, 0, 3])
def test_every_value_by_hand(layer):
    seeds = np.array([[1, 77, 0], [2**32 - 1, 5, 6]])
    x = np.arange(1.0, 2 * 3 * 2 * 4 + 1, dtype=np.float32).reshape(2, 3, 2, 4)
    got = np.asarray(drawn(seeds, layer).drop(jnp.asarray(x), "out"))
    for row, token, i, j in np.ndindex(x.shape):
        seed = int(seeds[row, token])
        seen = by_hand(seed, "layers.out", layer, i * 4 + j, 0.25)
        scale = 1 / 0.75 if seed else 1.0
        assert got[row, token, i, j] == pytest.approx(x[row, token, i, j] * scale * seen)


def test_joined_tokens_and_pieces_have_numbers():
    x = jnp.ones((2, 3, 32))
    joined = drawn([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]).drop(x, "up")
    np.testing.assert_array_equal(joined, drawn([[1, 3, 5], [8, 10, 12]]).drop(x, "up"))
    pieces = np.asarray(drawn([9, 0]).drop(x, "up"))
    assert (pieces[1] == 1).all()
    assert 0 < (pieces[0] == 0).mean() < 0.5
    assert len({tuple(token > 0) for token in pieces[0]}) == 3
