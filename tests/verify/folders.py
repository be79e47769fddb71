"""Random parameters for folders, and packages of other people."""

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


def norm_center(module, path):
    """What the scale of a norm is drawn around, so that heads and states stay near 1 and float32
    on both sides rounds alike: what is learnt of it is added to the offset of its family."""
    size, norm = module.size, path[-2].key
    if norm == "soft_norm":  # Gemma 3's connector, whose offset is 1
        return 0.0
    is_gemma4 = getattr(size, "value_norm", hasattr(size, "standardized"))
    if norm in ("query_norm", "key_norm") and is_gemma4:  # whose products are not scaled
        return 0.4
    return 1.0 if norm == "delta_norm" else 1.0 - getattr(size, "norm_offset", 0.0)


def draw_value(module, path, shape, rng):
    """Random values of a parameter, of a size that keeps activations near 1."""
    name = path[-1].key
    if name == "A_log":
        return np.log(rng.uniform(0.01, 16, shape))
    if name in ("layer_scalar", "std_scale") or name.endswith("_max"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("_min"):
        return -rng.uniform(0.5, 1.5, shape)
    fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 25
    noise = rng.normal(size=shape) / np.sqrt(fan_in)
    if name == "scale":
        return noise + norm_center(module, path)
    return noise + (name == "dt_bias")


def random_params(model, seed):
    """By module and part, every parameter random; layers of a kind stacked."""
    rng = np.random.default_rng(seed)

    def part(module, name):
        def draw(path, spec):
            return draw_value(module, path, spec.shape, rng).astype(np.float32)

        one = jax.eval_shape(lambda key: module.init(name, key), jax.random.key(0))
        if name not in stacked_parts(module):
            return jax.tree_util.tree_map_with_path(draw, one)
        n_layers = n_stacked_layers(module, name)
        layers = [jax.tree_util.tree_map_with_path(draw, one) for _ in range(n_layers)]
        return jax.tree.map(lambda *a: np.stack(a), *layers)

    return {
        name: {p: part(module, p) for p in module.inputs} for name, module in model.modules.items()
    }
