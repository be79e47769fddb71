"""Hidden states that tensor ranks split by tokens; that gradients stay, `test_gradients` says."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    MeshShape,
    SegmentPlan,
    Shape,
    token_dim,
    tp_share,
)
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import Segment, x_structs, y_structs
from tests.small import WIDTH, Text


def segment(ways, *, ends=False):
    """Two layers of the LLM: all of it with `ends`, else those before its last."""
    module = Text(2 if ends else 4)
    plan = SegmentPlan("llm", "llm", 0 if ends else 1, 2 if ends else 3, "llm", ends, ends)
    mesh = device_mesh(MeshShape(1, 1, ways), jax.devices())
    parts = frozenset(("entry", "layers", "exit") if ends else ("layers",))
    wanted = frozenset() if ends else frozenset(["hidden"])
    return Segment(plan, module, mesh, 1, trainable=parts, wants_gradient=wanted)


@pytest.mark.parametrize(
    "rows, tokens, ways, dim",
    [(1, 8, 1, None), (1, 8, 2, 1), (2, 8, 2, 0), (3, 8, 2, 1), (8, 729, 4, 0), (3, 9, 2, None),
     (0, 8, 2, 0), (1, 6, 4, None)],
)  # fmt: skip
def test_rows_or_tokens_are_split_where_the_degree_divides(rows, tokens, ways, dim):
    assert token_dim(rows, tokens, ways) == dim
    share = tp_share(np.array([rows]), np.array([tokens]), ways)
    assert share.tolist() == [1 if dim is None else 1 / ways]


@pytest.mark.parametrize("rows, tokens, piece", [(1, 24, (1, 12)), (2, 23, (1, 23))])
def test_what_is_kept_and_passed_on_is_split(rows, tokens, piece):
    """And no matrix is gathered."""
    s, shape = segment(2), Shape(rows, tokens)
    for struct in (x_structs(s, shape)["hidden"], y_structs(s, shape)["next"]):
        assert struct.sharding.shard_shape(struct.shape) == (1, *piece, WIDTH)
    lowering = Lowering(s)
    forward = lowering.lower(shape, FORWARD).compile()
    lowering.set_residual_shardings(shape, forward)
    hidden = [a.sharding.shard_shape(a.shape)[-3:] for a in jax.tree.leaves(
        lowering.residual_structs(shape)) if a.shape[-3:] == (rows, tokens, WIDTH)]  # fmt: skip
    assert hidden
    assert set(hidden) == {(*piece, WIDTH)}
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", forward.as_text())
    assert gathered
    assert all(f"{rows * tokens},{WIDTH}" in g or f"{rows},{tokens}" in g for g in gathered)


def test_tokens_that_the_degree_does_not_divide():
    """They are whole on every rank, and gradients those of one rank."""

    def grads(ways):
        lowering, rng = Lowering(segment(ways, ends=True)), np.random.default_rng(0)
        structs = lowering.argument_structs(Shape(1, 23), BACKWARD)
        draw = {"f": lambda n: rng.normal(size=n), "i": lambda n: rng.integers(0, 2, n),
                "b": lambda n: rng.integers(0, 2, n)}  # fmt: skip
        args = [
            jax.tree.map(
                lambda a: shard_array(draw[a.dtype.kind](a.shape).astype(a.dtype), a.sharding), tree
            )
            for tree in structs
        ]
        return jax.device_get(lowering.lower(Shape(1, 23), BACKWARD).compile()(*args)[2])

    for a, b in zip(jax.tree.leaves(grads(2)), jax.tree.leaves(grads(1)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
