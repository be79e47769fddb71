"""Models of transformers as the reference: random ones, and their values in our parameters."""

import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import PARTS, forward

from dflop_jax.verify.compare import gradient_errors
from dflop_jax.verify.reference import named_gradients
from dflop_jax.weights.contract import by_name, shape_of

with warnings.catch_warnings():
    # What other people's packages warn of while they are imported is not ours to fix.
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

LOGITS, GRADIENTS = 1e-4, 1e-4  # largest absolute, largest relative error


def randomise(model, seed):
    """Every parameter random, none at its initial value; no dropout, plain attention."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            one = name.endswith("weight") and p.ndim == 1
            fan_in = max(p[0].numel(), 1) if p.ndim > 1 else 25
            noise = rng.normal(size=tuple(p.shape)) / np.sqrt(fan_in)
            p.copy_(torch.from_numpy((noise + one).astype(np.float32)))
    model.set_attn_implementation("eager")
    return model.eval()


def to_ours(map_, named):
    """{module: {part: tree}} of arrays called by the names of transformers; layers stacked."""
    arrays = {map_.canonical(name): np.asarray(a) for name, a in named.items()}
    shapes = {name: shape_of(parts) for name, parts in by_name(map_.tensors).items()}
    out = {}
    for t in map_.tensors:
        array, shape = arrays[t.name], t.layout.file_shape
        assert array.shape == shapes[t.name], t
        if array.shape != shape:
            array = array[t.offset : t.offset + shape[0]]
        value = array.reshape(t.layout.split).transpose(t.layout.order).reshape(t.layout.shape)
        parts = out.setdefault(t.module, {part: {} for part in PARTS})
        tree = parts.setdefault(t.part, {})
        *inner, last = t.path
        for key in inner:
            tree = tree.setdefault(key, {})
        if t.layer is None:
            tree[last] = value
        else:
            assert len(tree.setdefault(last, [])) == t.layer
            tree[last].append(value)
    rest = arrays.keys() - shapes.keys()
    assert all(map_.is_ignored(name) for name in rest), rest
    return jax.tree.map(
        lambda a: np.stack(a) if isinstance(a, list) else a,
        out,
        is_leaf=lambda a: isinstance(a, list),
    )


def parameters(map_, model):
    return to_ours(map_, {n: p.detach().numpy() for n, p in model.named_parameters()})


def gradients(map_, model):
    """Those of the last backward pass, in our layout."""
    return to_ours(map_, named_gradients(model))


def features(module, params, batch):
    return module.exit(params["exit"], forward(module, params, batch), batch)


def logits(module, params, batch):
    x = forward(module, params, batch)
    return module.logits(params["exit"], x, params["entry"] if module.tied else None)


def text_batch(tokens, visual=None, is_visual=None):
    """Fields of the LLM for rows that are one sample each, for evaluation."""
    shape = tokens.shape
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
        "is_visual": jnp.zeros(shape, bool) if is_visual is None else jnp.asarray(is_visual),
        "visual": visual,
    }


def placed(found, mask, used=None):
    """Features [items, tokens, width] in order at the marked places of rows [rows, tokens]; of an
    item the first `used` count."""
    items, tokens, width = found.shape
    used = np.full(items, tokens) if used is None else used
    pick = [i * tokens + t for i in range(items) for t in range(used[i])]
    assert len(pick) == mask.sum()
    index = np.zeros(mask.shape, np.int32)
    index[mask] = pick
    return jnp.take(found.reshape(-1, width), index, axis=0)


def check(map_, model, outputs, ours, name):
    """Outputs and every gradient of a random linear function of them, here and there.

    `outputs` is the reference's, with a graph; `ours` maps parameters to the same.
    """
    params = parameters(map_, model)
    weights = np.random.default_rng(0).normal(size=tuple(outputs.shape)).astype(np.float32)
    (outputs * torch.from_numpy(weights)).sum().backward()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(params):
        found = ours(params)
        return jnp.sum(found * weights), found

    # Compiled for seconds and run for milliseconds: no optimisation.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    (_, found), grads = jax.jit(objective, compiler_options=fast)(params)
    error = np.abs(np.asarray(found) - outputs.detach().numpy()).max()
    assert found.dtype == jnp.float32
    assert error <= LOGITS, f"{name}: {error}"

    assert jax.tree.structure(gradients(map_, model)) == jax.tree.structure(grads)
    errors = gradient_errors(map_, grads, named_gradients(model))
    worst = max(errors.values())
    assert worst <= GRADIENTS, f"{name}: {errors}"
    print(f"{name}: outputs {error:.1e}, gradients {worst:.1e}")
