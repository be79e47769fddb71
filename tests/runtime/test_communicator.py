"""Moving arrays between any two meshes equals slicing on the host, on every device that holds a
piece; equal shards take the same route as between processes (tests/test_two_processes.py)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.runtime import communicator
from dflop_jax.runtime.communicator import (
    Route,
    find_route,
    local_shards,
    send,
    shard_array,
)  # fmt: skip

# (first device, (stage, data, model), dims' axes)
SIDES = {
    "one device": (0, (1, 1, 1), P()),
    "data 4": (0, (1, 4, 1), P(None, "data")),
    "data 3 x model 2": (2, (1, 3, 2), P(None, "data")),
    "data 2 x model 2": (4, (1, 2, 2), P(None, "data", "model")),
    "stage 2, on every stage": (0, (2, 2, 1), P(None, "data")),
    "stage 2, a part on each": (2, (2, 1, 2), P("stage", None, "model")),
    "stage 4 x data 2": (0, (4, 2, 1), P(None, "data")),
}
SHAPE = (2, 12, 6)


def sharding_of(side):
    first, shape, spec = side
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
    return NamedSharding(Mesh(devices.reshape(shape), ("stage", "data", "model")), spec)


def bounds(sharding, shape, device):
    """[start, stop) of a device's piece, from its place in the mesh."""
    at = dict(
        zip(sharding.mesh.axis_names, np.argwhere(sharding.mesh.devices == device)[0], strict=True)
    )
    out = []
    for n, axis in zip(shape, [*sharding.spec, *[None] * len(shape)], strict=False):
        size = n // sharding.mesh.shape[axis] if axis else n
        start = int(at[axis]) * size if axis else 0
        out.append(slice(start, start + size))
    return tuple(out)


def assert_everywhere(got, host, sharding):
    """Every device of the sharding holds its piece of `host`, and no other device does."""
    assert got.dtype == host.dtype
    assert got.shape == host.shape
    assert got.sharding == sharding
    held = local_shards(got)
    assert set(held) == set(sharding.mesh.devices.flat)
    for device, piece in held.items():
        assert piece.devices() == {device}
        np.testing.assert_array_equal(piece, host[bounds(sharding, host.shape, device)])


@pytest.mark.parametrize("target", SIDES)
@pytest.mark.parametrize("source", SIDES)
def test_send_between_any_two_meshes(source, target):
    before, after = sharding_of(SIDES[source]), sharding_of(SIDES[target])
    host = np.random.default_rng(0).integers(-99, 99, SHAPE).astype(jnp.bfloat16)
    array = shard_array(host, before)
    assert_everywhere(array, host, before)
    assert_everywhere(send(array, after), host, after)


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("other", [0, 1])
def test_what_is_donated_later_leaves_its_process_as_a_copy(monkeypatch, donated, other):
    """What JAX takes before it has left is lost: runs of a tied module over processes ended so."""
    sharding = sharding_of((0, (1, 1, 1), P()))
    host = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    array, sent = shard_array(host, sharding), {}
    route = Route((), ((Device(0, 0), Device(1, other)),), ())
    monkeypatch.setattr(communicator, "_route", lambda *_: route)

    def moved(held, *_):
        sent.update(held)
        return [*held.values()]

    monkeypatch.setattr(communicator, "move_shards", moved)
    send(array, sharding, donated=donated)
    (own,), (gone,) = array.addressable_shards, sent.values()
    np.testing.assert_array_equal(gone, host)
    same = gone.unsafe_buffer_pointer() == own.data.unsafe_buffer_pointer()
    assert same == (not donated or other == 0)


def test_between_processes_a_piece_goes_over_once_and_is_passed_on():
    a0, a1, b0, b1, c0, c1 = (Device(i, p) for i, p in enumerate((0, 0, 1, 1, 2, 2)))
    route = find_route({"x": [a0, a1]}, dict.fromkeys([b0, b1, c0, c1], "x"))
    assert route.sent == ((a0, b0),)
    assert route.forwarded == ((b0, b1), (b0, c0), (b0, c1))
    # A holder in the same process is nearer than a target elsewhere; a holder needs no copy.
    route = find_route({"x": [a0, c0], "y": [b1]}, {b0: "x", c1: "x", a0: "x", a1: "y"})
    assert route.sent == ((c0, c1), (a0, a0), (b1, a1))
    assert route.forwarded == ((a0, b0),)
    assert route.targets == (b0, c1, a0, a1)
    # Holders that are as near share the load.
    route = find_route({0: [a0, a1], 1: [a0, a1], 2: [a0, b1]}, {c0: 0, c1: 1, b0: 2})
    assert route.sent == ((a0, c0), (a1, c1), (b1, b0))
    assert find_route({"x": [a0]}, {}) == Route((), (), ())
