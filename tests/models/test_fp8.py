"""Products in FP8: against operands rounded by hand, in the layers of a model and nowhere else."""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_fields import fields, full_params

from dflop_jax.config import Config, ModelConfig
from dflop_jax.train.run_context import build_trained_model
from models.fp8 import fp8_product
from models.llava import build

MAX = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}


def rounded(x, dtype=ml_dtypes.float8_e4m3fn):
    """x in FP8 with one scale, in float64."""
    scale = np.float32(np.abs(x).max() / MAX[dtype])
    return np.float64((x / scale).astype(dtype)) * scale


@pytest.mark.parametrize("rows", [1, 6])
def test_product_and_gradients_of_rounded_operands(rows):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in ((rows, 4, 8), (4, 8, 16), (rows, 16)))
    with jax.numpy_dtype_promotion("standard"):
        y, pull = jax.vjp(lambda x, w: fp8_product(2).apply({}, x, w), x, w)
        dx, dw = pull(dy)
    x8, w8 = rounded(x), rounded(w)
    np.testing.assert_allclose(y, np.tensordot(x8, w8, 2), 1e-4, 1e-4)
    assert not np.allclose(y, np.tensordot(x, w, 2), 1e-3)
    dy8 = rounded(dy, ml_dtypes.float8_e5m2)
    np.testing.assert_allclose(dx, np.tensordot(dy8, w8, ((1,), (2,))), 1e-3, 1e-3)
    np.testing.assert_allclose(dw, np.tensordot(x8, dy8, ((0,), (0,))), 1e-3, 1e-3)


@pytest.mark.parametrize("lora", [False, True])
def test_layers_alone_compute_in_fp8(lora):
    plain = build("nano")
    models = [plain.with_lora(4, 8.0) if lora else plain for plain in (plain, plain.with_fp8())]
    for name, module in models[0].modules.items():
        params, batch = full_params(module), fields(module, 2, 16)
        other = models[1].modules[name]
        h = module.entry(params["entry"], batch)
        np.testing.assert_array_equal(h, other.entry(params["entry"], batch))
        layer = jax.tree.map(lambda a: a[0], params["layers"])
        want, got = module.layer(layer, h, batch), other.layer(layer, h, batch)
        error = jnp.linalg.norm(want - got) / jnp.linalg.norm(want)
        assert 1e-3 < error < 0.1


def test_chips_without_fp8_and_a_missing_qwix_are_refused(monkeypatch):
    config = Config(model=ModelConfig(size="nano", matmul="fp8"))
    assert build_trained_model(config, "sm_90").fp8
    with pytest.raises(ValueError, match="needs a Hopper GPU or newer, not sm_80"):
        build_trained_model(config, "sm_80")
    fp8_product.cache_clear()
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[fp8\]'"):
        build_trained_model(config)
