"""Gradients in float32 where they are products in bfloat16, against products of the same operands
in float64; and how they are summed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.profile.timed_programs import compile_timed_programs
from dflop_jax.records import MeshShape, Shape
from dflop_jax.runtime import parameter_layout
from dflop_jax.runtime.parameter_layout import grad_structs, stack_gradients, stacked_grad_structs
from dflop_jax.runtime.residuals import REMAT, SplitVjp
from models.llava import build

from .test_residuals import inner_layers

HALF, F32 = jnp.bfloat16, jnp.float32


def layer(trained, h, *_):
    """A product over two dims, one that is read twice, a bias and a scale."""
    y = jnp.einsum("BTW,WNH->BTNH", h, trained["matrix"])
    y = jnp.tensordot(y + trained["bias"][None, None], trained["moved"], axes=((2, 3), (1, 0)))
    return y @ trained["shared"] + h @ trained["shared"] * trained["scale"][None, None]


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(HALF)


ARRAYS = {
    "matrix": draw(6, 2, 3), "bias": draw(2, 3), "moved": draw(3, 2, 6), "shared": draw(6, 6),
    "scale": draw(6),
}  # fmt: skip


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("wraps", [lambda f: f, jax.jit, jax.checkpoint])
def test_products_are_not_rounded(remat, wraps):
    h, dout = draw(2, 50, 6), draw(1, 2, 50, 6)[0]
    found = {}
    for wide in (False, True):
        split = SplitVjp(
            REMAT[remat], wraps(layer), ARRAYS, h, {}, {}, wants_hidden=True, wide_gradients=wide
        )
        run = jax.jit(partial(split.backward, edge_inputs={}, constants={}))
        found[wide] = run(split.forward(ARRAYS, h, {}, {})[1], ARRAYS, dout=dout)
    (narrow, dh, _), (grads, dh_too, _) = found.values()
    np.testing.assert_array_equal(dh, dh_too)
    is_wide = {name for name, g in grads.items() if g.dtype == F32}
    assert is_wide == {"matrix", "moved"}
    for name, g in narrow.items():
        assert g.dtype == HALF
        np.testing.assert_array_equal(grads[name].astype(HALF), g)
    # The last product's operands are not rounded in between.
    dy = (dout @ np.asarray(ARRAYS["shared"]).T.astype(F32)).astype(HALF).astype(np.float64)
    y = jnp.einsum("BTW,WNH->BTNH", h, ARRAYS["matrix"]) + ARRAYS["bias"][None, None]
    exact = np.einsum("BTNH,BTD->HND", np.asarray(y, np.float64), dy)
    error = np.abs(exact - np.asarray(grads["moved"])).max()
    assert error < 1e-4 * np.abs(exact).max()
    assert error < 0.1 * np.abs(exact - np.asarray(narrow["moved"], np.float64)).max()


def test_large_gradients_of_unrolled_layers_are_summed_by_layer(monkeypatch):
    looped = inner_layers("none")
    unrolled = replace(looped, plan=replace(looped.plan, unrolled=True))
    size = looped.module.size.width**2
    monkeypatch.setattr(parameter_layout, "MIN_SPLIT_ELEMENTS", size)
    stacks = stacked_grad_structs(unrolled)
    assert grad_structs(looped) == stacks
    by_layer = grad_structs(unrolled)
    values = jax.tree.map(lambda a: np.arange(a.size, dtype=F32).reshape(a.shape), stacks)

    def split(value, structs):
        assert isinstance(structs, tuple) == (value[0, 0].size >= size)
        rows = tuple(np.split(value, len(structs), 1)) if isinstance(structs, tuple) else value
        assert jax.tree.map(np.shape, rows) == jax.tree.map(lambda a: a.shape, structs)
        return rows

    grads = jax.tree.map(split, values, by_layer)
    assert any(isinstance(x, tuple) for x in grads["layers"]["query"].values())
    jax.tree.map(np.testing.assert_array_equal, stack_gradients(unrolled, grads), values)


def test_unrolled_layers_in_bfloat16_run_on_a_cpu():
    """Its compiler lacks products of bfloat16 in float32 of some shapes."""
    model = build("nano", "bfloat16")
    s = shallow_segment(model, "vision", 2, jax.devices()[:1], MeshShape())
    s = replace(s, plan=replace(s.plan, unrolled=True))
    shape = Shape(2, model.piece_tokens["vision"])
    (timed,) = compile_timed_programs([s], shape, model.vocab_size, [1])
    ((_, backward),) = timed.runs
    assert all(np.isfinite(x.astype(F32)).all() for x in jax.tree.leaves(backward()))
