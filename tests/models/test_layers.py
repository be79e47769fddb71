"""The exact GELU against scipy, in value and slope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from models.layers import exact_gelu

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
