"""How parameters are cut over data ranks: evenly over any number of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dflop_jax.runtime.zero_sharding import add_data_axis, boxes_of_range, make_zero_spec

from .plain import whole_of


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
