"""Pieces of parameters on data ranks: cut by one rule, whole again layer by layer, summed back."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.gpu_compile.hlo_gathers import parameter_gathers
from dflop_jax.pipeline import shards
from dflop_jax.pipeline.cut import Cut, axes_of, cut_over, flat_boxes, split_spec

from .plain import whole_of

LAYERS, WIDTH, MLP, ROWS = 3, 8, 6, 60


@pytest.mark.parametrize(
    "shape, spec, ways, want",
    [
        ((6, 4), P(None, None), 2, P("data", None)),
        ((5, 4), P(None, None), 2, P(None, "data")),
        ((5, 3), P(None, None), 2, P(None, None)),
        ((6, 4), P("model", None), 2, P("model", "data")),
        ((2, 6, 4), P("stage", None, "model"), 3, P("stage", "data", "model")),
        ((2, 4), P("stage", "model"), 2, P("stage", "model")),
        ((0, 4), P(None, None), 2, P(None, "data")),
        ((), P(), 2, P()),
        ((6, 4), P(None, None), 1, P(None, None)),
    ],
)
def test_the_first_free_dim_that_divides_is_split(shape, spec, ways, want):
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert split_spec(struct, spec, ways) == want


def layer(p, x):
    up = jnp.tanh(x @ p["up"] + p["bias"][None])
    return x + up @ p["down"] * p["odd"].sum().reshape(1, 1)


def plain(layers, x, dy):
    """(output, gradient of layers, gradient of x) without a mesh, by jax's own derivative."""

    def run(layers, x):
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0]

    out, vjp = jax.vjp(run, layers, x)
    return out, *vjp(dy)


SPECS = {
    "up": P("stage", None, "model"),
    "down": P("stage", "model", None),
    "bias": P("stage", None),
    "odd": P("stage", None),
}


def program(mesh, cuts):
    """The same on data ranks: layers in pieces, gathered forward and backward, summed back."""
    gather = partial(shards.gather, mesh, cuts)
    whole = [k for k, cut in cuts.items() if not cut.is_split]

    def vary(tree):
        return {k: jax.lax.pcast(a, ("data",), to="varying") if k in whole else a
                for k, a in tree.items()}  # fmt: skip

    def body(layers, x, dy):
        layers = vary(layers)
        start = {k: jnp.zeros_like(a) for k, a in layers.items()}

        def forward(h, p, _):
            return layer(p, h), h

        def backward(carry, p, now):
            (dh, totals), (i, h) = carry, now
            dp, dh = jax.vjp(layer, p, h)[1](dh)
            dp = shards.scatter(mesh, cuts, dp)
            return (dh, {k: a.at[i].add(dp[k]) for k, a in totals.items()}), None

        out, hs = shards.scan_layers(gather, forward, x, layers)
        (dx, totals), _ = shards.scan_layers(
            gather, backward, (dy, start), layers, (jnp.arange(LAYERS), hs), reverse=True
        )
        return out, {k: jax.lax.psum(a, "data") if k in whole else a for k, a in totals.items()}, dx

    manual = {
        k: P(*("data" if "data" in axes_of(a) else None for a in cut.spec))
        for k, cut in cuts.items()
    }
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(manual, P("data"), P("data")),
        out_specs=(P("data"), manual, P("data")),
        axis_names={"data"},
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("data, model, flat", [
    (1, 1, ""),
    (2, 1, "odd"),
    (4, 1, "bias odd"),
    (2, 2, "odd"),
    (5, 1, "bias down odd up"),
    (3, 2, "down up"),
])  # fmt: skip
def test_layers_in_pieces_equal_whole_ones(data, model, flat):
    """Those that ranks divide no dim of are held flat."""
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, MLP), "down": (MLP, WIDTH), "bias": (MLP,), "odd": (3,)}
    layers = {k: rng.normal(size=(LAYERS, *s)).astype(np.float32) * 0.3 for k, s in shapes.items()}
    x, dy = rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[: data * model]).reshape(1, data, model),
                ("stage", "data", "model"))  # fmt: skip
    # As of a segment: the layers' dim is never split over data.
    cuts = {
        k: cut_over(
            jax.ShapeDtypeStruct(a.shape, a.dtype), SPECS[k], stacked=True, data=data, model=model
        )
        for k, a in layers.items()
    }
    assert " ".join(sorted(k for k, cut in cuts.items() if cut.part)) == flat
    run = program(mesh, cuts)
    put = {
        k: jax.device_put(cuts[k].hold(a), NamedSharding(mesh, cuts[k].spec))
        for k, a in layers.items()
    }
    with jax.default_matmul_precision("highest"):
        compiled = run.lower(put, x, dy).compile()
        got, want = compiled(put, x, dy), plain(layers, x, dy)
    sums = {k: whole_of(cuts[k], a) for k, a in got[1].items()}
    for g, w in zip(jax.tree.leaves((got[0], sums, got[2])), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
    for k, a in got[1].items():
        assert a.sharding.shard_shape(a.shape) == put[k].sharding.shard_shape(a.shape)
    # A layer travels in one collective where the compiler shards nothing of it.
    if model == 1 and data > 1:
        gathers = re.findall(r"= \S+ (all-gather|reduce-scatter)(?:-start)?\(", compiled.as_text())
        assert gathers.count("all-gather") == 4  # first and next layer, forward and backward
        assert gathers.count("reduce-scatter") == 1
    # Tensor-parallel ranks keep their own parts of matrices.
    assert "all-gather(" in compiled.as_text() or data == 1
    assert parameter_gathers(compiled.as_text(), model) == 0


def test_bfloat16_is_gathered_as_it_is_and_summed_in_float32():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1), ("stage", "data", "model"))
    specs, rng = [P("data"), P(None, "data")], np.random.default_rng(1)
    cuts = [Cut(P(*[None] * len(spec)), spec) for spec in specs]
    arrays = [rng.normal(size=(4,)).astype(jnp.bfloat16),
              rng.normal(size=(3, 8)).astype(jnp.bfloat16)]  # fmt: skip

    def body(*pieces):
        whole = shards.gather(mesh, cuts, list(pieces))
        return [w[None] for w in whole], shards.scatter(mesh, cuts, whole)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), axis_names={"data"},
                                out_specs=([P("data"), P("data")], specs)))  # fmt: skip
    whole, sums = run(*arrays)
    for a, w, s in zip(arrays, whole, sums, strict=True):
        assert (w.dtype, s.dtype) == (jnp.bfloat16, jnp.float32)
        for rank in np.asarray(w):
            np.testing.assert_array_equal(rank, a)
        np.testing.assert_array_equal(s, 4 * a.astype(np.float32))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 1, 5), (2, 3, 4)])
