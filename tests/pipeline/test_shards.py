"""Pieces of parameters on data ranks: cut by one rule, whole again layer by layer, summed back."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.pipeline import shards
from dflop_jax.pipeline.cut import Cut, axes_of, cut_over

from .plain import whole_of

LAYERS, WIDTH, MLP, ROWS = 3, 8, 6, 60


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

    def gathered(layers):
        return lambda i: shards.gather(mesh, cuts, {k: a[i] for k, a in layers.items()})

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

        of_place, places = gathered(layers), jnp.arange(LAYERS)
        out, hs = shards.scan_layers([of_place], [forward], x, [places], [1])
        (dx, totals), _ = shards.scan_layers(
            [of_place], [backward], (dy, start), [places], [1], hs, reverse=True
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
    assert "all-gather(" in compiled.as_text() or data == 1


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
