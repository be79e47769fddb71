"""How parameters are cut over data ranks: evenly over any number of them."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dflop_jax.pipeline.cut import cut_over, data_dim, flat_boxes, split_spec
from dflop_jax.profile.parts import param_dims, part_names
from dflop_jax.profile.state import shard_share
from dflop_jax.records import ParamDims
from models.composed import Composed
from models.sizes import AUDIO, DECODERS, VISION, ModelSize

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
    assert split_spec(struct, spec, ways) == want


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 1, 5), (2, 3, 4)])
def test_boxes_are_the_elements_in_order(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    for start in range(array.size + 1):
        for stop in range(start, array.size + 1):
            boxes = [array[tuple(slice(*r) for r in box)] for box in flat_boxes(start, stop, shape)]
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
    cut = cut_over(struct, whole, stacked=True, data=data, model=model, copies=copies)
    array = 1 + np.arange(np.prod(shape)).reshape(shape)
    held = cut.hold(array)
    assert held.shape == cut.held_shape(shape)
    assert held.ndim == len(shape)
    assert cut.shape_of(held.shape) == shape
    np.testing.assert_array_equal(held, np.asarray(cut.hold(jnp.asarray(array))))
    np.testing.assert_array_equal(whole_of(cut, held), array)
    np.testing.assert_array_equal(cut.release(jnp.asarray(held)), array)
    n_shards = held.shape[-1] // cut.piece
    assert n_shards == copies * data * (model if "model" in whole else 1)
    saved = np.zeros(shape, int)
    for first, last in [*((i, i + 1) for i in range(n_shards)), (0, n_shards), (1, n_shards)]:
        low, high = first * cut.piece, last * cut.piece
        ones = [(0, 1)] * (len(shape) - 2)
        shard = ((1, 3), *ones, (low, high))
        read = np.zeros_like(held[1:3, ..., low:high])
        for place, box in cut.boxes(shard):
            index = tuple(slice(*r) for r in box)
            assert not read[place].any()
            read[place] = array[index].reshape(read[place].shape)
            saved[index] += last == first + 1 and cut.is_first_copy(shard)
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


def all_shapes():
    """Of every module of `models.sizes`: (its name, parameters of a layer and of the ends)."""
    small = DECODERS["nano"]
    sizes = [(name, ModelSize(decoder)) for name, decoder in DECODERS.items()]
    sizes += [(name, ModelSize(small, vision=tower)) for name, tower in VISION.items()]
    sizes += [(name, ModelSize(small, audio=encoder)) for name, encoder in AUDIO.items()]
    for name, size in sizes:
        module = next(iter(Composed(size, jnp.dtype(jnp.float32)).modules.values()))
        ends = [part for part in part_names(module) if part != "layers"]
        yield (
            name,
            [("layers", p) for p in param_dims(module, ("layers",))]
            + [("ends", p) for p in param_dims(module, ends)],
        )


@pytest.mark.slow
def test_state_is_split_evenly_over_any_number_of_ranks():
    """All sizes, 1 to 4,096 ranks: a rank has its share of the elements, to 2% or an element of
    each parameter; as the cuts themselves have it, of counts that divide little or nothing."""
    ranks = np.arange(1, 4097)
    for name, parameters in all_shapes():
        for part in ("layers", "ends"):
            dims = [p for where, p in parameters if where == part]
            total = sum(prod(p.sizes) for p in dims)
            of_rank = shard_share(dims, ranks) * total
            even = total / ranks
            assert (of_rank >= even - 1e-6).all()
            assert (of_rank - even <= np.maximum(0.02 * even, len(dims))).all(), name
            for n in (5, 320, 2560, 4093):
                held = sum(prod(held_by_a_rank(p, n, part == "layers")) for p in dims)
                assert held == pytest.approx(of_rank[n - 1]), (name, n)


def held_by_a_rank(p: ParamDims, data: int, stacked: bool) -> tuple[int, ...]:
    """Sizes of a device's piece of a parameter, of one layer."""
    lead, stage = ((1,), ["stage"]) if stacked else ((), [])
    whole = P(*stage, *("model" if i == p.split else None for i in range(len(p.sizes))))
    struct = jax.ShapeDtypeStruct((*lead, *p.sizes), jnp.float32)
    cut = cut_over(struct, whole, stacked=stacked, data=data, model=1)
    shape = list(cut.held_shape(struct.shape))
    if cut.is_split:
        dim = data_dim(cut.spec)
        assert shape[dim] % data == 0
        shape[dim] //= data
    return tuple(shape)