def test_boxes_are_the_elements_in_order(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    for start in range(array.size + 1):
        for stop in range(start, array.size + 1):
            boxes = [array[tuple(slice(*r) for r in box)] for box in flat_boxes(start, stop, shape)]
            read = np.concatenate([np.zeros(0, int), *(box.ravel() for box in boxes)])
            np.testing.assert_array_equal(read, np.arange(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("shape, whole, data, model", [
    ((3, 5, 6), P("stage", None, "model"), 4, 3),
    ((3, 6, 5), P("stage", "model", None), 7, 2),
    ((3, 4), P("stage", "model"), 3, 2),
    ((3, 5), P("stage", None), 8, 2),
])  # fmt: skip
def test_shards_of_flat_parameters_are_boxes_of_them(shape, whole, data, model):
    """Every shard, and shards of several ranks, has the elements that its boxes say, and zeros."""
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    cut = cut_over(struct, whole, stacked=True, data=data, model=model)
    array = 1 + np.arange(np.prod(shape)).reshape(shape)
    held = cut.hold(array)
    assert held.shape == cut.held_shape(shape)
    assert held.ndim == len(shape)
    assert cut.shape_of(held.shape) == shape
    np.testing.assert_array_equal(held, np.asarray(cut.hold(jnp.asarray(array))))
    np.testing.assert_array_equal(whole_of(cut, held), array)
    n_shards = held.shape[-1] // cut.piece
    assert n_shards == data * (model if "model" in whole else 1)
    for first, last in [*((i, i + 1) for i in range(n_shards)), (0, n_shards), (1, n_shards)]:
        low, high = first * cut.piece, last * cut.piece
        ones = [(0, 1)] * (len(shape) - 2)
        read = np.zeros_like(held[1:3, ..., low:high])
        for place, box in cut.boxes(((1, 3), *ones, (low, high))):
            values = array[tuple(slice(*r) for r in box)]
            assert not read[place].any()
            read[place] = values.reshape(read[place].shape)
        np.testing.assert_array_equal(read, held[1:3, ..., low:high])
