"""Matrices in 8 bits, in families of models, against numpy's products of them with their scales."""

from __future__ import annotations

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.contract import adapter_of, layer_kinds_of, layer_of, with_adapter
from dflop_jax.pipeline import int8
from dflop_jax.pipeline.int8 import is_quantized
from dflop_jax.pipeline.stand_in import packed_field
from models.quantized import rounded

FAMILIES = {  # layers of several kinds, and of none of the decoder's
    "qwen3_5": "qwen3.5-nano",
    "gemma4": "gemma4-nano",
    "wan": "tiny-short+wan-nano",
}
TOKENS = 16


def dense(tree):
    """The parameters of a layer, or of an end, with floats in the place of codes and scales."""
    if not isinstance(tree, dict):
        return tree
    out = {k: dense(v) for k, v in tree.items() if k != "kernel_scale"}
    if "kernel_scale" in tree:
        codes, scale = (np.asarray(tree[k]) for k in ("kernel", "kernel_scale"))
        assert codes.dtype == np.int8
        out["kernel"] = jnp.asarray(codes * scale)  # outputs are the last dims
    return out


def drawn(module, part, seed):
    """Parameters of a part with its adapter, which acts, where it has one."""
    key = jax.random.key(seed)
    init = jax.jit(module.init, static_argnums=0)  # else compiled operation by operation
    params = {part: init(part, key)}
    adapter = adapter_of(part)
    if adapter in module.freeze_groups:
        pairs = init(adapter, key)
        noise = partial(np.random.default_rng(seed).normal, scale=0.2)
        params[adapter] = {
            name: {**pair, "b": jnp.asarray(noise(size=pair["b"].shape), jnp.float32)}
            for name, pair in pairs.items()
        }
    return with_adapter(part, params)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_computes_with_the_products(family):
    """What it gives, and the gradients of adapters and of what comes in."""
    plain = importlib.import_module(f"models.{family}").build(FAMILIES[family])
    groups = {g for m in plain.modules.values() for g in m.freeze_groups.values()}
    model = plain.with_lora(2, 4.0, targets=tuple(groups)).with_quantized(tuple(groups))
    for name, module in model.modules.items():
        assert is_quantized(module)
        n_matrices = check_parts(name, module, plain.piece_tokens.get(name, TOKENS))
        assert n_matrices > 0


def check_parts(name, module, tokens) -> int:
    """How many matrices there are, all of whose parts were compared."""
    names = {n for part in module.module.inputs for n in module.inputs[part]}
    specs = {n: module.field_spec(n, 2, tokens) for n in names}
    batch = {
        n: jnp.asarray(packed_field(n, (1, *s.shape), s.dtype, 2, 3)[0]) for n, s in specs.items()
    }
    shape = jax.eval_shape(module.entry, drawn(module, "entry", 1), batch)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape.shape), shape.dtype)
    runs = {"entry": lambda p, x: module.entry(p, batch)}
    for kind in dict.fromkeys(layer_kinds_of(module)):
        layer = layer_of(module, kind)
        runs[kind] = lambda p, x, layer=layer: layer(p, x, batch)
    if not module.tied:
        runs["exit"] = lambda p, x: module.exit(p, x, batch)
    seen = 0
    for part, run in runs.items():
        params = drawn(module, part, 2)
        seen += sum(a.dtype == jnp.int8 for a in jax.tree.leaves(params))
        adapter = params.pop("adapter", {})

        def of(adapter, x, params, run=run):
            out = run({**params, **({"adapter": adapter} if adapter else {})}, x)
            return sum(map(jnp.sum, jax.tree.leaves(out))), out

        gradients = jax.jit(jax.grad(of, argnums=(0, 1), has_aux=True))
        got, want = (gradients(adapter, x, p) for p in (params, dense(params)))
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            scale = max(np.abs(b).max(), 1e-3)
            np.testing.assert_allclose(a, b, atol=1e-5 * scale, err_msg=f"{name}.{part}")
    return seen


def test_rounding_by_hand():
    w = np.array([[1.0, 0.0, -4.0], [-2.0, 0.0, 1.0]], np.float32)
    codes, scale = rounded(jnp.asarray(w), 1)
    np.testing.assert_array_equal(codes, [[64, 0, -127], [-127, 0, 32]])
    np.testing.assert_allclose(scale, [2 / 127, 0.0, 4 / 127], rtol=1e-7)
    # And by numpy, which knows by it again what models, that import nothing of it, have rounded.
    np.testing.assert_array_equal(int8.scales_of(w, 1), scale)
    np.testing.assert_array_equal(int8.codes(w, np.asarray(scale)), codes)
