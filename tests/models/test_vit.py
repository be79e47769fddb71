"""The vision tower and connector against plain numpy in float64."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from model_fields import fields, full_params, outputs
from test_attention import oracle as attention_oracle
from test_decoder import to_f64

from models.sizes import VISION
from models.vit import VisionModule

NANO = VISION["nano"]
# Pixels beyond the last whole patch, no merging, no final norm.
ODD = dataclasses.replace(NANO, tile_px=29, merge=1, post_norm=False)


def numpy_norm(p, x, eps):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def numpy_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numpy_exact_gelu(x):
    return 0.5 * x * (1 + scipy.special.erf(x / math.sqrt(2)))


def affine(p, x):
    return x @ p["kernel"] + p["bias"]


def numpy_layer(size, p, x):
    h = numpy_norm(p["attn_norm"], x, size.norm_eps)
    q, k, v = (
        np.einsum("btd,dnh->btnh", h, p[name]["kernel"]) + p[name]["bias"]
        for name in ("query", "key", "value")
    )
    h = attention_oracle(q, k, v, np.ones(x.shape[:2]), causal=False)
    x = x + np.einsum("btnh,nhd->btd", h, p["out"]["kernel"]) + p["out"]["bias"]
    h = numpy_norm(p["mlp_norm"], x, size.norm_eps)
    return x + affine(p["down"], numpy_gelu(affine(p["up"], h)))


def numpy_patches(pixels, size):
    """Patches by explicit loops."""
    px = size.patch_px
    rows = [
        [
            image[r * px : (r + 1) * px, c * px : (c + 1) * px].ravel()
            for r in range(size.grid)
            for c in range(size.grid)
        ]
        for image in pixels
    ]
    return np.asarray(rows, np.float64).reshape(len(pixels), size.patches_per_tile, 3 * px**2)


def numpy_merge(x, grid, merge):
    side = range(grid // merge)
    tokens = [
        np.concatenate(
            [
                x[:, (r * merge + i) * grid + c * merge + j]
                for i in range(merge)
                for j in range(merge)
            ],
            axis=-1,
        )
        for r in side
        for c in side
    ]
    return np.stack(tokens, axis=1)


def numpy_forward(size, params, pixels):
    p = to_f64(params)
    x = (numpy_patches(np.asarray(pixels), size) / 255 - 0.5) / 0.5
    x = affine(p["entry"]["patch"], x) + p["entry"]["position"]
    for i in range(size.n_layers):
        x = numpy_layer(size, jax.tree.map(lambda a, i=i: a[i], p["layers"]), x)
    if size.post_norm:
        x = numpy_norm(p["exit"]["post_norm"], x, size.norm_eps)
    x = numpy_merge(x, size.grid, size.merge)
    return affine(p["exit"]["out"], numpy_exact_gelu(affine(p["exit"]["hidden"], x)))


@pytest.mark.parametrize("size", [NANO, ODD], ids=["nano", "odd"])
@pytest.mark.parametrize("items", [0, 1, 3])
def test_matches_numpy(size, items):
    module = VisionModule(size, 24, jnp.dtype("float32"))
    params = full_params(module)
    batch = fields(module, items, 1)
    found = jax.jit(partial(outputs, module))(params, batch)
    assert found.shape == (items, size.tokens_per_tile, 24)
    want = numpy_forward(size, params, batch["pixels"])
    scale = np.abs(want).max(initial=1.0)
    np.testing.assert_allclose(found / scale, want / scale, atol=1e-5)
