"""Gathers of parameters over tensor ranks: on programs compiled here, of which they are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.gpu_compile.hlo_gathers import device_groups, parameter_gathers

ROWS, WIDTH, MLP, LAYERS = 8, 16, 32, 3
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


UP, DOWN, X = P(None, "data", "model"), P(None, "model", "data"), P("data")


def compiled(body, *arrays) -> str:
    """The text of a function on one device's parts of arrays of these shapes and axes."""
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, axes))
        for shape, axes in arrays
    ]
    specs = tuple(axes for _, axes in arrays)
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=X, check_vma=False)
    return jax.jit(mapped).lower(*structs).compile().as_text()


def whole(array, *axes):
    """Joined over mesh axes, each given with the dim that it splits."""
    for axis, dim in axes:
        array = jax.lax.all_gather(array, axis, axis=dim, tiled=True)
    return array


@pytest.mark.parametrize("over_model, gathers", [(False, 0), (True, 2)])
def test_of_layers_in_a_loop_each_gather_counts_once(over_model, gathers):
    """A layer is carried to the round that visits it; over data alone it keeps a rank's parts."""

    def join(up, down):
        if over_model:
            up, down = whole(up, ("model", 1)), whole(down, ("model", 0))
        return whole(up, ("data", 0)), whole(down, ("data", 1))

    def body(x, up, down):
        def layer(state, parts):
            x, (up_now, down_now) = state
            part = jnp.tanh(x @ up_now) @ down_now
            return (x + (part if over_model else jax.lax.psum(part, "model")), join(*parts)), None

        nothing = jnp.zeros((WIDTH, MLP if over_model else MLP // 2))
        return jax.lax.scan(layer, (x, (nothing, nothing.T)), (up, down))[0][0]

    text = compiled(
        body,
        ((ROWS, WIDTH), X),
        ((LAYERS, WIDTH, MLP), UP),
        ((LAYERS, MLP, WIDTH), DOWN),
    )
    assert text.count(" all-gather(") == 2 + gathers
    assert parameter_gathers(text, 2) == gathers


def test_activations_do_not_count():
    def body(x, up):
        return whole(jnp.tanh(x @ whole(up[0], ("data", 0))), ("model", 1))

    text = compiled(body, ((ROWS, WIDTH), X), ((LAYERS, WIDTH, MLP), UP))
    assert text.count(" all-gather(") == 2
    assert parameter_gathers(text, 2) == 0


@pytest.mark.parametrize("dims, gathers", [(1, 0), (2, 1)])
def test_a_matrix_that_is_whole_before_it_is_summed_counts(dims, gathers):
    """Of vectors, of which every tensor rank has a part of the sum, it cannot be otherwise."""

    def body(x, dy):
        gradient = x.T @ dy if dims == 2 else dy.sum(0)
        gradient = whole(gradient, ("model", dims - 1))
        return jax.lax.psum_scatter(gradient, "data", tiled=True)

    hidden = (ROWS, MLP), P("data", "model")
    text = compiled(body, ((ROWS, WIDTH), X), hidden)
    assert text.count(" all-gather(") == 1
    assert parameter_gathers(text, 2) == gathers


def test_a_matrix_that_is_summed_in_parts_does_not():
    def body(x, dy):
        return jax.lax.psum_scatter(x.T @ dy, "data", tiled=True)

    text = compiled(body, ((ROWS, WIDTH), X), ((ROWS, MLP), P("data", "model")))
    assert " reduce-scatter(" in text
    assert parameter_gathers(text, 2) == 0


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={1}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=2] {'b'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", None),
        ("replica_groups={}", None),
        ("dimensions={0}", None),
    ],
)
def test_groups_of_devices_are_read(text, groups):
    assert device_groups(f"channel_id=1, {text}") == groups


def test_a_gather_of_a_form_that_is_not_known_counts():
    line = "%g = f32[4]{0} all-gather(%p), replica_groups=anew, dimensions={0}"
    text = f"ENTRY %m (p: f32[2]) -> f32[4] {{\n  %p = f32[2]{{0}} parameter(0)\n  {line}\n}}\n"
    assert parameter_gathers(text, 2) == 1
    assert parameter_gathers(text, 1) == 0


def test_a_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parameter_gathers("loss: 3.2\n", 2)
