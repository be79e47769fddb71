"""The exact GELU against scipy, in value and slope; modules in bfloat16."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from model_fields import fields, forward, full_params, outputs

from models.audio import AudioModule
from models.decoder import DecoderModule
from models.layers import exact_gelu
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
