"""Random parameters for folders, and when a verified folder is the reference's."""

import importlib
import logging
import warnings

import jax
import numpy as np
import pytest

from dflop_jax.contract import n_stacked_layers, stacked_parts


def load(name, minversion=None):
    """A package of other people, imported when a test needs it; skips the test without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        pytest.importorskip(name, minversion=minversion)
        return importlib.import_module(name)


def check_equal(result):
    """Every tensor has the same bits; logits and gradients are the reference's, to 1e-5 and 1e-4 of
    the largest or as far as its own float32 is (`dflop_jax.verify.verify.VerifyResult`)."""
    assert result.not_compared == ""
    assert result.bit_identical
    assert result.exit_code == 0
    assert result.max_logit_error < 1e-4
    assert result.max_grad_error < 1e-3


def draw_value(path, shape, rng):
    """Random values of a parameter, of a size that keeps activations near 1."""
    name = path[-1].key
    if name in ("A_log", "layer_scalar", "std_scale") or name.endswith("_max"):
        return (
            np.log(rng.uniform(0.01, 16, shape))
            if name == "A_log"
            else rng.uniform(0.5, 1.5, shape)
        )
    if name.endswith("_min"):
        return -rng.uniform(0.5, 1.5, shape)
    fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 25
    noise = rng.normal(size=shape) / np.sqrt(fan_in)
    return noise + (name in ("scale", "dt_bias"))


def random_params(model, seed):
    """By module and part, every parameter random; layers of a kind stacked."""
    rng = np.random.default_rng(seed)

    def draw(path, spec):
        return draw_value(path, spec.shape, rng).astype(np.float32)

    def part(module, name):
        one = jax.eval_shape(lambda key: module.init(name, key), jax.random.key(0))
        if name not in stacked_parts(module):
            return jax.tree_util.tree_map_with_path(draw, one)
        layers = [
            jax.tree_util.tree_map_with_path(draw, one)
            for _ in range(n_stacked_layers(module, name))
        ]
        return jax.tree.map(lambda *a: np.stack(a), *layers)

    return {
        name: {p: part(module, p) for p in module.inputs} for name, module in model.modules.items()
    }
