"""How parameters are split over data ranks and hidden states over tensor ranks; for gradients see
`test_gradients`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    MeshShape,
    SegmentPlan,
    Shape,
    token_dim,
    tp_share,
)
from dflop_jax.runtime import shards
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import Segment, x_structs, y_structs
from dflop_jax.runtime.zero_sharding import (
    ZeroSpec,
    add_data_axis,
    boxes_of_range,
    make_zero_spec,
)
from tests.small import WIDTH, Text

from .plain import whole_of


def inner_lowering(plan_zero, mesh_shape, first, stop, n_layers):
    """Of inner layers of the LLM."""
    plan = SegmentPlan("llm", "llm", first, stop, "llm", False, False, "none", zero=plan_zero)
    mesh = device_mesh(mesh_shape, jax.devices())
    trains, hidden = frozenset(["layers"]), frozenset(["hidden"])
    return Lowering(Segment(plan, Text(n_layers), mesh, 1, trains, hidden))


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
    assert add_data_axis(struct, spec, ways) == want


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 1, 5), (2, 3, 4)])
def test_boxes_are_the_elements_in_order(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    for start in range(array.size + 1):
        for stop in range(start, array.size + 1):
            boxes = [
                array[tuple(slice(*r) for r in box)] for box in boxes_of_range(start, stop, shape)
            ]
            read = np.concatenate([np.zeros(0, int), *(box.ravel() for box in boxes)])
            np.testing.assert_array_equal(read, np.arange(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("shape, whole, data, model, copies", [
    ((3, 5, 6), P("stage", None, "model"), 4, 3, 1),
    ((3, 6, 5), P("stage", "model", None), 7, 2, 1),
    ((3, 4), P("stage", "model"), 3, 2, 1),
    ((3, 5), P("stage", None), 8, 2, 1),
    ((3, 4, 6), P("stage", None, "model"), 2, 3, 3),
    ((3, 5), P("stage", None), 3, 1, 2),
])  # fmt: skip
def test_shards_of_flat_parameters_are_boxes_of_them(shape, whole, data, model, copies):
    """Every shard, and shards of several ranks, has the elements that its boxes say, and zeros; the
    first block of ranks has all of them once."""
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    cut = make_zero_spec(struct, whole, stacked=True, dp=data, tp=model, n_replicas=copies)
    array = 1 + np.arange(np.prod(shape)).reshape(shape)
    held = cut.to_stored(array)
    assert held.shape == cut.stored_shape(shape)
    assert held.ndim == len(shape)
    assert cut.full_shape(held.shape) == shape
    np.testing.assert_array_equal(held, np.asarray(cut.to_stored(jnp.asarray(array))))
    np.testing.assert_array_equal(whole_of(cut, held), array)
    n_shards = held.shape[-1] // cut.shard_elements
    assert n_shards == copies * data * (model if "model" in whole else 1)
    saved = np.zeros(shape, int)
    for first, last in [*((i, i + 1) for i in range(n_shards)), (0, n_shards), (1, n_shards)]:
        low, high = first * cut.shard_elements, last * cut.shard_elements
        ones = [(0, 1)] * (len(shape) - 2)
        shard = ((1, 3), *ones, (low, high))
        read = np.zeros_like(held[1:3, ..., low:high])
        for place, box in cut.boxes(shard):
            index = tuple(slice(*r) for r in box)
            assert not read[place].any()
            read[place] = array[index].reshape(read[place].shape)
            saved[index] += last == first + 1 and cut.is_first_replica(shard)
        np.testing.assert_array_equal(read, held[1:3, ..., low:high])
        # Rows that are layers 7, 2 and 3 of a stack of nine.
        stack, layers = np.zeros((9, *shape[1:]), int), [7, 2, 3]
        stack[layers] = array
        boxes = list(cut.layer_boxes(((0, 3), *shard[1:]), layers))
        assert {box[0] for _, box in boxes} <= {(7, 8), (2, 4)}
        read = np.zeros_like(held[..., low:high])
        for place, box in boxes:
            assert not read[place].any()
            read[place] = stack[tuple(slice(*r) for r in box)].reshape(read[place].shape)
        np.testing.assert_array_equal(read, held[..., low:high])
    assert (saved[1:] == 1).all()


# ---- collectives ----


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
    lowering, shape = inner_lowering(3, MeshShape(data=data), 1, 4, 8), Shape(1, 24)
    forward = lowering.lower(shape, FORWARD).compile()
    lowering.set_residual_shardings(shape, forward)
    moved = [
        re.findall(r"= \S+ (all-gather|reduce-scatter)(?:-start)?\(", program.as_text())
        for program in (forward, lowering.lower(shape, BACKWARD).compile())
    ]
    assert [sorted(kinds) for kinds in moved] == [
        ["all-gather"] * 2, ["all-gather"] * 2 + ["reduce-scatter"]
    ]  # fmt: skip


# ---- tokens ----


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
    lowering, shape = inner_lowering(1, MeshShape(1, 1, 2), 1, 3, 4), Shape(rows, tokens)
    s = lowering.segment
    for struct in (x_structs(s, shape)["hidden"], y_structs(s, shape)["next"]):
        assert struct.sharding.shard_shape(struct.shape) == (1, *piece, WIDTH)
    forward = lowering.lower(shape, FORWARD).compile()
    lowering.set_residual_shardings(shape, forward)
    hidden = [a.sharding.shard_shape(a.shape)[-3:] for a in jax.tree.leaves(
        lowering.residual_structs(shape)) if a.shape[-3:] == (rows, tokens, WIDTH)]  # fmt: skip
    assert hidden
    assert set(hidden) == {(*piece, WIDTH)}
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", forward.as_text())
    assert gathered
    assert all(f"{rows * tokens},{WIDTH}" in g or f"{rows},{tokens}" in g for g in gathered)
