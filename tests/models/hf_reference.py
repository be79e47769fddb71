"""Models of transformers as the reference: random ones, and their values in our parameters."""

import logging
import warnings

import jax
import numpy as np
import pytest
from model_fields import PARTS

from dflop_jax.weights.contract import by_name, shape_of

with warnings.catch_warnings():
    # What other people's packages warn of while they are imported is not ours to fix.
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")


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
