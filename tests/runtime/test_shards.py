"""Pieces of parameters on data ranks: cut by one rule, whole again layer by layer, summed back."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflop_jax.records import BACKWARD, FORWARD, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime import shards
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import ZeroSpec
from tests.small import Text


def test_bfloat16_is_gathered_as_it_is_and_summed_in_float32():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1), ("stage", "data", "model"))
    specs, rng = [P("data"), P(None, "data")], np.random.default_rng(1)
    cuts = [ZeroSpec(P(*[None] * len(spec)), spec) for spec in specs]
    arrays = [rng.normal(size=(4,)).astype(jnp.bfloat16),
              rng.normal(size=(3, 8)).astype(jnp.bfloat16)]  # fmt: skip

    def body(*pieces):
        whole = shards.all_gather(mesh, cuts, list(pieces))
        return [w[None] for w in whole], shards.reduce_scatter(mesh, cuts, whole)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), axis_names={"data"},
                                out_specs=([P("data"), P("data")], specs)))  # fmt: skip
    whole, sums = run(*arrays)
    for a, w, s in zip(arrays, whole, sums, strict=True):
        assert (w.dtype, s.dtype) == (jnp.bfloat16, jnp.float32)
        for rank in np.asarray(w):
            np.testing.assert_array_equal(rank, a)
        np.testing.assert_array_equal(s, 4 * a.astype(np.float32))


@pytest.mark.parametrize("data", [3, 4])
def test_a_layer_travels_in_one_collective(data):
    """The first one before a loop over layers, the next one in it, forward and backward; so do its
    gradients. That they are right: the plans of `test_gradients`."""
    plan = SegmentPlan("llm", "llm", 1, 4, "llm", False, False, "none", zero=3)
    mesh, shape = device_mesh(MeshShape(data=data), jax.devices()), Shape(1, 24)
    trains, hidden = frozenset(["layers"]), frozenset(["hidden"])
    lowering = Lowering(Segment(plan, Text(8), mesh, 1, trains, hidden))
    forward = lowering.lower(shape, FORWARD).compile()
    lowering.set_residual_shardings(shape, forward)
    moved = [
        re.findall(r"= \S+ (all-gather|reduce-scatter)(?:-start)?\(", program.as_text())
        for program in (forward, lowering.lower(shape, BACKWARD).compile())
    ]
    assert [sorted(kinds) for kinds in moved] == [
        ["all-gather"] * 2, ["all-gather"] * 2 + ["reduce-scatter"]
    ]  # fmt: skip
